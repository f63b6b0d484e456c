"""Takes the states of a call out of shared memory, layer by layer, while the call goes on.

Each becomes a tensor with memory of its own, which is looked at for values that are no states: once, by the thread that
has it in its cache.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ..capture.segment import PAGE, Sheet
from .landed import Landed

T = TypeVar("T")
Key = tuple[int, int]
"""Layer, by its place among those captured, and request, by its place in the call."""

POLL_SECONDS = 0.005
GROUP_BYTES = 4 * 2**20
"""States are handled together until they are this large: a task of a thread costs as much as copying a small one."""
THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))


def fault_of(state: torch.Tensor) -> str:
    """What shows that these are no hidden states: values that are not finite, or nothing but zeros; else nothing.

    A sum is finite only if every value is, and not zero only if some value is not. Where it is neither, as it has
    overflowed or come to zero, the values themselves are looked at.
    """
    total = float(state.sum())
    if math.isfinite(total) and total != 0:
        return ""
    low, high = (float(end) for end in torch.aminmax(state))
    if not (math.isfinite(low) and math.isfinite(high)):
        return "holds values that are not finite"
    return "is all zero" if low == high == 0 else ""


@dataclass(frozen=True)
class Part(Generic[T]):
    """One of the results of a task for many."""

    group: Future[list[T]]
    place: int

    def result(self) -> T:
        return self.group.result()[self.place]


class Landing:
    """One call's states on their way out of `sheet`, from the begin of the call until `finish` or `stop`."""

    def __init__(self, pool: ThreadPoolExecutor, sheet: Sheet) -> None:
        self._pool = pool
        self._sheet = sheet
        self._ended = threading.Event()
        self._lengths = torch.tensor(sheet.layout.lengths)
        self._open = torch.ones(sheet.landed.shape, dtype=torch.bool)
        self._targets: dict[Key, Part[torch.Tensor]] = {}
        self._copies: dict[Key, tuple[int, Part[Landed]]] = {}
        self._error: Exception | None = None
        self._poller = threading.Thread(target=self._poll, name="eagle3compat-landing", daemon=True)
        self._poller.start()

    def _groups(self, keys: Iterable[Sequence[int]]) -> Iterator[list[Key]]:
        layout = self._sheet.layout
        group: list[Key] = []
        size = 0
        for layer, number in keys:
            group.append((layer, number))
            size += layout.lengths[number] * layout.hidden_size * layout.dtype.itemsize
            if size >= GROUP_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _source(self, key: Key) -> torch.Tensor:
        layer, number = key
        return self._sheet.places[self._sheet.layout.requests[number]][layer]

    def _poll(self) -> None:
        try:
            self._take()
        except Exception as error:  # noqa: BLE001  finish() raises it in the caller's thread
            self._error = error

    def _take(self) -> None:
        for group in self._groups(self._open.nonzero().tolist()):
            prepared_group = self._pool.submit(prepared, [self._source(key) for key in group])
            self._targets.update({key: Part(prepared_group, place) for place, key in enumerate(group)})
        while bool(self._open.any()) and not self._ended.wait(POLL_SECONDS):
            there = (self._sheet.landed == self._lengths) & self._open
            if bool(there.any()):
                revisions = self._sheet.revisions.tolist()
                self._copy({(layer, number): revisions[layer][number] for layer, number in there.nonzero().tolist()})

    def _copy(self, revisions: Mapping[Key, int]) -> None:
        """Have these copied, of the revision that is given for each."""
        for group in self._groups(revisions):
            pairs = [(self._source(key), self._targets[key]) for key in group]
            copied_group = self._pool.submit(copied, pairs)
            for place, key in enumerate(group):
                self._open[key] = False
                self._copies[key] = revisions[key], Part(copied_group, place)

    def finish(self, replies: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The states by request and layer, given what the worker says of each: see Store.collect."""
        self._ended.set()
        self._poller.join()
        try:
            if self._error is not None:
                raise self._error
            said = dict(self._said(replies))
            # what is not read yet, or was written again since
            self._copy({key: now for key, now in said.items() if self._copies.get(key, (None,))[0] != now})
            states: dict[str, list[Any]] = {request: list(replies[request]) for request in self._sheet.layout.requests}
            for layer, number in said:
                states[self._sheet.layout.requests[number]][layer] = self._copies[layer, number][1].result()
        finally:
            self.stop()
        return states

    def _said(self, replies: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Key, int]]:
        """What lies in the segment, with its revision."""
        for number, request in enumerate(self._sheet.layout.requests):
            for layer in range(self._sheet.layout.layers):
                if isinstance(replies[request][layer], int):
                    yield (layer, number), replies[request][layer]

    def stop(self) -> None:
        """Leave the rest where it is. Afterwards nothing reads the segment any more."""
        self._ended.set()
        self._poller.join()
        parts: list[Part[Any]] = [*self._targets.values(), *(copy for _revision, copy in self._copies.values())]
        running = {part.group for part in parts}
        for future in running:
            future.cancel()
        for future in running:
            if not future.cancelled():
                future.exception()
        self._open.zero_()
        self._targets.clear()
        self._copies.clear()


def prepared(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Memory for a copy of each, of which every page is there already: that takes as long as the copy."""
    targets = []
    for source in sources:
        target = torch.empty_like(source, memory_format=torch.contiguous_format)
        target.view(torch.uint8).view(-1)[::PAGE] = 0
        targets.append(target)
    return targets


def copied(pairs: Sequence[tuple[torch.Tensor, Part[torch.Tensor]]]) -> list[Landed]:
    """Each first tensor in the memory that the second part is."""
    tensors = [target.result().copy_(source) for source, target in pairs]
    return [Landed(tensor, fault_of(tensor)) for tensor in tensors]
