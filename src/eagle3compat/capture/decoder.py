"""Finds the decoder layers of a loaded model, wherever its wrappers put them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnprovenCaptureError


@dataclass(frozen=True)
class Decoder:
    """`base` runs the layers one after another in its forward; its final norm is among `after`, its other children."""

    base: torch.nn.Module
    path: str
    layers: list[torch.nn.Module]
    after: dict[str, torch.nn.Module]


def find_decoder(model: torch.nn.Module, num_layers: int) -> Decoder:
    """The outermost module that owns a list of `num_layers` decoder layers, whatever the list is called.

    Of several such lists in one module the largest is meant: a model may keep a norm or a projection a layer besides.
    A multimodal wrapper is first asked for its language model (vLLM's `get_language_model`), so that a vision tower
    with as many layers is not mistaken for it.
    """
    name = type(model).__name__
    language = getattr(model, "get_language_model", None)
    root: Any = language() if callable(language) else model
    seen: list[str] = []
    queue: deque[tuple[str, torch.nn.Module]] = deque([("", root)])
    while queue:
        path, module = queue.popleft()
        fitting = []
        for child_name, child in module.named_children():
            here = f"{path}.{child_name}" if path else child_name
            if isinstance(child, torch.nn.ModuleList):
                seen.append(f"{here} ({len(child)})")
                if len(child) == num_layers and len(child) > 0:
                    fitting.append(child)
            else:
                queue.append((here, child))
        if fitting:
            layers = max(fitting, key=lambda child: sum(weight.numel() for weight in child.parameters()))
            others = {n: c for n, c in module.named_children() if not isinstance(c, torch.nn.ModuleList)}
            return Decoder(module, path or type(module).__name__, list(layers), others)
    raise UnprovenCaptureError(
        name,
        f"no list of {num_layers} decoder layers was found in it (lists found: {', '.join(seen) or 'none'})",
        "Open an issue with the model's name; speculators' server path (0.5 or later) is the way around.",
    )
