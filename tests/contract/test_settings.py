"""What the user asks for, by argument or by environment, and what is refused before anything is loaded."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import pytest

import eagle3compat
from eagle3compat.adapter import Adapter, Status
from eagle3compat.adapters import ADAPTERS

if TYPE_CHECKING:
    from tests.contract.conftest import Stock

IDS = [adapter.id for adapter in ADAPTERS]
every = pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
ABSENT = "/nowhere/model"
"""A path that the adapter `results` refuses: that error shows that the check before it has passed."""


def dependants(name: str) -> set[str]:
    """The adapters that make no sense without `name`."""
    found: set[str] = set()
    for adapter in ADAPTERS:
        if {name, *found} & set(adapter.requires):
            found.add(adapter.id)
    return found


def named(report: eagle3compat.Report, *statuses: Status) -> set[str]:
    return {outcome.adapter for outcome in report if outcome.status in statuses}


@pytest.fixture
def drifted(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> Stock:
    """A vLLM whose engine core has no `step`."""
    monkeypatch.delattr("vllm.v1.engine.core.EngineCore.step")
    return stock


@every
def test_a_skipped_adapter_is_disabled_and_its_dependants_fail(stock: Stock, adapter: Adapter) -> None:
    report = eagle3compat.apply(skip=[adapter.id])
    assert report[adapter.id].status is Status.DISABLED
    try:
        stock.load()
    except ImportError:
        assert not stock.unaided
        assert adapter.id == "vllm_names"
        return
    report = eagle3compat.status()
    needed = {outcome.adapter for outcome in eagle3compat.plan() if outcome.status is Status.APPLIED}
    assert named(report, Status.DISABLED) == {adapter.id}
    assert named(report, Status.FAILED) == dependants(adapter.id) & needed
    expected = eagle3compat.IncompatibleError if named(report, Status.FAILED) else Exception
    with pytest.raises(expected) as caught:
        stock.class_(ABSENT, [1])
    if expected is eagle3compat.IncompatibleError:
        assert f"'{adapter.id}' is disabled" in str(caught.value)
    else:
        assert not isinstance(caught.value, eagle3compat.IncompatibleError)


@every
def test_a_skipped_adapter_rebinds_nothing(stock: Stock, adapter: Adapter) -> None:
    if not stock.unaided and adapter.id == "vllm_names":
        pytest.skip("the import needs it here")
    eagle3compat.apply(skip=[adapter.id])
    stock.load()
    assert stock.rebound() == stock.expected(eagle3compat.status())


def test_only_disables_the_others(stock: Stock) -> None:
    only = ["speculators_import", "vllm_names", "worker_names", "tokenizer"]
    eagle3compat.apply(only=only)
    stock.load()
    report = eagle3compat.status()
    assert named(report, Status.DISABLED) == set(IDS) - set(only)
    assert report.healthy
    assert stock.rebound() == {"AutoTokenizer", "VllmHiddenStatesGenerator.__init__"}


def test_only_and_skip_together(stock: Stock) -> None:
    report = eagle3compat.apply(only=["tokenizer", "request"], skip=["tokenizer"])
    assert named(report, Status.DISABLED) == set(IDS) - {"request"}


def test_the_environment_adds_to_what_is_skipped(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3COMPAT_SKIP", "tokenizer, request,")
    assert named(eagle3compat.apply(skip=["memory"]), Status.DISABLED) == {"tokenizer", "request", "memory"}


@pytest.mark.parametrize("ask", ["only", "skip", "environment"])
def test_an_unknown_adapter_is_refused_and_nothing_applied(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    if ask == "environment":
        monkeypatch.setenv("EAGLE3COMPAT_SKIP", "nonsense")
    with pytest.raises(eagle3compat.InputError, match=r"no adapter 'nonsense'\. The adapters are: capture, configs"):
        eagle3compat.apply(**({} if ask == "environment" else {ask: ["nonsense"]}))  # type: ignore[arg-type]
    assert eagle3compat.status().outcomes == ()


def test_an_unknown_mode_is_refused(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3COMPAT", "yes")
    with pytest.raises(eagle3compat.InputError, match="EAGLE3COMPAT=yes is not known: use one of strict, warn, off"):
        eagle3compat.apply()


def test_off_leaves_stock_as_it_is(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    stock.load_once()
    monkeypatch.setenv("EAGLE3COMPAT", "off")
    before = type(stock.untouched)()
    report = eagle3compat.apply()
    assert {outcome.status for outcome in report} == {Status.DISABLED}
    assert report.healthy
    assert "EAGLE3COMPAT=off" in report.headline
    assert before.changes() == []


def test_off_takes_out_what_was_applied(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    eagle3compat.apply()
    stock.load()
    monkeypatch.setenv("EAGLE3COMPAT", "off")
    eagle3compat.apply()
    assert stock.rebound() == set()


def test_other_settings_replace_the_earlier_ones(stock: Stock) -> None:
    eagle3compat.apply(skip=["tokenizer"])
    stock.load()
    report = eagle3compat.apply()
    assert named(report, Status.DISABLED) == set()
    assert stock.rebound() == stock.expected(report)


@pytest.mark.parametrize("first", ["apply", "import"])
def test_a_drifted_adapter_is_named_with_what_was_expected_and_found(drifted: Stock, first: str) -> None:
    def act() -> None:
        if first == "import":
            drifted.load_once()
            eagle3compat.apply()
        else:
            eagle3compat.apply()
            drifted.load()
            drifted.class_(ABSENT, [1])

    with pytest.raises(eagle3compat.IncompatibleError) as caught:
        act()
    error = caught.value
    assert error.adapter == "execution"
    assert error.clause == "vllm.v1.engine.core:EngineCore.step"
    assert error.expected == "vllm.v1.engine.core:EngineCore.step to be there"
    assert error.found == "class 'vllm.v1.engine.core:EngineCore' has no attribute 'step'"
    assert "eagle3compat doctor" in error.remedy
    assert "EAGLE3COMPAT_SKIP=execution" in error.remedy
    for words in (error.adapter, error.clause, error.expected, error.found, error.remedy):
        assert words in str(error)


def test_the_drift_is_the_report_s_too(drifted: Stock) -> None:
    eagle3compat.apply()
    drifted.load()
    report = eagle3compat.status()
    assert not report.healthy
    assert named(report, Status.DRIFTED) == {"execution"}
    assert named(report, Status.FAILED) == dependants("execution")
    assert "MultiprocExecutor" not in drifted.rebound()


def test_a_parameter_that_went_is_named(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    executor: Any = __import__("vllm.v1.executor.multiproc_executor", fromlist=["MultiprocExecutor"]).MultiprocExecutor

    def collective_rpc(self: Any, method: str, args: Any = ()) -> Any: ...

    monkeypatch.setattr(executor, "collective_rpc", collective_rpc)
    eagle3compat.apply()
    stock.load()
    outcome = eagle3compat.status()["execution"]
    assert outcome.status is Status.DRIFTED
    assert "no parameter 'timeout' in (method, args=...)" in outcome.found


def test_the_constructor_refuses_before_it_looks_at_anything(
    drifted: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    eagle3compat.apply()
    module = drifted.load()
    for name in ("AutoConfig", "AutoTokenizer"):
        monkeypatch.setattr(module, name, None)
    with pytest.raises(eagle3compat.IncompatibleError):
        module.VllmHiddenStatesGenerator("owner/name")


@pytest.mark.parametrize("ask", ["argument", "environment"])
def test_without_strict_the_same_is_logged_and_nothing_raised(
    drifted: Stock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ask: str
) -> None:
    if ask == "environment":
        monkeypatch.setenv("EAGLE3COMPAT", "warn")
    drifted.load_once()
    with caplog.at_level(logging.WARNING, "eagle3compat"):
        report = eagle3compat.apply(strict=ask == "environment")
        assert "adapter 'execution' cannot bridge this pair" in caplog.text
        caplog.clear()
        with pytest.raises(Exception) as caught:  # noqa: PT011  what stock itself does with such a path
            drifted.class_(ABSENT, [1])
    assert not report.healthy
    assert not isinstance(caught.value, eagle3compat.IncompatibleError)
    assert "adapter 'execution' cannot bridge this pair" in caplog.text


def test_strict_in_the_environment_overrides_the_argument(drifted: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3COMPAT", "strict")
    drifted.load_once()
    with pytest.raises(eagle3compat.IncompatibleError):
        eagle3compat.apply(strict=False)


def test_a_fault_that_was_repaired_is_forgotten_by_a_new_apply(stock: Stock) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr("vllm.v1.engine.core.EngineCore.step")
        eagle3compat.apply()
        stock.load()
        assert not eagle3compat.status().healthy
    eagle3compat.revert()
    assert eagle3compat.apply().healthy


def test_the_constructor_keeps_its_signature(stock: Stock) -> None:
    own = inspect.signature(stock.load_once().VllmHiddenStatesGenerator)
    eagle3compat.apply()
    assert inspect.signature(stock.class_) == own
    assert stock.class_.__init__.__qualname__ == "VllmHiddenStatesGenerator.__init__"
