"""What a Python file binds, read as a syntax tree; nothing here imports the code that it reads."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from .contract import Call, Imported, SourceNotFoundError
from .places import Place
from .signature import Def


@dataclass(frozen=True)
class Member:
    """`from module import name`."""

    module: str
    name: str


@dataclass(frozen=True)
class Whole:
    """`import module`, as far as the bound name goes: `import a.b` binds `a`."""

    module: str


Bound: TypeAlias = "Def | ast.ClassDef | ast.expr | Member | Whole | None"
"""What a name stands for; None for something that cannot be followed."""

_BINDING = rb"(?m)^[\w \t.,;:=(|*\[\]]*\b%s\b|[\"']%s[\"']"
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))


@dataclass
class Scope:
    """The names of a module's or a class's body.

    A name has several meanings when branches differ; `fallbacks` are those bound in an `except`.
    """

    names: dict[str, list[Bound]] = field(default_factory=dict)
    fallbacks: dict[str, list[Bound]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __contains__(self, name: str) -> bool:
        return name in self.names or name in self.fallbacks


class Module:
    """One module's source; read, then parsed, when first needed."""

    def __init__(self, name: str, path: Place) -> None:
        self.name, self.path = name, path
        self.fault = ""

    @cached_property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py" or self.path.is_dir()

    @cached_property
    def data(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path.suffix == ".py" else b""
        except OSError as error:
            self.fault = f"{self.path} cannot be read: {error}"
            return b""

    @cached_property
    def tree(self) -> ast.Module:
        """Empty if the file cannot be read or parsed; `fault` then says why."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.data)
        except (SyntaxError, ValueError) as error:
            self.fault = f"{self.path} does not parse on this Python: {error}"
            return ast.Module(body=[], type_ignores=[])

    @cached_property
    def scope(self) -> Scope:
        scope = Scope()
        _Reader(scope, self).read(self.tree.body)
        return scope

    @cached_property
    def replaced(self) -> bool:
        """Whether it puts a lazy object in its place, with the names that it imports for type checkers."""
        return b"sys.modules[__name__] =" in self.data

    def mentions(self, name: str) -> bool:
        """False if the text alone shows that the module does not bind `name`; parsing it costs much more."""
        return name.encode() in self.data or b"import *" in self.data

    def seems_to_bind(self, name: str) -> bool:
        """`mentions`, without those in prose and in the examples of docstrings; may miss an odd layout."""
        word = name.encode()
        return b"import *" in self.data or (
            word in self.data and re.search(_BINDING % (word, word), self.data) is not None
        )

    def absolute(self, module: str | None, level: int) -> str:
        """The full name of the module that `from ..module import` means here."""
        if not level:
            return module or ""
        parts = self.name.split(".")
        keep = len(parts) - level + self.is_package
        return ".".join([*parts[:keep], *([module] if module else [])])

    @cached_property
    def exported(self) -> frozenset[str] | None:
        """What `__all__` lists, or None without one that can be read."""
        listed: set[str] = set()
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets) and value is not None:
                listed.update(strings(value))
        return frozenset(listed) or None

    @cached_property
    def lazy(self) -> dict[str, str]:
        """The names that a module-level `__getattr__` knows, with the text of what they stand for, if any.

        They are the keys of the dictionaries that it looks into, and the strings that it compares with.
        """
        hooks = self.scope.names.get("__getattr__", ())
        found: dict[str, str] = {}
        for node in (n for hook in hooks if isinstance(hook, ast.FunctionDef) for n in ast.walk(hook)):
            if isinstance(node, ast.Compare):
                found.update(dict.fromkeys(strings(node), ""))
            elif isinstance(node, ast.Name):
                for table in self.scope.names.get(node.id, ()):
                    if isinstance(table, ast.Dict):
                        found.update(_entries(table))
        return found

    def require_source(self) -> ast.Module:
        if self.path.suffix != ".py":
            raise SourceNotFoundError(f"module {self.name!r} has no source: it is {self.path}")
        tree = self.tree
        if self.fault:
            raise SourceNotFoundError(self.fault)
        return tree

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        """The calls of plain names, `name(...)`, in the order of their lines."""
        calls: dict[str, list[Call]] = {}
        for node in ast.walk(self.require_source()):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                plain = [a for a in node.args if not isinstance(a, ast.Starred)]
                keywords = tuple(k.arg for k in node.keywords if k.arg is not None)
                starred = len(plain) < len(node.args) or len(keywords) < len(node.keywords)
                calls.setdefault(node.func.id, []).append(Call(len(plain), keywords, starred, node.lineno))
        return {name: sorted(found, key=lambda call: call.line) for name, found in calls.items()}

    def imports(self, of: str) -> tuple[Imported, ...]:
        """The imports from `of` without which this module cannot be imported."""
        found = []
        for node in _run_at_import(self.require_source().body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.split(".")[0]
                    found.append(Imported(alias.name, None, bound, node.lineno))
            elif isinstance(node, ast.ImportFrom):
                source = self.absolute(node.module, node.level)
                found += [Imported(source, a.name, a.asname or a.name, node.lineno) for a in node.names]
        return tuple(i for i in found if i.module == of or i.module.startswith(of + "."))


class _Reader:
    """Fills a scope from the statements of a body."""

    def __init__(self, scope: Scope, module: Module, in_class: bool = False) -> None:
        self.scope, self.module, self.in_class = scope, module, in_class

    def read(self, body: Sequence[ast.stmt], branch: bool = False, fallback: bool = False) -> None:
        for node in body:
            for name, bound in self._bindings(node):
                names = self.scope.fallbacks if fallback else self.scope.names
                names[name] = [*names.get(name, ()), bound] if branch else [bound]
            if isinstance(node, ast.If):
                for part in [node.body, node.orelse] if self.module.replaced else runtime_branches(node):
                    self.read(part, True, fallback)
            elif isinstance(node, _TRY):
                for part in (node.body, node.orelse):
                    self.read(part, True, fallback)
                for handler in node.handlers:
                    self.read(handler.body, True, True)
                self.read(node.finalbody, True, fallback)
            elif isinstance(node, (ast.With, ast.For, ast.While)):
                self.read(node.body, True, fallback)
            elif isinstance(node, ast.Delete) and not branch:
                for target in node.targets:
                    self.scope.names.pop(getattr(target, "id", ""), None)

    def _bindings(self, node: ast.stmt) -> Iterator[tuple[str, Bound]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if not decorated(node, "overload", "setter", "deleter"):
                yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                yield (alias.asname, Whole(alias.name)) if alias.asname else (top, Whole(top))
        elif isinstance(node, ast.ImportFrom):
            source = self.module.absolute(node.module, node.level)
            for alias in node.names:
                if alias.name == "*":
                    self.scope.stars.append(source)
                else:
                    yield alias.asname or alias.name, Member(source, alias.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                else:
                    elements = target.elts if isinstance(target, (ast.Tuple, ast.List)) else ()
                    yield from ((e.id, None) for e in elements if isinstance(e, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            # A field without a default is no attribute of its class, but it is one of every instance.
            declared = self.in_class and node.target.id not in self.scope
            if node.value is not None or declared:
                yield node.target.id, node.value


def read_class(node: ast.ClassDef, module: Module) -> Scope:
    """The names of a class body, and the names that it only annotates."""
    scope = Scope()
    _Reader(scope, module, in_class=True).read(node.body)
    return scope


def decorated(node: Def, *names: str) -> bool:
    """Whether the name of a decorator, whatever module it is taken from, ends with one of these."""
    found = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    last = (d.attr if isinstance(d, ast.Attribute) else getattr(d, "id", "") for d in found)
    return any(name.endswith(names) for name in last)


def strings(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def _entries(table: ast.Dict) -> Iterator[tuple[str, str]]:
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            text = value.value if isinstance(value, ast.Constant) else ""
            yield key.value, text if isinstance(text, str) else ""


def _run_at_import(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported and whose failure is not handled."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from (s for branch in runtime_branches(node) for s in _run_at_import(branch))
        elif isinstance(node, _TRY):
            if not any(handles_import(handler) for handler in node.handlers):
                yield from _run_at_import(node.body)
            yield from _run_at_import([*node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from _run_at_import(node.body)


def handles_import(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    named = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return bool(named & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


def runtime_branches(node: ast.If) -> list[list[ast.stmt]]:
    """The branches that can run outside a type checker."""
    test, negated = node.test, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, True
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    if name != "TYPE_CHECKING":
        return [node.body, node.orelse]
    return [node.body] if negated else [node.orelse]
