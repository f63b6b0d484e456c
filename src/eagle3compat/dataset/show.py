"""How findings are shown: a table by kind of fault, and one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .check import Advance, Findings
from .faults import KINDS, Fault, written
from .files import IN_PROCESS
from .redo import advice, resumes_at

if TYPE_CHECKING:
    from rich.table import Table


def show(findings: Findings, examples: int, moved: Path | None) -> None:
    """Print what was read, what is wrong, and what to do."""
    from rich.text import Text

    from ..terminal import console

    out = console()
    out.print(Text(_summary(findings)), soft_wrap=True)
    if findings.recomputed:
        out.print(_recomputed_table(findings.recomputed))
    if findings.faults:
        out.print(_fault_table(findings.faults, examples))
    for line in [*findings.notes, *([""] if findings.redo else []), *advice(findings.folder, findings.redo, moved)]:
        out.print(Text(line), soft_wrap=True)


def _summary(findings: Findings) -> str:
    folder = findings.folder
    said = f"{folder.path}: {len(folder.files)} files, {folder.layout.id}"
    if findings.expected is not None:
        layers, width, dtype = findings.expected
        said += f", {layers} layers of {width} in {dtype}, {sum(findings.lengths.values()):,} tokens"
    if not findings.faults:
        return f"{said}: no fault found"
    return f"{said}: {len(findings.faults)} faults in {count_files(findings.faults):,} files"


def count_files(faults: list[Fault]) -> int:
    """How many files they are about, those of a gap counted each."""
    gaps = sum(len(fault.indices) for fault in faults if fault.last is not None)
    return gaps + len({fault.file for fault in faults if fault.last is None})


def _fault_table(faults: list[Fault], examples: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("fault", "files", "file", "what is wrong"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "files" else "left")
    for kind, members in groupby(faults, key=lambda fault: fault.kind):
        same = list(members)
        count = count_files(same)
        title: str = f"{kind}: {KINDS[kind].title}"
        for number, fault in enumerate(same[:examples]):
            left = (Text(title), f"{count:,}") if number == 0 else ("", "")
            table.add_row(*left, Text(fault.file), Text(fault.detail))
        if len(same) > examples:
            rest = sorted({index for fault in same[examples:] for index in fault.indices})
            table.add_row("", "", f"{len(same) - examples} more", Text(written(rest)))
    return table


def _recomputed_table(rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("recomputed", "tokens", "error of each layer, median row / worst row", "verdict"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        errors = "  ".join(f"{layer['id']}: {layer['median']:.1e} / {layer['worst']:.1e}" for layer in row["layers"])
        table.add_row(Text(row["file"]), str(row["tokens"]), Text(errors), "differs" if row["reason"] else "equal")
    return table


def as_dict(findings: Findings, moved: Path | None) -> dict[str, Any]:
    folder = findings.folder
    known = findings.expected and dict(zip(("layers", "hidden_size", "dtype"), findings.expected, strict=True))
    redo: dict[str, Any] = {"indices": findings.redo, "advice": advice(folder, findings.redo, moved)}
    if folder.layout is IN_PROCESS:
        redo["stock_resumes_at"] = resumes_at(folder, findings.redo if moved else ())
    return {
        "directory": str(folder.path),
        "layout": folder.layout.id,
        "files": len(folder.files),
        "tokens": sum(findings.lengths.values()),
        "expected": known,
        "clean": not findings.faults,
        "faults": [fault.as_dict() for fault in findings.faults],
        "notes": findings.notes,
        "redo": redo,
        "moved_to": str(moved) if moved else None,
        "recomputed": findings.recomputed,
    }


@contextmanager
def progress(doing: str, total: int, unit: str = "bytes") -> Iterator[Advance]:
    """A bar on standard error while it is watched; what is read from standard output stays clean."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    out = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal, redirect_stdout=False) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda amount_done: bar.advance(task, amount_done)
