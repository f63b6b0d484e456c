"""Rebinding names, seeing whether they are still in place, and taking it back."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest

from eagle3compat.ledger import Ledger


class Base:
    def method(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "static"


class Child(Base):
    pass


def replacement(*_args: Any) -> str:
    return "replacement"


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def module() -> Any:
    made = ModuleType("made")
    vars(made)["name"] = "original"
    return made


def test_restores_the_identical_object(ledger: Ledger, module: Any) -> None:
    original = vars(module)["name"]
    ledger.rebind("a", module, "name", replacement)
    assert module.name is replacement
    assert ledger.restore() == []
    assert vars(module)["name"] is original
    assert list(ledger) == []


def test_a_name_that_was_not_there_is_deleted(ledger: Ledger, module: Any) -> None:
    before = dict(vars(module))
    ledger.rebind("a", module, "sorted", replacement)
    ledger.restore()
    assert vars(module) == before


def test_a_name_that_was_none_is_none_again(ledger: Ledger, module: Any) -> None:
    module.name = None
    ledger.rebind("a", module, "name", replacement)
    ledger.restore()
    assert vars(module)["name"] is None


def test_an_inherited_attribute_is_deleted_from_the_class_not_set(ledger: Ledger) -> None:
    before = dict(vars(Child))
    ledger.rebind("a", Child, "method", replacement)
    assert Child().method() == "replacement"
    ledger.restore()
    assert dict(vars(Child)) == before
    assert Child().method() == "base"


def test_a_static_method_stays_one(ledger: Ledger) -> None:
    original = vars(Base)["static"]
    ledger.rebind("a", Base, "static", staticmethod(replacement))
    ledger.restore()
    assert vars(Base)["static"] is original


def test_two_rebindings_of_one_name_are_undone_in_reverse(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "name", replacement)
    ledger.rebind("b", module, "name", lambda: None)
    assert ledger.restore() == []
    assert module.name == "original"


def test_the_upper_of_two_rebindings_alone(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "name", replacement)
    ledger.rebind("b", module, "name", functools.wraps(replacement)(lambda: None))
    assert ledger.displaced() == []
    ledger.restore("b")
    assert module.name is replacement
    assert [entry.adapter for entry in ledger] == ["a"]


def test_one_adapter_s_rebindings_alone(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "one", replacement)
    ledger.rebind("b", module, "two", replacement)
    ledger.rebind("a", module, "three", replacement)
    ledger.restore("a")
    assert not hasattr(module, "one")
    assert not hasattr(module, "three")
    assert [str(entry) for entry in ledger.of("b")] == ["made.two"]
    assert ledger.of("a") == []


def test_within_a_module_are_its_names_and_those_of_its_classes(ledger: Ledger, module: Any) -> None:
    other = ModuleType("other")
    module.Child = Child
    for holder in (module, Child, Base, other):
        ledger.rebind("a", holder, "added", replacement)
    assert ledger.restore("a", module) == []
    assert [entry.holder for entry in ledger] == [Base, other]
    assert "added" not in vars(Child)
    ledger.restore()
    assert not hasattr(Base, "added")


def test_what_somebody_else_put_there_is_left_and_returned(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "name", replacement)
    module.name = "theirs"
    (left,) = ledger.restore()
    assert (left.adapter, left.holder, left.name) == ("a", module, "name")
    assert module.name == "theirs"
    assert list(ledger) == []


def test_a_name_that_somebody_else_deleted_stays_deleted(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "name", replacement)
    del module.name
    assert [entry.name for entry in ledger.restore()] == ["name"]
    assert not hasattr(module, "name")


def test_what_was_replaced_is_displaced(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "name", replacement)
    assert ledger.displaced() == []
    module.name = "theirs"
    assert [str(entry) for entry in ledger.displaced()] == ["made.name"]


@pytest.mark.parametrize("depth", [1, 3])
def test_what_was_wrapped_openly_is_in_place(ledger: Ledger, module: Any, depth: int) -> None:
    ledger.rebind("a", module, "name", replacement)
    for _ in range(depth):
        module.name = functools.wraps(module.name)(lambda: None)
    assert ledger.displaced() == []


def test_an_open_wrapper_around_something_else_is_not_ours(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "name", replacement)
    module.name = functools.wraps(len)(lambda: None)
    assert len(ledger.displaced()) == 1


def test_wrappers_in_a_circle_are_not_followed_for_ever(ledger: Ledger, module: Any) -> None:
    ledger.rebind("a", module, "name", replacement)
    one: Any = lambda: None  # noqa: E731
    one.__wrapped__ = one
    module.name = one
    assert len(ledger.displaced()) == 1


class Odd:
    """Compares like an array: its truth value is an error."""

    def __eq__(self, other: object) -> Any:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


def test_objects_are_told_apart_by_identity_never_by_comparison(ledger: Ledger, module: Any) -> None:
    original = module.name = Odd()
    ledger.rebind("a", module, "name", Odd())
    ledger.rebind("a", module, "name", Odd())
    assert [entry.name for entry in ledger.displaced()] == ["name"]
    assert ledger.restore() == []
    assert vars(module)["name"] is original
