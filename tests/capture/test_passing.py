"""The stream is what enters the next layer, whatever a model does between two layers, in whichever step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import (
    ASKED,
    HIDDEN,
    LAYERS,
    PROMPTS,
    Base,
    Model,
    NormedPair,
    Pair,
    Single,
    model_of,
    recording,
    reference,
    step,
    whole,
)

from eagle3compat.capture.passing import links_of, passed_on
from eagle3compat.errors import UnprovenCaptureError

SEEDED = torch.Generator().manual_seed(0)
ROWS = torch.randn(5, HIDDEN, generator=SEEDED)


class Deep(Base):
    """Adds `features` between its first layers, as Qwen3-VL adds those of an image; None: there is no image.

    What it adds makes a new tensor, or is written into the one that there is.
    """

    features: torch.Tensor | None = None
    in_place = False

    def forward(self, input_ids: Any, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> Any:
        hidden, residual = self.embed(input_ids) + 0.1 * positions[:, None], None
        self.entered = []
        for number, layer in enumerate(self.layers):
            output = layer(positions, hidden, residual)
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            if self.features is not None and number < 2:
                hidden = hidden.add_(self.features) if self.in_place else hidden + self.features
            self.entered.append(hidden.clone() if residual is None else hidden + residual)
        return self.norm(hidden) if residual is None else self.norm(hidden, residual)[0]


def run(runner: Any, recorder: Any, features: torch.Tensor | None) -> None:
    """One step of all prompts, of which what was recorded is what entered each next layer."""
    recorder.store.begin(PROMPTS)
    base = runner.model.model
    base.features = features
    runner.execute_model(step(whole()))
    start = 0
    for name, states in recorder.store.collect(list(PROMPTS)).items():
        rows = slice(start, start + len(PROMPTS[name]))
        start = rows.stop
        for layer, state in zip(ASKED, states, strict=True):
            torch.testing.assert_close(state, base.entered[layer][rows], rtol=1e-5, atol=1e-5)
            plain = reference(base, PROMPTS[name])[layer]
            assert torch.allclose(state, plain, atol=1e-4) == (features is None)  # the control


FEATURES = torch.randn(sum(map(len, PROMPTS.values())), HIDDEN, generator=SEEDED)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        (NormedPair, [None, FEATURES, None]),
        (NormedPair, [FEATURES, None, FEATURES]),
        (Pair, [None, FEATURES]),
        (Single, [None, FEATURES]),
    ],
)
def test_what_is_added_between_layers_is_in_the_stream(kind: Any, steps: list[Any], in_place: bool) -> None:
    runner, recorder = recording(Model(Deep(*[kind] * LAYERS)))
    runner.model.model.in_place = in_place
    for features in steps:
        run(runner, recorder, features)


@pytest.mark.parametrize("kind", [Pair, Single])
def test_without_a_norm_that_shows_it_an_image_is_refused(kind: Any) -> None:
    """The first batch has it, and layers have no norm: nothing shows what came in the place of what they returned."""
    runner, recorder = recording(Model(Deep(*[kind] * LAYERS)))
    recorder.store.begin(PROMPTS, leads={name: 1 for name in PROMPTS})
    runner.model.model.features = FEATURES
    with pytest.raises(UnprovenCaptureError, match="what an image adds is not seen"):
        runner.execute_model(step(whole()))


class Summing(Base):
    """Passes on one tensor of the two that a layer returns: their sum."""

    def forward(self, input_ids: Any, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> Any:
        hidden = self.embed(input_ids) + 0.1 * positions[:, None]
        for layer in self.layers:
            update, stream = layer(positions, hidden, None)
            hidden = update + stream
        return self.norm(hidden)


def test_where_it_cannot_be_seen_text_is_captured_and_images_are_refused() -> None:
    runner, recorder = recording(Model(Summing(*[NormedPair] * LAYERS)))
    runner.execute_model(step(whole()))
    assert recorder.how == "hidden + residual"
    recorder.store.clear()
    recorder.store.begin(PROMPTS, leads={"req_0_2": 1})
    with pytest.raises(UnprovenCaptureError, match=r"what layers \[0, 2, 3\] return is not what comes after them gets"):
        runner.execute_model(step(whole()))


def test_what_no_longer_follows_the_last_layer_is_refused() -> None:
    runner, _recorder = recording(model_of(NormedPair))
    runner.execute_model(step(whole()))
    base = runner.model.model
    base.finish = lambda hidden, residual: base.norm(hidden + 1, residual)[0]
    with pytest.raises(UnprovenCaptureError, match=r"what comes after layer 3 \(NormedPair\) no longer gets what"):
        runner.execute_model(step(whole()))


def test_items_are_found_among_the_arguments() -> None:
    hidden, residual, other = ROWS.clone(), ROWS.clone(), ROWS.clone()
    positions = torch.arange(5)
    assert links_of((hidden, residual), (positions, hidden, residual), {}) == {0: 1, 1: 2}
    assert links_of((hidden, residual), (), {"x": residual, "positions": positions, "y": hidden}) == {0: "y", 1: "x"}
    assert links_of((hidden, residual), (positions, other, residual), {}) == {1: 2, 0: 1}
    assert links_of((hidden, residual), (positions, other, residual), {}, replaced=False) == {1: 2}
    assert links_of((hidden, residual), (positions, other), {}) == {}
    assert links_of(hidden, (hidden, None), {"scale": torch.ones(5, 1)}) == {0: 0}
    assert links_of((hidden, None), (hidden,), {"extra": other}) == {0: 0}
    assert links_of({"hidden": hidden}, (hidden,), {}) == {}


def test_what_was_passed_on_is_taken_and_nothing_else() -> None:
    hidden, residual, other = ROWS.clone(), ROWS.clone(), ROWS.clone()
    found = passed_on((hidden, "x", residual), {0: 1, 2: "y"}, (None, other), {"y": residual})
    assert found[0] is other
    assert found[1:] == ("x", residual)
    assert passed_on(hidden, {0: 0}, (other,), {}) is other
    assert passed_on(hidden, {0: 0}, (other,), {}, replaced=False) is None
    assert passed_on(hidden, {0: 0}, (), {}) is None
    assert passed_on(hidden, {0: 0}, (other[:2],), {}) is None
    assert passed_on(hidden, {0: 0}, (other.double(),), {}) is None
