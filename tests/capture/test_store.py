"""Captured rows are filed by request and position, and only rows that are shown to be the prompt's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from eagle3compat.capture.rows import Step
from eagle3compat.capture.segment import Address, Layout, Segment, Sheet
from eagle3compat.capture.store import Spans, Store, joined
from eagle3compat.errors import ResultError, UnprovenCaptureError

PROMPTS = {"a": [7, 8, 9], "b": [4, 5]}
ROWS = torch.arange(20.0).reshape(5, 4)


def store(*layers: int) -> Store:
    filled = Store(layers or (1,))
    filled.begin(PROMPTS)
    return filled


def file(into: Store, step: Step, positions: list[int], tokens: list[int] | None, rows: torch.Tensor = ROWS) -> None:
    ids = None if tokens is None else torch.tensor(tokens)
    pieces = into.pieces(step, torch.tensor(positions), ids)
    for layer in into.layer_ids:
        into.put(layer, step, pieces, rows + layer)
    into.end_step()


BOTH = Step(("b", "a"), (2, 3))


def test_rows_go_to_their_requests() -> None:
    filled = store(1, 2)
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9])
    collected = filled.collect(["a", "b"])
    assert torch.equal(collected["a"][0], ROWS[2:] + 1)
    assert torch.equal(collected["a"][1], ROWS[2:] + 2)
    assert torch.equal(collected["b"][0], ROWS[:2] + 1)


def test_what_was_filed_is_a_copy() -> None:
    filled, rows = store(), ROWS.clone()
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9], rows)
    rows.zero_()
    assert bool(filled.collect(["a"])["a"][0].all())


def test_layer_ids_are_kept_once_in_the_order_asked() -> None:
    assert Store([5, 1, 5, 3, 1]).layer_ids == (5, 1, 3)


def test_the_dtype_is_kept() -> None:
    filled = store()
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9], ROWS.to(torch.bfloat16))
    assert filled.collect(["a"])["a"][0].dtype is torch.bfloat16


def test_a_request_that_is_not_expected_is_passed_over() -> None:
    filled = store()
    assert not filled.expects(Step(("x",), (2,)))
    assert filled.expects(Step(("x", "a"), (2, 3)))
    file(filled, Step(("x", "a"), (2, 3)), [0, 1, 0, 1, 2], [1, 1, 7, 8, 9])
    assert torch.equal(filled.collect(["a"])["a"][0], ROWS[2:] + 1)


def test_rows_past_the_prompt_are_passed_over() -> None:
    filled = store()
    file(filled, Step(("b", "a"), (2, 3)), [2, 3, 0, 1, 2], [1, 1, 7, 8, 9])
    with pytest.raises(ResultError, match="only 0 of 2 rows of b were computed"):
        filled.collect(["b"])


@pytest.mark.parametrize("positions", [[1, 0], [0, 2], [0, 0], [-1, 0]])
def test_positions_that_do_not_follow_one_another_within_the_prompt_are_refused(positions: list[int]) -> None:
    with pytest.raises(ResultError, match="position"):
        file(store(), Step(("b",), (2,)), positions, None)


@pytest.mark.parametrize("tokens", [[4, 6], [5, 4], [7, 8]])
def test_other_tokens_than_the_prompt_s_are_refused(tokens: list[int]) -> None:
    with pytest.raises(ResultError, match="computed from other tokens than its prompt"):
        file(store(), Step(("b",), (2,)), [0, 1], tokens)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_a_stream_with_fewer_rows_than_the_step_is_refused(rows: int) -> None:
    """One row would be copied into all places of a request: of the right shape, and wrong."""
    with pytest.raises((ResultError, UnprovenCaptureError), match="rows"):
        file(store(), BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9], ROWS[:rows])


def test_fewer_positions_than_rows_are_refused() -> None:
    filled = store()
    with pytest.raises(ResultError):
        file_and_collect(filled, BOTH, [0, 1, 0, 1], [4, 5, 7, 8, 9])


def file_and_collect(filled: Store, *arguments: Any) -> Any:
    file(filled, *arguments)
    return filled.collect(["a", "b"])


def test_missing_rows_are_named_with_figures() -> None:
    filled = store()
    file(filled, Step(("a",), (2,)), [1, 2], [8, 9])
    with pytest.raises(ResultError, match=r"only 2 of 3 rows of a were computed\. Nothing of this call was returned"):
        filled.collect(["a"])


def test_collected_requests_are_forgotten() -> None:
    filled = store()
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9])
    filled.collect(["a"])
    assert not filled.expects(Step(("a",), (1,)))
    assert filled.expects(Step(("b",), (1,)))
    with pytest.raises(KeyError):
        filled.collect(["a"])


def test_clear_forgets_everything() -> None:
    filled = store()
    filled.clear()
    assert not filled.expects(BOTH)


def test_rows_that_follow_one_another_in_step_and_place_travel_together() -> None:
    pieces = [(slice(0, 2), 10), (slice(2, 5), 12), (slice(5, 6), 20), (slice(7, 8), 21), (slice(8, 9), 22)]
    assert joined(pieces) == [(slice(0, 5), 10), (slice(5, 6), 20), (slice(7, 9), 21)]
    assert joined([]) == []


def test_stretches_are_counted_once_however_they_come() -> None:
    drawn = random.Random(3)
    for _ in range(200):
        spans, filed = Spans(), set[int]()
        for _ in range(8):
            start = drawn.randrange(20)
            rows = set(range(start, start + drawn.randint(1, 6)))
            assert spans.add(start, start + len(rows)) == bool(rows & filed)
            filed |= rows
            assert spans.count == len(filed)


LAYOUT = Layout(("a", "b"), (3, 2), layers=2, hidden_size=4, dtype=torch.float32)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment(LAYOUT.size)
    yield made
    made.close_file()


def attached(segment: Segment) -> tuple[Store, Sheet]:
    """A store that files into the segment, and what the driver sees of it."""
    filled = Store((1, 2))
    filled.attach(segment.address)
    filled.begin(PROMPTS, LAYOUT)
    return filled, Sheet(LAYOUT, segment.data)


def test_rows_go_to_their_places_in_the_segment(segment: Segment) -> None:
    filled, sheet = attached(segment)
    file(filled, Step(("b",), (2,)), [0, 1], [4, 5], ROWS[:2])
    assert sheet.landed.tolist() == [[0, 2], [0, 2]]
    file(filled, Step(("a",), (2,)), [1, 2], [8, 9], ROWS[3:])
    assert sheet.landed.tolist() == [[2, 2], [2, 2]]
    file(filled, Step(("a",), (1,)), [0], [7], ROWS[2:3])
    assert filled.collect(["a", "b"]) == {"a": [0, 0], "b": [0, 0]}
    assert sheet.landed.tolist() == [[3, 2], [3, 2]]
    for layer in (0, 1):
        assert torch.equal(sheet.places["a"][layer], ROWS[2:] + layer + 1)
        assert torch.equal(sheet.places["b"][layer], ROWS[:2] + layer + 1)


def test_rows_computed_again_are_told_before_they_are_written(segment: Segment) -> None:
    filled, sheet = attached(segment)
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9])
    file(filled, Step(("a",), (2,)), [0, 1], [7, 8], 10 * ROWS)
    assert sheet.revisions.tolist() == [[2, 0], [2, 0]]
    assert filled.collect(["b", "a"]) == {"b": [0, 0], "a": [2, 2]}
    assert torch.equal(sheet.places["a"][0][:2], 10 * ROWS[:2] + 1)


def test_rows_of_another_width_or_dtype_than_laid_out_are_kept_apart(segment: Segment) -> None:
    for rows in (ROWS.double(), ROWS.repeat(1, 2)):
        filled, sheet = attached(segment)
        file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9], rows)
        assert torch.equal(filled.collect(["a"])["a"][1], rows[2:] + 2)
        assert sheet.landed.tolist() == [[0, 0], [0, 0]]


def test_rows_that_are_missing_are_noticed_though_an_earlier_call_left_some(segment: Segment) -> None:
    filled, sheet = attached(segment)
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9])
    filled.clear()
    filled.begin(PROMPTS, LAYOUT)
    assert sheet.places["a"].any()
    assert sheet.landed.tolist() == [[0, 0], [0, 0]]
    file(filled, Step(("a",), (2,)), [0, 1], [7, 8])
    with pytest.raises(ResultError, match="only 2 of 3 rows of a were computed"):
        filled.collect(["a"])


def test_a_layer_whose_rows_are_missing_is_noticed(segment: Segment) -> None:
    filled, _sheet = attached(segment)
    pieces = filled.pieces(BOTH, torch.tensor([0, 1, 0, 1, 2]), None)
    filled.put(1, BOTH, pieces, ROWS)
    with pytest.raises(ResultError, match="only 0 of 3 rows of a were computed"):
        filled.collect(["a"])


def test_a_segment_that_is_gone_is_an_error_and_the_store_goes_on_by_itself(segment: Segment) -> None:
    filled = Store((1, 2))
    with pytest.raises(RuntimeError):
        filled.attach(Address("/proc/self/fd/9999", 4096, 77))
    filled.begin(PROMPTS, LAYOUT)
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9])
    assert torch.equal(filled.collect(["a"])["a"][0], ROWS[2:] + 1)


class Late:
    """A courier whose rows arrive only when they are waited for, as those of a device may."""

    def __init__(self) -> None:
        self.under_way: list[Any] = []
        self.most = 0

    def adopt(self, data: Any) -> None:
        assert not self.under_way

    def send(self, copies: Any, done: Any) -> None:
        self.under_way.append((copies, done))
        self.most = max(self.most, len(self.under_way))

    def settle(self, keep: int = 0) -> None:
        while len(self.under_way) > keep:
            copies, done = self.under_way.pop(0)
            for rows, place in copies:
                place.copy_(rows)
            done()

    abandon = settle


def test_what_is_on_its_way_is_waited_for_and_is_not_called_landed(segment: Segment) -> None:
    filled, sheet = attached(segment)
    courier = filled._courier = Late()
    for position, token in enumerate(PROMPTS["a"]):
        file(filled, Step(("a",), (1,)), [position], [token], ROWS[position : position + 1])
        assert sheet.landed[:, 0].tolist() == [position, position]  # the step before has arrived, this one has not
    file(filled, Step(("b", "a"), (2, 1)), [0, 1, 2], [4, 5, 9])
    assert sheet.revisions.tolist() == [[1, 0], [1, 0]]
    assert courier.most == 4  # two steps of two layers
    assert filled.collect(["a", "b"]) == {"a": [2, 2], "b": [0, 0]}  # read in between, it would be of another revision
    assert torch.equal(sheet.places["a"][0], torch.cat([ROWS[:2], ROWS[2:3]]) + 1)


def test_a_new_call_waits_until_rows_of_a_failed_one_no_longer_arrive(segment: Segment) -> None:
    filled, sheet = attached(segment)
    courier = filled._courier = Late()
    file(filled, BOTH, [0, 1, 0, 1, 2], [4, 5, 7, 8, 9])
    filled.clear()
    filled.begin(PROMPTS, LAYOUT)
    assert not courier.under_way
    assert sheet.landed.tolist() == [[0, 0], [0, 0]]
    filled.attach(None)
