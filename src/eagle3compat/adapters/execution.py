"""Stock drives vLLM's executor by hand; its phases, its replies and its planning differ in most releases."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ..adapter import GENERATOR, Adapter
from ..contract import Accepts, Binds, Exists
from ..ledger import Ledger

CORE = "vllm.v1.engine.core:EngineCore"
EXECUTOR = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"


class Execution(Adapter):
    """Puts vLLM's own engine core behind the executor's name.

    The engine core plans the KV cache, executes in one phase or two, and accounts for every step; `collective_rpc`
    answers in the form that this stock release expects.
    """

    id = "execution"
    seam = "execution"
    breaks = (
        "`Boolean value of Tensor with more than one value is ambiguous` or tensors of the wrong shape "
        "(`collective_rpc` returns a value, not a list, from vLLM 0.11.1 on), `State error: sample_tokens() must be "
        "called` on the second call, `RuntimeError: Request req_0_32 not found`, states cut short when the KV cache is "
        "small, errors with empty messages"
    )
    stock_needs = (
        Binds(GENERATOR, "MultiprocExecutor", EXECUTOR),
        Exists(f"{EXECUTOR}.sample_tokens"),
    )
    always = "stock never tells the scheduler what was computed, so sequences past 32 or past the KV cache are lost"
    relies_on = (
        Accepts(f"{CORE}.__init__", ("vllm_config", "executor_class", "log_stats")),
        Exists(f"{CORE}.step"),
        Exists(f"{CORE}.add_request"),
        Exists(f"{CORE}.abort_requests"),
        Exists(f"{CORE}.shutdown"),
        Accepts(f"{EXECUTOR}.collective_rpc", ("method", "timeout", "args")),
        Exists(f"{EXECUTOR}.determine_available_memory"),
    )
    replaces = ("MultiprocExecutor",)
    requires = ("capture", "configs")
    upstream = "https://github.com/vllm-project/speculators/pull/225"
    remove_when = "never while in-process extraction is used: this is how batches are executed"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        from ..engine.stand_in import V0_3, V0_4, Executor

        constants = inspect.unwrap(module.VllmHiddenStatesGenerator.generate).__code__.co_consts
        expectation = V0_4 if "_set_request_metadata" in constants else V0_3

        def executor(vllm_config: Any) -> Executor:
            model_share = vllm_config.cache_config.gpu_memory_utilization
            return Executor(vllm_config, model_share * module.CACHE_MEMORY_FRACTION, expectation)

        ledger.rebind(self.id, module, "MultiprocExecutor", executor)
