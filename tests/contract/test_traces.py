"""What the library leaves in the process: while it is applied only what is said, after `revert()` nothing."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
import weakref
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Any

import pytest

import eagle3compat
from eagle3compat.adapter import GENERATOR, PACKAGE, WORKER

if TYPE_CHECKING:
    from tests.contract.conftest import Stock


@pytest.fixture
def snapshot(stock: Stock) -> Any:
    """Everything as it is once the stock modules are imported, the library not applied."""
    stock.load_once()
    return type(stock.untouched)()


def test_revert_puts_back_the_identical_objects(stock: Stock, snapshot: Any) -> None:
    eagle3compat.apply()
    assert snapshot.changes() != []
    eagle3compat.revert()
    assert snapshot.changes() == []


def test_revert_puts_back_the_identical_objects_each_time(stock: Stock, snapshot: Any) -> None:
    for _ in range(3):
        eagle3compat.apply()
        eagle3compat.apply()
        eagle3compat.revert()
        eagle3compat.revert()
        assert snapshot.changes() == []


def test_a_name_taken_from_the_builtins_is_deleted_again(stock: Stock, snapshot: Any) -> None:
    eagle3compat.apply()
    assert "sorted" in vars(stock.generator)
    eagle3compat.revert()
    assert "sorted" not in vars(stock.generator)


def test_apply_changes_the_stock_modules_alone(stock: Stock, snapshot: Any) -> None:
    report = eagle3compat.apply()
    places = {change.split(" ")[0] for change in snapshot.changes()}
    names = {f"{GENERATOR}.{name}" for name in stock.expected(report) if "." not in name}
    methods = {f"{GENERATOR}:{name}" for name in stock.expected(report) if "." in name}
    assert places == {"sys.meta_path", *names, *methods}


def test_a_state_kept_by_the_context_manager_ends_with_it(stock: Stock, snapshot: Any) -> None:
    with eagle3compat.applied() as report:
        assert stock.rebound() == stock.expected(report)
    assert snapshot.changes() == []


def test_within_another_the_context_manager_leaves_that_one_in_place(stock: Stock, snapshot: Any) -> None:
    with eagle3compat.applied() as report:
        with eagle3compat.applied():
            pass
        with eagle3compat.applied(skip=["results"]) as inner:
            assert inner["results"].status.value == "disabled"
        assert eagle3compat.status() == report
        assert stock.rebound() == stock.expected(report)
    assert snapshot.changes() == []


def test_the_context_manager_leaves_no_trace_after_an_exception(stock: Stock, snapshot: Any) -> None:
    with pytest.raises(ZeroDivisionError), eagle3compat.applied():
        _ = 1 // 0
    assert snapshot.changes() == []


def test_no_trace_of_an_apply_that_raises(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.load_once()
    monkeypatch.delattr("vllm.v1.engine.core.EngineCore.step")
    before = type(stock.untouched)()
    with pytest.raises(eagle3compat.IncompatibleError):
        eagle3compat.apply()
    eagle3compat.revert()
    assert before.changes() == []


def test_a_failed_import_leaves_vllm_as_it_was(stock: Stock) -> None:
    eagle3compat.apply()
    before = type(stock.untouched)()
    stock.fail()
    assert before.changes() == []


@pytest.mark.parametrize("name", [GENERATOR, WORKER, PACKAGE])
def test_stock_modules_have_their_ordinary_loaders(stock: Stock, name: str) -> None:
    with eagle3compat.applied():
        stock.load()
        assert_ordinary(name)
    assert_ordinary(name)


def assert_ordinary(name: str) -> None:
    module = sys.modules[name]
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert type(importlib.util.find_spec(name).loader) is SourceFileLoader  # type: ignore[union-attr]


def test_a_reload_while_applied_adapts_the_same_module_again(stock: Stock) -> None:
    report = eagle3compat.apply()
    module = stock.load()
    report = eagle3compat.status()
    assert importlib.reload(module) is module
    assert eagle3compat.status() == report
    assert stock.rebound() == stock.expected(report)
    assert module.VllmHiddenStatesGenerator.generate.__wrapped__.__code__.co_filename == module.__file__
    eagle3compat.revert()
    assert stock.rebound() == set()


def test_a_class_taken_before_the_module_is_imported_anew_stays_adapted(stock: Stock) -> None:
    eagle3compat.apply()
    earlier = stock.load().VllmHiddenStatesGenerator
    constructor, generate = earlier.__init__, earlier.generate
    stock.load()
    assert earlier.__init__ is constructor
    assert earlier.generate is generate
    eagle3compat.revert()
    assert earlier.generate.__code__.co_filename == stock.generator.__file__


def test_a_class_taken_before_a_reload_stays_adapted(stock: Stock) -> None:
    eagle3compat.apply()
    module = stock.load()
    earlier = module.VllmHiddenStatesGenerator
    constructor, generate = earlier.__init__, earlier.generate
    importlib.reload(module)
    assert earlier.__init__ is constructor
    assert earlier.generate is generate


def test_revert_keeps_no_stock_module_alive(stock: Stock) -> None:
    eagle3compat.apply()
    stock.load()
    module = weakref.ref(stock.generator)
    eagle3compat.revert()
    stock.drop()
    gc.collect()
    assert module() is None


def test_revert_leaves_what_another_patcher_put_there_and_says_so(
    stock: Stock, caplog: pytest.LogCaptureFixture
) -> None:
    eagle3compat.apply()
    module = stock.load()
    theirs = functools.wraps(module.SchedulerConfig)(lambda **fields: None)
    module.SchedulerConfig = theirs
    with caplog.at_level(logging.WARNING, "eagle3compat"):
        eagle3compat.revert()
    assert module.SchedulerConfig is theirs
    assert stock.rebound() == {"SchedulerConfig"}
    assert "SchedulerConfig was replaced by somebody else" in caplog.text


def test_a_name_that_was_patched_before_apply_is_put_back_as_it_was(stock: Stock) -> None:
    module = stock.load_once()
    theirs = module.SchedulerConfig = functools.wraps(module.SchedulerConfig)(lambda **fields: None)
    eagle3compat.apply()
    assert module.SchedulerConfig is not theirs
    eagle3compat.revert()
    assert module.SchedulerConfig is theirs
