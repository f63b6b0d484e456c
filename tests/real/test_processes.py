"""Every process: forked and spawned workers, two ranks, faults in workers, and processes that nobody asked to adapt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS, Session, once, run_session

pytestmark = pytest.mark.real

LAYERS = [1, 3, 5]
TOLERANCE = 1e-4
CONTROL = 0.2

ARCHITECTURE = "DeferringForCausalLM"
"""Of deferring.py, which needs vLLM."""
SPAWNED, FORKED = ("0.16.0", "0.3.0"), ("0.32.0", "0.4.0.1")
Comparison = Callable[[str, Path, Path, list[int]], dict[str, Any]]
References = Callable[[str, str], Path]


def load(model: Path, **more: Any) -> dict[str, Any]:
    return {"model_path": str(model), "layer_ids": LAYERS, "max_model_len": 256, "dtype": "float32", **more}


def extraction(name: str, model: Path, **more: Any) -> list[dict[str, Any]]:
    """Load, extract the mixed batch, shut down."""
    return [
        {"name": f"load {name}", "do": "load", "with": load(model, **more)},
        {"name": name, "do": "generate", "with": {"prompts": PROMPTS["mixed"], "save": name}},
        {"name": f"attest {name}", "do": "attest"},
        {"name": f"close {name}", "do": "close"},
    ]


@pytest.fixture
def start_methods(shared: Path, models: dict[str, Path]) -> Session:
    """Both start methods in one process, the forked worker first: after a CUDA start only spawn would be left."""
    plan = [{"name": "apply", "do": "apply"}]
    for method in ("fork", "spawn"):
        plan += extraction(method, models["llama"], start_method=method)
    return run_session(shared, "start methods", FORKED, plan)


@pytest.fixture
def two_ranks(shared: Path, models: dict[str, Path]) -> Session:
    plan = [{"name": "apply", "do": "apply"}]
    for family in ("llama", "deepseek_v3"):
        plan += extraction(family, models[family], tensor_parallel_size=2)
    return run_session(shared, "two ranks", FORKED, plan, VLLM_CPU_OMP_THREADS_BIND="0|1")


@pytest.fixture
def deferred(shared: Path, models: dict[str, Path]) -> Session:
    """A model that leaves each layer's sum over the ranks to the norm after it, with and without that sum."""

    def make(target: Path) -> None:
        shutil.copytree(models["llama"], target)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, "architectures": [ARCHITECTURE]}))

    model = once(shared, "deferring", make)
    plan = [{"name": "apply", "do": "apply"}, {"name": "register", "do": "register_deferring"}]
    plan += extraction("two ranks", model, tensor_parallel_size=2, start_method="fork")
    plan += extraction("one rank", model, start_method="fork")
    plan.append({"name": "without sums", "do": "without_sums"})
    plan += extraction("unsummed", model, tensor_parallel_size=2, start_method="fork")
    return run_session(shared, "deferred", FORKED, plan, VLLM_CPU_OMP_THREADS_BIND="0|1")


@pytest.fixture
def faults(shared: Path, models: dict[str, Path]) -> Session:
    llama = models["llama"]
    prompts = {"prompts": PROMPTS["mixed"][:3]}
    plan: list[dict[str, Any]] = [
        {"name": "apply", "do": "apply"},
        {"name": "too small", "do": "load", "with": load(llama, edit={"cache_config.cpu_kvcache_space_bytes": 4096})},
        {"name": "after too small", "do": "children"},
        {"name": "load", "do": "load", "with": load(llama)},
        {"name": "raise", "do": "rpc", "with": {"method": "eagle3compat_collect", "args": [["nobody"]]}},
        {"name": "after raise", "do": "generate", "with": prompts},
        {"name": "kill", "do": "kill_worker", "with": {"rank": 0}},
        {"name": "after kill", "do": "generate", "with": prompts},
        {"name": "dead", "do": "generate", "with": prompts},
        {"name": "not adapted", "do": "load", "with": load(llama, edit={"parallel_config.worker_extension_cls": ""})},
        *extraction("afresh", llama),
    ]
    return run_session(shared, "faults", SPAWNED, plan)


