"""Every order of up to four of: import, failing import, apply, revert. No order is missing, as all are generated."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import pytest

import eagle3compat
from eagle3compat.adapter import GENERATOR, Status
from eagle3compat.adapters import ADAPTERS

if TYPE_CHECKING:
    from tests.contract.conftest import Stock

ACTIONS = ("import", "fail", "apply", "revert")
ORDERS = list(itertools.product(ACTIONS, repeat=4))
IN_PLACE = (Status.APPLIED, Status.NOT_NEEDED)


class Model:
    """What must be so after each action."""

    def __init__(self, stock: Stock) -> None:
        self.stock = stock
        self.applied = False
        self.finders = list(sys.meta_path)

    def act(self, action: str) -> None:
        if action == "fail":
            self.stock.fail()
        elif action == "import" and not self.applied and not self.stock.unaided:
            with pytest.raises(ImportError):
                self.stock.load()
        elif action == "import":
            self.stock.load()
        elif action == "apply":
            before = eagle3compat.status() if self.applied else None
            report = eagle3compat.apply()
            assert before in (None, report), "applied twice, it reports something else"
            self.applied = True
        else:
            eagle3compat.revert()
            self.applied = False

    def check(self) -> None:
        report = eagle3compat.status()
        assert [outcome.adapter for outcome in report] == ([a.id for a in ADAPTERS] if self.applied else [])
        assert report.healthy, str(report)
        assert len(sys.meta_path) == len(self.finders) + (1 if self.applied else 0)
        if GENERATOR not in sys.modules:
            return
        if not self.applied:
            assert self.stock.rebound() == set()
            return
        assert {outcome.status for outcome in report} <= set(IN_PLACE), str(report)
        assert self.stock.rebound() == self.stock.expected(report)
        assert wrappers(self.stock.class_.__init__) == 2
        assert wrappers(self.stock.class_.generate) == 1
        with pytest.raises(eagle3compat.ModelNotFoundError):
            self.stock.class_("/nowhere/model", [1])


def wrappers(function: object) -> int:
    """How many times a function is wrapped."""
    wrapped = getattr(function, "__wrapped__", None)
    return 0 if wrapped is None else 1 + wrappers(wrapped)


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_order(stock: Stock, order: tuple[str, ...]) -> None:
    model = Model(stock)
    for action in order:
        model.act(action)
        model.check()


def test_every_order_of_up_to_four_actions_is_there() -> None:
    prefixes = {order[:length] for order in ORDERS for length in range(1, 5)}
    assert len(prefixes) == 4 + 4**2 + 4**3 + 4**4
