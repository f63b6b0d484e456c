"""Models in which the tokens of an image attend to each other (Gemma 3, PaliGemma, Molmo 2): what that takes of vLLM.

An attention backend that can do it, and all of an image in one step. vLLM sees to both on CUDA and ROCm, but for a
limit on the tokens of a prompt in a step, which splits an image that such a step begins with
(`vllm/v1/core/sched/scheduler.py`, 0.16 to 0.32), and for a step that other prompts have filled but for less than an
image. That one the server does not make: prompts are computed together only if one step holds them (`batches.py`). On a
CPU vLLM sees to neither and says nothing, and states are off by as much as another image's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def fault_of_images(vllm_config: Any, one_way: Sequence[str]) -> str:
    """Why images would not be computed as the model has it, and what to do; nothing where they are.

    `one_way` are the workers' backends that cannot have them attend to each other.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if not getattr(model, "is_mm_prefix_lm", False):
        return ""
    limit = getattr(scheduler, "long_prefill_token_threshold", 0)
    if one_way:
        found = f"vLLM's attention backend here ({', '.join(one_way)}) has each attend to those before it alone"
        remedy = "Leave images out (text is served), or serve it on a GPU."
    elif limit:
        found = f"steps of {limit} tokens of a prompt, by --long-prefill-token-threshold, may hold a part of an image"
        remedy = "Leave that option out, or images (text is served)."
    elif not getattr(scheduler, "disable_chunked_mm_input", False):
        found = "a step may hold a part of an image"
        remedy = "Start the server with --disable-chunked-mm-input, or leave images out (text is served)."
    else:
        return ""
    name = f"{model.model} ({model.hf_config.model_type})"
    return (
        f"an image's tokens attend to each other in {name}, and {found}, so the states would not be the model's. "
        f"{remedy}"
    )
