"""The kinds of fault that files of hidden states can have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Kind:
    """`redo`: the content is lost or wrong, so the sample is to be extracted again."""

    title: str
    redo: bool = True


KINDS: dict[str, Kind] = {
    "missing": Kind("no file for an index"),
    "unreadable": Kind("truncated, or not such a file"),
    "no access": Kind("this user may not read it", redo=False),
    "checksum": Kind("bytes differ from their checksum"),
    "incomplete": Kind("lacks a tensor that it must have"),
    "shape": Kind("a tensor of the wrong shape or kind"),
    "length": Kind("token ids, states and loss mask differ in length"),
    "layers": Kind("another number of layers"),
    "dtype": Kind("another dtype"),
    "not finite": Kind("NaN or infinite values"),
    "zero": Kind("rows that are all zero"),
    "same layer": Kind("two layers hold the same states"),
    "same states": Kind("the states of another sample"),
    "contradiction": Kind("one prompt, two different results"),
    "prefix": Kind("a shared prompt prefix with different states"),
    "differs": Kind("recomputed states differ"),
    "waste": Kind("drags a buffer larger than its tensors", redo=False),
    "number": Kind("a number far beyond the others", redo=False),
    "record": Kind("what is written of the files cannot be used", redo=False),
    "length record": Kind("sample_lengths.json disagrees", redo=False),
    "leftover": Kind("left by a run that was interrupted", redo=False),
    "stray": Kind("training would read it as a sample", redo=False),
}
"""By id, in the order in which they are shown."""


@dataclass(frozen=True)
class Fault:
    """One finding. `file` is a name inside the checked folder; `index` its number, None for what is no sample.

    `last` is the last index of a gap that begins at `index`; None for what is about one file.
    """

    kind: str
    file: str
    index: int | None
    detail: str
    last: int | None = None

    @property
    def indices(self) -> range:
        """The indices that it is about."""
        if self.index is None:
            return range(0)
        return range(self.index, (self.index if self.last is None else self.last) + 1)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def to_redo(faults: Iterable[Fault]) -> list[int]:
    """The indices whose content is lost or wrong, ascending."""
    return sorted({index for fault in faults if KINDS[fault.kind].redo for index in fault.indices})


def ranges(indices: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending indices as runs, both ends included: 3, 7, 8, 9 are `[(3, 3), (7, 9)]`."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def written(indices: Iterable[int], most: int = 40) -> str:
    """`3, 7-9`, for people: the first `most` runs."""
    runs = ranges(indices)
    said = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:most]]
    if len(runs) > most:
        said.append(f"... and {sum(high - low + 1 for low, high in runs[most:])} more")
    return ", ".join(said)
