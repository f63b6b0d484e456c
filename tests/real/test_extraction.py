"""Stock extraction on real vLLM releases: right tensors beside controls that must be wrong, and clear errors.

Every pair of {speculators 0.3.0, 0.4.0.1} and {vLLM 0.11.0, 0.16.0, 0.32.0} runs Llama, Qwen3 and DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken import BROKEN, broken_copies
from conftest import FAMILIES, PROMPTS, Session, once, run_session

pytestmark = pytest.mark.real

PAIRS = [(vllm, speculators) for vllm in ("0.11.0", "0.16.0", "0.32.0") for speculators in ("0.3.0", "0.4.0.1")]
LAYERS = [4, 0, 5, 2, 4]
"""Unsorted, one twice, the last of six among them: stock returns four of these, in another order."""
TOLERANCE = 1e-5
"""Of the largest value, in float32 (2e-6 to 3e-6 were measured): a wrong row or layer cannot hide in rounding."""
TOLERANCE_BF16 = 0.1
"""The same where the model runs in bf16, as stock runs it, against float32: six layers of its rounding."""
CONTROL = 0.3
"""What a neighbouring layer or row is off by at the least."""

groups = [pytest.param(pair, id="-".join(pair), marks=pytest.mark.xdist_group("-".join(pair))) for pair in PAIRS]


def load(model: Path, **more: Any) -> dict[str, Any]:
    return {"model_path": str(model), "layer_ids": LAYERS, "max_model_len": 256, "dtype": "float32", **more}


def plan_of(models: dict[str, Path], broken: Path) -> list[dict[str, Any]]:
    """Everything that one pair is asked, in one process."""
    llama = models["llama"]
    constructors = {
        "missing model": load(Path("/nowhere/model")),
        "not a model": load(llama.parent),
        "layer out of range": load(llama, layer_ids=[1, 6]),
        "no layers": load(llama, layer_ids=[]),
        "layer not a number": load(llama, layer_ids=["2"]),
        "no room for a prompt": {**load(llama), "max_model_len": 1},
        "no rank": load(llama, tensor_parallel_size=0),
    }
    constructors.update({name: load(broken / name) for name in BROKEN})
    calls: dict[str, list[Any]] = {
        "no prompts": [],
        "empty prompt": [[9, 10], []],
        "foreign token": [[9, 10], [11, 70000]],
    }
    plan: list[dict[str, Any]] = [{"name": "apply", "do": "apply"}, {"name": "imports", "do": "imports"}]
    plan += [{"name": name, "do": "load", "with": arguments} for name, arguments in constructors.items()]
    for family in FAMILIES:
        plan.append({"name": f"load {family}", "do": "load", "with": load(models[family])})
        for batch in ("mixed", "over budget") if family == "llama" else ("mixed",):
            arguments = {"prompts": PROMPTS[batch], "save": f"{family}-{batch}"}
            plan.append({"name": f"{family} {batch}", "do": "generate", "with": arguments})
        if family == "llama":
            plan += [{"name": name, "do": "generate", "with": {"prompts": prompts}} for name, prompts in calls.items()]
            plan.append({"name": "too long", "do": "generate", "with": {"prompts": [[9] * 300, [10] * 20]}})
            again = {"prompts": PROMPTS["mixed"], "save": "llama-again"}
            plan.append({"name": "again", "do": "generate", "with": again})
            plan.append({"name": "pickle", "do": "transport", "with": {"choice": "pickled"}})
            pickled = {"prompts": PROMPTS["mixed"], "save": "llama-pickled"}
            plan.append({"name": "pickled", "do": "generate", "with": pickled})
        plan.append({"name": f"attest {family}", "do": "attest"})
        plan.append({"name": f"close {family}", "do": "close"})
    as_stock = {"prompts": PROMPTS["mixed"], "save": "bf16"}
    plan += [
        {"name": "load bf16", "do": "load", "with": load(llama, dtype="auto")},
        {"name": "bf16", "do": "generate", "with": as_stock},
        {"name": "close bf16", "do": "close"},
    ]
    return [*plan, {"name": "revert", "do": "revert"}, {"name": "status", "do": "status"}]


@pytest.fixture(params=groups)
def session(request: pytest.FixtureRequest, shared: Path, models: dict[str, Path]) -> Session:
    # The plugin is filtered out in every session: workers must be adapted without it.
    pair: tuple[str, str] = request.param
    broken = once(shared, "broken", lambda target: broken_copies(models["llama"], target))
    return run_session(shared, "-".join(pair), pair, plan_of(models, broken), VLLM_PLUGINS="")


References = Callable[[str, str], Path]
Comparison = Callable[[str, Path, Path, list[int]], dict[str, Any]]


@pytest.mark.parametrize(("family", "batch"), [("llama", "over budget"), *((family, "mixed") for family in FAMILIES)])
def test_every_tensor_equals_transformers(
    session: Session, family: str, batch: str, references: References, comparison: Comparison
) -> None:
    shapes = session.value(f"{family} {batch}")["shapes"]
    assert shapes == [[[len(prompt), 128]] * len(LAYERS) for prompt in PROMPTS[batch]]
    got = session.folder / f"{family}-{batch}.pt"
    figures = comparison(f"{session.folder.name}-{family}-{batch}", got, references(family, batch), LAYERS)
    assert figures["tensors"] == len(PROMPTS[batch]) * len(LAYERS)
    assert figures["max"] < TOLERANCE, figures
    assert figures["wrong_layer"] > CONTROL, figures
    assert figures["shifted_row"] > CONTROL, figures


def test_the_dtype_of_stock_is_kept_and_as_near_as_it_can_be(
    session: Session, references: References, comparison: Comparison
) -> None:
    if "Unsupported CPU attention" in session.outcomes["bf16"].get("message", ""):
        pytest.skip("this build of vLLM has no bf16 attention for this processor")
    assert session.value("bf16")["dtypes"] == ["torch.bfloat16"]
    want = references("llama", "mixed")
    figures = comparison(f"{session.folder.name}-bf16", session.folder / "bf16.pt", want, LAYERS)
    assert 1e-4 < figures["max"] < TOLERANCE_BF16, figures


def test_results_come_back_in_input_order(session: Session) -> None:
    assert session.value("llama mixed")["input_ids"] == PROMPTS["mixed"]


def test_the_next_call_after_bad_input_is_right(
    session: Session, references: References, comparison: Comparison
) -> None:
    assert session.value("again")["input_ids"] == PROMPTS["mixed"]
    got, want = session.folder / "llama-again.pt", references("llama", "mixed")
    assert comparison(f"{session.folder.name}-again", got, want, LAYERS)["max"] < TOLERANCE


def test_states_come_through_shared_memory_and_pickled_alike(
    session: Session, references: References, comparison: Comparison
) -> None:
    for family in FAMILIES:
        assert session.value(f"{family} mixed")["transport"] == "shared"
    assert session.value("pickled")["transport"] == "pickled"
    got, want = session.folder / "llama-pickled.pt", references("llama", "mixed")
    assert comparison(f"{session.folder.name}-pickled", got, want, LAYERS)["max"] < TOLERANCE
    assert "come pickled" not in session.log


@pytest.mark.parametrize(
    ("step", "kind", "says"),
    [
        ("missing model", "ModelNotFoundError", "/nowhere/model"),
        ("not a model", "ModelNotFoundError", "config.json"),
        ("layer out of range", "InputError", "6 out of bounds [0, 5]. Layer ids count"),
        ("no layers", "InputError", "layer_ids is empty"),
        ("layer not a number", "InputError", "'2' is not an integer"),
        ("no room for a prompt", "InputError", "max_model_len is 1. It must be an integer of 2 or more"),
        ("no rank", "InputError", "tensor_parallel_size is 0. It must be an integer of 1 or more"),
        *((name, "InputError", says) for name, (_, says) in BROKEN.items()),
        ("no prompts", "InputError", "cannot be empty"),
        ("empty prompt", "InputError", "prompt 1 is empty"),
        ("foreign token", "InputError", "prompt 1 holds token id 70000"),
    ],
)
def test_bad_input_is_named(session: Session, step: str, kind: str, says: str) -> None:
    error = session.error(step)
    assert error["error"] == kind, error["traceback"]
    assert says in error["message"]
    assert "ValueError" in error["bases"]
    assert error["processes"] == 0, "a fault that can be known before the load must be said before a worker is started"


def test_a_load_does_start_workers(session: Session) -> None:
    """The control of the test above."""
    assert session.outcomes["load llama"]["processes"] == 1


def test_a_prompt_over_the_limit_is_cut_and_said_once(session: Session) -> None:
    assert session.value("too long")["shapes"] == [[[255, 128]] * 5, [[20, 128]] * 5]
    assert session.log.count("longer than 255 tokens") == 1


def test_every_adapter_is_healthy(session: Session) -> None:
    report = session.value("imports")
    assert report["healthy"]
    assert {outcome["status"] for outcome in report["adapters"]} <= {"applied", "not needed", "deferred"}


def test_apply_imports_nothing_heavy(session: Session) -> None:
    assert session.value("apply")["heavy"] == []  # how long it takes is a benchmark's to say


def test_workers_attest_what_is_in_them(session: Session) -> None:
    for family in FAMILIES:
        for worker in session.value(f"attest {family}"):
            assert worker["captures"]
            assert worker["reading"] == "hidden + residual"
            assert worker["tokens_checked"]
            assert worker["pid"] != session.value(f"load {family}")["driver_pid"]


def test_no_worker_is_left_after_shutdown(session: Session) -> None:
    for family in FAMILIES:
        assert session.value(f"close {family}")["children"] == []


def test_revert_leaves_nothing_applied(session: Session) -> None:
    assert session.value("status")["adapters"] == []