@pytest.mark.xdist_group("start methods")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_forked_and_spawned_workers_capture(
    start_methods: Session, method: str, references: References, comparison: Comparison
) -> None:
    assert start_methods.value(f"load {method}")["start_method"] == method
    (worker,) = start_methods.value(f"attest {method}")
    assert worker["captures"]
    got, want = start_methods.folder / f"{method}.pt", references("llama", "mixed")
    figures = comparison(f"start-{method}", got, want, LAYERS)
    assert figures["max"] < TOLERANCE
    assert min(figures["wrong_layer"], figures["shifted_row"]) > CONTROL


@pytest.mark.xdist_group("two ranks")
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_two_ranks_return_whole_states_once(
    two_ranks: Session, family: str, references: References, comparison: Comparison
) -> None:
    workers = two_ranks.value(f"attest {family}")
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert [worker["captures"] for worker in workers] == [True, False]
    figures = comparison(f"ranks-{family}", two_ranks.folder / f"{family}.pt", references(family, "mixed"), LAYERS)
    assert figures["max"] < TOLERANCE
    assert min(figures["wrong_layer"], figures["shifted_row"]) > CONTROL


@pytest.mark.xdist_group("deferred")
@pytest.mark.parametrize(
    ("name", "how"), [("two ranks", "all-reduced hidden + residual"), ("one rank", "hidden + residual")]
)
def test_a_sum_over_ranks_that_is_left_to_the_next_norm_is_made(
    deferred: Session, name: str, how: str, references: References, comparison: Comparison
) -> None:
    assert {worker["reading"] for worker in deferred.value(f"attest {name}")} == {how}
    got = deferred.folder / f"{name}.pt"
    figures = comparison(f"deferred-{name}", got, references("llama", "mixed"), LAYERS)
    assert figures["max"] < TOLERANCE
    assert min(figures["wrong_layer"], figures["shifted_row"]) > CONTROL


@pytest.mark.xdist_group("deferred")
def test_the_control_without_the_sum_nothing_is_returned(deferred: Session) -> None:
    error = deferred.error("unsummed")
    assert "UnprovenCaptureError" in error["message"]
    assert "no reading of it equals what enters the final norm" in error["message"]


@pytest.mark.xdist_group("faults")
def test_an_exception_of_a_worker_comes_with_type_traceback_and_rank(faults: Session) -> None:
    error = faults.error("raise")
    assert error["error"] == "WorkerError"
    for words in ("VllmWorker-0", "KeyError", "nobody", "in collect", "calling eagle3compat_collect"):
        assert words in error["message"]


@pytest.mark.xdist_group("faults")
def test_the_generator_works_after_a_worker_raised(faults: Session) -> None:
    assert faults.value("after raise")["input_ids"] == PROMPTS["mixed"][:3]


@pytest.mark.xdist_group("faults")
def test_a_killed_worker_is_named_and_the_generator_says_it_is_dead(faults: Session) -> None:
    killed = faults.error("after kill")
    assert killed["error"] in ("WorkerError", "GeneratorDeadError")
    assert "exit code -9" in killed["message"]
    dead = faults.error("dead")
    assert dead["error"] == "GeneratorDeadError"
    assert "exit code -9" in dead["message"]
    assert "make a new VllmHiddenStatesGenerator" in dead["message"]


@pytest.mark.xdist_group("faults")
def test_a_worker_without_the_extension_is_refused_before_it_starts(faults: Session) -> None:
    error = faults.error("not adapted")
    assert error["error"] == "WorkerNotAdaptedError"
    assert "no extension" in error["message"]


@pytest.mark.xdist_group("faults")
def test_a_cache_too_small_for_one_prompt_is_refused_with_the_figures(faults: Session) -> None:
    error = faults.error("too small")
    assert error["error"] == "WorkerError"
    assert "KV cache" in error["message"]
    assert faults.value("after too small") == {"children": []}, "the workers of an engine that failed must not stay"


@pytest.mark.xdist_group("faults")
def test_a_new_generator_works_after_a_dead_one(faults: Session) -> None:
    assert faults.value("afresh")["input_ids"] == PROMPTS["mixed"]
    assert faults.value("close afresh")["children"] == []
