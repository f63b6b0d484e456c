"""Refuses models whose residual stream vLLM scales in float16, so that it does not overflow (DeepSeek and its kin).

The final norm does not see a scale, so the proof does not either; the states would be a constant fraction of what the
model computes in any other dtype.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..errors import UnprovenCaptureError
from .decoder import Decoder


def refuse_scaled(model: str, decoder: Decoder, runner: Any) -> None:
    """Raise UnprovenCaptureError where a layer divides the stream by a factor other than 1 in the runner's dtype."""
    if getattr(getattr(runner, "model_config", None), "dtype", None) is not torch.float16:
        return
    for kind, layer in {type(layer): layer for layer in decoder.layers}.items():
        factor = getattr(layer, "routed_scaling_factor", None)
        if factor not in (None, 1) and _depends_on_float16(kind):
            raise UnprovenCaptureError(
                model,
                f"in float16 vLLM's {kind.__name__} divides the residual stream by routed_scaling_factor ({factor}), "
                "so its states are not those of the model",
                "Nothing was returned. Run the model in bfloat16 (`torch_dtype` in its config.json).",
            )


def _depends_on_float16(kind: type) -> bool:
    try:
        return "float16" in inspect.getsource(kind.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):  # no source to look at: it is not shown that it does not
        return True
