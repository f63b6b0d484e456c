"""The order of the rows of a step is the model runner's, in either generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eagle3compat.capture.rows import RowReader, Step
from eagle3compat.errors import UnprovenCaptureError


class First:
    """A runner with an `input_batch`, which reorders it before its forward."""

    def __init__(self, order: list[str]) -> None:
        self.order, self.seen = order, []
        self.computed: list[int] | None = None
        self.input_batch: Any = SimpleNamespace(req_ids=[])

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self.input_batch.req_ids, self.input_batch.num_computed_tokens_cpu = self.order, self.computed
        return self.forward()

    def forward(self) -> Any:
        return self.read()

    def read(self) -> Any:
        raise NotImplementedError


class Second(First):
    """A runner without an `input_batch`."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(order)
        del self.input_batch

    def prepare_inputs(self, *_args: Any, **_kwargs: Any) -> Any:
        return SimpleNamespace(req_ids=self.order, num_computed_tokens_np=self.computed)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        self.prepare_inputs(scheduler_output, batch=None)
        return self.forward()


def reader(runner: Any) -> RowReader:
    """A reader that the runner's forward asks for the step under way."""
    rows = RowReader(runner)
    runner.read = rows.step
    return rows


def scheduled(**counts: int) -> Any:
    return SimpleNamespace(num_scheduled_tokens=counts)


both = pytest.mark.parametrize("kind", [First, Second])


@both
def test_the_order_is_the_runner_s_and_the_counts_the_scheduler_s(kind: Any) -> None:
    runner = kind(["c", "a", "b"])
    reader(runner)
    assert runner.execute_model(scheduled(a=1, b=20, c=3)) == Step(("c", "a", "b"), (3, 1, 20))


@both
def test_the_next_step_has_its_own_order(kind: Any) -> None:
    runner = kind(["c", "a"])
    reader(runner)
    runner.execute_model(scheduled(a=1, c=3))
    runner.order = ["b", "c"]
    assert runner.execute_model(scheduled(c=2, b=9)) == Step(("b", "c"), (9, 2))


@both
def test_how_much_is_computed_is_the_runner_s(kind: Any) -> None:
    runner = kind(["c", "a"])
    reader(runner)
    assert runner.execute_model(scheduled(a=1, c=3)).starts is None
    runner.computed = [7, 0]
    assert runner.execute_model(scheduled(a=1, c=3)) == Step(("c", "a"), (3, 1), (7, 0))


def test_of_requests_that_are_not_in_this_step_nothing_is_said() -> None:
    runner = First(["c", "a", "b"])
    reader(runner)
    runner.computed = [7, 5, 4]
    assert runner.execute_model(scheduled(a=1, b=2)) == Step(("a", "b"), (1, 2), (5, 4))


@both
def test_outside_a_step_there_is_none(kind: Any) -> None:
    runner = kind(["a"])
    rows = reader(runner)
    assert rows.step() is None
    runner.execute_model(scheduled(a=1))
    assert rows.step() is None
    assert runner.forward() is None


@both
def test_a_step_without_tokens_is_none(kind: Any) -> None:
    runner = kind([])
    reader(runner)
    assert runner.execute_model(scheduled()) is None


@both
def test_after_an_exception_there_is_no_step(kind: Any) -> None:
    runner = kind(["a"])
    rows = reader(runner)
    runner.read = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        runner.execute_model(scheduled(a=1))
    assert rows.step() is None


@both
@pytest.mark.parametrize("order", [["a"], ["a", "b", "b"], ["a", "x"]])
def test_a_batch_that_is_not_the_scheduler_s_is_refused(kind: Any, order: list[str]) -> None:
    runner = kind(order)
    reader(runner)
    with pytest.raises(UnprovenCaptureError, match=r"differ"):
        runner.execute_model(scheduled(a=1, b=2))


def test_requests_in_the_batch_that_are_not_in_this_step_have_no_rows() -> None:
    runner = First(["c", "a", "b"])
    reader(runner)
    assert runner.execute_model(scheduled(a=1, b=2)) == Step(("a", "b"), (1, 2))


def test_a_dummy_run_within_a_second_generation_runner_is_none() -> None:
    runner = Second(["a"])
    reader(runner)
    runner.prepare_inputs()
    assert runner.forward() is None


@both
def test_arguments_and_results_pass_through(kind: Any) -> None:
    runner = kind(["a"])
    RowReader(runner)
    runner.read = lambda: "result"
    assert runner.execute_model(scheduled(a=1), intermediate_tensors=None) == "result"
    assert runner.execute_model(scheduler_output=scheduled(a=1)) == "result"


def test_a_runner_of_neither_generation_is_refused() -> None:
    class Third:
        def execute_model(self) -> None: ...

    with pytest.raises(UnprovenCaptureError, match="neither `input_batch` nor `prepare_inputs`"):
        RowReader(Third())
