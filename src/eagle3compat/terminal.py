"""How the commands write: tables for people, wide and without colour where nobody watches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE, NARROW = 160, 100
"""Columns where standard output is no terminal: what fits into 160, and a table of several columns, is as wide as it
is, so that lines can be pasted and searched; sentences that would be wrapped there too are wrapped at 100, or at their
longest word."""


def console() -> Console:
    """A console on standard output. Plain strings are read as markup: wrap what others wrote in `rich.text.Text`."""
    from rich.console import Console
    from rich.measure import Measurement

    if sys.stdout.isatty():
        return Console(highlight=False)

    class Piped(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            sizes = [Measurement.get(self, self.options, each) for each in objects]
            boxed = any(getattr(each, "box", None) is not None for each in objects)
            if not boxed and max((size.maximum for size in sizes), default=0) >= WIDE:
                options["width"] = max(NARROW, *(size.minimum for size in sizes))
            super().print(*objects, **options)

    return Piped(width=WIDE, color_system=None, force_terminal=False, highlight=False)


def grid(rows: Iterable[tuple[str, str]], padding: int = 2) -> Table:
    """Rows of a name and what is said of it, taken literally."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, padding))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, said in rows:
        table.add_row(Text(name), Text(said))
    return table


@contextmanager
def progress(doing: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that says on standard error what is done now: a line, or a spinner where somebody watches."""
    from rich.console import Console

    if not sys.stderr.isatty():
        yield lambda step: print(f"eagle3compat: {doing}: {step}", file=sys.stderr, flush=True)
        return
    with Console(stderr=True).status(doing) as status:
        yield lambda step: status.update(f"{doing}: {step}")


def print_json(data: dict[str, Any]) -> None:
    try:
        print(json.dumps(data, indent=2), flush=True)
    except BrokenPipeError:  # whoever reads it, `head` say, has had enough; what is flushed at exit goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
