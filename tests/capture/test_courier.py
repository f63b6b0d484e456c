"""Rows arrive whole at their places, in order, while the device goes on; the CUDA part needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eagle3compat.capture.courier import Direct, SideStream, courier_for
from eagle3compat.capture.segment import Segment

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch calls cuda")
ROWS, HIDDEN = 2000, 4096


def test_rows_are_there_when_send_returns_on_the_cpu() -> None:
    rows, place, done = torch.randn(3, 4), torch.zeros(3, 4), []
    courier = courier_for(rows.device)
    assert isinstance(courier, Direct)
    courier.send([(rows, place)], lambda: done.append(torch.equal(place, rows)))
    assert done == [True]


@pytest.fixture(params=["registered", "staged"])
def memory(request: pytest.FixtureRequest) -> Iterator[tuple[SideStream, torch.Tensor]]:
    courier = SideStream(torch.device("cuda", 0))
    segment = Segment(8 * ROWS * HIDDEN * 2)
    segment.close_file()
    if request.param == "registered":
        courier.adopt(segment.data)
        assert courier._registered is not None, "shared memory could not be registered with CUDA"
    yield courier, segment.data[: 8 * ROWS * HIDDEN * 2].view(torch.bfloat16).view(8, ROWS, HIDDEN)
    courier.settle()
    courier.adopt(None)


@cuda
def test_rows_arrive_though_their_memory_is_used_again_at_once(memory: tuple[SideStream, torch.Tensor]) -> None:
    courier, places = memory
    arrived: list[int] = []
    want = []
    for number in range(8):
        rows = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
        want.append(rows.cpu())
        kept = rows.clone()
        courier.send([(kept[:1000], places[number, :1000]), (kept[1000:], places[number, 1000:])],
                     lambda number=number: arrived.append(number))
        del kept
        torch.full((ROWS, HIDDEN), -1.0, device="cuda", dtype=torch.bfloat16)  # would get the memory just freed
    courier.settle()
    assert arrived == list(range(8))
    for number in range(8):
        assert torch.equal(places[number].view(torch.int16), want[number].view(torch.int16))


@cuda
def test_the_device_s_later_work_is_not_waited_for(memory: tuple[SideStream, torch.Tensor]) -> None:
    courier, places = memory
    rows = torch.randn(ROWS, HIDDEN, device="cuda").bfloat16()
    courier.send([(rows, places[0])], lambda: None)
    torch.cuda._sleep(2**33)
    later = torch.cuda.Event()
    later.record()
    courier.settle()
    assert not later.query(), "the copy waited for what was queued after it"
    assert torch.equal(places[0], rows.cpu())


@cuda
def test_rows_are_not_read_before_they_are_computed(memory: tuple[SideStream, torch.Tensor]) -> None:
    courier, places = memory
    rows = torch.zeros(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    torch.cuda._sleep(2**28)
    rows.fill_(3)
    courier.send([(rows, places[0])], lambda: None)
    courier.settle()
    assert bool((places[0] == 3).all())


@cuda
def test_places_may_be_made_within_the_forward() -> None:
    courier = SideStream(torch.device("cuda", 0))
    with torch.inference_mode():
        rows = torch.randn(ROWS, HIDDEN, device="cuda")
        place = torch.empty(ROWS, HIDDEN)
        courier.send([(rows, place)], lambda: None)
        courier.settle()
        assert torch.equal(place, rows.cpu())


@cuda
def test_an_error_of_a_send_is_raised_once(memory: tuple[SideStream, torch.Tensor]) -> None:
    courier, _places = memory

    def fail() -> None:
        raise ValueError("no")

    courier.send([], fail)
    with pytest.raises(ValueError, match="no"):
        courier.settle()
    courier.settle()
    courier.send([], fail)
    courier.abandon()
    courier.settle()


@cuda
def test_memory_that_cannot_be_registered_leaves_no_error_behind() -> None:
    courier = SideStream(torch.device("cuda", 0))
    data = Segment(2**20).data
    courier.adopt(data)
    other = SideStream(torch.device("cuda", 0))
    other.adopt(data)  # registered already
    assert other._registered is None
    assert int(torch.ones(3, device="cuda").sum()) == 3
    courier.adopt(None)
