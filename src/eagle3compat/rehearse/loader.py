"""Random weights of a sensible size, drawn in each worker before vLLM prepares them for its kernels.

vLLM's own dummy weights are all below a thousandth: no layer then changes the stream by as much as bf16 can hold, and a
wrong layer or row could not be told from the right one.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

LOAD_FORMAT = "eagle3compat_random"
REHEARSAL = "_EAGLE3COMPAT_REHEARSAL"
"""Set in the processes of a rehearsal, and in no other."""


def register_if_rehearsing() -> None:
    """In a worker of a rehearsal: give vLLM's registry the load format. Elsewhere: nothing."""
    if not os.environ.get(REHEARSAL):
        return
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOAD_FORMAT)
    class RandomWeights(BaseModelLoader):  # type: ignore[misc]
        """Draws every parameter by its name, so that ranks agree on what they share."""

        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                if parameter.is_floating_point():
                    parameter.data.copy_(draw(name, parameter.shape))


def draw(name: str, shape: Any) -> Any:
    """float32 values of one parameter: a layer adds to the stream about as much as is there, whatever its width."""
    import torch

    values = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    last = name.rsplit(".", 1)[-1]
    if len(shape) < 2:
        if last == "A":  # a state-space model's decay as vLLM keeps it, already negated: positive would grow
            return -torch.exp(0.1 * values)
        return 1 + 0.1 * values if last == "weight" or "norm" in last else 0.1 * values
    if "embed" in name or "wte" in name:
        return values
    return values * float(shape[-1]) ** -0.5
