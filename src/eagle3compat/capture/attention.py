"""Whether a worker's attention has the tokens of an image attend to each other, where the model does."""

from __future__ import annotations

from typing import Any


def one_way_backends(runner: Any) -> list[str]:
    """Names of attention backends in which an image's tokens see those before them alone, though the model's see all.

    Empty where all is as the model has it. On a GPU vLLM takes no such backend for such a model; on a CPU it takes the
    one that there is (`vllm/platforms/cpu.py`, 0.16 to 0.32).
    """
    if not getattr(runner.model_config, "is_mm_prefix_lm", False):
        return []
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
    names = [kind.get_name() for kind in backends if not getattr(kind, "supports_mm_prefix", bool)()]
    return sorted(names) if backends else ["unknown"]
