"""Which rows of a step are which request's tokens.

The order of requests in a step is the model runner's own: V1 runners keep it in `input_batch`, V2 runners return it
from `prepare_inputs`. How many rows a request has is in the scheduler's output; from which place in the prompt they
start is in the `positions` that the forward gets, and for prompts with images, whose rotary positions are no places, in
what the runner says it has computed. Nothing is assumed from the order of submission.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnprovenCaptureError


@dataclass(frozen=True)
class Step:
    """The requests of one forward in row order, and the number of rows of each.

    `starts` is how many tokens of each the runner had computed before; None where it does not say.
    """

    request_ids: tuple[str, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...] | None = None

    @property
    def total(self) -> int:
        return sum(self.counts)


class RowReader:
    """Knows, while the model's forward runs, the step it belongs to; None for dummy and warm-up runs."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._scheduled: dict[str, int] | None = None
        self._prepared: Any = None
        self._wrap(runner, "execute_model", self._around_execute)
        if hasattr(runner, "input_batch"):
            self.generation = "V1"
        elif hasattr(runner, "prepare_inputs"):
            self.generation = "V2"
            self._wrap(runner, "prepare_inputs", self._around_prepare)
        else:
            raise UnprovenCaptureError(
                type(runner).__name__,
                "the model runner has neither `input_batch` nor `prepare_inputs`, so rows cannot be told apart",
                "Run `eagle3compat doctor` and report its output.",
            )

    @staticmethod
    def _wrap(runner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(runner, name)
        setattr(runner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def _around_execute(self, original: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._scheduled = dict(scheduler_output.num_scheduled_tokens)
        try:
            return original(scheduler_output, *args, **kwargs)
        finally:
            self._scheduled = self._prepared = None

    def _around_prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._prepared = original(*args, **kwargs)
        return self._prepared

    def step(self) -> Step | None:
        """The step under way, or None when the forward is not one of scheduled requests."""
        if not self._scheduled:
            return None
        if self.generation == "V1":
            batch = self._runner.input_batch
            computed = getattr(batch, "num_computed_tokens_cpu", None)
        elif self._prepared is not None:
            batch = self._prepared
            computed = getattr(batch, "num_computed_tokens_np", None)
        else:
            return None
        # V1 keeps requests in its batch that are not scheduled in this step
        placed = [p for p in enumerate(batch.req_ids) if self.generation == "V2" or p[1] in self._scheduled]
        order = [request for _place, request in placed]
        if set(order) != set(self._scheduled) or len(order) != len(self._scheduled):
            raise UnprovenCaptureError(
                type(self._runner).__name__,
                f"the runner's batch {order} and the scheduler's {sorted(self._scheduled)} differ",
                "Nothing was returned. Run `eagle3compat doctor` and report its output.",
            )
        starts = None if computed is None else tuple(int(computed[place]) for place, _request in placed)
        return Step(tuple(order), tuple(int(self._scheduled[request]) for request in order), starts)

    def tokens(self) -> torch.Tensor | None:
        """The token ids of the step's rows, `[rows or more]`, from which the runner makes embeddings; None: unknown."""
        if self.generation == "V1":
            ids = getattr(self._runner, "input_ids", None)
            ids = getattr(ids, "gpu", ids)
        else:
            ids = getattr(self._prepared, "input_ids", None)
        return ids if isinstance(ids, torch.Tensor) else None
