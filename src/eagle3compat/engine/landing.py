"""Takes the states of a call out of shared memory, layer by layer, while the call goes on.

Each becomes a tensor with memory of its own, which is looked at for values that are no states: once, by the thread that
has it in its cache.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ..capture.segment import PAGE, Sheet
from .landed import Landed

POLL_SECONDS = 0.005
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


class Landing:
    """One call's states on their way out of `sheet`, from the begin of the call until `finish` or `stop`."""

    def __init__(self, pool: ThreadPoolExecutor, sheet: Sheet) -> None:
        self._pool = pool
        self._sheet = sheet
        self._ended = threading.Event()
        requests = sheet.layout.requests
        self._open = {(layer, number) for layer in range(sheet.layout.layers) for number in range(len(requests))}
        self._targets = {key: pool.submit(prepared, self._source(*key)) for key in sorted(self._open)}
        self._copies: dict[tuple[int, int], tuple[int, Future[Landed]]] = {}
        self._poller = threading.Thread(target=self._poll, name="eagle3compat-landing", daemon=True)
        self._poller.start()

    def _source(self, layer: int, number: int) -> torch.Tensor:
        return self._sheet.places[self._sheet.layout.requests[number]][layer]

    def _poll(self) -> None:
        lengths = self._sheet.layout.lengths
        while self._open and not self._ended.wait(POLL_SECONDS):
            landed, revisions = self._sheet.landed.tolist(), self._sheet.revisions.tolist()
            for layer, number in [key for key in self._open if landed[key[0]][key[1]] == lengths[key[1]]]:
                self._copy(layer, number, revisions[layer][number])

    def _copy(self, layer: int, number: int, revision: int) -> None:
        key = layer, number
        self._open.discard(key)
        target = self._targets[key].result
        self._copies[key] = revision, self._pool.submit(copied, self._source(layer, number), target)

    def finish(self, replies: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """The states by request and layer, given what the worker says of each: see Store.collect."""
        self._ended.set()
        self._poller.join()
        try:
            for layer, number, said in self._said(replies):
                if self._copies.get((layer, number), (None,))[0] != said:  # not read yet, or written again since
                    self._copy(layer, number, said)
            states: dict[str, list[Any]] = {request: list(replies[request]) for request in self._sheet.layout.requests}
            for layer, number, _said in self._said(replies):
                states[self._sheet.layout.requests[number]][layer] = self._copies[layer, number][1].result()
        finally:
            self.stop()
        return states

    def _said(self, replies: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, int, int]]:
        """Layer, request and revision of what lies in the segment."""
        for number, request in enumerate(self._sheet.layout.requests):
            for layer in range(self._sheet.layout.layers):
                if isinstance(replies[request][layer], int):
                    yield layer, number, replies[request][layer]

    def stop(self) -> None:
        """Leave the rest where it is. Afterwards nothing reads the segment any more."""
        self._ended.set()
        self._poller.join()
        running: list[Future[Any]] = [*self._targets.values(), *(copy for _revision, copy in self._copies.values())]
        for future in running:
            future.cancel()
        for future in running:
            if not future.cancelled():
                future.exception()
        self._open.clear()
        self._targets.clear()
        self._copies.clear()


def prepared(source: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of `source`, of which every page is there already: that takes as long as the copy."""
    target = torch.empty_like(source, memory_format=torch.contiguous_format)
    target.view(torch.uint8).view(-1)[::PAGE] = 0
    return target


def copied(source: torch.Tensor, target: Any) -> Landed:
    """`source` in the memory that `target()` gives."""
    tensor: torch.Tensor = target().copy_(source)
    return Landed(tensor, fault_of(tensor))
