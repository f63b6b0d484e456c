"""Runs one cell: `python -m eagle3compat.matrix.child PLAN EVENTS`, in the environment that is measured.

`python -m eagle3compat.matrix.child PLAN --compare NAME STREAMS` prints, as JSON, how the states that it left for a
model compare with other streams than the plan's.

PLAN is the JSON of a `Plan`. Steps are told as `eagle3compat.steps` tells them; those of a model carry its name, and
where one fails the next model is tried.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

from ..steps import Events, exit_code

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"


@dataclass(frozen=True)
class Subject:
    """A model: its folder, what to extract from it, transformers' streams for the same prompts, and where states go."""

    name: str
    folder: str
    layer_ids: list[int]
    calls: list[list[list[int]]]
    reference: str
    states: str


@dataclass(frozen=True)
class Plan:
    """What to run. An empty start method leaves the choice to vLLM."""

    subjects: list[Subject]
    tensor_parallel_size: int
    start_method: str
    dtype: str
    max_model_len: int

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**content, "subjects": [Subject(**subject) for subject in content["subjects"]]})


def run(plan: Plan, events: Events) -> None:
    """Every step in order."""
    import importlib

    import eagle3compat

    with events.step("import"):
        eagle3compat.apply()
        module = importlib.import_module(GENERATOR)
    with events.step("apply") as facts:
        facts["adapters"] = {outcome.adapter: outcome.status.value for outcome in eagle3compat.status()}
    for subject in plan.subjects:
        with suppress(Exception):  # told as the outcome of its step; the next model does not depend on it
            extract(plan, subject, module, events)


def extract(plan: Plan, subject: Subject, module: Any, events: Events) -> None:
    """Load, extract and compare one model."""
    try:
        with events.step(f"load {subject.name}"):
            generator = _generator(plan, module)(
                subject.folder, layer_ids=subject.layer_ids, max_model_len=plan.max_model_len,
                tensor_parallel_size=plan.tensor_parallel_size,
            )
        try:
            with events.step(f"generate {subject.name}") as facts:
                results = [result for call in subject.calls for result in generator.generate(call)]
                attested = generator.executor.collective_rpc("eagle3compat_attest")
                facts["workers"] = len({worker["pid"] for worker in attested} - {os.getpid()})
                facts["start_method"] = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork")
                facts["tokens"] = sum(len(result["input_ids"]) for result in results)
            with events.step(f"compare {subject.name}") as facts:
                keep(subject, results)
                facts.update(compare(subject, results))
        finally:
            generator.executor.shutdown()
    except Exception:
        traceback.print_exc()
        raise


def _generator(plan: Plan, module: Any) -> Any:
    """The stock class, whose vLLM computes in the plan's dtype and starts its workers as the plan says."""
    original = module.ModelConfig

    class Recorded(module.VllmHiddenStatesGenerator):  # type: ignore[misc]
        def _create_vllm_config(self, *args: Any, **kwargs: Any) -> Any:
            module.ModelConfig = wraps(original)(lambda **given: original(**{**given, "dtype": plan.dtype}))
            try:
                config = super()._create_vllm_config(*args, **kwargs)
            finally:
                module.ModelConfig = original
            if plan.start_method:  # after vLLM's platform has chosen
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = plan.start_method
            return config

    return Recorded


def keep(subject: Subject, results: Sequence[dict[str, Any]]) -> None:
    """Leave the results beside the plan, for another comparison."""
    import torch

    torch.save([{name: result[name] for name in ("input_ids", "hidden_states")} for result in results], subject.states)


def compare(subject: Subject, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The largest error by layer id, and the least that a wrong layer and a shifted row are off by.

    Raises ValueError where results are not in the order of the prompts, or a tensor has another shape.
    """
    import torch

    from ..yardstick import reference

    prompts = [prompt for call in subject.calls for prompt in call]
    if [result["input_ids"].tolist() for result in results] != prompts:
        raise ValueError("the results are not those of the prompts, in their order")
    wanted = torch.load(subject.reference)
    errors: dict[str, float] = {}
    wrong_layer, shifted_row = float("inf"), float("inf")
    for result, streams in zip(results, wanted, strict=True):
        for layer, state in zip(subject.layer_ids, result["hidden_states"], strict=True):
            error = reference.compare(state, streams[layer])["max"]
            errors[str(layer)] = max(errors.get(str(layer), 0.0), error)
            neighbour = streams[layer - 1 if layer else 1]
            wrong_layer = min(wrong_layer, reference.compare(state, neighbour)["max"])
            if len(state) > 1:
                shifted_row = min(shifted_row, reference.compare(state[1:], streams[layer][:-1])["max"])
    return {
        "errors": {layer: _rounded(error) for layer, error in errors.items()},
        "controls": {"wrong_layer": _rounded(wrong_layer), "shifted_row": _rounded(shifted_row)},
        "tensors": sum(len(result["hidden_states"]) for result in results),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def compare_again(plan: Plan, name: str, streams: str) -> None:
    import torch

    (subject,) = [subject for subject in plan.subjects if subject.name == name]
    print(json.dumps(compare(replace(subject, reference=streams), torch.load(subject.states))))


def main() -> int:
    if "--compare" in sys.argv:
        compare_again(Plan.read(Path(sys.argv[1])), *sys.argv[3:])
        return 0
    return exit_code(lambda: run(Plan.read(Path(sys.argv[1])), Events(Path(sys.argv[2]))))


if __name__ == "__main__":
    sys.exit(main())
