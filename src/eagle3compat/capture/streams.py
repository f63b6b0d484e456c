"""What a decoder layer's residual stream is, decided from what the layer returns and proved by the final norm.

vLLM's decoder layers return `(hidden, residual)` with the sum still to be taken, or the stream itself, or
`(hidden, None)`; some return a residual that is already contained in `hidden`. The model itself knows: what it hands to
its final norm is the stream of the last layer. So the reading of a layer's return value is the one under which the last
layer's stream equals what enters the final norm, and the norm's result is what the model's forward returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnprovenCaptureError

Reading = Callable[[Any], torch.Tensor]

REMEDY = (
    "Nothing was returned. Open an issue with the model's name; "
    "speculators' server path (0.5 or later) is the way around."
)


def _first(output: Any) -> torch.Tensor:
    first = output[0] if isinstance(output, (tuple, list)) else output
    stream: torch.Tensor = first.clone()  # later layers may write into it
    return stream


def _sum(output: Any) -> torch.Tensor:
    stream: torch.Tensor = output[0] + output[1]
    return stream


READINGS: dict[str, Reading] = {"hidden + residual": _sum, "hidden": _first}


def shape_of(output: Any) -> str:
    """The structure of a layer's return value, as text: `(tensor, tensor)`, `tensor`, `(tensor, None)`."""
    if isinstance(output, torch.Tensor):
        return "tensor"
    if isinstance(output, (tuple, list)):
        parts = ["tensor" if isinstance(p, torch.Tensor) else "None" if p is None else type(p).__name__ for p in output]
        return "(" + ", ".join(parts) + ")"
    return type(output).__name__


def readings_of(output: Any) -> dict[str, Reading]:
    """The ways in which a layer's return value can be read, likeliest first; empty when there is none."""
    if isinstance(output, torch.Tensor):
        return {"hidden": _first}
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        if len(output) > 1 and isinstance(output[1], torch.Tensor) and output[1].shape == output[0].shape:
            return READINGS
        return {"hidden": _first}
    return {}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference between two tensors, relative to the largest value of `other`."""
    if one.shape != other.shape:
        return float("inf")
    scale = other.float().abs().max().clamp_min(1e-30)
    return float(((one.float() - other.float()).abs().max() / scale).item())


def entering(args: tuple[Any, ...]) -> torch.Tensor | None:
    """The stream that enters a norm called as `norm(x)` or `norm(x, residual)`; None for anything else."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if not tensors:
        return None
    if len(tensors) > 1 and tensors[1].shape == tensors[0].shape:
        return tensors[0] + tensors[1]
    return tensors[0].clone()


def tolerance(dtype: torch.dtype) -> float:
    """How far two computations of one sum may lie apart: a few roundings of `dtype`."""
    return 4 * float(torch.finfo(dtype).eps)


def decide(model: str, layer: str, output: Any, entered: torch.Tensor) -> tuple[str, Reading]:
    """The reading of the last layer's `output` that gives the stream which `entered` the final norm."""
    distances = {}
    wanted = entered.reshape(-1, entered.shape[-1])
    for name, reading in readings_of(output).items():
        distances[name] = distance(reading(output).reshape(-1, entered.shape[-1]), wanted)
        if distances[name] <= tolerance(entered.dtype):
            return name, reading
    tried = ", ".join(f"{name}: off by {value:.2g} of the largest value" for name, value in distances.items())
    raise UnprovenCaptureError(
        model,
        f"{layer} returns {shape_of(output)}, and no reading of it equals what enters the final norm "
        f"({tried or 'none fits'})",
        REMEDY,
    )
