"""Imports that fail, imports that run in another thread, `speculators` itself imported anew, threads that apply."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

import pytest

import eagle3compat
from eagle3compat.adapter import GENERATOR, PACKAGE, Status

if TYPE_CHECKING:
    from tests.contract.conftest import Stock

THREADS = 8
SECONDS = 60
APPLYING: list[Callable[[], Any]] = [eagle3compat.apply] * THREADS


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """Run all of them, each in a thread of its own, from one moment on."""
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], Any]) -> Any:
        barrier.wait(SECONDS)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(run, action) for action in actions]]


def assert_adapted(stock: Stock) -> None:
    report = eagle3compat.status()
    assert {outcome.status for outcome in report} <= {Status.APPLIED, Status.NOT_NEEDED}, str(report)
    assert stock.rebound() == stock.expected(report)
    assert stock.class_.__init__.__wrapped__.__wrapped__.__code__.co_filename == stock.generator.__file__
    assert stock.class_.generate.__wrapped__.__code__.co_filename == stock.generator.__file__
    with pytest.raises(eagle3compat.ModelNotFoundError):
        stock.class_("/nowhere/model", [1])


def test_threads_that_apply_at_once_get_one_report(stock: Stock) -> None:
    stock.load_once()
    reports = at_once(*APPLYING)
    assert len(set(map(str, reports))) == 1
    assert_adapted(stock)
    eagle3compat.revert()
    assert stock.rebound() == set()


def test_threads_that_apply_before_the_import_get_one_report(stock: Stock) -> None:
    finders = len(sys.meta_path)
    reports = at_once(*APPLYING)
    assert len(set(map(str, reports))) == 1
    assert len(sys.meta_path) == finders + 1
    stock.load()
    assert_adapted(stock)


def test_one_thread_imports_while_others_apply(stock: Stock) -> None:
    if not stock.unaided:
        eagle3compat.apply()
    at_once(stock.load, *APPLYING)
    assert_adapted(stock)


def test_threads_that_apply_and_revert_leave_one_of_the_two(stock: Stock) -> None:
    stock.load_once()
    at_once(*APPLYING, *[eagle3compat.revert] * THREADS)
    eagle3compat.apply()
    assert_adapted(stock)
    eagle3compat.revert()
    assert stock.rebound() == set()


class Gone(MetaPathFinder):
    """As if a module were no longer there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


