"""Stock plans the KV cache with vLLM helpers that changed arguments, moved, or need a layout resolved first."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..adapter import GENERATOR, Adapter
from ..contract import Binds, Exists
from ..ledger import Ledger

UTILS = "vllm.v1.core.kv_cache_utils"
HELPERS = (
    "unify_hybrid_kv_cache_specs",
    "_get_kv_cache_groups_uniform_spec",
    "get_kv_cache_config_from_groups",
)
HASHING = ("get_hash_fn_by_name", "init_none_hash", "get_request_block_hasher")


class KVPlanning(Adapter):
    """Leaves the KV cache to the engine core, which planned it when the executor was started.

    Groups, layout, block sizes and the number of blocks are vLLM's own for the model, hybrid and sparse ones included.
    Block hashes serve prefix caching, which is off.
    """

    id = "kv_planning"
    seam = "kv planning"
    breaks = (
        "`get_kv_cache_config_from_groups() got an unexpected keyword argument 'kv_cache_specs'` (0.3 from vLLM 0.12), "
        "`missing 'kv_cache_specs'` (0.4 on 0.11), `KV cache layout has not been resolved yet` (from 0.29), "
        "AssertionError for hybrid models; block-hash assertions"
    )
    stock_needs = (
        *(Binds(GENERATOR, name, f"{UTILS}:{name}") for name in HELPERS),
        Exists("vllm.utils.hashing:get_hash_fn_by_name"),
    )
    always = "stock's plan is another one than the engine core's, and would overwrite its number of blocks"
    relies_on = (Exists("vllm.config:CacheConfig.num_gpu_blocks"),)
    replaces = (*HELPERS, *HASHING)
    requires = ("execution",)
    upstream = "https://github.com/vllm-project/speculators/pull/348"
    remove_when = "never while in-process extraction is used: the engine core plans"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        replacements = {HELPERS[0]: nothing, HELPERS[1]: nothing, HELPERS[2]: planned}
        replacements.update(dict.fromkeys(HASHING, nothing))
        for name, replacement in replacements.items():
            if hasattr(module, name):
                ledger.rebind(self.id, module, name, replacement)


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """The engine core does this itself."""


def planned(vllm_config: Any, *_args: Any, **_kwargs: Any) -> Any:
    """The engine core's own plan for this configuration."""
    from ..engine.stand_in import PlannedCache, executor_of

    return PlannedCache(executor_of(vllm_config).vllm_config.cache_config.num_gpu_blocks)
