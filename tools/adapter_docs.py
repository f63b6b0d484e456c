"""Writes docs/adapters.md from the adapters themselves; `--check` exits 1 when the file on disk differs.

python tools/adapter_docs.py [--check] [FILE]
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from eagle3compat.adapter import Adapter
from eagle3compat.adapters import ADAPTERS
from eagle3compat.contract import Clause

FILE = Path(__file__).parent.parent / "docs" / "adapters.md"
NAME = re.compile(r"\w+(?:[.:]\w+)+")
HEAD = """\
<!-- Written by tools/adapter_docs.py from src/eagle3compat/adapters. Change it there. -->

# Adapters

Each adapter bridges one seam between stock speculators and vLLM, in the order in which an extraction meets them.
It is *needed* when something that stock counts on does not hold on the installed vLLM, or when stock is wrong there on
every vLLM. It has *drifted* when something that it relies on itself does not hold. `eagle3compat plan` prints what
that comes to here, `eagle3compat explain ADAPTER` with each clause looked at.
"""


def document() -> str:
    """The whole page."""
    parts = [HEAD, "\n".join(_table()), *("\n".join(_section(adapter)) for adapter in ADAPTERS)]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _table() -> Iterator[str]:
    yield "| adapter | seam | where | what breaks without it | when it can be deleted |"
    yield "|---|---|---|---|---|"
    for adapter in ADAPTERS:
        cells = (f"[{adapter.id}](#{adapter.id})", adapter.seam, adapter.where, adapter.breaks, adapter.remove_when)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _section(adapter: Adapter) -> Iterator[str]:
    yield f"## {adapter.id}\n"
    yield f"{inspect.getdoc(type(adapter)) or ''}\n"
    yield f"Without it: {adapter.breaks}.\n"
    if adapter.always:
        yield f"Needed on every vLLM: {adapter.always}.\n"
    yield from _clauses("Needed when one of these does not hold", adapter.stock_needs)
    yield from _clauses("Drifted when one of these does not hold", adapter.relies_on)
    if adapter.requires:
        yield f"Makes no sense without: {', '.join(f'[{name}](#{name})' for name in adapter.requires)}.\n"
    yield f"Runs in the {adapter.where}; waits for the import of `{adapter.target}`.\n"
    yield f"Upstream: {f'<{adapter.upstream}>' if adapter.upstream else 'no issue or pull request known'}.\n"
    yield f"Can be deleted when: {adapter.remove_when}."


def _clauses(heading: str, clauses: Iterable[Clause]) -> Iterator[str]:
    lines = [f"- {NAME.sub(_as_code, _said(clause))}" for clause in clauses]
    if lines:
        yield f"{heading}:\n"
        yield "\n".join(lines) + "\n"


def _said(clause: Clause) -> str:
    """What is expected, with what it is expected of unless that says so itself."""
    by_itself = clause.expected.startswith(getattr(clause, "path", "\0"))
    return clause.expected if by_itself else f"{clause}: {clause.expected}"


def _as_code(name: re.Match[str]) -> str:
    return f"`{name.group()}`"


if __name__ == "__main__":
    from pages import page_command  # type: ignore[import-not-found]

    sys.exit(page_command(FILE, document, "the code of the adapters"))
