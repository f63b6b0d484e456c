"""Runs the stock generator, adapted, on a small model: `python -m eagle3compat.rehearse.child PLAN EVENTS`.

PLAN is the JSON of a `Plan`; each step that ends appends one JSON line to EVENTS, and so does a step that raises.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..hardware import accelerators
from ..steps import Events, exit_code
from .loader import LOAD_FORMAT

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
TOLERANCE = 0.05
"""How far the median row of a batch may lie from the same prompt alone, relative to its size, in bf16.

The largest is no measure: a mixture's router may choose otherwise for a few rows in a hundred, whose scores are nearly
equal."""
MEMORY, MOST_OF_MEMORY = 8 * 2**30, 0.8
"""Bytes on each accelerator for a small model with the kernels' working memory for 8,192 tokens, and stock's share."""
CONTROL = 0.2
"""What the next row and another layer are off by at the least."""


@dataclass(frozen=True)
class Plan:
    """What to run. `alone` are indices into `batch`."""

    model: str
    layer_ids: list[int]
    tensor_parallel_size: int
    max_model_len: int
    short: list[list[int]]
    batch: list[list[int]]
    alone: list[int]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def rehearse(plan: Plan, events: Events) -> None:
    """Every step in order. Whatever a step raises ends the rehearsal."""
    import importlib

    import eagle3compat

    with events.step("apply") as facts:
        facts["said"] = eagle3compat.apply().headline
    with events.step("import"):
        stock: Any = importlib.import_module(GENERATOR).VllmHiddenStatesGenerator

    class Rehearsed(stock):  # type: ignore[misc]
        """The stock generator; its finished configuration takes random weights."""

        def _create_vllm_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super()._create_vllm_config(*args, **kwargs)
            config.load_config.load_format = LOAD_FORMAT
            return config

    with events.step("load") as facts:
        generator = Rehearsed(
            plan.model, layer_ids=plan.layer_ids, max_model_len=plan.max_model_len,
            tensor_parallel_size=plan.tensor_parallel_size, gpu_memory_utilization=memory_share(),
        )  # fmt: skip
        facts["said"] = f"{plan.tensor_parallel_size} worker(s)"
    try:
        with events.step("short batch") as facts:
            short = generator.generate(plan.short)
            facts["said"] = _said(short)
        with events.step("workers") as facts:
            attested = generator.executor.collective_rpc("eagle3compat_attest")
            facts["said"] = f"residual stream: {attested[0]['reading']}; proved by the final norm"
        with events.step("over-budget batch") as facts:
            batch = generator.generate(plan.batch)
            facts["said"] = _said(batch)
        with events.step("batch against alone") as facts:
            alone = [generator.generate([plan.batch[index]])[0] for index in plan.alone]
            facts["said"] = compare(plan.layer_ids, [batch[index] for index in plan.alone], alone)
    finally:
        with events.step("shutdown"):
            generator.executor.shutdown()


def memory_share() -> float:
    """What of an accelerator's memory a small model may take: others may be at work on it."""
    sizes = [device.memory for device in accelerators() if device.memory]
    return min([MOST_OF_MEMORY, *(MEMORY / size for size in sizes)])


def _said(results: Sequence[dict[str, Any]]) -> str:
    tokens = sum(len(result["input_ids"]) for result in results)
    states = results[0]["hidden_states"]
    return f"{len(results)} samples, {tokens} tokens, {len(states)} x [tokens, {states[0].shape[-1]}] {states[0].dtype}"


def compare(layer_ids: Sequence[int], batch: Sequence[dict[str, Any]], alone: Sequence[dict[str, Any]]) -> str:
    """Raises ResultError unless the batch's states are those of the prompts alone, and unlike what is near them."""
    from ..errors import ResultError

    worst, rows, layers = 0.0, float("inf"), float("inf")
    for one, other in zip(batch, alone, strict=True):
        for index, layer in enumerate(layer_ids):
            got, want = one["hidden_states"][index], other["hidden_states"][index]
            worst = max(worst, median_distance(got, want))
            rows = min(rows, median_distance(got[:-1], want[1:]))
            for another in range(index):
                if layer_ids[another] != layer:
                    layers = min(layers, median_distance(one["hidden_states"][another], want))
    remedy = "Run `eagle3compat doctor` and report its output with the model's name."
    figures = f"a row: {worst:.2g}; the next row: {rows:.2g}; another layer: {layers:.2g}"
    if not worst <= TOLERANCE:
        raise ResultError(None, f"a batch has other states than the same prompts alone ({figures})", remedy)
    if not min(rows, layers) >= CONTROL:
        raise ResultError(None, f"rows or layers cannot be told apart, so nothing is shown ({figures})", remedy)
    return f"off by {figures}"


def median_distance(got: Any, want: Any) -> float:
    """The median over rows of the size of the difference, relative to the size of the row."""
    got, want = got.float(), want.float()
    relative = (got - want).norm(dim=1) / want.norm(dim=1).clamp_min(1e-30)
    return float(relative.median())


def main() -> int:
    plan = Plan(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    return exit_code(lambda: rehearse(plan, Events(Path(sys.argv[2]))))


if __name__ == "__main__":
    sys.exit(main())
