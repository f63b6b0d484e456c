"""Prompts for a rehearsal: random tokens, none of which means anything to the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from .child import Plan
from .config import Config, Model

BUDGET = 8192
"""Stock's token budget of a step, at the least."""


def plan_of(config: Config, model: str, layer_ids: list[int], ranks: int, longest: int) -> Plan:
    """What the child is to run: a short batch, and one of more than 32 sequences and more tokens than a step takes."""
    special = set(_special(config))
    vocabulary = int(Model(config).get("vocab_size", 1000))
    ordinary = [token for token in range(min(256, vocabulary // 2), min(vocabulary, 32000)) if token not in special]
    rng = random.Random(0)
    high = min(longest - 1, 250)
    low = max(high - 35, 1)
    lengths = [rng.randint(low, high) for _ in range(33)]
    while sum(lengths) <= BUDGET * 1.1:
        lengths.append(rng.randint(low, high))

    def prompt(length: int) -> list[int]:
        return [rng.choice(ordinary) for _ in range(length)]

    filled = 0
    cut = 0
    for index, length in enumerate(lengths):  # the first prompt that does not fit into the first step whole
        filled += length
        if filled > BUDGET:
            cut = index
            break
    return Plan(
        model, layer_ids, ranks, longest, [prompt(min(length, high)) for length in (1, 7, 33, 64, 20)],
        [prompt(length) for length in lengths], sorted({0, 32, cut, len(lengths) - 1}),
    )


def _special(config: Any) -> Iterator[int]:
    """Every token id that the config gives a meaning to: an image's, for one, wants an image."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _special(value)
        elif "token" in name:
            yield from (item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
