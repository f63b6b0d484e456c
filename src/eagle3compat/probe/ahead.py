"""Fetches in a few rounds what a probe is going to read, instead of file by file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..adapter import GENERATOR, WORKER
from ..adapters import ADAPTERS
from ..contract import Clause
from ..syntax import Member
from .archive import Entry
from .sources import Source
from .types import TypedSurface

ROUNDS = 3
"""How far re-exports are followed: `vllm.config:CacheConfig` to `vllm.config.cache` is one."""


def ahead(source: Source, surface: TypedSurface) -> None:
    """Fetch the files that clauses and stock's imports lead to. What this misses is fetched when it is read."""
    if not isinstance(source.place, Entry):
        return
    tree, base = source.place.tree, source.place.path.removesuffix(source.name)
    wanted = {split for split in _wanted(surface) if split[0].split(".")[0] == source.name}
    for _ in range(ROUNDS):
        files = (f"{base}{name}" for module, _ in wanted for name in _names(module))
        tree.prefetch(set(files) & tree.files)
        wanted = set(_further(wanted, surface))


def _wanted(surface: TypedSurface) -> Iterator[tuple[str, str]]:
    """Modules, each with the name that is asked of it."""
    clauses = (clause for adapter in ADAPTERS for clause in (*adapter.stock_needs, *adapter.relies_on))
    for path in (path for clause in clauses for path in paths(clause)):
        module, _, names = path.partition(":")
        yield module, names.partition(".")[0]
    for stock in (GENERATOR, WORKER):
        for imported in surface.imports(stock, "vllm"):
            yield imported.module, imported.name or ""


def paths(clause: Clause) -> Iterator[str]:
    """The paths that a clause names, itself or in the clauses that it is made of."""
    if hasattr(clause, "path"):
        yield clause.path
    parts: Iterable[Clause] = getattr(clause, "clauses", None) or filter(None, [getattr(clause, "clause", None)])
    for part in parts:
        yield from paths(part)


def _names(module: str) -> Iterator[str]:
    """The files that a module and the packages above it may be."""
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        yield f"{'/'.join(parts[:depth])}/__init__.py"
    yield f"{'/'.join(parts)}.py"


def _further(wanted: set[tuple[str, str]], surface: TypedSurface) -> Iterator[tuple[str, str]]:
    """Where modules that were fetched take these names from."""
    for name, member in wanted:
        module = surface.find_module(name)
        for bound in module.scope.names.get(member, ()) if module else ():
            if isinstance(bound, Member):
                yield bound.module, bound.name
