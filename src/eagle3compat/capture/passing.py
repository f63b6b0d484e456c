"""What the next layer gets of what a layer returned.

Most models pass it on as it is. Qwen3-VL adds features of an image to it between two layers ("deepstack"), in steps
that have an image and in others not. The stream is what enters the next layer, so it is read there, from the arguments
in whose place the layer's return value was passed on; it is then right whatever is done in between, in any step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Place = int | str
"""An argument of a call: its index, or its name."""
Links = Mapping[int, Place]
"""Items of what a layer returns (0 for a lone tensor), and the arguments of the next layer that they become."""


def links_of(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], replaced: bool = True) -> dict[int, Place]:
    """Which arguments of the next layer are items of `output` or, if they may be `replaced`, come in their place.

    An item that is passed on is an argument itself. If one is not, and one argument of its shape is none of the items,
    that came in its place: whether it did, the proof shows.
    """
    items = tensors_of(output)
    shape = next((item.shape for item in items.values()), None)
    arguments: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    given = {
        place: value
        for place, value in arguments
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == shape
    }
    links: dict[int, Place] = {}
    for item, tensor in items.items():
        place = next((place for place, value in given.items() if value is tensor), None)
        if place is not None:
            links[item] = place
    left = [item for item in items if item not in links]
    others = [place for place in given if place not in links.values()]
    if replaced and len(left) == len(others) == 1:
        links[left[0]] = others[0]
    return links


def tensors_of(output: Any) -> dict[int, torch.Tensor]:
    """The tensors of a layer's return value that have the shape of the first, by item."""
    parts = list(output) if isinstance(output, (tuple, list)) else [output]
    return {
        item: part
        for item, part in enumerate(parts)
        if isinstance(part, torch.Tensor) and part.shape == getattr(parts[0], "shape", None)
    }


def passed_on(
    output: Any, links: Links, args: tuple[Any, ...], kwargs: Mapping[str, Any], replaced: bool = True
) -> Any:
    """`output` with its linked items as the next layer gets them.

    None where that gets none of their shape and dtype, or others though they may not be `replaced`.
    """
    parts = list(output) if isinstance(output, (tuple, list)) else [output]
    for item, place in links.items():
        if isinstance(place, int):
            value = args[place] if place < len(args) else None
        else:
            value = kwargs.get(place)
        old = parts[item]
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (old.shape, old.dtype):
            return None
        if value is not old and not replaced:
            return None
        parts[item] = value
    return tuple(parts) if isinstance(output, (tuple, list)) else parts[0]


def same(entered: Any, output: Any) -> bool:
    """Whether two forms of a layer's return value hold the same values."""
    ours, others = tensors_of(entered), tensors_of(output)
    return all(torch.equal(tensor, others[item]) for item, tensor in ours.items())
