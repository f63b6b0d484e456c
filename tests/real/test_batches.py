"""Whatever the batch: random ones against one-by-one extraction, on ample and on short KV caches and budgets.

The same is asked of stock alone on the vLLM that it was written for, and expected to fail: so the test can.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Session, run_session

pytestmark = pytest.mark.real

ADAPTED = [("0.11.0", "0.4.0.1"), ("0.16.0", "0.3.0"), ("0.32.0", "0.4.0.1")]
STOCK = [("0.11.0", "0.3.0"), ("0.16.0", "0.4.0.1")]
EVERY = [0, 1, 2, 3, 4, 5]
SOME = [4, 1, 5, 1]
BANK = {"seed": 7, "count": 24, "longest": 250}
COUNTS = (1, 10, 11, 32, 33, 1000)
BLOCK_TOKENS = 32
"""A KV block that every CPU build has: what fits into a pool is then the same on all of them."""
SHORT: dict[str, Any] = {
    # Several prompts are computed at once, a piece each, and there are blocks for little more than one: those that
    # began last lose theirs, and are computed again.
    "scheduler_config.max_num_batched_tokens": 64,
    "scheduler_config.long_prefill_token_threshold": 16,
    "cache_config.num_gpu_blocks_override": 10,
    "cache_config.block_size": BLOCK_TOKENS,
}
# vLLM finds that the longest prompt fits, and does not count the block that it keeps for itself.
TOO_SHORT = {"cache_config.num_gpu_blocks_override": 8, "cache_config.block_size": BLOCK_TOKENS}


def groups(pairs: list[tuple[str, str]]) -> list[Any]:
    """One test process a pair."""
    return [pytest.param(p, id="-".join(p), marks=pytest.mark.xdist_group(f"batches {p}")) for p in pairs]


def load(model: Path, layer_ids: list[int], **more: Any) -> dict[str, Any]:
    return {"model_path": str(model), "layer_ids": layer_ids, "max_model_len": 256, "dtype": "float32", **more}


def plan_of(model: Path) -> list[dict[str, Any]]:
    rounds = {"rounds": 8, "seed": 11}
    return [
        {"name": "apply", "do": "apply"},
        {"name": "load ample", "do": "load", "with": load(model, EVERY)},
        {"name": "alone", "do": "alone", "with": BANK},
        *(
            {"name": f"count {count}", "do": "count", "with": {"sequences": count, "layer_ids": EVERY}}
            for count in COUNTS
        ),
        {"name": "ample", "do": "random_batches", "with": {"layer_ids": EVERY, **rounds}},
        {"name": "close ample", "do": "close"},
        {"name": "load short", "do": "load", "with": load(model, SOME, edit=SHORT)},
        {"name": "short", "do": "under_pressure", "with": {"layer_ids": SOME, **rounds}},
        {"name": "close short", "do": "close"},
        {"name": "load too short", "do": "load", "with": load(model, SOME, edit=TOO_SHORT)},
        {"name": "does not fit", "do": "generate", "with": {"prompts": [[9] * 20, [10] * 250, [11] * 150]}},
        {"name": "fits", "do": "generate", "with": {"prompts": [[9] * 20, [10] * 90]}},
        {"name": "close too short", "do": "close"},
    ]


def stock_plan_of(model: Path) -> list[dict[str, Any]]:
    edit = {"scheduler_config.max_num_batched_tokens": 512}
    return [
        {"name": "memory", "do": "without_accelerator", "with": {"gib": 8}},
        {"name": "load", "do": "load", "with": load(model, EVERY, edit=edit)},
        {"name": "alone", "do": "alone", "with": BANK},
        {"name": "batches", "do": "random_batches", "with": {"layer_ids": EVERY, "rounds": 8, "seed": 11}},
    ]


@pytest.fixture(params=groups(ADAPTED))
def session(request: pytest.FixtureRequest, shared: Path, models: dict[str, Path]) -> Session:
    return run_session(shared, "batches-" + "-".join(request.param), request.param, plan_of(models["llama"]))


@pytest.fixture(params=groups(STOCK))
def stock(request: pytest.FixtureRequest, shared: Path, models: dict[str, Path]) -> Session:
    return run_session(shared, "stock-" + "-".join(request.param), request.param, stock_plan_of(models["llama"]))


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_sequences(session: Session, count: int) -> None:
    assert session.value(f"count {count}") == []


def test_random_batches_equal_one_by_one(session: Session) -> None:
    assert session.value("ample")["wrong"] == []


def test_random_batches_equal_one_by_one_when_the_cache_and_the_budget_are_short(session: Session) -> None:
    figures = session.value("short")
    assert figures["wrong"] == []
    assert figures["computed"] > 1.1 * figures["tokens"], "nothing was computed again, so the cache was not short"


def test_a_prompt_that_does_not_fit_is_named_and_the_next_call_works(session: Session) -> None:
    if "error" in session.outcomes["load too short"]:  # a vLLM that counts its own block refuses at the start
        assert "max seq len (256)" in session.error("load too short")["message"]
        return
    error = session.error("does not fit")
    assert error["error"] == "InputError"
    for words in ("prompt 1 has 250 tokens", "need 8 blocks", "7 can be used", "num_gpu_blocks_override, which is 8"):
        assert words in error["message"]
    assert [shapes[0] for shapes in session.value("fits")["shapes"]] == [[20, 128], [90, 128]]


@pytest.mark.xfail(strict=True, reason="stock on its own vLLM")
def test_stock_alone_passes_the_same(stock: Session) -> None:
    assert stock.value("batches")["wrong"] == []
