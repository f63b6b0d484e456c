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
from ..engine.queues import socket_files
from ..faults import watch_worker
from ..rehearse.loader import register_if_rehearsing
from ..report import source_digest
from .attention import one_way_backends
from .recorder import Recorder
from .segment import Address, Layout

# Only a worker of an adapted driver imports this module: it joins the driver, so that whatever it imports of
# speculators works here too. A fault is the driver's to report, which asks for an attestation.
watch_worker()
apply(strict=False)
register_if_rehearsing()


class HiddenStatesWorkerExtension:
    """What the stock generator calls in a worker by name, and what the driver of this library calls."""

    _eagle3compat_recorder: Recorder

    def eagle3compat_attest(self) -> dict[str, Any]:
        """What is in place in this worker process: plain data."""
        from vllm.distributed import get_tp_group

        recorder: Recorder | None = getattr(self, "_eagle3compat_recorder", None)
        return {
            "rank": getattr(self, "rank", None),
            "pid": os.getpid(),
            "source": source_digest(),
            "extension": type(self).__name__,
            "captures": recorder is not None and recorder.files,
            **(recorder.found() if recorder else {}),
            "runner": recorder.rows.generation if recorder else None,
            "reading": recorder.how if recorder else None,
            "sockets": sorted(socket_files([getattr(get_tp_group(), "mq_broadcaster", None)])),
            "tokens_checked": recorder.checked_tokens if recorder else None,
            "adapters": {outcome.adapter: outcome.status.value for outcome in status()},
        }

    def eagle3compat_one_way(self) -> list[str]:
        """Attention backends that compute images otherwise than the model has it, by name."""
        worker: Any = self
        return one_way_backends(worker.model_runner)

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
        from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce

        worker: Any = self
        num_layers = int(worker.model_config.hf_text_config.num_hidden_layers)
        ranks, sums = get_tp_group().world_size, {}

        def agree(distances: list[float]) -> list[float]:
            shares = torch.tensor(distances, device=worker.device)
            return [float(share) / ranks for share in tensor_model_parallel_all_reduce(shares)]

        if ranks > 1:
            sums = {"reduce": tensor_model_parallel_all_reduce, "agree": agree}
        files = get_tp_group().rank_in_group == 0
        self._eagle3compat_recorder = Recorder(worker.model_runner, num_layers, layer_ids, files, **sums)

    def _reset_capture(self) -> None:
        """Forget what was captured."""
        if not hasattr(self, "_eagle3compat_recorder"):
            raise RuntimeError("_reset_capture was called before _setup_hidden_states_capture: set up first")
        self._eagle3compat_recorder.store.clear()

    def eagle3compat_attach(self, address: Address | None) -> str:
        """Use this shared memory for captured rows from now on; why that can't be, or nothing when it can."""
        if not self._eagle3compat_recorder.files:
            return ""
        try:
            self._eagle3compat_recorder.store.attach(address)
        except (OSError, RuntimeError) as error:  # the driver then asks for rows in replies, and says so
            return f"{type(error).__name__}: {error}"
        return ""

    def eagle3compat_begin(
        self,
        prompts: Mapping[str, Sequence[int]],
        layout: Layout | None = None,
        leads: Mapping[str, int] | None = None,
    ) -> None:
        """Expect these requests and no others, request id to token ids.

        Their rows go to attached memory where `layout` says so. `leads` says of those with an image how many tokens
        come before the first. What a failed call left is forgotten.
        """
        if not hasattr(self, "_eagle3compat_recorder"):
            raise RuntimeError("eagle3compat_begin was called before _setup_hidden_states_capture: set up first")
        self._eagle3compat_recorder.store.clear()
        self._eagle3compat_recorder.store.begin(prompts, layout, leads)

    def eagle3compat_collect(self, requests: Sequence[str]) -> dict[str, list[torch.Tensor | int]] | None:
        """Hand over these requests, see Store.collect; None off rank 0."""
        if not self._eagle3compat_recorder.files:
            self._eagle3compat_recorder.store.clear()
            return None
        return self._eagle3compat_recorder.store.collect(requests)
