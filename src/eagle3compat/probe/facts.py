"""What clauses ask of a vLLM, written down, so that they can be asked again where that vLLM is not."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..adapter import GENERATOR
from ..adapters import ADAPTERS
from ..contract import AnyOf, Call, Clause, Imported, Imports, Not, SourceNotFoundError, Surface
from ..signature import Signature, written
from ..source import SourceSurface
from .ahead import paths

Fact: TypeAlias = "tuple[str | None, str | None]"
"""Why a path does not exist, None if it does; and its signature, None without one."""
Facts: TypeAlias = "dict[str, Fact]"


def questions(stock: Iterable[Surface]) -> list[str]:
    """Every path that the clauses of the adapters can ask about, for these stock releases, in order."""
    asked = {path for adapter in ADAPTERS for c in (*adapter.stock_needs, *adapter.relies_on) for path in paths(c)}
    for surface in stock:
        asked |= {imported.path for imports in _imports(surface).values() for imported in imports}
    return sorted(asked)


def _imports(stock: Surface) -> dict[str, tuple[Imported, ...]]:
    """What each stock module of this release imports of the package that a clause asks about."""
    found = {}
    for clause in (inner for adapter in ADAPTERS for c in adapter.stock_needs for inner in _import_clauses(c)):
        try:
            found[clause.caller] = stock.imports(clause.caller, clause.of)
        except SourceNotFoundError:  # this release has no such module
            continue
    return found


def _import_clauses(clause: Clause) -> Iterator[Imports]:
    if isinstance(clause, Imports):
        yield clause
    for inner in clause.clauses if isinstance(clause, AnyOf) else [clause.clause] if isinstance(clause, Not) else []:
        yield from _import_clauses(inner)


def take(surface: SourceSurface, asked: Iterable[str], package: str) -> Facts:
    """The facts of those of the paths that are in `package`."""
    return {path: _fact(surface, path) for path in asked if path.partition(":")[0].split(".")[0] == package}


def _fact(surface: SourceSurface, path: str) -> Fact:
    signature = surface.signature(path)
    text = None if signature is None else str(signature)
    if text is not None and parse(text) != signature:
        raise ValueError(f"the signature of {path} cannot be written down: {text}")
    return None if surface.exists(path) else surface.explain(path), text


def parse(text: str) -> Signature:
    """The signature that `str` wrote."""
    node = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return written(node, drop_first=False)


def take_stock(surface: Surface) -> dict[str, Any]:
    """The imports and the calls of the stock modules, as plain data."""
    names = sorted({c.name for adapter in ADAPTERS for c in adapter.stock_needs if hasattr(c, "name")})
    return {
        "imports": {
            module: [[i.module, i.name, i.bound, i.line] for i in imports]
            for module, imports in _imports(surface).items()
        },
        "calls": {
            name: [[c.positional, list(c.keywords), c.starred, c.line] for c in surface.calls(GENERATOR, name)]
            for name in names
        },
    }


class RecordedSurface:
    """Answers from facts. Raises LookupError where something was not written down: an answer is never made up."""

    def __init__(self, facts: Mapping[str, Fact], stock: Mapping[str, Any]) -> None:
        self._facts, self._stock = facts, stock

    def exists(self, path: str) -> bool:
        return self._fact(path)[0] is None

    def signature(self, path: str) -> Signature | None:
        text = self._fact(path)[1]
        return None if text is None else parse(text)

    def explain(self, path: str) -> str:
        return self._fact(path)[0] or f"{path} is there; its signature cannot be told from its source"

    def calls(self, module: str, name: str) -> tuple[Call, ...]:
        if module != GENERATOR or name not in self._stock["calls"]:
            raise LookupError(f"the calls of {name} in {module} are not recorded: make the record anew")
        return tuple(Call(at, tuple(words), starred, line) for at, words, starred, line in self._stock["calls"][name])

    def imports(self, module: str, of: str) -> tuple[Imported, ...]:
        if module not in self._stock["imports"]:
            raise SourceNotFoundError(f"no module named {module!r}")
        return tuple(Imported(*imported) for imported in self._stock["imports"][module])

    def _fact(self, path: str) -> Fact:
        if path not in self._facts:
            raise LookupError(f"{path} is not recorded: make the record anew")
        return self._facts[path]


def fold(releases: Mapping[str, Mapping[str, Any]]) -> dict[str, list[list[Any]]]:
    """What each release has under each key, as the changes: `[release, value]` for the first one and each new value."""
    changes: dict[str, list[list[Any]]] = {}
    for release, values in releases.items():
        for key in sorted({*values, *changes}):
            value, so_far = values.get(key), changes.setdefault(key, [])
            if not so_far or so_far[-1][1] != value:
                so_far.append([release, value])
    return changes


def unfold(changes: Mapping[str, Sequence[Sequence[Any]]], releases: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What was folded, by release."""
    found: dict[str, dict[str, Any]] = {release: {} for release in releases}
    for key, steps in changes.items():
        begun = {release: value for release, value in steps}
        current = None
        for release in releases:
            current = begun.get(release, current)
            if current is not None:
                found[release][key] = current
    return found
