"""The class that vLLM mixes into each of its workers, in place of the stock extension of the same name.

vLLM resolves it by its dotted name inside the worker process, before the device is touched and before weights are
loaded, whether the worker was forked or spawned and whatever `VLLM_PLUGINS` says. vLLM refuses an extension whose names
its worker has already, so all state lives in one attribute.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import apply, status
from ..faults import watch_worker
from ..rehearse.loader import register_if_rehearsing
from ..report import source_digest
from .recorder import Recorder

# Only a worker of an adapted driver imports this module: it joins the driver, so that whatever it imports of
# speculators works here too. A fault is the driver's to report, which asks for an attestation.
watch_worker()
apply(strict=False)
register_if_rehearsing()


class HiddenStatesWorkerExtension:
    """What the stock generator calls in a worker by name, and what the driver of this library calls."""

    _eagle3compat_recorder: Recorder | None

    def eagle3compat_attest(self) -> dict[str, Any]:
        """What is in place in this worker process: plain data."""
        recorder = getattr(self, "_eagle3compat_recorder", None)
        return {
            "rank": getattr(self, "rank", None),
            "pid": os.getpid(),
            "source": source_digest(),
            "extension": type(self).__name__,
            "captures": recorder is not None,
            "runner": recorder.rows.generation if recorder else None,
            "reading": recorder.reading[0] if recorder and recorder.reading else None,
            "tokens_checked": recorder.checked_tokens if recorder else None,
            "adapters": {outcome.adapter: outcome.status.value for outcome in status()},
        }

    def eagle3compat_echo(self, word: str) -> str:
        """Return `word`: shows that replies are not left over from an earlier call."""
        return word

    def eagle3compat_available_memory(self, share: float) -> int:
        """Bytes for the KV cache: `share` of the free accelerator memory, as stock plans it; vLLM's figure on CPU."""
        worker: Any = self
        if worker.cache_config.kv_cache_memory_bytes is None and torch.accelerator.is_available():
            module = torch.get_device_module(torch.accelerator.current_accelerator())
            if hasattr(module, "mem_get_info"):
                free, _total = module.mem_get_info()
                worker.cache_config.kv_cache_memory_bytes = int(free * share)
        return int(worker.determine_available_memory())

    def _setup_hidden_states_capture(self, layer_ids: Sequence[int]) -> None:
        """Capture these decoder layers (0-based; the output of the layer, before any later norm) from now on."""
        from vllm.distributed import get_tp_group

        worker: Any = self
        num_layers = int(worker.model_config.hf_text_config.num_hidden_layers)
        if get_tp_group().rank_in_group == 0:
            self._eagle3compat_recorder = Recorder(worker.model_runner, num_layers, layer_ids)
        else:
            self._eagle3compat_recorder = None

    def _reset_capture(self) -> None:
        """Forget what was captured."""
        if not hasattr(self, "_eagle3compat_recorder"):
            raise RuntimeError("_reset_capture was called before _setup_hidden_states_capture: set up first")
        if self._eagle3compat_recorder is not None:
            self._eagle3compat_recorder.store.clear()

    def eagle3compat_begin(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """Expect these requests: request id to token ids."""
        if self._eagle3compat_recorder is not None:
            self._eagle3compat_recorder.store.begin(prompts)

    def eagle3compat_collect(self, requests: Sequence[str]) -> dict[str, list[torch.Tensor]] | None:
        """Hand over these requests: one `[len(prompt), hidden_size]` a distinct layer id; None off rank 0."""
        if self._eagle3compat_recorder is None:
            return None
        return self._eagle3compat_recorder.store.collect(requests)
