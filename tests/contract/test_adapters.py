"""What every adapter has to hold, whatever its seam."""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

import eagle3compat
from eagle3compat.adapter import GENERATOR, PACKAGE, WORKER, Adapter, Status
from eagle3compat.adapters import ADAPTERS
from eagle3compat.contract import Accepts, Call, Clause, Exists, Imported, Signature
from eagle3compat.surfaces import LiveSurface

if TYPE_CHECKING:
    from tests.contract.conftest import Stock

IDS = [adapter.id for adapter in ADAPTERS]
every = pytest.mark.parametrize("adapter", ADAPTERS, ids=IDS)
RELIES_ON_NOTHING = {
    "vllm_names": "it supplies whatever is absent, and what is there it leaves alone",
    "worker_names": "the same for the worker's module",
    "scheduler": "its stand-in is this library's own and calls nothing of vLLM's; it requires `execution`",
}
"""Adapters without clauses of their own, and why that is right."""
CLAUSES = [(adapter, clause) for adapter in ADAPTERS for clause in adapter.relies_on]


def test_no_adapter_is_missing(stock: Stock) -> None:
    classes = {c for c in subclasses(Adapter) if c.__module__.startswith("eagle3compat.adapters.")}
    assert {type(adapter) for adapter in ADAPTERS} == classes
    assert [outcome.adapter for outcome in eagle3compat.apply()] == IDS
    assert len(set(IDS)) == len(IDS)


def subclasses(class_: Any) -> set[type]:
    """All below a class."""
    return {below for child in class_.__subclasses__() for below in {child, *subclasses(child)}}


def test_what_each_adapter_may_rebind_is_written_down(stock: Stock) -> None:
    assert set(stock.rebinds) == set(IDS)


@every
def test_says_what_it_replaces(stock: Stock, adapter: Adapter) -> None:
    assert set(adapter.replaces) == {name for name in stock.rebinds[adapter.id] if "." not in name}
    assert set(adapter.hands_back) <= set(adapter.replaces)


@every
def test_documents_itself(adapter: Adapter) -> None:
    for text in (adapter.id, adapter.seam, adapter.breaks, adapter.remove_when, inspect.getdoc(type(adapter))):
        assert text
        assert text.strip() == text
    assert adapter.upstream.startswith("https://github.com/")
    assert adapter.target in (GENERATOR, WORKER, PACKAGE)
    assert adapter.where in ("driver", "worker", "driver and worker")
    assert adapter.always or adapter.stock_needs, "nothing says when it is needed"


@every
def test_relies_on_something_or_says_why_not(adapter: Adapter) -> None:
    assert bool(adapter.relies_on) != (adapter.id in RELIES_ON_NOTHING)


@every
def test_requires_only_what_comes_before_it(adapter: Adapter) -> None:
    assert set(adapter.requires) <= set(IDS[: IDS.index(adapter.id)])


@every
def test_the_plan_from_source_says_what_then_becomes_of_it(stock: Stock, adapter: Adapter) -> None:
    planned = eagle3compat.plan()[adapter.id]
    eagle3compat.apply()
    stock.load()
    assert eagle3compat.status()[adapter.id] == planned
    assert planned.status in (Status.APPLIED, Status.NOT_NEEDED)


