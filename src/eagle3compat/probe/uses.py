"""What code takes from another package, read from its source: every import, call and attribute, as it would run.

Beside the clauses, which say what somebody thought of, this shows a change that nobody thought of.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..syntax import Module, handles_import, runtime_branches
from .types import TypedSurface

_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Use:
    """One use of the other package, and what is wrong with it, if anything.

    `path` is what is used there, `root` the name of the using module that leads to it. `inherited` says that it is used
    on an object that a call of `root` led to. A `guarded` use is one whose failure the code handles itself, or that it
    asks for with `hasattr`.
    """

    kind: str
    module: str
    line: int
    text: str
    path: str
    root: str
    inherited: bool
    guarded: bool
    fault: str = ""


@dataclass(frozen=True)
class _Thing:
    """What an expression stands for: the object at `path`, or an instance of that class."""

    path: str
    root: str
    instance: bool = False
    inherited: bool = False

    def member(self, name: str) -> str:
        return f"{self.path}{'.' if ':' in self.path else ':'}{name}"


def uses(surface: TypedSurface, modules: Sequence[str], of: str) -> list[Use]:
    """What the source of `modules` uses of the package `of`, as it would run: first the imports, then the rest.

    A class is followed from its constructor through its methods; what is not annotated is not followed.
    Raises SourceNotFoundError if a module cannot be read.
    """
    readers = [_Reader(surface, surface.module(name), of) for name in modules]
    for reader in readers:
        reader.run_module()
    for reader in readers:
        reader.run_definitions()
    return [use for reader in readers for use in reader.imports] + [use for reader in readers for use in reader.found]


class _Reader:
    """Walks through one module as Python would run it, and takes down what it uses."""

    def __init__(self, surface: TypedSurface, module: Module, of: str) -> None:
        self._surface, self._module, self._of = surface, module, of
        self.imports: list[Use] = []
        self.found: list[Use] = []
        self._names: dict[str, _Thing] = {}
        self._own: dict[str, _Thing] = {}
        self._class: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self._entered: set[ast.AST] = set()
        self._guarded = 0
        self._asked_for = frozenset(_asked_for(module))

    def run_module(self) -> None:
        for node in self._module.require_source().body:
            if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
                self._visit(node)

    def run_definitions(self) -> None:
        for node in self._module.tree.body:
            if isinstance(node, ast.ClassDef):
                self._run_class(node)
        for node in self._module.tree.body:
            if isinstance(node, _FUNCTIONS):
                self._enter(node)

    def _run_class(self, node: ast.ClassDef) -> None:
        self._own, self._class = {}, {part.name: part for part in node.body if isinstance(part, _FUNCTIONS)}
        for base in node.bases:
            self._visit(base)
        first = [self._class["__init__"]] if "__init__" in self._class else []
        for method in [*first, *self._class.values()]:
            self._enter(method)
        self._own, self._class = {}, {}

    def _enter(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """The body of a function, once, with names of its own."""
        if node in self._entered:
            return
        self._entered.add(node)
        outer, self._names = self._names, dict(self._names)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self._names.pop(argument.arg, None)
            self._bind(argument.arg, self._instance_of(argument.annotation))
        for statement in node.body:
            self._visit(statement)
        self._names = outer

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, ast.If):
            self._visit(node.test)
            for branch in runtime_branches(node):
                self._each(branch)
        elif isinstance(node, _TRY):
            self._try(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            self._assign(node)
        elif isinstance(node, (ast.Call, ast.Attribute)):
            self._type(node)
        elif isinstance(node, _FUNCTIONS):
            self._enter(node)
        else:
            self._each(ast.iter_child_nodes(node))

    def _each(self, nodes: Iterator[ast.AST] | Sequence[ast.AST]) -> None:
        for node in nodes:
            self._visit(node)

    def _try(self, node: ast.Try) -> None:
        handled = any(handles_import(handler) and not _raises(handler) for handler in node.handlers)
        self._guarded += handled
        self._each(node.body)
        self._guarded -= handled
        for handler in node.handlers:
            self._each(handler.body)
        self._each([*node.orelse, *node.finalbody])

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        level = getattr(node, "level", 0)
        source = self._module.absolute(node.module, level) if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            module = source or alias.name
            path = f"{source}:{alias.name}" if source and alias.name != "*" else module
            bound = alias.asname or (alias.name if source else alias.name.split(".")[0])
            self._names.pop(bound, None)
            if module != self._of and not module.startswith(f"{self._of}."):
                continue
            text = f"from {source} import {alias.name}" if source else f"import {alias.name}"
            use = self._use("import", node, text, _Thing(path, bound))
            self.imports.append(use if self._surface.exists(path) else replace(use, fault=self._surface.explain(path)))
            self._bind(bound, _Thing(path if source or alias.asname else alias.name.split(".")[0], bound))

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> None:
        thing = self._type(node.value) if node.value is not None else None
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                self._names.pop(target.id, None)
                self._bind(target.id, thing)
            elif isinstance(target, ast.Attribute) and _is_self(target.value):
                if thing is not None:
                    self._own[target.attr] = thing
            else:
                self._visit(target)

    def _bind(self, name: str, thing: _Thing | None) -> None:
        if thing is not None:
            self._names[name] = thing

    def _type(self, node: ast.expr) -> _Thing | None:
        """What an expression stands for, if it comes from the other package; uses in it are taken down on the way."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.NamedExpr):
            self._assign(node)
            return self._type(node.target)
        if isinstance(node, ast.Attribute):
            if _is_self(node.value):
                return self._own.get(node.attr)
            holder = self._type(node.value)
            return self._attribute(node, holder) if holder is not None else None
        if isinstance(node, ast.Call):
            return self._call(node)
        self._each(ast.iter_child_nodes(node))
        return None

    def _attribute(self, node: ast.Attribute, holder: _Thing) -> _Thing | None:
        if not holder.instance and self._surface.is_opaque(holder.path):
            return None
        path = holder.member(node.attr)
        use = self._use("attribute", node, ast.unparse(node), replace(holder, path=path))
        there = self._surface.may_have(path) if holder.instance else self._surface.exists(path)
        self.found.append(use if there else replace(use, fault=self._surface.explain(path)))
        if not there:
            return None
        if not holder.instance:
            return replace(holder, path=path)
        declared = self._surface.attribute(path)
        if declared is not None:
            return _Thing(declared, holder.root, instance=True, inherited=True)
        return replace(holder, path=path, instance=False) if self._surface.signature(path) is not None else None

    def _call(self, node: ast.Call) -> _Thing | None:
        of_self = isinstance(node.func, ast.Attribute) and _is_self(node.func.value)
        own = self._class.get(node.func.attr) if of_self else None  # type: ignore[attr-defined]
        called = None if own is not None else self._type(node.func)
        self._each([*node.args, *(keyword.value for keyword in node.keywords)])
        if own is not None:
            self._enter(own)
            return self._instance_of(own.returns)
        if called is None or called.instance:
            return None
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
        starred = len(plain) < len(node.args) or len(keywords) < len(node.keywords)
        signature = self._surface.signature(called.path)
        refused = signature.bind(len(plain), keywords, partial=starred) if signature else None
        fault = f"{called.path.rpartition(':')[2]}() {refused}" if refused else ""
        if not self._surface.exists(called.path):
            fault = self._surface.explain(called.path)
        use = self._use("call", node, f"{ast.unparse(node.func)}({', '.join(_arguments(node))})", called)
        self.found.append(replace(use, fault=fault))
        if self._surface.is_class(called.path):
            return replace(called, instance=True, inherited=True)
        returned = self._surface.result(called.path)
        return _Thing(returned, called.root, instance=True, inherited=True) if returned else None

    def _instance_of(self, annotation: ast.expr | None) -> _Thing | None:
        """An instance of the class that an annotation names, in the words of this module."""
        named = self._names.get(annotation.id) if isinstance(annotation, ast.Name) else None
        if named is None or not self._surface.is_class(named.path):
            return None
        return replace(named, instance=True, inherited=True)

    def _use(self, kind: str, node: ast.expr | ast.stmt, text: str, thing: _Thing) -> Use:
        guarded = self._guarded > 0 or (kind != "import" and thing.path.rpartition(".")[2] in self._asked_for)
        return Use(kind, self._module.name, node.lineno, text, thing.path, thing.root, thing.inherited, guarded)


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _asked_for(module: Module) -> Iterator[str]:
    """The attributes that a module asks for by name before it uses them: `hasattr(core, "step_fn")`."""
    for node in ast.walk(module.require_source()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            for part in node.args[1:2]:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _arguments(node: ast.Call) -> Iterator[str]:
    """What is passed, without the values: `..., block_size=...`."""
    yield from ("*..." if isinstance(argument, ast.Starred) else "..." for argument in node.args)
    yield from (f"{keyword.arg}=..." if keyword.arg else "**..." for keyword in node.keywords)

