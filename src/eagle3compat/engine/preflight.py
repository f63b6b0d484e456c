"""Refuses, before a worker is started, a run that is already known to fail once the model is loaded.

What vLLM refuses itself while it builds its configuration is not repeated here. A figure that may be wrong (a KV cache
in another format, layers that share one) is logged, and refused only where no reading of it would fit.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..hardware import SMALL_SHM, Accelerator, accelerators, shared_memory, visible
from ..rehearse.config import Config, Model
from ..rehearse.estimate import GIB, Estimate, estimate

log = logging.getLogger("eagle3compat")

LEAST_SHM = 128 * 2**20
"""A worker's replies of up to 10 MiB go round a ring of ten chunks in /dev/shm (vLLM's shm_broadcast.py, 0.11 to 0.32);
where it has less, the worker ends with a bus error in the middle of a run."""
SURE = 2
"""By how much the KV cache must be too small to be refused: it may be kept in half as many bytes."""


def check(vllm_config: Any, kv_share: float) -> None:
    """`vllm_config` is a finished VllmConfig; `kv_share` the share of free device memory that the KV cache takes.

    Raises InputError, a ValueError; nothing has been started then.
    """
    check_shared_memory(shared_memory())
    kind = str(getattr(vllm_config.device_config, "device_type", ""))
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    found = accelerators() if kind == "cuda" else []
    check_devices(found, ranks)
    needs = needs_of(vllm_config, ranks)
    if needs is None:
        return
    if found:
        check_memory(found, needs, kv_share)
    elif kind == "cpu":
        check_cache(needs, cpu_cache(), "Raise VLLM_CPU_KVCACHE_SPACE (GiB), or lower max_model_len.")


def check_shared_memory(memory: dict[str, int] | None) -> None:
    if memory is None or memory["free"] >= SMALL_SHM:
        return
    said = f"/dev/shm has {memory['free'] / 2**20:.0f} MiB free of {memory['total'] / 2**20:.0f} MiB"
    remedy = "Start the container with --shm-size=8g or --ipc=host, or delete what fills it."
    if memory["free"] < LEAST_SHM:
        raise InputError(f"{said}; vLLM's workers reply through it and would end with a bus error. {remedy}")
    log.warning("eagle3compat: %s, through which vLLM's workers reply. %s", said, remedy)


def check_devices(found: list[Accelerator], ranks: int) -> None:
    seen = visible(found)
    if found and seen < ranks:
        raise InputError(
            f"tensor_parallel_size is {ranks}, and {seen} of {len(found)} devices are visible: each rank needs one. "
            "Lower it, or look at CUDA_VISIBLE_DEVICES."
        )


def check_memory(found: list[Accelerator], needs: Estimate, kv_share: float) -> None:
    """Whether the weights fit into the smallest device, and a sequence into what stock's share leaves the KV cache."""
    totals = [device.memory for device in found if device.memory is not None]
    if not totals or needs.weights_from == "the shapes in its config":  # an estimate is no reason to refuse
        return
    smallest = min(totals)
    if needs.weights_per_rank > smallest:
        fits = -(-needs.weights // int(smallest * 0.9))
        raise InputError(
            f"the weights take {needs.weights_per_rank / GIB:.1f} GiB on each rank, and a device has "
            f"{smallest / GIB:.1f} GiB. Use a tensor_parallel_size of {fits} or more."
        )
    left = smallest - needs.weights_per_rank
    check_cache(
        needs, int(left * kv_share),
        "Lower max_model_len, raise gpu_memory_utilization, or use more tensor-parallel ranks.",
    )


def check_cache(needs: Estimate, bytes_there: int | None, remedy: str) -> None:
    needed = needs.kv_one_sequence_per_rank
    if not bytes_there or needed <= bytes_there:
        return
    said = (
        f"one sequence of {needs.sequence} tokens takes {needed / GIB:.2f} GiB of KV cache on each rank, and there is "
        f"{bytes_there / GIB:.2f} GiB for it at most"
    )
    if needed > SURE * bytes_there:
        raise InputError(f"{said}. {remedy}")
    log.warning("eagle3compat: %s. %s", said, remedy)


def cpu_cache() -> int | None:
    """Bytes for the KV cache of a CPU build, None where the setting does not say."""
    said = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    return int(said) * GIB if said.isdecimal() and int(said) else None


def needs_of(vllm_config: Any, ranks: int) -> Estimate | None:
    """What the model needs, None where its config cannot be read so."""
    model = vllm_config.model_config
    try:
        config = json.loads(json.dumps(model.hf_config.to_dict(), default=str))
        if Model(config).mla and os.environ.get("VLLM_MLA_DISABLE") == "1":  # it then keeps keys and values whole
            return None
        return estimate(config, [0], ranks, int(model.max_model_len), index=_size_on_disk(str(model.model)))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        log.debug("what the model needs is not known from its config: %s", error)
        return None


def _size_on_disk(model: str) -> Config | None:
    """The size of the weights in a local folder, in the form of an index of weights."""
    folder = Path(model)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")]
    return {"metadata": {"total_size": sum(sizes)}} if sizes else None