class Without(LiveSurface):
    """What is imported, but for one path."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._gone = path

    def exists(self, path: str) -> bool:
        return path != self._gone and super().exists(path)

    def signature(self, path: str) -> Signature | None:
        return None if path == self._gone else super().signature(path)

    def explain(self, path: str) -> str:
        return f"{path} is gone" if path == self._gone else super().explain(path)


@pytest.mark.parametrize(("adapter", "clause"), CLAUSES, ids=lambda value: getattr(value, "id", None) or str(value))
def test_has_drifted_when_what_it_relies_on_is_gone(stock: Stock, adapter: Adapter, clause: Clause) -> None:
    assert isinstance(clause, (Exists, Accepts))
    stock.load_once()
    outcome = adapter.decide(Without(clause.path))
    if outcome.status is Status.NOT_NEEDED:
        pytest.skip("what stock counts on is there without it")
    assert outcome.status is Status.DRIFTED
    assert outcome.clause == str(clause)
    assert outcome.expected
    assert outcome.found == f"{clause.path} is gone"


class Nothing:
    """A surface on which nothing exists."""

    def exists(self, path: str) -> bool:
        return False

    def signature(self, path: str) -> Signature | None:
        return None

    def calls(self, module: str, name: str) -> tuple[Call, ...]:
        return (Call(0, (), False, 1),)

    def imports(self, module: str, of: str) -> tuple[Imported, ...]:
        return (Imported(of, None, of, 1),)


@every
def test_is_not_healthy_where_nothing_is_as_it_was_unless_it_supplies_it(adapter: Adapter) -> None:
    outcome = adapter.decide(Nothing())
    assert outcome.status is (Status.APPLIED if adapter.id in RELIES_ON_NOTHING else Status.DRIFTED)
    assert outcome.reason


@every
def test_an_exception_in_its_install_is_reported_and_breaks_no_import(
    stock: Stock, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = type(adapter).install

    def install(self: Adapter, module: Any, ledger: Any) -> None:
        original(self, module, ledger)
        if self is adapter:
            raise LookupError("no such luck")

    monkeypatch.setattr(type(adapter), "install", install)
    with suppress(eagle3compat.IncompatibleError):  # at once where the adapter's module is imported already
        eagle3compat.apply()
    stock.load()
    outcome = eagle3compat.status()[adapter.id]
    if outcome.status is Status.NOT_NEEDED:
        return
    assert outcome.status is Status.FAILED
    assert outcome.reason == "LookupError: no such luck"
    names = stock.rebinds[adapter.id]
    assert {name for name in names if "." not in name} & stock.rebound() == set()
    with pytest.raises(eagle3compat.IncompatibleError, match="no such luck"):
        stock.class_("/nowhere/model", [1])


@every
def test_an_exception_around_the_import_is_reported_and_breaks_no_import(
    stock: Stock, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    if adapter.target == PACKAGE or not stock.unaided:
        pytest.skip("the import needs it here")

    def during_import(self: Adapter) -> Any:
        raise LookupError("no such luck")

    monkeypatch.setattr(type(adapter), "during_import", during_import)
    eagle3compat.apply()
    stock.load()
    outcome = eagle3compat.status()[adapter.id]
    assert (outcome.status, outcome.reason) == (Status.FAILED, "LookupError: no such luck")


def place(stock: Stock, name: str) -> tuple[Any, str]:
    """Where a name of REBINDS is kept; skips the test where this stock release does not have it."""
    holder = stock.class_ if "." in name else stock.generator
    attribute = name.split(".")[-1]
    if attribute not in vars(holder):
        pytest.skip("this stock release has no such name")
    return holder, attribute


def test_reports_a_name_that_another_patcher_has_replaced(stock: Stock, adapter: str, rebound: str) -> None:
    eagle3compat.apply()
    stock.load()
    if eagle3compat.status()[adapter].status is Status.NOT_NEEDED:
        pytest.skip("not needed on this pair")
    holder, attribute = place(stock, rebound)
    setattr(holder, attribute, lambda *args, **kwargs: None)
    outcome = eagle3compat.status()[adapter]
    assert outcome.status is Status.FAILED
    assert attribute in outcome.reason
    assert "replaced by another patcher" in outcome.reason
    if attribute != "__init__":
        with pytest.raises(eagle3compat.IncompatibleError, match="replaced by another patcher"):
            stock.class_("/nowhere/model", [1])


def test_a_wrapper_that_shows_what_it_wraps_is_no_replacement(stock: Stock, adapter: str, rebound: str) -> None:
    eagle3compat.apply()
    stock.load()
    before = eagle3compat.status()
    holder, attribute = place(stock, rebound)
    ours = getattr(holder, attribute)
    for _ in range(2):
        theirs = functools.wraps(getattr(holder, attribute))(lambda *args, **kwargs: ours(*args, **kwargs))
        setattr(holder, attribute, theirs)
    assert eagle3compat.status() == before
