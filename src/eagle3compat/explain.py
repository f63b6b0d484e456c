"""Everything that is known of one adapter, with each clause looked at on the installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from . import detect
from .adapter import Adapter
from .contract import Clause, Surface
from .terminal import console, grid


def explain(adapter: Adapter) -> None:
    """Print it."""
    out = console()
    surface = _installed()
    out.print(Text(f"{adapter.id} · {adapter.seam}", style="bold"))
    out.print(Padding(Text(inspect.getdoc(type(adapter)) or ""), (0, 0, 1, 2)))
    out.print(grid(_facts(adapter, surface)))
    out.print()
    out.print(_clauses("stock needs", adapter.stock_needs, surface))
    out.print(_clauses("it relies on", adapter.relies_on, surface))


def _facts(adapter: Adapter, surface: Surface | None) -> Iterator[tuple[str, str]]:
    yield "without it", adapter.breaks
    if adapter.always:
        yield "always needed", adapter.always
    yield "runs in", adapter.where
    yield "waits for", f"the import of {adapter.target}"
    if adapter.requires:
        yield "requires", ", ".join(adapter.requires)
    yield "upstream", adapter.upstream or "no issue or pull request known"
    yield "delete it when", adapter.remove_when
    if surface is None:
        yield "here", "not looked at: vLLM or speculators is not installed"
    else:
        outcome = adapter.decide(surface)
        yield "here", f"{outcome.status.word(planned=True)}: {outcome.reason}"


def _installed() -> Surface | None:
    if detect.package("vllm") is None or detect.package("speculators") is None:
        return None
    from .source import SourceSurface

    return SourceSurface.installed("vllm", "speculators", "transformers")


def _clauses(heading: str, clauses: Iterable[Clause], surface: Surface | None) -> Table:
    table = Table(title_justify="left", expand=False)
    table.add_column(heading, overflow="fold")
    table.add_column("holds")
    table.add_column("found" if surface else "expected", overflow="fold")
    for clause in clauses:
        if surface is None:
            table.add_row(Text(str(clause)), "not looked at", Text(clause.expected))
        else:
            finding = clause.evaluate(surface)
            table.add_row(Text(str(clause)), "yes" if finding.held else "no", Text(finding.found))
    if not table.row_count:
        table.add_row("nothing", "", "")
    return table
