"""A sample of the files extracted again, through stock's generator with the adapters in place, and compared."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..engine.media import media_tokens
from ..errors import InputError
from .across import row_errors
from .check import Findings
from .faults import Fault, written
from .files import Folder
from .sample import opened

TOLERANCES = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.05}
"""Of a row's own norm, for the median row, by the coarser dtype of the two; what is stored more coarsely: FLOAT8."""
FLOAT8 = 0.15
SINGLE_ROW = 10
"""No row may be off by more than so many tolerances: in bf16 that is half its norm, and other rows are off by more."""
BATCH_TOKENS = 8192
SEARCHED = 2000
"""Files of the same length whose states are looked at for those of another."""

States = dict[int, Any]
"""`[S, H]` by in-process layer id."""


def choose(findings: Findings, count: int, seed: int) -> list[int]:
    """Indices of sound files to recompute: the shortest, the longest, and others from all over the set.

    Those that may hold images are not among them, unless all do.
    """
    faulty = set(findings.redo)
    sound = [index for index in sorted(findings.lengths) if index not in faulty]
    without = [index for index in sound if index not in findings.images]
    if without and len(without) < len(sound):
        left = written([index for index in sound if index in findings.images])
        findings.notes.append(f"Files that may hold images are not recomputed, as token ids do not carry them: {left}.")
    sound = without or sound
    if len(sound) <= count:
        return sound
    by_length = sorted(sound, key=lambda index: (findings.lengths[index], index))
    chosen = {by_length[-1], by_length[0]} if count > 1 else {by_length[-1]}
    rest = [index for index in sound if index not in chosen]
    parts = count - len(chosen)
    source = random.Random(seed)
    for part in range(parts):
        chosen.add(rest[source.randrange(part * len(rest) // parts, (part + 1) * len(rest) // parts)])
    return sorted(chosen)


@dataclass(frozen=True)
class Plan:
    """What will be asked of the model; in-process layer ids. `wanted` are the files', in their order.

    `media` are the tokens that stand for an image or the like, by their names in the model's configuration.
    """

    model: str
    wanted: list[int]
    asked: list[int]
    tensor_parallel_size: int = 1
    media: Mapping[int, str] = field(default_factory=dict)


def plan(folder: Folder, layer_ids: Sequence[int], model: str, tensor_parallel_size: int = 1) -> Plan:
    """Look whether the files can be recomputed with this model, before anything is read. Raises InputError."""
    wanted = [layer - folder.layout.shift for layer in layer_ids]
    if not wanted or min(wanted) < 0:
        raise InputError(f"layer ids {list(layer_ids)} are not all decoder layers'. Check --layer-ids.")
    config = config_of(model)
    layers = int(getattr(config, "text_config", config).num_hidden_layers)
    return Plan(model, wanted, with_neighbours(wanted, layers), tensor_parallel_size, media_tokens(config.to_dict()))


def recompute(
    findings: Findings, indices: Sequence[int], plan: Plan, advance: Callable[[int], None] | None = None
) -> None:
    """Extract these files' prompts again, and add what differs to the findings. Raises what extraction raises.

    Those with an image are left out, with a note: their token ids do not carry it.
    """
    prompts = {index: _ids(findings.folder, index) for index in indices}
    images = [index for index, ids in prompts.items() if not plan.media.keys().isdisjoint(ids)]
    for index in images:
        del prompts[index]
    if images:
        findings.notes.append(f"Files with images cannot be recomputed from their token ids: {written(images)}.")
    if not prompts:
        return
    with generator_of(plan, max(map(len, prompts.values()))) as generator:
        for batch in _batches(prompts):
            results = generator.generate([prompts[index] for index in batch])
            for index, result in zip(batch, results, strict=True):
                states = dict(zip(plan.asked, result["hidden_states"], strict=True))
                _judge(findings, index, plan.wanted, states)
                if advance is not None:
                    advance(1)
    findings.sort()


def config_of(model: str) -> Any:
    """transformers' configuration of the model. Raises InputError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=True)
    except (OSError, ValueError) as error:
        raise InputError(f"the configuration of {model} cannot be read: {error}. Check --model.") from None


def with_neighbours(wanted: Sequence[int], layers: int) -> list[int]:
    """The layers and those beside them, ascending: a shift of layer ids shows as a neighbour's states."""
    beyond = [layer for layer in wanted if layer >= layers]
    if beyond:
        raise InputError(f"layer {beyond[0]} is beyond the model's {layers} layers. Check --model and --layer-ids.")
    return sorted({near for layer in wanted for near in (layer - 1, layer, layer + 1) if 0 <= near < layers})


def _ids(folder: Folder, index: int) -> list[int]:
    with opened(folder.files[index], folder.layout) as sample:
        ids: list[int] = sample.ids.tolist()
    return ids


def _batches(prompts: dict[int, list[int]]) -> list[list[int]]:
    batches: list[list[int]] = []
    filled = BATCH_TOKENS
    for index, ids in prompts.items():
        if filled + len(ids) > BATCH_TOKENS:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += len(ids)
    return batches


@contextmanager
def generator_of(plan: Plan, longest: int) -> Iterator[Any]:
    """A stock generator with the adapters in place; its workers are ended at the end."""
    import eagle3compat

    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # torch has had threads here, which a fork does not survive
    with stdout_kept(), eagle3compat.applied():
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

        generator = VllmHiddenStatesGenerator(
            plan.model, layer_ids=plan.asked, max_model_len=longest + 1, tensor_parallel_size=plan.tensor_parallel_size
        )
        try:
            yield generator
        finally:
            generator.executor.shutdown()


@contextmanager
def stdout_kept() -> Iterator[None]:
    """Within, what this process and its workers print goes to standard error: vLLM logs to standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


def _judge(findings: Findings, index: int, wanted: Sequence[int], states: States) -> None:
    folder = findings.folder
    with opened(folder.files[index], folder.layout) as sample:
        stored = [state.clone() for state in sample.states]
        dtype = sample.dtype
    if len(stored) != len(wanted):
        raise InputError(f"{folder.layout.file(index)} holds {len(stored)} layers for {len(wanted)} layer ids.")
    limit = tolerance(dtype, states[wanted[0]])
    layers, reasons = [], []
    for layer, state in zip(wanted, stored, strict=True):
        figures = compare(state, states[layer])
        layers.append({"id": layer + folder.layout.shift, **figures})
        off = figures["median"] > limit or figures["worst"] > SINGLE_ROW * limit
        if off or _nearer_to_another(state, layer, states, figures["median"], limit):
            reasons.append((layer, figures))
    said = ""
    if reasons:
        said = _explain(findings, index, reasons, dict(zip(wanted, stored, strict=True)), states, limit)
        findings.faults.append(Fault("differs", folder.layout.file(index), index, said))
    findings.recomputed.append({
        "file": folder.layout.file(index), "index": index, "tokens": len(stored[0]), "tolerance": limit,
        "layers": layers, "reason": said,
    })


def _nearer_to_another(state: Any, layer: int, states: States, error: float, limit: float) -> bool:
    """In a deep model neighbouring layers may differ by less than the tolerance; whose these are still shows."""
    if error < limit / 10:
        return False
    return any(compare(state, want)["median"] < error / 3 for other, want in states.items() if other != layer)


def tolerance(stored: str, computed: Any) -> float:
    """For the median row's error, by the coarser of the two dtypes."""
    return max(TOLERANCES.get(name, FLOAT8) for name in (stored, str(computed.dtype).removeprefix("torch.")))


def compare(got: Any, want: Any) -> dict[str, float]:
    """How far states `[S, H]` are off.

    `median` and `worst` are of the rows, each as a part of its own norm: the few rows with huge values that most models
    have do not hide the others. `max` is the largest difference as a part of the largest value.
    """
    if got.shape != want.shape:
        return {"median": math.inf, "worst": math.inf, "max": math.inf}
    errors = row_errors(got, want)
    largest = (got.float() - want.float()).abs().max() / want.float().abs().max()
    return {"median": float(errors.median()), "worst": float(errors.max()), "max": float(largest)}


def _explain(
    findings: Findings, index: int, reasons: list[tuple[int, dict[str, float]]], stored: States, states: States,
    limit: float,
) -> str:
    """What differs, with its figures, and why, where that can be recognised."""
    shift = findings.folder.layout.shift
    layer, figures = max(reasons, key=lambda reason: reason[1]["median"])
    which = ", ".join(str(number + shift) for number, _ in reasons)
    said = f"layers {which} differ: layer {layer + shift} by {figures['median']:.2f} in the median row, limit {limit:g}"
    why = (
        _other_layer(stored, states, limit, shift)
        or _shifted_rows(stored[layer], states[layer], limit)
        or _other_file(findings, index, list(stored).index(layer), states[layer], limit)
        or _some_rows(stored[layer], states[layer], limit)
    )
    return f"{said}: {why}" if why else said


def _other_layer(stored: States, states: States, limit: float, shift: int) -> str:
    found = {}
    for layer, state in stored.items():
        errors = {other: compare(state, want)["median"] for other, want in states.items()}
        nearest = min(errors, key=lambda other: (errors[other], other != layer))
        if errors[nearest] <= limit:
            found[layer] = nearest
    moved = {layer: other for layer, other in found.items() if other != layer}
    if not moved:
        return ""
    steps = {other - layer for layer, other in moved.items()}
    pairs = ", ".join(f"{layer + shift} holds layer {other + shift}" for layer, other in moved.items())
    return f"layer ids are shifted by {steps.pop()} ({pairs})" if len(steps) == 1 else f"layers are swapped ({pairs})"


def _shifted_rows(state: Any, want: Any, limit: float) -> str:
    """Rows that are right and stand in another place: looked for from the middle one."""
    import torch

    if state.shape != want.shape or len(state) < 3:
        return ""
    middle = len(state) // 2
    errors = row_errors(state[middle].float().expand_as(want), want)
    step = int(torch.argmin(errors)) - middle
    if step == 0 or float(errors[middle + step]) > SINGLE_ROW * limit:
        return ""
    here = state[max(0, -step) : len(state) - max(0, step)]
    there = want[max(0, step) : len(want) - max(0, -step)]
    if compare(here, there)["median"] > limit:
        return ""
    return f"its rows are shifted by {step}: row {middle} is that of token {middle + step}"


def _other_file(findings: Findings, index: int, place: int, want: Any, limit: float) -> str:
    """The file that holds the states of this one's prompt, among those of its length and nearest to it."""
    folder = findings.folder
    alike = [other for other, length in findings.lengths.items() if length == len(want) and other != index]
    for other in sorted(alike, key=lambda other: abs(other - index))[:SEARCHED]:
        with opened(folder.files[other], folder.layout) as sample:
            if place < len(sample.states) and compare(sample.states[place], want)["median"] <= limit:
                return f"its states are in {folder.layout.file(other)}"
    return ""


def _some_rows(state: Any, want: Any, limit: float) -> str:
    if state.shape != want.shape:
        return ""
    wrong = (~(row_errors(state, want) <= SINGLE_ROW * limit)).nonzero().flatten().tolist()
    if not wrong or len(wrong) > len(state) // 2:
        return ""
    return f"{len(wrong)} of {len(state)} rows are wrong, from row {wrong[0]} to {wrong[-1]}"
