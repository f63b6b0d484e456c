"""Captured rows are filed by request and position, and only rows that are shown to be the prompt's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle3compat.capture.rows import Step
from eagle3compat.capture.store import Store
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
