"""Layers that scale the residual stream in float16 are refused, and only these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3compat.capture.scaled import refuse_scaled
from eagle3compat.errors import UnprovenCaptureError


class Plain(torch.nn.Module):
    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream


class Scaling(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.routed_scaling_factor = factor

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream / self.routed_scaling_factor if stream.dtype == torch.float16 else stream


def refuse(*layers: torch.nn.Module, dtype: torch.dtype = torch.float16) -> None:
    decoder: Any = SimpleNamespace(layers=torch.nn.ModuleList(layers))
    refuse_scaled("Model", decoder, SimpleNamespace(model_config=SimpleNamespace(dtype=dtype)))


def test_a_scaled_stream_is_refused_by_name_with_the_way_out() -> None:
    with pytest.raises(UnprovenCaptureError, match=r"Scaling divides .* \(2.5\).*bfloat16"):
        refuse(Plain(), Scaling(2.5))


@pytest.mark.parametrize("layer", [Plain(), Scaling(1.0)], ids=["no factor", "a factor of one"])
def test_others_are_not(layer: torch.nn.Module) -> None:
    refuse(layer)


def test_other_dtypes_are_not_scaled() -> None:
    refuse(Scaling(2.5), dtype=torch.bfloat16)


def test_a_runner_without_a_configuration_is_not_judged() -> None:
    decoder: Any = SimpleNamespace(layers=torch.nn.ModuleList([Scaling(2.5)]))
    refuse_scaled("Model", decoder, SimpleNamespace())
