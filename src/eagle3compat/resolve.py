"""Follows names through source files: re-exports, star imports, aliases, lazy modules, inheritance."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from .places import Place
from .signature import Def
from .syntax import Bound, Member, Module, Scope, Whole, decorated, read_class

_COMPILED = (".so", ".pyd")


@dataclass(frozen=True)
class Missing:
    """Nothing of that name, and why."""

    reason: str


@dataclass(frozen=True)
class Function:
    node: Def
    module: Module
    in_class: bool


@dataclass(frozen=True)
class Class:
    node: ast.ClassDef
    module: Module

    @property
    def path(self) -> str:
        return f"{self.module.name}:{self.node.name}"


@dataclass(frozen=True)
class Value:
    """Something that exists and is not looked into; `origin` is its full name if another package has it."""

    origin: str = ""


Target: TypeAlias = "Module | Function | Class | Value | Missing"
Seen: TypeAlias = "frozenset[tuple[str, str]]"


def locate(module: str, roots: Mapping[str, Place]) -> Place | None:
    """The file of `module`, or the directory of a package without `__init__.py`; None if there is none.

    `roots` maps the name of a top-level package to its directory.
    """
    top, *rest = module.split(".")
    if top not in roots or not roots[top].is_dir():
        return None
    here = roots[top]
    for depth, part in enumerate(rest, start=1):
        package = here / part
        if depth == len(rest) and not (package / "__init__.py").is_file():
            source = here / f"{part}.py"
            if source.is_file():
                return source
            compiled = (path for path in here.glob(f"{part}.*") if path.suffix in _COMPILED)
            return next(compiled, package if package.is_dir() else None)
        if not package.is_dir():
            return None
        here = package
    initial = here / "__init__.py"
    return initial if initial.is_file() else here


class Resolver:
    """Reads the packages in `roots`, a file at most once and only when a name leads there."""

    def __init__(self, roots: Mapping[str, Place]) -> None:
        self.roots = dict(roots)
        self._modules: dict[str, Module | None] = {}
        self._scopes: dict[ast.ClassDef, Scope] = {}
        self._lineages: dict[ast.ClassDef, tuple[Class | str, ...]] = {}

    def module(self, name: str) -> Module | Missing:
        if name not in self._modules:
            path = locate(name, self.roots)
            self._modules[name] = Module(name, path) if path else None
        return self._modules[name] or Missing(f"no module named {self._first_absent(name)!r}")

    def _first_absent(self, name: str) -> str:
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((prefix for prefix in prefixes if locate(prefix, self.roots) is None), name)

    def member(self, owner: Target, name: str) -> Target:
        if isinstance(owner, Module):
            return self.top_level(owner, name)
        if isinstance(owner, Class):
            return self.attribute(owner, name)
        if isinstance(owner, Value) and owner.origin:
            return Missing(f"{name!r} is not known: {owner.origin} is not among the packages that are read")
        return owner if isinstance(owner, Missing) else Missing(f"{name!r} of a value is not known")

    def top_level(self, module: Module, name: str, seen: Seen = frozenset()) -> Target:
        """What `name` stands for in `module`: bound there, star-imported, lazy, or a submodule."""
        if module.path.suffix in _COMPILED:
            return Value()
        found: Target | None = None
        key = (module.name, name)
        if key not in seen and module.mentions(name):
            seen |= {key}
            found = self._choose(module.scope, name, lambda bound: self._follow(bound, module, seen))
            found = self._starred(module, name, seen) if found is None else found
            found = self._lazy(module, name, seen) if found is None else found
        if found is None and module.is_package:
            submodule = self.module(f"{module.name}.{name}")
            found = None if isinstance(submodule, Missing) else submodule
        return found or Missing(module.fault or f"module {module.name!r} has no attribute {name!r}")

    def attribute(self, owner: Class, name: str) -> Target:
        """What `name` stands for in a class or its bases; `self.name = ...` in a method does not count."""
        unread = []
        for base in self.lineage(owner):
            if isinstance(base, Class):
                found = self.in_body(base, name)
                if found is not None:
                    return found
            elif base.startswith("builtins.") and hasattr(getattr(builtins, base[9:], None), name):
                return Value()
            elif base.split(".")[0] not in ("abc", "builtins", "enum", "typing", "typing_extensions"):
                unread.append(base)
        if hasattr(type, name):
            return Value()
        note = f" (its base {', '.join(unread)} is not among the packages that are read)" if unread else ""
        return Missing(f"class {owner.path!r} has no attribute {name!r}{note}")

    def in_body(self, owner: Class, name: str, seen: Seen = frozenset()) -> Target | None:
        """What the body of the class itself binds `name` to."""
        if (owner.path, name) in seen:
            return None
        seen |= {(owner.path, name)}
        scope = self._scopes.get(owner.node)
        if scope is None:
            scope = self._scopes[owner.node] = read_class(owner.node, owner.module)
        return self._choose(scope, name, lambda bound: self._follow(bound, owner.module, seen, owner))

    def lineage(self, owner: Class, below: frozenset[ast.ClassDef] = frozenset()) -> tuple[Class | str, ...]:
        """The class and its bases, in the order in which attributes are looked up.

        A base that is not read is there as its full name. Diamonds are put in order by their last occurrence.
        """
        if owner.node in self._lineages:
            return self._lineages[owner.node]
        line: list[Class | str] = []
        for expression in owner.node.bases:
            plain = expression.value if isinstance(expression, ast.Subscript) else expression
            base = self.evaluate(plain, owner.module)
            if isinstance(base, Class) and base.node not in below | {owner.node}:
                line += self.lineage(base, below | {owner.node})
            else:
                line.append(getattr(base, "origin", "") or ast.unparse(plain))
        line = [owner, *(base for at, base in enumerate(line) if base not in line[at + 1 :])]
        self._lineages[owner.node] = tuple(line)
        return tuple(line)

    def evaluate(
        self, node: ast.expr, module: Module, owner: Class | None = None, seen: Seen = frozenset()
    ) -> Target:
        """What a name or a dotted name stands for in `module`, or in the body of `owner`."""
        if isinstance(node, ast.Name):
            local = self.in_body(owner, node.id, seen) if owner else None
            found = local or self.top_level(module, node.id, seen)
            if isinstance(found, Missing) and hasattr(builtins, node.id):
                return Value(f"builtins.{node.id}")
            return found
        if isinstance(node, ast.Attribute):
            holder = self.evaluate(node.value, module, owner, seen)
            if isinstance(holder, Value):
                return Value(f"{holder.origin}.{node.attr}" if holder.origin else "")
            return self.member(holder, node.attr)
        return Value()

    def _choose(self, scope: Scope, name: str, follow: Callable[[Bound], Target]) -> Target | None:
        """The meaning of a name; of several, one that exists, and none in particular if `def`s differ."""
        missing: Target | None = None
        for group in (scope.names.get(name, ()), scope.fallbacks.get(name, ())):
            targets = [follow(bound) for bound in group]
            there = [target for target in targets if not isinstance(target, Missing)]
            functions = [target.node.args for target in there if isinstance(target, Function)]
            if len(functions) > 1 and len({ast.dump(args) for args in functions}) > 1:
                return Value()
            if there:
                return next((target for target in there if not isinstance(target, Value)), there[0])
            missing = missing or next(iter(targets), None)
        return missing

    def _follow(self, bound: Bound, module: Module, seen: Seen, owner: Class | None = None) -> Target:
        if isinstance(bound, (Member, Whole)):
            if bound.module.split(".")[0] not in self.roots:
                return Value(bound.module if isinstance(bound, Whole) else f"{bound.module}.{bound.name}")
            source = self.module(bound.module)
            if isinstance(bound, Whole) or isinstance(source, Missing):
                return source
            return self.top_level(source, bound.name, seen)
        if isinstance(bound, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Function(bound, module, owner is not None)
        if isinstance(bound, ast.ClassDef):
            return Class(bound, module)
        target = self.evaluate(bound, module, owner, seen) if bound is not None else Value()
        if isinstance(target, Function):
            return replace(target, in_class=owner is not None or decorated(target.node, "classmethod"))
        return Value() if isinstance(target, Missing) else target

    def _starred(self, module: Module, name: str, seen: Seen) -> Target | None:
        # The last one wins. In a lazy package (transformers: hundreds) they are disjoint, and costly to read.
        lazy = module.replaced
        for star in module.scope.stars if lazy else reversed(module.scope.stars):
            source = self.module(star)
            if isinstance(source, Missing) or not (source.seems_to_bind if lazy else source.mentions)(name):
                continue
            exported = source.exported
            if name in exported if exported is not None else not name.startswith("_"):
                found = self.top_level(source, name, seen)
                if not isinstance(found, Missing):
                    return found
        return None

    def _lazy(self, module: Module, name: str, seen: Seen) -> Target | None:
        text = module.lazy.get(name)
        if text is None:
            return None
        source, _, attribute = text.partition(":")
        if not all(part.isidentifier() for part in source.lstrip(".").split(".")):
            return Value()
        relative = source.lstrip(".")
        target = self._follow(
            Member(module.absolute(relative, len(source) - len(relative)), attribute or name), module, seen
        )
        return Value() if isinstance(target, Missing) else target
