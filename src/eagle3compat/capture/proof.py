"""Proves which reading of a layer's return value is the model's residual stream.

The model itself knows: the norm that comes after a layer, the next layer's first or the final one, gets that layer's
stream. How it is called tells little: `norm(x, residual)` adds the two in most models and ignores the second in some
(Cohere), and a fused all-reduce may not call it at all. So the norm is asked: the right reading is the one of which
the norm alone makes what the model made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnprovenCaptureError
from .streams import REMEDY, Reading, Reduce, distance, first_of, flat, readings_of, shape_of, tolerance

Agree = Callable[[list[float]], list[float]]
"""Makes one list of distances out of those of all tensor-parallel ranks, so that all decide alike."""
Head = Callable[[torch.Tensor], Any]
"""A model's `compute_logits`: what it makes of `[rows, hidden_size]` that its forward returned."""
HEAD_ROWS = 4
"""Rows on which the head is tried: it makes logits for the whole vocabulary."""


@dataclass
class Normed:
    """A norm that a layer's stream entered, and what came out: `entered` where it was called with one tensor."""

    norm: torch.nn.Module
    normed: torch.Tensor
    entered: torch.Tensor | None = None

    def distance(self, stream: torch.Tensor, total: int | None) -> float:
        """How far the norm of `stream` lies from what the model made, in the first `total` rows; inf if it has none."""
        if stream.numel() != self.normed.numel():
            return float("inf")
        stream = stream.reshape(self.normed.shape)
        if self.entered is not None:  # a norm may not see a factor, or a shift
            from_entered = distance(flat(stream)[:total], flat(self.entered.reshape(stream.shape))[:total])
            if not from_entered <= tolerance(self.entered.dtype):
                return from_entered
        again = first_of(self.norm(stream.to(self.normed.dtype)))
        return distance(flat(again)[:total], flat(self.normed)[:total])


class FirstCall:
    """Watches modules for the first of them that is called after `reset`, and keeps what entered it and what came out.

    `after` delays the watch until that module has been called.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], after: torch.nn.Module | None = None) -> None:
        self.module: torch.nn.Module | None = None
        self.output: Any = None
        self._entered: torch.Tensor | None = None
        self._after = after is not None
        self._armed = self._open = False
        self._handles = [] if after is None else [after.register_forward_hook(self._arm)]
        for module in modules:
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._behind))

    def reset(self) -> None:
        """Forget the last call, and watch."""
        self.module = self.output = self._entered = None
        self._open, self._armed = True, not self._after

    def close(self) -> None:
        """Watch no longer; what was seen stays."""
        self._open = self._armed = False

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def normed(self) -> Normed | None:
        """The call as a norm's; None if no call was seen, or not a norm's."""
        output = first_of(self.output)
        if self.module is None or not isinstance(output, torch.Tensor):
            return None
        return Normed(self.module, output, self._entered)

    def _arm(self, _module: torch.nn.Module, _args: Any, _output: Any) -> None:
        self._armed = self._open

    def _before(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._armed and self.module is None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if tensors:
                self.module = module
                alike = [tensor for tensor in tensors if tensor.shape == tensors[0].shape]
                self._entered = tensors[0].clone() if len(alike) == 1 else None

    def _behind(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if module is self.module and self.output is None:
            self.output = first_of(output).clone() if isinstance(first_of(output), torch.Tensor) else output


def norm_of_head(
    head: Head | None, modules: Iterable[torch.nn.Module], returned: torch.Tensor, total: int
) -> Normed | None:
    """The final norm of a model that leaves it to its head; None where the head does not begin with one of `modules`.

    The head is run on a few rows of what the forward returned, and the first of `modules` that it calls must be a norm
    that gets these rows as they are: so what the forward returned is the stream before that norm. Step 3.5 is such a
    model (vllm/model_executor/models/step3p5.py, `compute_logits`, 0.25.1). All tensor-parallel ranks must call this.
    """
    if head is None:
        return None
    watch = FirstCall(modules)
    watch.reset()
    rows = flat(returned)[: min(total, HEAD_ROWS)]
    try:
        head(rows)
    finally:
        watch.remove()
    seen = watch.normed
    if seen is None or not is_norm(seen.norm) or seen.entered is None or not torch.equal(seen.entered, rows):
        return None
    return Normed(seen.norm, first_of(seen.norm(returned.clone())), returned)


def is_norm(module: torch.nn.Module) -> bool:
    """Whether a module is a norm by its class's name, as all of vLLM's and transformers' are."""
    return "norm" in type(module).__name__.lower()


def decide(
    model: str,
    layer: str,
    output: Any,
    normed: Sequence[Normed],
    where: str = "the final norm",
    total: int | None = None,
    reduce: Reduce | None = None,
    agree: Agree | None = None,
) -> Reading:
    """The reading of a layer's `output` of which one of `normed` makes what the model made.

    Only the first `total` rows are compared; the others are padding. Raises UnprovenCaptureError when no reading fits,
    and when two that differ fit alike.
    """
    tried: dict[str, float] = {}
    for summing in (None, reduce) if reduce is not None else (None,):  # what fits as it is needs no sum over ranks
        readings = readings_of(output, summing)
        distances = [min(one.distance(reading(output), total) for one in normed) for reading in readings]
        if agree is not None:
            distances = agree(distances)
        # The closest, not the first that is close enough: a residual may be small beside the stream.
        order = sorted(range(len(readings)), key=lambda index: (math.isnan(distances[index]), distances[index]))
        fit = [readings[i] for i in order if distances[i] <= tolerance(normed[0].normed.dtype)]
        if fit:
            return unambiguous(model, layer, output, fit, total)
        tried.update((readings[index].name, distances[index]) for index in order)
    found = ", ".join(f"{name}: off by a factor of {value:.2g}" for name, value in tried.items())
    raise UnprovenCaptureError(
        model,
        f"{layer} returns {shape_of(output)}, and no reading of it equals what enters {where} ({found or 'none fits'})",
        REMEDY,
    )


def unambiguous(model: str, layer: str, output: Any, fit: Sequence[Reading], total: int | None) -> Reading:
    """The first of `fit`; raises UnprovenCaptureError if another that fits is another stream."""
    stream = flat(fit[0](output))[:total]
    for other in fit[1:]:
        if not distance(flat(other(output))[:total], stream) <= 4 * tolerance(stream.dtype):
            raise UnprovenCaptureError(
                model, f"{layer} returns {shape_of(output)}, of which {fit[0].name} and {other.name} fit alike", REMEDY
            )
    return fit[0]
