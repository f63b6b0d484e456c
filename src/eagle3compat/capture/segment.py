"""Memory that the driver and the capturing worker have in common: captured rows go there, and are never pickled.

It is a memfd, a file in memory without a name. Whoever holds it keeps it, so nothing is left behind however a process
ends, and its size is limited by memory alone: `/dev/shm` has 64 MB in most containers. The driver makes it; the worker
opens it as `/proc/<driver>/fd/<n>`, whether it was forked or spawned.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import torch

PAGE = 4096
ROUNDING = 2 * 2**20
_serials = itertools.count()


@dataclass(frozen=True)
class Layout:
    """Where one call's rows lie: a header of counters, then `[layers, all rows, hidden_size]`, requests in order."""

    requests: tuple[str, ...]
    lengths: tuple[int, ...]
    layers: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def header(self) -> int:
        """Bytes before the first row."""
        return rounded(2 * 8 * self.layers * len(self.requests), PAGE)

    @property
    def size(self) -> int:
        """Bytes in all."""
        row: int = self.hidden_size * self.dtype.itemsize
        return self.header + self.layers * sum(self.lengths) * row


class Sheet:
    """One call's places in a segment.

    `landed` `[layers, requests]` int64: how many rows of a request are there, complete and shown to be its own.
    `revisions`, likewise: goes up before and after rows that were there already are written again.
    `rows` is `[layers, all rows, hidden_size]`; `starts` says at which row of them a request begins, and `places` maps
    it to its `[layers, rows, hidden_size]`.
    """

    def __init__(self, layout: Layout, data: torch.Tensor) -> None:
        shape = (2, layout.layers, len(layout.requests))
        words = data[: 8 * 2 * layout.layers * len(layout.requests)].view(torch.int64)
        self.landed, self.revisions = words.view(shape)
        rows = data[layout.header : layout.size].view(layout.dtype)
        self.rows = rows.view(layout.layers, sum(layout.lengths), layout.hidden_size)
        self.layout = layout
        self.index = {request: number for number, request in enumerate(layout.requests)}
        ends = itertools.accumulate(layout.lengths)
        self.starts = {
            name: end - length for name, end, length in zip(layout.requests, ends, layout.lengths, strict=True)
        }
        self.places = dict(zip(layout.requests, self.rows.split(layout.lengths, dim=1), strict=True))


@dataclass(frozen=True)
class Address:
    """Where a worker finds a segment of `size` bytes. `serial` tells it from earlier ones at the same path."""

    path: str
    size: int
    serial: int

    def open(self) -> torch.Tensor:
        """The segment, as bytes. Raises RuntimeError or OSError where it cannot be opened."""
        return torch.from_file(self.path, shared=True, size=self.size, dtype=torch.uint8)


class Segment:
    """The driver's side of a segment: made with all its memory, or not at all.

    Raises OSError when there is not enough memory for it and, beside it, for results of the same size.
    """

    def __init__(self, size: int) -> None:
        size = rounded(size + size // 8, ROUNDING)
        free = available_memory()
        if 2 * size > free:
            raise OSError(f"{mebibytes(free)} of memory are available, and {mebibytes(2 * size)} are needed")
        self._file = os.memfd_create("eagle3compat")
        try:
            os.posix_fallocate(self._file, 0, size)
            self.address = Address(f"/proc/{os.getpid()}/fd/{self._file}", size, next(_serials))
            self.data = self.address.open()
        except BaseException:
            os.close(self._file)
            raise
        self.announced = False

    def close_file(self) -> None:
        """Both sides have it open: from here on it lives as long as one of them maps it."""
        if not self.announced:
            self.announced = True
            os.close(self._file)


def rounded(size: int, unit: int) -> int:
    """`size`, up to a multiple of `unit`."""
    return -(-size // unit) * unit


def mebibytes(size: int) -> str:
    return f"{-(-size // 2**20):,} MiB"


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process and its children can still take: the machine's, or what its control groups leave."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    figures = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    groups = root / "sys/fs/cgroup"
    own = [line[3:].strip("/") for line in _text(root / "proc/self/cgroup").splitlines() if line.startswith("0::")]
    folders = {folder for name in ("", *own) for folder in (groups / name, *(groups / name).parents)}
    for folder, limit, used in (
        *((folder, "memory.max", "memory.current") for folder in folders),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        ceiling, taken = _text(folder / limit), _text(folder / used)
        if ceiling.isdigit() and taken.isdigit():
            stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # given up when asked for
            figures.append(int(ceiling) - int(taken) + cached)
    return max(0, min(figures))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # this kind of control group is not there
        return ""
