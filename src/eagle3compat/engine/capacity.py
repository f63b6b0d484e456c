"""Whether a sequence fits into the KV cache at all.

vLLM checks at the start that one sequence of `max_model_len` fits, by memory; it does not where the number of blocks is
set by hand, and it counts the block that it keeps for itself. Such a sequence would wait for ever.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from ..errors import InputError


def check_capacity(core: Any, vllm_config: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Raise InputError for the longest of `prompts` unless the idle engine `core` has the KV blocks that it needs.

    Where this vLLM does not say what a sequence needs, nothing is checked: the engine then notices that it idles.
    """
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    length = len(prompts[longest])
    needed, available = blocks_needed(core, vllm_config, length), blocks_available(core)
    if needed is None or available is None or needed <= available:
        return
    override = getattr(vllm_config.cache_config, "num_gpu_blocks_override", None)
    setting = (
        f"num_gpu_blocks_override, which is {override}"
        if override
        else "gpu_memory_utilization (VLLM_CPU_KVCACHE_SPACE on a CPU)"
    )
    raise InputError(
        f"prompt {longest} has {length} tokens, which need {needed} blocks of KV cache; {available} can be used. "
        f"Nothing of this call was extracted. Raise {setting}, or shorten or drop the prompt.", longest,
    )


def blocks_needed(core: Any, vllm_config: Any, tokens: int) -> int | None:
    """KV cache blocks that one sequence of `tokens` takes, all groups together, by vLLM's own count."""
    from vllm.v1.core import kv_cache_utils

    sequences_at_once = getattr(kv_cache_utils, "get_max_concurrency_for_kv_cache_config", None)
    planned = getattr(core.scheduler, "kv_cache_config", None)
    if sequences_at_once is None or planned is None or not planned.kv_cache_groups:
        return None
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.model_config.max_model_len = tokens
    return math.ceil(float(planned.num_blocks / sequences_at_once(config, planned)) - 1e-6)


def blocks_available(core: Any) -> int | None:
    """KV cache blocks that are free while nothing runs; fewer than planned, as vLLM keeps one that is never filled."""
    pool = getattr(getattr(core.scheduler, "kv_cache_manager", None), "block_pool", None)
    return None if pool is None else int(pool.get_num_free_blocks())
