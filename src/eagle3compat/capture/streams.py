"""The ways in which a decoder layer's return value can be read as its residual stream.

vLLM's decoder layers return `(hidden, residual)` with the sum still to be taken, or the stream itself, or
`(hidden, None)`; some return a residual that is already contained in `hidden`, some put other tensors between the two,
and some leave the sum over tensor-parallel ranks to whatever comes next. Which reading is right, `proof` decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the tensor-parallel ranks, which must all call it."""

REMEDY = (
    "Nothing was returned. Open an issue with the model's name; "
    "speculators' server path (0.5 or later) is the way around."
)


@dataclass(frozen=True)
class Reading:
    """The stream is the sum of the tensors at `items` of what a layer returns; the first may be one rank's share."""

    items: tuple[int, ...]
    reduce: Reduce | None = None

    @property
    def name(self) -> str:
        names = [{0: "hidden", 1: "residual"}.get(item, f"item {item}") for item in self.items]
        if self.reduce is not None:
            names[0] = f"all-reduced {names[0]}"
        return " + ".join(names)

    def __call__(self, output: Any) -> torch.Tensor:
        """A copy, `[..., hidden_size]`: later layers may write into what a layer returned."""
        parts = [output[item] for item in self.items] if isinstance(output, (tuple, list)) else [output]
        stream: torch.Tensor = parts[0] if self.reduce is None else self.reduce(parts[0].clone())
        if len(parts) == 1 and self.reduce is None:
            stream = stream.clone()
        for part in parts[1:]:
            stream = stream + part
        return stream


def readings_of(output: Any, reduce: Reduce | None = None) -> list[Reading]:
    """The ways in which a layer's return value can be read, likeliest first; empty when there is none.

    `reduce` is given where there are tensor-parallel ranks to sum over.
    """
    if isinstance(output, torch.Tensor):
        items: list[tuple[int, ...]] = [(0,)]
    elif isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        alike = [i for i, part in enumerate(output) if isinstance(part, torch.Tensor) and part.shape == output[0].shape]
        items = [*itertools.combinations(alike, 2), *((item,) for item in alike)]
    else:
        return []
    readings = [Reading(item) for item in items]
    if reduce is not None:
        readings += [Reading(item, reduce) for item in items if item[0] == 0]
    return readings


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


def first_of(output: Any) -> Any:
    """The first item of a tuple or list, or the value itself: `norm(x, residual)` and models return either.

    transformers' models return a mapping instead, if they are not asked for a tuple.
    """
    if isinstance(output, Mapping):
        return output.get("last_hidden_state", output)
    return output[0] if isinstance(output, (tuple, list)) and output else output


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


def tolerance(dtype: torch.dtype) -> float:
    """How far two computations of one sum may lie apart: a few roundings of `dtype`."""
    return 4 * float(torch.finfo(dtype).eps)


def flat(stream: torch.Tensor) -> torch.Tensor:
    """`[rows, hidden_size]`, whatever batch dimensions there are."""
    return stream.reshape(-1, stream.shape[-1])