class Slow(MetaPathFinder):
    """Holds up the import of one module until it is told to go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached, self.go = threading.Event(), threading.Event()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname == self.name:
            self.reached.set()
            assert self.go.wait(SECONDS)
        return PathFinder.find_spec(fullname, path) if fullname == self.name else None


@pytest.fixture
def slow(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> Slow:
    """The import of the generator stops in the middle."""
    finder = Slow(stock.poisoned)
    monkeypatch.delitem(sys.modules, stock.poisoned)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    return finder


def test_apply_in_the_middle_of_another_thread_s_import(stock: Stock, slow: Slow) -> None:
    if not stock.unaided:
        pytest.skip("this import does not succeed without the library")
    importing = threading.Thread(target=stock.load)
    importing.start()
    assert slow.reached.wait(SECONDS)
    applying = threading.Thread(target=eagle3compat.apply)
    applying.start()
    applying.join(0.5)
    slow.go.set()
    importing.join(SECONDS)
    applying.join(SECONDS)
    with pytest.raises(eagle3compat.ModelNotFoundError):
        stock.class_("/nowhere/model", [1])
    assert_adapted(stock)


def test_revert_in_the_middle_of_another_thread_s_import(stock: Stock, slow: Slow) -> None:
    eagle3compat.apply()
    importing = threading.Thread(target=stock.load)
    importing.start()
    assert slow.reached.wait(SECONDS)
    eagle3compat.revert()
    slow.go.set()
    importing.join(SECONDS)
    assert eagle3compat.status().outcomes == ()
    assert stock.rebound() == set()


def test_status_in_the_middle_of_an_import_does_not_wait_for_it(stock: Stock, slow: Slow) -> None:
    eagle3compat.apply()
    importing = threading.Thread(target=stock.load)
    importing.start()
    assert slow.reached.wait(SECONDS)
    assert eagle3compat.status()["results"].status is Status.DEFERRED
    slow.go.set()
    importing.join(SECONDS)
    assert_adapted(stock)


@pytest.mark.parametrize("times", [1, 3])
def test_apply_after_a_failed_import(stock: Stock, times: int) -> None:
    for _ in range(times):
        stock.fail()
    eagle3compat.apply()
    stock.load()
    assert_adapted(stock)


def test_an_import_that_fails_while_applied_can_be_repeated(stock: Stock) -> None:
    eagle3compat.apply()
    stock.fail()
    assert eagle3compat.status().healthy
    stock.load()
    assert_adapted(stock)


def test_revert_after_a_failed_import(stock: Stock) -> None:
    eagle3compat.apply()
    stock.fail()
    eagle3compat.revert()
    assert stock.untouched.changes() == []


def test_a_vllm_module_that_fails_to_import_once_is_no_lasting_fault(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    eagle3compat.apply()
    original = importlib.import_module

    def broken(name: str, package: str | None = None) -> Any:
        if name == "vllm.v1.request":
            raise OSError("a library that vLLM loads is busy")
        return original(name, package)

    with monkeypatch.context() as patch, nullcontext() if stock.unaided else pytest.raises(ImportError):
        patch.setattr(importlib, "import_module", broken)
        original(GENERATOR)
    assert "a library that vLLM loads is busy" in eagle3compat.status()["vllm_names"].reason
    stock.load()
    assert_adapted(stock)


def test_a_module_of_vllm_that_is_gone_is_not_made_up_for_others(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.structured_output")
    monkeypatch.setattr(sys, "meta_path", [Gone("vllm.v1.structured_output"), *sys.meta_path])
    eagle3compat.apply()
    stock.load()
    assert "vllm.v1.structured_output" not in sys.modules
    assert eagle3compat.status()["vllm_names"].status is Status.APPLIED
    assert_adapted(stock)


def test_a_name_of_vllm_that_is_gone_is_not_made_up_for_others(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    monkeypatch.delattr(planning, "_get_kv_cache_groups_uniform_spec")
    eagle3compat.apply()
    stock.load()
    assert not hasattr(planning, "_get_kv_cache_groups_uniform_spec")
    outcome = eagle3compat.status()["vllm_names"]
    assert outcome.status is Status.APPLIED
    assert "_get_kv_cache_groups_uniform_spec" in outcome.reason
    assert eagle3compat.status()["kv_planning"].status is Status.APPLIED


def test_a_gone_name_that_nothing_rebinds_raises_a_clear_error_when_used(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("vllm.sampling_params.SamplingParams")
    eagle3compat.apply()
    module = stock.load()
    with pytest.raises(eagle3compat.IncompatibleError, match=r"vllm\.sampling_params:SamplingParams"):
        module.SamplingParams(max_tokens=1)


PACKAGE_ORDERS = (("apply", "import"), ("import", "apply"), ("fail", "apply", "import"), ("apply", "fail", "import"),
                  ("apply", "import", "import"), ("apply", "revert", "apply", "import"))


@pytest.fixture
def without_package(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> Stock:
    """speculators is not imported; what was is put back afterwards."""
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        monkeypatch.delitem(sys.modules, name)
    return stock


@pytest.mark.parametrize("order", PACKAGE_ORDERS, ids=" ".join)
def test_the_package_itself_in_every_order(without_package: Stock, order: tuple[str, ...]) -> None:
    for action in order:
        without_package.drop_package()
        if action == "apply":
            eagle3compat.apply()
        elif action == "revert":
            eagle3compat.revert()
        else:
            import_package(poison=action == "fail")
    if order[-1] == "apply":  # and `import` before it may have failed, where transformers is too new for it
        import_package()
    without_package.load()
    assert_adapted(without_package)
    configuration: Any = sys.modules["transformers.configuration_utils"]
    assert "torch" not in vars(configuration) or configuration.torch is sys.modules["torch"]


def import_package(poison: bool = False) -> None:
    applied = bool(eagle3compat.status().outcomes)
    with pytest.MonkeyPatch.context() as patch:
        if poison:
            patch.setitem(sys.modules, f"{PACKAGE}.config", None)
        try:
            importlib.import_module(PACKAGE)
        except Exception:
            if poison or not applied:
                return
            raise
        assert not poison
