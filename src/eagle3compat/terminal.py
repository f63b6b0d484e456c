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

PIPED_WIDTH = 160
"""Columns where standard output is no terminal: a table that is pasted or searched must not be cut to 80."""


def console() -> Console:
    """A console on standard output. Plain strings are read as markup: wrap what others wrote in `rich.text.Text`."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(width=PIPED_WIDTH, color_system=None, force_terminal=False, highlight=False)


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
