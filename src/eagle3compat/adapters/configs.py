"""Stock builds vLLM's config objects one by one; fields that became required, or defaults that changed, break it."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from ..adapter import GENERATOR, Adapter
from ..contract import Accepts, Binds, Exists
from ..engine.checkpoint import check_weights
from ..engine.model_class import named_faults
from ..errors import IncompatibleError
from ..ledger import Ledger

ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"
PARTS = ("CacheConfig", "ModelConfig", "SchedulerConfig", "DeviceConfig", "LoadConfig")
DROPPED = {
    "CacheConfig": {"block_size"},  # the attention backend knows which sizes it has
    "SchedulerConfig": {"max_model_len", "is_encoder_decoder"},  # the model config says both
}
CHOSEN = {
    "enable_prefix_caching": False,  # a cached prefix is not computed, so its states would be missing
    "enable_chunked_prefill": True,  # a prompt may be longer than the token budget
    "async_scheduling": False,  # states are filed step by step
    "distributed_executor_backend": "mp",
    # Each image is its own request's, whatever looked alike before. And for that cache vLLM 0.26.0, while it starts,
    # has Qwen's processors take the token of a video without one, which transformers 5.24 refuses.
    "mm_processor_cache_gb": 0,
}


class Recorded:
    """The fields that stock gave to one config class."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind, self.fields = kind, fields


class Configs(Adapter):
    """Builds the VllmConfig as `vllm serve` does, from the engine arguments that stock's fields amount to.

    The names of the engine arguments are vLLM's command line, which changes far less than the config classes. Prefix
    caching and asynchronous scheduling are off, chunked prefill is on, the block size is the backend's own.
    """

    id = "configs"
    seam = "configs"
    breaks = (
        "`ValidationError: SchedulerConfig.is_encoder_decoder Field required` (0.3 from vLLM 0.12 on); prefix caching "
        "silently on; a KV block size of 16 where the backend has none: `No valid attention backend found`"
    )
    stock_needs = tuple(Binds(GENERATOR, name, f"vllm.config:{name}") for name in (*PARTS, "VllmConfig"))
    always = "stock takes defaults that are wrong for extraction on later releases (block size, prefix caching)"
    relies_on = (
        Accepts(
            f"{ARGUMENTS}.__init__",
            ("model", "tokenizer", "trust_remote_code", "dtype", "max_model_len", "enforce_eager",
             "gpu_memory_utilization", "tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens",
             "enable_prefix_caching", "enable_chunked_prefill", "distributed_executor_backend"),
        ),
        Exists(f"{ARGUMENTS}.create_engine_config"),
    )
    replaces = (*PARTS, "VllmConfig")
    hands_back = ("VllmConfig",)
    requires = ("capture",)
    upstream = "https://github.com/vllm-project/speculators/pull/225"
    remove_when = "stock builds its configuration from engine arguments"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        for kind in PARTS:
            ledger.rebind(self.id, module, kind, functools.partial(recorded, kind))
        ledger.rebind(self.id, module, "VllmConfig", vllm_config)


def recorded(kind: str, **fields: Any) -> Recorded:
    """Takes down the fields that stock gives to the config class `kind`."""
    return Recorded(kind, fields)


def engine_arguments(parts: dict[str, Recorded]) -> dict[str, Any]:
    """The engine arguments that stock's config fields amount to."""
    arguments: dict[str, Any] = {}
    for part in parts.values():
        dropped = DROPPED.get(part.kind, set())
        arguments.update({name: value for name, value in part.fields.items() if name not in dropped})
    return arguments


def vllm_config(**parts: Recorded) -> Any:
    """A finished VllmConfig for extraction.

    Raises IncompatibleError for a field that is no engine argument, InputError for a folder without weights, as vLLM
    takes its time to build a configuration, and ModelClassError where it cannot import its class of the model.
    """
    import inspect

    from vllm.engine.arg_utils import EngineArgs

    accepted = inspect.signature(EngineArgs).parameters
    arguments = engine_arguments(parts)
    check_weights(Path(str(arguments.get("model", ""))), str(arguments.get("load_format", "auto")))
    for name in arguments:
        if name not in accepted:
            raise IncompatibleError(
                Configs.id, f"{ARGUMENTS} takes '{name}'", name, "no such engine argument",
                "Leave that field out of the generator's configuration.",
            )
    arguments.update({name: value for name, value in CHOSEN.items() if name in accepted})
    with named_faults():
        return EngineArgs(**arguments).create_engine_config()
