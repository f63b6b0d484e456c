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


def kept(output: Any) -> Any:
    """A copy of a layer's return value: later layers may write into the original."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, (tuple, list)):
        return tuple(part.clone() if isinstance(part, torch.Tensor) else part for part in output)
    return output


def shape_of(output: Any) -> str:
    """The structure of a layer's return value, as text: `(tensor, tensor)`, `tensor`, `(tensor, None)`.

    A tensor of another shape than the first is `other`: it cannot be the residual that belongs to it.
    """
    if isinstance(output, torch.Tensor):
        return "tensor"
    if isinstance(output, (tuple, list)):
        return "(" + ", ".join(_part(part, output[0]) for part in output) + ")"
    return type(output).__name__


def _part(part: Any, first: Any) -> str:
    if isinstance(part, torch.Tensor):
        return "tensor" if getattr(first, "shape", part.shape) == part.shape else "other"
    return "None" if part is None else type(part).__name__


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
    """The largest difference between two tensors, each relative to the value that it is a difference of.

    The median value is added to that, so that values near zero do not count for more. The largest would not do in its
    place: language models have single activations a thousand times the others, beside which all else looks close.
    """
    if one.shape != other.shape:
        return float("inf")
    expected = other.float()
    size = expected.abs()
    relative = (one.float() - expected).abs() / (size + size.median()).clamp_min(1e-30)
    return float(relative.max().item())


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


def flat(stream: torch.Tensor) -> torch.Tensor:
    """`[rows, hidden_size]`, whatever batch dimensions there are."""
    return stream.reshape(-1, stream.shape[-1])


def decide(
    model: str, layer: str, output: Any, entered: torch.Tensor, total: int | None = None
) -> tuple[str, Reading]:
    """The reading of the last layer's `output` that gives the stream which `entered` the final norm.

    Only the first `total` rows are compared; the others are padding.
    """
    distances = {}
    readings = readings_of(output)
    for name, reading in readings.items():
        distances[name] = distance(flat(reading(output))[:total], flat(entered)[:total])
    # The closest, not the first that is close enough: a residual may be small beside the stream.
    closest = min(distances, key=distances.__getitem__, default="")
    if closest and distances[closest] <= tolerance(entered.dtype):
        return closest, readings[closest]
    tried = ", ".join(f"{name}: off by a factor of {value:.2g}" for name, value in distances.items())
    raise UnprovenCaptureError(
        model,
        f"{layer} returns {shape_of(output)}, and no reading of it equals what enters the final norm "
        f"({tried or 'none fits'})",
        REMEDY,
    )
