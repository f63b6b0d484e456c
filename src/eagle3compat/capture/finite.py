"""Tells where a model begins to compute values that are not finite, in the first batch.

Such values prove nothing: every comparison with one is false, and the fault looks like another.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnprovenCaptureError
from .decoder import Decoder
from .streams import first_of, flat

DAMAGED = "Nothing was returned. Fetch the checkpoint again, or report it to who made it."
OVERFLOW = (
    "Nothing was returned. No weight that can be seen in this worker holds such values (vLLM's kernels may keep theirs "
    "in a form of their own), so it overflows, or the checkpoint is damaged in that layer: try another dtype (stock "
    "takes it from config.json; bfloat16 holds what float16 cannot), fetch the layer's file again, or look at these "
    "prompts."
)


class FiniteWatch:
    """Hooks on every decoder layer until `remove`; they wait for no device."""

    def __init__(self, decoder: Decoder) -> None:
        self._sums: dict[int, torch.Tensor] = {}
        self._total: int | None = None
        self._hooks = [layer.register_forward_hook(self._hook(i)) for i, layer in enumerate(decoder.layers)]

    def watch(self, total: int | None) -> None:
        """Look at the first `total` rows from now on; None: at nothing, and keep what was seen."""
        self._total = total
        if total is not None:
            self._sums = {}

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def first(self) -> int | None:
        """The first layer that returned a value that is not finite."""
        return next((index for index, total in sorted(self._sums.items()) if not torch.isfinite(total)), None)

    def _hook(self, index: int) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if self._total is not None:
                parts = output if isinstance(output, (tuple, list)) else [output]
                sums = [_sum(part, self._total) for part in parts if _summable(part)]
                if sums:
                    self._sums[index] = torch.stack(sums).sum()

        return hook


def _summable(value: Any) -> bool:
    """Whether it is a tensor in a format that can be summed, and that has values that are not finite."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1


def _sum(tensor: torch.Tensor, total: int | None = None) -> torch.Tensor:
    """A scalar that is finite if every value is, without another tensor of this size."""
    rows = tensor if total is None or tensor.dim() < 2 else flat(tensor)[:total]
    return rows.sum(dtype=torch.float32)


def refuse_unless_finite(name: str, model: torch.nn.Module, returned: Any, total: int, watch: FiniteWatch) -> None:
    """Raise UnprovenCaptureError where what the model's forward returned, which all ranks share, is not finite."""
    returned = first_of(returned)
    if not isinstance(returned, torch.Tensor) or torch.isfinite(_sum(returned, total)):
        return
    layer = watch.first()
    where = "after its last decoder layer" if layer is None else f"first in what decoder layer {layer} returns"
    damaged = damaged_weights(model)
    fault = f"in this batch it computes values that are not finite (NaN or infinity), {where}"
    if damaged:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        fault += f", and its weight {damaged[0]}{more} holds such values"
    raise UnprovenCaptureError(name, fault, DAMAGED if damaged else OVERFLOW)


def damaged_weights(model: torch.nn.Module) -> list[str]:
    """The names of parameters that hold a value that is not finite, in the model's order."""
    return [
        name for name, weight in model.named_parameters()
        if _summable(weight) and not torch.isfinite(_sum(weight.detach()))
    ]
