"""A source surface that also says where a thing is written, and what class an expression over it has."""

from __future__ import annotations

import ast
from functools import lru_cache

from ..resolve import Class, Function, Missing, Target, Value
from ..source import SourceSurface
from ..syntax import Module, decorated


class TypedSurface(SourceSurface):
    """Follows annotations, as far as source alone allows; where it does not, the class is unknown."""

    def module(self, name: str) -> Module:
        """Raises SourceNotFoundError if its source cannot be read."""
        return self._source(name)

    def find_module(self, name: str) -> Module | None:
        found = self._resolver.module(name)
        return None if isinstance(found, Missing) else found

    def modules(self, package: str) -> list[str]:
        """The modules right inside a package, by name, in order."""
        top, *parts = package.split(".")
        place = self._resolver.roots[top]
        for part in parts:
            place = place / part
        return sorted(f"{package}.{file.name[:-3]}" for file in place.glob("*.py") if file.name != "__init__.py")

    def location(self, path: str) -> str | None:
        """`vllm/v1/request.py:57` of a class or function; of anything else the file that has it or would have it."""
        target = self._find(path)
        if isinstance(target, (Class, Function)):
            return f"{_file(target.module)}:{target.node.lineno}"
        module = target if isinstance(target, Module) else self._resolver.module(path.partition(":")[0])
        return None if isinstance(module, Missing) else _file(module)

    def is_class(self, path: str) -> bool:
        return isinstance(self._find(path), Class)

    def is_opaque(self, path: str) -> bool:
        """Whether source does not tell what attributes the thing at `path` has: a function, or some value."""
        return isinstance(self._find(path), (Function, Value))

    def result(self, path: str) -> str | None:
        """The path of the class of what a call of the function at `path` returns; None if it is not known."""
        target = self._find(path)
        return self._annotated(target.node.returns, target) if isinstance(target, Function) else None

    def attribute(self, path: str) -> str | None:
        """The path of the class of the attribute at `path` of an instance; None if it is not known."""
        owner, _, name = path.rpartition(".")
        target = self._find(path)
        if isinstance(target, Function):
            return self._annotated(target.node.returns, target) if decorated(target.node, "property") else None
        holder = self._find(owner) if ":" in owner else target
        lineage = self._resolver.lineage(holder) if isinstance(holder, Class) else ()
        for base in (base for base in lineage if isinstance(base, Class)):
            for node in base.node.body:
                if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
                    return self._annotated(node.annotation, base)
        return None

    def may_have(self, path: str) -> bool:
        """Whether instances of a class have this attribute: in a class body, set on `self`, or perhaps by a base
        class that cannot be read."""
        if self.exists(path):
            return True
        owner, _, name = path.rpartition(".")
        holder = self._find(owner)
        lineage = self._resolver.lineage(holder) if isinstance(holder, Class) else ("unknown",)
        known = ("abc", "builtins", "enum", "typing", "typing_extensions")
        for base in lineage:
            if isinstance(base, str):
                if base.split(".")[0] not in known:
                    return True
            elif name in _set_on_self(base.node) or self._resolver.in_body(base, "__getattr__"):
                return True
        return False

    def _annotated(self, node: ast.expr | None, where: Class | Function) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp):
            sides = [side for side in (node.left, node.right) if not _is_none(side)]
            return self._annotated(sides[0], where) if len(sides) == 1 else None
        if isinstance(node, ast.Subscript):
            return self._annotated(node.slice, where) if getattr(node.value, "id", "") == "Optional" else None
        target: Target | None = self._resolver.evaluate(node, where.module) if node is not None else None
        return target.path if isinstance(target, Class) else None


def _file(module: Module) -> str:
    stem = module.name.replace(".", "/")
    return f"{stem}/__init__.py" if module.is_package else f"{stem}{module.path.suffix}"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


@lru_cache(maxsize=64)
def _set_on_self(node: ast.ClassDef) -> frozenset[str]:
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return frozenset(n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id in ("self", "cls"))
