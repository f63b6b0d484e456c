"""Reads every file of a set, and says what is wrong with it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..threads import compute_alone
from .across import APART, Across, row_errors
from .content import HEADS, ROWS, RUN, Facts, heads, inspect
from .faults import KINDS, Fault, to_redo, written
from .files import IN_PROCESS, Folder
from .records import CONFIG, read_json
from .sample import UnreadableError, opened

THREADS = 8
"""Reading, checksums and torch all work outside Python's lock."""
MOST_MISSING = 1_000_000
"""More missing files than that are a wrong number, not a run that was interrupted."""
CHANGED = "it changed while the folder was read; check again when the run that writes it has ended"

Advance = Callable[[int], None]


@dataclass
class Findings:
    """What was found in one folder."""

    folder: Folder
    expected: tuple[int, int, str] | None
    """Layers, hidden size and dtype of the set."""
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    """Token counts of the files that were readable, by index."""
    images: set[int] = field(default_factory=set)
    """Files that may hold images: only their rows before the first were compared with those of others."""
    recomputed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def redo(self) -> list[int]:
        return to_redo(self.faults)

    @property
    def unusable(self) -> list[int]:
        """The indices that cannot be converted: those to redo, and files that are not to be had or to be renamed."""
        others = {fault.index for fault in self.faults if fault.kind in ("no access", "number")}
        return sorted({*self.redo, *(index for index in others if index is not None)})

    def sort(self) -> None:
        order = list(KINDS)
        self.faults.sort(key=lambda fault: (order.index(fault.kind), -1 if fault.index is None else fault.index))


def check(
    folder: Folder, layer_ids: Sequence[int] | None = None, count: int | None = None, advance: Advance | None = None
) -> Findings:
    """Read every file once, and compare them. `count` is how many samples there should be, where that is known.

    `layer_ids` are those that the files were made with, in their own convention. `advance` is called with the bytes of
    each file that was read.
    """
    layer_ids = folder.layer_ids if layer_ids is None else layer_ids
    across = Across(lambda index, rows: _read_heads(folder, index, rows))
    findings = Findings(folder, None, list(folder.records.faults))
    for facts in _facts(folder, layer_ids):
        findings.faults += [Fault(kind, facts.name, facts.index, detail) for kind, detail in facts.faults]
        if facts.signature is not None:
            findings.lengths[facts.index] = facts.length
            if facts.told < facts.length:
                findings.images.add(facts.index)
        across.add(facts, HEADS)
        if advance is not None:
            advance(facts.size)
    _compare(findings, across, layer_ids)
    if findings.images:
        findings.notes.append(
            f"{len(findings.images)} files hold one token id {RUN} times or more in a row, as images do, of which ids "
            "do not tell the states: only rows before that were compared with other files'."
        )
    _look_around(findings, count)
    findings.sort()
    return findings


def _facts(folder: Folder, layer_ids: Sequence[int] | None) -> Iterator[Facts]:
    """Of each file, by index, read by several threads; only so many are held as there are threads."""
    workers = min(THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, initializer=compute_alone) as pool:
        pending: deque[Future[Facts]] = deque()
        try:
            for index, path in folder.files.items():
                pending.append(pool.submit(inspect, index, path, folder.layout, layer_ids))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _read_heads(folder: Folder, index: int, rows: int) -> Any:
    try:
        with opened(folder.files[index], folder.layout) as sample:
            return heads(sample.states, rows)
    except (UnreadableError, RuntimeError):  # as stacking layers of several shapes, where it is another file by now
        return None


def _compare(findings: Findings, across: Across, layer_ids: Sequence[int] | None) -> None:
    folder = findings.folder
    found = across.expected()
    if found is not None:
        layers = len(layer_ids) if layer_ids else found[0]
        width = folder.records.hidden_size or found[1]
        findings.expected = (layers, width, found[2])
        findings.faults += across.unlike(findings.expected, folder.layout.file)
    name = folder.layout.file
    layer_ids = layer_ids or ()

    def differ(first: int, second: int) -> str:
        try:
            return difference(folder, first, second, layer_ids)
        except UnreadableError:
            across.changed |= {first, second}
            return ""

    findings.faults += across.faults(name, differ)
    findings.faults += [Fault("unreadable", name(index), index, CHANGED) for index in sorted(across.changed)]
    if across.copies:
        pairs = ", ".join(f"{name(second)} of {name(first)}" for first, second in across.copies[:3])
        findings.notes.append(
            f"{len(across.copies)} files are exact copies of others ({pairs}): right if the data repeat themselves."
        )


