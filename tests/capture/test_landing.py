"""States leave shared memory as tensors of their own, once they are whole, looked at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from eagle3compat.capture.segment import Layout, Sheet
from eagle3compat.engine.landed import Joined, Landed
from eagle3compat.engine.landing import Landing, fault_of

LAYOUT = Layout(("a", "b"), (4, 3), layers=2, hidden_size=8, dtype=torch.bfloat16)
NOTHING_AGAIN = {"a": [0, 0], "b": [0, 0]}


@pytest.fixture
def sheet() -> Sheet:
    """As the worker leaves it when all rows are there."""
    made = Sheet(LAYOUT, torch.zeros(LAYOUT.size, dtype=torch.uint8))
    for number, place in enumerate(made.places.values(), 1):
        place.copy_(torch.randn(place.shape) + number)
    return made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_states_are_taken_while_the_call_goes_on(sheet: Sheet, pool: ThreadPoolExecutor) -> None:
    landing = Landing(pool, sheet)
    sheet.landed[1, 0] = 4
    until(lambda: (1, 0) in landing._copies)
    sheet.landed[0, 1] = 2  # of three
    assert list(landing._copies) == [(1, 0)]
    want = sheet.places["a"][1].clone()
    assert torch.equal(landing.finish(NOTHING_AGAIN)["a"][1].tensor, want)


def test_what_has_landed_is_whole_and_owned(sheet: Sheet, pool: ThreadPoolExecutor) -> None:
    want = {name: place.clone() for name, place in sheet.places.items()}
    states = Landing(pool, sheet).finish(NOTHING_AGAIN)
    for place in sheet.places.values():
        place.zero_()
    assert list(states) == ["a", "b"]
    for name, row in states.items():
        for layer, state in enumerate(row):
            assert torch.equal(state.tensor, want[name][layer])
            assert state.tensor.is_contiguous()
            assert state.tensor.untyped_storage().nbytes() == state.tensor.nbytes
            assert state.fault == ""


def test_rows_that_were_written_again_are_taken_again(sheet: Sheet, pool: ThreadPoolExecutor) -> None:
    landing = Landing(pool, sheet)
    sheet.landed[0, 0] = 4
    until(lambda: (0, 0) in landing._copies)
    landing._copies[0, 0][1].result()
    sheet.revisions[0, 0] += 1
    sheet.places["a"][0].fill_(9)
    states = landing.finish({"a": [1, 0], "b": [0, 0]})
    assert bool((states["a"][0].tensor == 9).all())


def test_many_small_states_are_taken_together_and_stay_apart(pool: ThreadPoolExecutor) -> None:
    lengths = tuple(1 + number % 5 for number in range(300))
    layout = Layout(tuple(map(str, range(300))), lengths, layers=3, hidden_size=4, dtype=torch.float32)
    sheet = Sheet(layout, torch.zeros(layout.size, dtype=torch.uint8))
    sheet.rows.copy_(torch.arange(1, sheet.rows.numel() + 1).view(sheet.rows.shape))
    sheet.landed[:, ::2] = torch.tensor(lengths)[::2]  # half of them while the call goes on
    landing = Landing(pool, sheet)
    until(lambda: len(landing._copies) == 450)
    states = landing.finish({name: [0, 0, 0] for name in layout.requests})
    for name, place in sheet.places.items():
        assert torch.equal(torch.stack([state.tensor for state in states[name]]), place)
        assert all(state.tensor.untyped_storage().nbytes() == state.tensor.nbytes for state in states[name])


def test_what_ends_the_thread_that_takes_them_is_told(
    sheet: Sheet, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "submit", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Landing(pool, sheet).finish(NOTHING_AGAIN)


def test_what_came_in_the_reply_is_kept(sheet: Sheet, pool: ThreadPoolExecutor) -> None:
    own = torch.ones(4, 16)
    states = Landing(pool, sheet).finish({"a": [own, 0], "b": [0, 0]})
    assert states["a"][0] is own
    assert isinstance(states["a"][1], Landed)


def test_after_a_stop_nothing_reads_the_segment(sheet: Sheet, pool: ThreadPoolExecutor) -> None:
    landing = Landing(pool, sheet)
    sheet.landed.copy_(torch.tensor([[4, 3], [4, 3]]))
    landing.stop()
    assert not landing._poller.is_alive()
    assert not landing._copies
    landing.stop()


def test_a_request_that_the_worker_does_not_answer_for_is_an_error(sheet: Sheet, pool: ThreadPoolExecutor) -> None:
    landing = Landing(pool, sheet)
    with pytest.raises(KeyError):
        landing.finish({"a": [0, 0]})
    assert not landing._poller.is_alive()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, value: float) -> None:
    for at in (0, 1, 17, 511, 4095, 4099):
        state = torch.randn(4100).to(dtype)
        assert fault_of(state) == ""
        state[at] = value
        assert fault_of(state) == "holds values that are not finite"
        state[(at + 7) % 4100] = -value  # their sum is not infinite any more
        assert fault_of(state) == "holds values that are not finite"


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ([0.0, 0.0], "is all zero"),
        ([-0.0, 0.0], "is all zero"),
        ([0.0, 1e-30], ""),
        ([1.0, -1.0], ""),
        ([3e38, 3e38, 3e38], ""),
        ([-3e38, -3e38], ""),
        ([float("nan"), 0.0], "holds values that are not finite"),
    ],
)
def test_sums_that_come_to_zero_or_overflow_are_looked_into(values: list[float], fault: str) -> None:
    assert fault_of(torch.tensor(values, dtype=torch.bfloat16)) == fault


def test_half_precision_sums_overflow_without_a_fault() -> None:
    assert fault_of(torch.full((100, 100), 60000.0, dtype=torch.float16)) == ""


def test_stock_s_copy_is_the_tensor_itself_and_a_second_one_is_not() -> None:
    state = Landed(torch.ones(3, 2), "")
    first, second = state.clone().cpu(), state.clone().cpu()
    assert first is state.tensor
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_slices_of_requests_are_the_states_and_others_are_cut() -> None:
    pieces = [Landed(torch.arange(6.0).view(3, 2), ""), Landed(torch.arange(6.0, 10.0).view(2, 2), "")]
    joined = Joined(pieces)
    assert joined[0:3].clone().cpu() is pieces[0].tensor
    assert joined[3:5].clone().cpu() is pieces[1].tensor
    assert joined[2:4].clone().cpu().tolist() == [[4.0, 5.0], [6.0, 7.0]]
