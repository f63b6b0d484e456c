"""How captured states come from the worker to the driver: through shared memory, or else in its replies, pickled."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import InputError, WorkerNotAdaptedError
from ..threads import compute_alone

if TYPE_CHECKING:
    from ..capture.segment import Layout, Segment
    from .core import Engine
    from .landing import Landing

log = logging.getLogger("eagle3compat")

VARIABLE = "EAGLE3COMPAT_TRANSPORT"
CHOICES = ("auto", "shared", "pickled")
COLLECT_BYTES = 256 * 2**20
"""Captured states are collected from the worker in pieces of about this size, where they are pickled."""


def chosen() -> str:
    """What EAGLE3COMPAT_TRANSPORT says. Raises InputError."""
    choice = os.environ.get(VARIABLE, "").strip().lower() or "auto"
    if choice not in CHOICES:
        raise InputError(f"{VARIABLE} is {choice!r}. Set it to {', '.join(CHOICES[:-1])} or {CHOICES[-1]}.")
    return choice


class Transport:
    """The states of one call after another, from `begin` before it to `collect` after it.

    `choice` is `auto` (shared memory; pickled replies, with one warning, where there is none), `shared` (an error
    instead) or `pickled`. Beside the results it holds shared memory for the largest call so far, until `close`.
    """

    def __init__(self, engine: Engine, choice: str) -> None:
        self._engine = engine
        self.choice = choice
        model = engine.vllm_config.model_config
        self._hidden_size, self._dtype = model.get_hidden_size(), model.dtype
        self._segment: Segment | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._landing: Landing | None = None
        self._layout: Layout | None = None
        self._unusable = self._warned = False
        self.way = ""
        """How the states of the last call came: `shared` or `pickled`."""

    def begin(self, prompts: Mapping[str, Sequence[int]], layers: int, leads: Mapping[str, int] | None = None) -> None:
        """Have the worker expect these requests (id to token ids), of `layers` distinct layers each.

        `leads` says of those with an image how many tokens come before the first.
        """
        self.abandon()
        self._layout = layout = self._layout_of(prompts, layers)
        shared = self.choice != "pickled" and not self._unusable and self._attach(layout)
        self._engine.call("eagle3compat_begin", dict(prompts), layout if shared else None, leads)
        self.way = "shared" if shared else "pickled"
        if shared:
            self._land(layout)

    def _layout_of(self, prompts: Mapping[str, Sequence[int]], layers: int) -> Layout:
        from ..capture.segment import Layout

        lengths = tuple(len(prompt) for prompt in prompts.values())
        return Layout(tuple(prompts), lengths, layers, self._hidden_size, self._dtype)

    def _attach(self, layout: Layout) -> bool:
        """Make both sides have a segment that is large enough."""
        from ..capture.segment import Segment, mebibytes

        if self._segment is not None and self._segment.address.size >= layout.size:
            return True
        if self._segment is not None:
            self._segment = None
            self._engine.call("eagle3compat_attach", None)
        try:
            segment = Segment(layout.size)
        except (OSError, RuntimeError) as error:
            return self._do_without(f"{mebibytes(layout.size)} of shared memory could not be had: {error}")
        try:
            why = next((reply for reply in self._engine.call("eagle3compat_attach", segment.address) if reply), "")
        finally:
            segment.close_file()
        if why:
            self._unusable = True
            return self._do_without(f"a worker cannot open {mebibytes(segment.address.size)} of shared memory: {why}")
        self._segment = segment
        return True

    def _do_without(self, why: str) -> bool:
        """Say once that states come pickled, and why."""
        remedy = (
            "Pass fewer prompts in a call, or give more memory to the machine or the container "
            f"(docker run --memory); {VARIABLE}=pickled says that this is meant."
        )
        if self.choice == "shared":
            raise InputError(f"{VARIABLE} is 'shared', but {why}. {remedy}")
        if not self._warned:
            log.warning("eagle3compat: captured states come pickled, which is slow: %s. %s", why, remedy)
        self._warned = True
        return False

    def _land(self, layout: Layout) -> None:
        from ..capture.segment import Sheet
        from .landing import THREADS, Landing

        assert self._segment is not None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "eagle3compat-landing", initializer=compute_alone)
        self._landing = Landing(self._pool, Sheet(layout, self._segment.data))

    def collect(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        """The states of the requests that were begun: for each, one `[len(prompt), hidden_size]` a layer.

        They are Landed, or tensors where they came pickled.
        """
        if self._landing is None:
            return self._pickled(prompts)
        try:
            replies = self._ask(list(prompts))
            for state in (entry for entries in replies.values() for entry in entries if not isinstance(entry, int)):
                self.way = "pickled"  # the model's stream is not as its configuration says: the next call knows
                self._hidden_size, self._dtype = state.shape[-1], state.dtype
            return self._landing.finish(replies)
        finally:
            self.abandon()

    def _pickled(self, prompts: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        assert self._layout is not None
        row_bytes = self._layout.layers * self._layout.hidden_size * self._layout.dtype.itemsize
        collected: dict[str, list[Any]] = {}
        batch: list[str] = []
        size = 0
        for number, (request, prompt) in enumerate(prompts.items(), 1):
            batch.append(request)
            size += len(prompt) * row_bytes
            if size >= COLLECT_BYTES or number == len(prompts):
                collected.update(self._ask(batch))
                batch, size = [], 0
        return collected

    def _ask(self, requests: list[str]) -> dict[str, list[Any]]:
        found = [reply for reply in self._engine.call("eagle3compat_collect", requests) if reply is not None]
        if len(found) != 1:
            raise WorkerNotAdaptedError(
                f"{len(found)} workers returned captured states where one should", "Run `eagle3compat doctor`."
            )
        states: dict[str, list[Any]] = found[0]
        return states

    def abandon(self) -> None:
        """What was begun is of no interest any more."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.stop()

    def close(self) -> None:
        """Release the shared memory. What was returned is not in it."""
        self.abandon()
        self._segment = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