def difference(folder: Folder, first: int, second: int, layer_ids: Sequence[int]) -> str:
    """How the states of two files with one prompt differ beyond rounding, in words; empty if they don't.

    Raises UnreadableError where one of them is not what it was.
    """
    with (
        opened(folder.files[first], folder.layout) as one,
        opened(folder.files[second], folder.layout) as other,
    ):
        if len(one.states) != len(other.states):
            return ""  # said already, of the one with another number of layers
        names = folder.layout.layers(len(one.states), layer_ids)
        for layer, got, want in zip(names, one.states, other.states, strict=True):
            if got.shape != want.shape:
                return ""
            parts = zip(got.split(ROWS), want.split(ROWS), strict=True)
            wrong = sum(int((~(row_errors(mine, theirs) <= APART)).sum()) for mine, theirs in parts)
            if wrong:
                return f"and {wrong} of {len(got)} rows of {layer} differ; one of them is wrong"
    return ""


def _look_around(findings: Findings, count: int | None) -> None:
    """What the folder itself shows: gaps, leftovers, and files that training would take for samples."""
    folder = findings.folder
    findings.faults += _gaps(folder, folder.records.samples if count is None else count, count is not None)
    for path in folder.leftovers:
        findings.faults.append(Fault("leftover", path.name, None, "it is no sample; delete it when no run is going on"))
    for path in folder.strays:
        name = str(path.relative_to(folder.path))
        said = 'its name ends in "pt": stock\'s trainer reads every such file below the folder as a sample'
        findings.faults.append(Fault("stray", name, None, said))
    if folder.layout is IN_PROCESS:
        _compare_lengths(findings, folder.path / "sample_lengths.json")


def _gaps(folder: Folder, count: int | None, asked: bool) -> list[Fault]:
    """The indices without a file, a fault for each run of them, and the numbers that cannot be right."""
    name, faults = folder.layout.file, []
    indices = list(folder.files)
    while len(indices) > 1 and indices[-1] + 1 - len(indices) > MOST_MISSING:
        far = indices.pop()
        said = f"{far - indices[-1] - 1:,} files are missing before it: rename it, or move it away"
        faults.append(Fault("number", name(far), far, said))
    end = indices[-1] + 1
    if count is not None and count - len(indices) > MOST_MISSING:
        said = f"{count:,} samples, of which {len(indices):,} are there; it is passed over. Correct it"
        faults.append(Fault("record", "--count" if asked else CONFIG, None, said))
    elif count is not None:
        end = max(end, count)
    before = -1
    for index in [*indices, end]:
        if index > before + 1:
            more = f", nor any up to {name(index - 1)}" if index > before + 2 else ""
            after = "; later ones are there" if index < end else ""
            faults.append(Fault("missing", name(before + 1), before + 1, f"no such file{more}{after}", index - 1))
        before = index
    return faults


def _compare_lengths(findings: Findings, path: Path) -> None:
    """Stock 0.4 writes the token counts at the end of a run, and its trainer packs batches by them."""
    if not path.exists():
        return
    try:
        recorded = {int(name): length for name, length in read_json(path).items()}
    except InputError as error:
        findings.faults.append(Fault("length record", path.name, None, str(error).partition(f"{path} ")[2]))
        return
    except ValueError as error:
        findings.faults.append(Fault("length record", path.name, None, f"it has no numbers of files: {error}"))
        return
    for index, length in findings.lengths.items():
        if recorded.get(index, length) != length:
            said = f"{path.name} says {str(recorded[index])[:60]} tokens, the file has {length}"
            findings.faults.append(Fault("length record", findings.folder.layout.file(index), index, said))
    lacking = sorted(set(findings.lengths) - set(recorded))
    if lacking:
        findings.notes.append(
            f"{path.name} lacks {len(lacking)} files ({written(lacking, 5)}): stock's trainer guesses every length."
        )
