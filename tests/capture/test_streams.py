"""How a layer's return value is read, and which reading the final norm proves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle3compat.capture.proof import Normed, decide
from eagle3compat.capture.streams import distance, readings_of, shape_of, tolerance
from eagle3compat.errors import UnprovenCaptureError

ONE = torch.arange(12.0).reshape(3, 4)
OTHER = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("output", "shape", "readings"),
    [
        (ONE, "tensor", ["hidden"]),
        ((ONE, OTHER), "(tensor, tensor)", ["hidden + residual", "hidden", "residual"]),
        ([ONE, OTHER], "(tensor, tensor)", ["hidden + residual", "hidden", "residual"]),
        ((ONE, None), "(tensor, None)", ["hidden"]),
        ((ONE,), "(tensor)", ["hidden"]),
        ((ONE, OTHER, "x"), "(tensor, tensor, str)", ["hidden + residual", "hidden", "residual"]),
        ((None, ONE), "(None, tensor)", []),
        ((), "()", []),
        ({"hidden": ONE}, "dict", []),
        (None, "NoneType", []),
    ],
)
def test_shape_and_readings(output: Any, shape: str, readings: list[str]) -> None:
    assert shape_of(output) == shape
    assert [reading.name for reading in readings_of(output)] == readings


def test_a_second_tensor_of_another_shape_is_no_residual() -> None:
    assert [reading.name for reading in readings_of((ONE, torch.ones(3, 1)))] == ["hidden"]


def test_a_pair_with_a_second_tensor_of_another_shape_has_another_structure() -> None:
    """`(tensor, tensor)` is read as a sum: a tensor `[rows, 1]` in the second place would be added to every column."""
    assert shape_of((ONE, torch.ones(3, 1))) != shape_of((ONE, OTHER))


@pytest.mark.parametrize("output", [ONE, (ONE, None), (ONE, OTHER)])
def test_what_is_read_is_a_copy(output: Any) -> None:
    for reading in readings_of(output):
        read = reading(output)
        before = read.clone()
        for part in [output] if isinstance(output, torch.Tensor) else output:
            if part is not None:
                part.add_(100)
        assert torch.equal(read, before)
        ONE.sub_(100 if ONE[0, 0] >= 100 else 0)
        OTHER.sub_(100 if OTHER[0, 0] >= 100 else 0)


class Scale(torch.nn.Module):
    """A norm of a kind, in which every value shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def reading_of(output: Any, stream: torch.Tensor) -> str:
    """The reading of `output` under which its norm is that of `stream`."""
    return decide("Model", "Layer", output, [Normed(Scale(), stream * 2)]).name


@pytest.mark.parametrize(("entered", "name"), [(ONE + OTHER, "hidden + residual"), (ONE, "hidden")])
def test_the_reading_that_enters_the_norm_is_taken(entered: torch.Tensor, name: str) -> None:
    assert reading_of((ONE, OTHER), entered) == name


def test_batched_streams_are_compared_row_by_row() -> None:
    assert reading_of((ONE[None], OTHER[None]), ONE + OTHER) == "hidden + residual"


def test_no_reading_is_refused_with_the_distances() -> None:
    with pytest.raises(UnprovenCaptureError) as caught:
        reading_of((ONE, OTHER), ONE + 5)
    message = str(caught.value)
    assert "hidden states of Model cannot be captured: Layer returns (tensor, tensor)" in message
    assert "no reading of it equals what enters the final norm (hidden + residual: off by " in message
    assert caught.value.model == "Model"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_closer_reading_is_taken_where_one_value_dwarfs_the_rest(dtype: torch.dtype) -> None:
    """Language models have single activations a thousand times as large as the others."""
    stream = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    stream[0, 3] = 3000.0
    stale = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).to(dtype) * 0.1
    assert reading_of((stream, stale), stream) == "hidden"
    assert reading_of((stream, stale), stream + stale) == "hidden + residual"


def test_values_that_are_not_finite_prove_nothing() -> None:
    broken = torch.full((3, 4), float("nan"))
    with pytest.raises(UnprovenCaptureError):
        reading_of((ONE, OTHER), broken)
    assert not distance(broken, ONE) <= tolerance(torch.float32)


def test_a_wrong_value_is_not_hidden_by_a_huge_one() -> None:
    stream = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    stream[0, 3] = 30000.0
    wrong = stream.clone()
    wrong[5, 5] += 0.01
    assert distance(wrong, stream) > tolerance(torch.float32)


def test_distance_is_relative_to_each_value_and_the_median() -> None:
    assert distance(ONE, ONE) == 0
    assert distance(torch.tensor([1.0, 1.0, 3.3]), torch.tensor([1.0, 1.0, 3.0])) == pytest.approx(0.075)
    assert distance(ONE, ONE[:2]) == float("inf")
    assert distance(torch.zeros(2, 2), torch.zeros(2, 2)) == 0
