"""Stock's worker extension re-writes the model's forward; on most families that fails or silently differs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..adapter import WORKER, Adapter
from ..capture import EXTENSION
from ..contract import Accepts
from ..ledger import Ledger
from .configs import Recorded

STOCK_EXTENSION = "speculators.data_generation.custom_worker.HiddenStatesWorkerExtension"


class Capture(Adapter):
    """Names this library's worker extension in place of stock's, so that every worker resolves it, forked or spawned.

    It keeps the model's own forward and takes each layer's residual stream from hooks, proves on the first batch that
    this is the model's stream, and files rows by request and position with the tokens checked.
    """

    id = "capture"
    seam = "capture and attribution"
    breaks = (
        "`'LlamaModel' object has no attribute 'get_input_embeddings'` (0.3 from vLLM 0.11.1 on), `'GPUModelRunner' "
        "object has no attribute 'input_batch'` (V2 runner), wrong values where layers take more than three arguments "
        "(`llama_4_scaling`) or return something else than a pair, rows of one sample in another after chunking or "
        "preemption"
    )
    always = "stock replaces the model's forward by a loop of its own and attributes rows by order of submission"
    relies_on = (Accepts("vllm.engine.arg_utils:EngineArgs.__init__", ("worker_extension_cls",)),)
    replaces = ("ParallelConfig",)
    retires = WORKER
    where = "worker"
    upstream = "https://github.com/vllm-project/speculators/issues/279"
    remove_when = "never while in-process extraction is used: this is how states are captured"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        ledger.rebind(self.id, module, "ParallelConfig", parallel_config)


def parallel_config(**fields: Any) -> Recorded:
    """A ParallelConfig whose workers carry this library's extension."""
    if fields.get("worker_extension_cls") == STOCK_EXTENSION:
        fields["worker_extension_cls"] = EXTENSION
    return Recorded("ParallelConfig", fields)
