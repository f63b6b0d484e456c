"""A model whose residual stream cannot be shown to be one is refused, and nothing of it is returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import LAYERS, PROMPTS, Base, Keyed, Model, Pair, Single, Stale, WithNone, model_of, recording, step, whole

from eagle3compat.errors import ResultError, UnprovenCaptureError


class Scaled(Base):
    """Returns something else than its final norm."""

    def finish(self, hidden: Any, residual: Any) -> Any:
        return 2 * super().finish(hidden, residual)


class NoNorm(Base):
    """Has no final norm."""

    def finish(self, hidden: Any, residual: Any) -> Any:
        return hidden + residual


class Edited(Base):
    """Changes the stream between the last layer and the norm."""

    def finish(self, hidden: Any, residual: Any) -> Any:
        return super().finish(hidden * torch.arange(1, 9), residual)


class Skipping(Base):
    """Does not call its first layer."""

    def forward(self, input_ids: Any, positions: Any, inputs_embeds: Any = None) -> Any:
        self.layers[0].forward = lambda positions, hidden, residual: (hidden, None)
        layers, self._modules["layers"] = self.layers, self.layers[1:]
        try:
            return super().forward(input_ids, positions, inputs_embeds)
        finally:
            self._modules["layers"] = layers


@pytest.mark.parametrize(
    ("base", "says"),
    [
        (Scaled, "its forward returns something else than its final norm"),
        (NoNorm, "no final norm was seen after the last Pair"),
        (Edited, r"layer 3 \(Pair\) returns \(tensor, tensor\), and no reading of it equals what enters the final"),
        (Skipping, r"its forward did not call layers \[0\]"),
    ],
)
def test_a_model_whose_stream_cannot_be_proved_is_refused_each_time(base: type[Base], says: str) -> None:
    runner, recorder = recording(Model(base(*[Pair] * LAYERS)))
    for _ in range(2):
        with pytest.raises(UnprovenCaptureError, match=says):
            runner.execute_model(step(whole()))
    with pytest.raises(ResultError, match="only 0 of"):
        recorder.store.collect(list(PROMPTS))


@pytest.mark.parametrize(
    ("kinds", "returns"),
    [
        ((WithNone, WithNone, WithNone, Single), r"layer \d \(WithNone\) returns \(tensor, None\), the last .* tensor"),
        ((Stale, WithNone, Single, WithNone), r"layer \d \(\w+\) returns .*, the last layer \(tensor, None\)"),
        ((WithNone, WithNone, Keyed, WithNone), r"layer 2 \(Keyed\) returns dict, the last layer \(tensor, None\)"),
    ],
)
def test_layers_that_return_different_structures_are_refused_each_time(kinds: Any, returns: str) -> None:
    runner, recorder = recording(model_of(*kinds))
    for _ in range(2):
        with pytest.raises(UnprovenCaptureError, match=returns):
            runner.execute_model(step(whole()))
    with pytest.raises(ResultError, match="only 0 of"):
        recorder.store.collect(list(PROMPTS))


def test_layers_that_return_something_unreadable_are_refused() -> None:
    runner, _recorder = recording(model_of(Keyed))
    with pytest.raises(UnprovenCaptureError, match=r"layer 3 \(Keyed\) returns dict"):
        runner.execute_model(step(whole()))


class Looped(Base):
    """Runs its layers twice, as looped transformers do: which of the two passes is meant by a layer's id?"""

    def finish(self, hidden: Any, residual: Any) -> Any:
        for layer in self.layers:
            hidden, residual = layer(None, hidden, residual)
        return super().finish(hidden, residual)


def test_a_layer_that_runs_twice_in_one_forward_is_refused() -> None:
    runner, _recorder = recording(Model(Looped(*[Pair] * LAYERS)))
    with pytest.raises(UnprovenCaptureError):
        runner.execute_model(step(whole()))


def test_a_forward_without_positions_is_refused() -> None:
    class Bare(Model):
        def forward(self, input_ids: Any, where: Any) -> Any:  # type: ignore[override]
            return super().forward(input_ids, where)

    runner, _recorder = recording(Bare(Base(*[Pair] * LAYERS)))
    with pytest.raises(UnprovenCaptureError, match="gets no `positions`"):
        runner.execute_model(step(whole()))


@pytest.mark.parametrize("kind", [Pair, Single, WithNone, Stale])
def test_weights_that_are_not_finite_are_named_with_the_layer_where_that_begins(kind: Any) -> None:
    model = model_of(kind)
    model.model.layers[1].weight[2, 3] = float("nan")  # no layer that is asked for
    runner, recorder = recording(model, asked=[0, 3])
    with pytest.raises(UnprovenCaptureError) as caught:
        runner.execute_model(step(whole()))
    said = str(caught.value)
    assert "not finite (NaN or infinity), first in what decoder layer 1 returns" in said
    assert "its weight layers.1.weight holds such values. Nothing was returned. Fetch the checkpoint again" in said
    with pytest.raises(ResultError, match="only 0 of"):
        recorder.store.collect(list(PROMPTS))


def test_a_model_that_overflows_is_told_from_one_whose_weights_are_damaged() -> None:
    model = model_of(Pair)
    model.model.layers[2].update = lambda stream: stream / (stream - stream)
    runner, _recorder = recording(model)
    says = r"first in what decoder layer 2 .*No weight .* another dtype"
    with pytest.raises(UnprovenCaptureError, match=says):
        runner.execute_model(step(whole()))


def test_what_is_not_finite_in_rows_that_are_padding_is_nobody_s() -> None:
    class Padded(Base):
        def forward(self, input_ids: Any, positions: Any, inputs_embeds: Any = None) -> Any:
            returned = super().forward(input_ids, positions, inputs_embeds)
            returned[-1] = float("nan")
            return returned

    model = Model(Padded(*[Pair] * LAYERS))
    damaged = model.model
    from eagle3compat.capture.decoder import find_decoder
    from eagle3compat.capture.finite import FiniteWatch, refuse_unless_finite

    watch = FiniteWatch(find_decoder(model, LAYERS))
    returned = model(torch.tensor(PROMPTS["req_0_2"]), torch.arange(7))
    refuse_unless_finite("Padded", damaged, returned, 6, watch)
    with pytest.raises(UnprovenCaptureError, match="after its last decoder layer"):
        refuse_unless_finite("Padded", damaged, returned, 7, watch)
