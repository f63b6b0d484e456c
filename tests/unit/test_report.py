"""What `apply()`, `plan()` and `status()` return."""

from __future__ import annotations

import io
import json
import pickle

import pytest
from rich.console import Console

from eagle3compat.adapter import Outcome, Status
from eagle3compat.report import COLOURS, Report, source_digest


def outcome(adapter: str, status: Status, reason: str = "why", clause: str = "") -> Outcome:
    return Outcome(adapter, "seam", status, reason, clause, clause and "this", clause and "that")


GOOD = Report("one on two", (outcome("a", Status.APPLIED), outcome("b", Status.NOT_NEEDED)))


@pytest.mark.parametrize("status", list(Status))
def test_health(status: Status) -> None:
    report = Report("", (outcome("a", Status.APPLIED), outcome("b", status)))
    assert report.healthy == (status not in (Status.DRIFTED, Status.FAILED))


def test_a_report_of_nothing_is_healthy() -> None:
    assert Report("", ()).healthy


def test_outcomes_are_found_by_the_adapter_s_id() -> None:
    assert GOOD["b"] is GOOD.outcomes[1]
    assert [o.adapter for o in GOOD] == ["a", "b"]
    with pytest.raises(KeyError, match="no adapter 'c'; there are: a, b"):
        GOOD["c"]


def test_as_a_dict_it_is_plain_data() -> None:
    report = Report("one on two", (outcome("a", Status.DRIFTED, clause="module:name"),))
    data = json.loads(json.dumps(report.as_dict()))
    assert data["headline"] == "one on two"
    assert data["healthy"] is False
    assert data["adapters"] == [
        {
            "adapter": "a", "seam": "seam", "status": "drifted", "reason": "why", "clause": "module:name",
            "expected": "this", "found": "that",
        }
    ]
    assert "clause" not in GOOD.as_dict()["adapters"][0]


def test_as_text_every_adapter_has_a_line() -> None:
    assert str(GOOD) == "one on two\n  a  applied     why\n  b  not needed  why"
    assert str(Report("nothing", ())) == "nothing"


def test_of_a_plan_nothing_is_applied() -> None:
    plan = Report("one on two", GOOD.outcomes, planned=True)
    assert str(plan).splitlines() == [
        "plan, nothing is changed by it: one on two", "  a  to be applied  why", "  b  not needed     why",
    ]
    assert plan != GOOD
    assert pickle.loads(pickle.dumps(plan)) == plan == plan.brief()
    assert plan.as_dict() == GOOD.as_dict()  # for programs the values are the same


def test_what_waits_for_an_import_is_said_to_wait() -> None:
    report = Report("one on two", (outcome("a", Status.DEFERRED), outcome("b", Status.DISABLED)))
    assert str(report).splitlines() == [
        "one on two: adapters go in when speculators is imported", "  a  waiting   why", "  b  disabled  why",
    ]
    out = io.StringIO()
    Console(file=out, width=200, color_system=None).print(report.table())
    assert "waiting" in out.getvalue()
    assert "deferred" not in out.getvalue()
    assert report.as_dict()["adapters"][0]["status"] == "deferred"


def test_the_headline_may_be_worked_out_late() -> None:
    asked = []
    report = Report(lambda: asked.append(1) or "late", GOOD.outcomes)  # type: ignore[func-returns-value]
    assert asked == []
    assert report.headline == "late"
    assert str(report).startswith("late\n")


def test_reports_that_say_the_same_are_equal() -> None:
    assert Report(lambda: "one on two", GOOD.outcomes) == GOOD
    assert Report(lambda: "another", GOOD.outcomes) != GOOD


def test_a_report_survives_pickle() -> None:
    late = Report(lambda: "one on two", GOOD.outcomes)
    assert pickle.loads(pickle.dumps(late)) == GOOD


def test_its_representation_shows_the_headline() -> None:
    assert "one on two" in repr(Report(lambda: "one on two", ()))


def test_every_status_has_a_colour() -> None:
    assert set(COLOURS) == set(Status)


@pytest.mark.parametrize("text", ["takes list[int]", "[bold]", "[/]", "a[0][/red]", ":smile:"])
def test_text_in_a_table_is_printed_as_it_is(text: str) -> None:
    out = io.StringIO()
    report = Report(text, (outcome(text, Status.FAILED, text),))
    Console(file=out, width=200, color_system=None).print(report.table())
    assert out.getvalue().count(text) == 3


def test_the_fingerprint_tells_what_is_switched_off_and_not_why_the_rest_is_as_it_is() -> None:
    other = Report("elsewhere", (outcome("a", Status.DEFERRED), outcome("b", Status.APPLIED)))
    off = Report("one on two", (outcome("a", Status.DISABLED), outcome("b", Status.NOT_NEEDED)))
    assert GOOD.fingerprint == other.fingerprint
    assert GOOD.fingerprint != off.fingerprint
    assert len(source_digest()) == 16
