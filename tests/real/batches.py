"""Random batches against the same prompts extracted one by one, and the figures of how they differ.

Runs inside an environment with a real vLLM, on the stock generator, with the library or without it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/eagle3compat/yardstick"))

from reference import compare

States = list[torch.Tensor]


def bank(seed: int, count: int, longest: int) -> list[list[int]]:
    """Prompts of 1 to `longest` tokens; every third begins with the beginning of another."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        length = rng.randint(1, longest)
        shared = rng.choice(prompts)[: rng.randint(1, length)] if prompts and number % 3 == 0 else []
        prompts.append([*shared, *(rng.randrange(8, 600) for _ in range(length - len(shared)))])
    return prompts


def one_by_one(generator: Any, prompts: Sequence[list[int]]) -> list[States]:
    """Each prompt in a call of its own; layer ids as the generator was made with."""
    return [generator.generate([prompt])[0]["hidden_states"] for prompt in prompts]


def differences(
    results: Sequence[dict[str, Any]], chosen: Sequence[int], alone: Sequence[States], layer_ids: Sequence[int]
) -> list[str]:
    """What is wrong with `results` for the prompts `chosen`; `alone` holds every layer of every prompt."""
    found = []
    if len(results) != len(chosen):
        found.append(f"{len(results)} results for {len(chosen)} prompts")
    for place, (result, index) in enumerate(zip(results, chosen, strict=False)):
        states = result["hidden_states"]
        if len(states) != len(layer_ids):
            found.append(f"sample {place}: {len(states)} tensors for {len(layer_ids)} layer ids")
            continue
        for layer, state in zip(layer_ids, states, strict=True):
            wanted = alone[index][layer]
            if state.shape != wanted.shape:
                found.append(f"sample {place}, layer {layer}: {list(state.shape)} where {list(wanted.shape)} is right")
            elif compare(state, wanted)["max"] > TOLERANCE:
                found.append(f"sample {place}, layer {layer}: off by {compare(state, wanted)['max']:.3g}")
    return found


TOLERANCE = 1e-4
"""Of the largest value, in float32: kernels sum in another order for another batch (1e-6 was measured)."""


def random_batches(
    generator: Any, prompts: Sequence[list[int]], alone: Sequence[States], layer_ids: Sequence[int],
    rounds: int, seed: int, most: int = 40,
) -> dict[str, Any]:
    """`rounds` calls of 1 to `most` prompts, drawn with repetition; the batches that came back wrong, and how."""
    rng = random.Random(seed)
    wrong: list[dict[str, Any]] = []
    sequences = tokens = 0
    for number in range(rounds):
        chosen = [rng.randrange(len(prompts)) for _ in range(rng.randint(1, most))]
        sequences += len(chosen)
        tokens += sum(len(prompts[index]) for index in chosen)
        try:
            faults = differences(generator.generate([prompts[index] for index in chosen]), chosen, alone, layer_ids)
        except Exception as error:  # noqa: BLE001  stock raises for some batches, which is one way to be wrong
            faults = [f"{type(error).__name__}: {str(error)[:200]}"]
        if faults:
            wrong.append({"round": number, "sequences": len(chosen), "faults": len(faults), "first": faults[0]})
    return {"rounds": rounds, "sequences": sequences, "tokens": tokens, "wrong": wrong}


class Scheduled:
    """Counts, while it is entered, the tokens that the engine behind a generator schedules."""

    def __init__(self, generator: Any) -> None:
        self.scheduler = generator.executor.engine._core.scheduler
        self.tokens = self.steps = 0

    def __enter__(self) -> Scheduled:
        schedule = self.scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.tokens += output.total_num_scheduled_tokens
            self.steps += output.total_num_scheduled_tokens > 0
            return output

        self.scheduler.schedule = counted
        return self

    def __exit__(self, *_: object) -> None:
        del self.scheduler.schedule
