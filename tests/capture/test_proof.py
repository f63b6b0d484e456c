"""How each layer is read is proved by the norm after it, in models of every habit; what is not proved is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_recorder import assert_right
from toys import (
    LAYERS,
    PROMPTS,
    RANKS,
    Bare,
    Base,
    Deaf,
    Model,
    NormedPair,
    Runner,
    SecondRunner,
    Settled,
    Share,
    Stale,
    Triple,
    chunks,
    model_of,
    recording,
    reference,
    step,
    summed,
    whole,
)

from eagle3compat.capture.proof import Normed, decide
from eagle3compat.capture.recorder import Recorder
from eagle3compat.errors import UnprovenCaptureError

ROWS = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class DeafEnd(Base):
    """Hands a stale residual to a norm that ignores it: only what the norm makes tells that it does."""

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return self.norm(hidden, residual)[0]


def deaf() -> Model:
    model = Model(DeafEnd(*[Stale] * LAYERS))
    model.model.norm = Deaf()
    return model


@pytest.mark.parametrize("generation", [Runner, SecondRunner])
@pytest.mark.parametrize(
    ("kinds", "how"),
    [
        ([NormedPair], "hidden + residual"),
        ([Settled], "hidden"),
        ([Triple], "hidden + item 2"),
        ([NormedPair, Settled, NormedPair, Settled], "hidden + residual or hidden"),
        ([Settled, NormedPair, Bare, NormedPair], "hidden + residual or hidden"),
        ([Bare, Settled, NormedPair, Triple], "hidden or hidden + residual or hidden + item 2"),
    ],
)
def test_layers_of_differing_structure_are_each_proved_by_the_norm_after(
    kinds: list[Any], how: str, generation: type[Runner]
) -> None:
    runner, recorder = recording(model_of(*kinds), generation)
    for rows in chunks(PROMPTS, 4):
        runner.execute_model(step(rows))
    assert set((recorder.how or "").split(" or ")) == set(how.split(" or "))
    assert_right(runner, recorder)


def test_a_norm_that_ignores_the_residual_it_is_given() -> None:
    runner, recorder = recording(deaf())
    runner.execute_model(step(whole()))
    assert recorder.how == "hidden"
    assert_right(runner, recorder)


def test_what_enters_such_a_norm_would_be_taken_for_the_sum() -> None:
    """The control of the test above: the two tensors that it is called with add up to something else."""
    model, entered = deaf(), []
    model.model.norm.register_forward_pre_hook(lambda _module, args: entered.append(args[0] + args[1]))
    model(torch.tensor(PROMPTS["req_0_2"]), torch.arange(7))
    assert not torch.allclose(entered[0], reference(model.model, PROMPTS["req_0_2"])[-1], atol=1e-2)


class Blending(Base):
    """Changes the stream between its layers (Solar)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def blend(_module: torch.nn.Module, given: Any) -> Any:
            return given[0], given[1] * ROWS[0], given[2]

        handle = self.layers[1].register_forward_pre_hook(blend)
        try:
            return super().forward(*args, **kwargs)
        finally:
            handle.remove()


def test_a_model_that_changes_the_stream_between_layers_is_refused() -> None:
    runner, _recorder = recording(Model(Blending(*[NormedPair] * LAYERS)))
    with pytest.raises(UnprovenCaptureError, match=r"layer 0 \(NormedPair\) .* what enters the next layer's Norm"):
        runner.execute_model(step(whole()))


class Batched(Base):
    """Runs with a leading batch dimension (transformers' own models in vLLM)."""

    def forward(self, input_ids: Any, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> Any:
        return (super().forward(input_ids[None], positions[None]),)


class Unbatching(Model):
    def forward(self, input_ids: Any, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> Any:
        return super().forward(input_ids, positions, inputs_embeds)[0][0]


@pytest.mark.parametrize("kind", [NormedPair, Settled])
def test_a_leading_batch_dimension(kind: Any) -> None:
    runner, recorder = recording(Unbatching(Batched(*[kind] * LAYERS)))
    runner.padding = 3
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


def ranks(model: Model, files: bool = True) -> tuple[Runner, Recorder]:
    """A recorder that sums over ranks."""
    runner = Runner(model, PROMPTS)
    recorder = Recorder(runner, LAYERS, [2, 0, 3], files, reduce=summed, agree=list)
    recorder.store.begin(PROMPTS)
    return runner, recorder


def test_a_sum_over_the_ranks_that_is_left_to_the_next_layer_is_made() -> None:
    runner, recorder = ranks(model_of(Share))
    for rows in chunks(PROMPTS, 4):
        runner.execute_model(step(rows))
    assert recorder.how == "all-reduced hidden + residual"
    assert_right(runner, recorder)


@pytest.mark.parametrize("kind", [NormedPair, Settled, Stale])
def test_no_sum_is_made_where_none_is_left(kind: Any) -> None:
    runner, recorder = ranks(model_of(kind))
    runner.execute_model(step(whole()))
    assert "all-reduced" not in (recorder.how or "")
    assert_right(runner, recorder)


def test_without_the_sum_such_a_model_is_refused() -> None:
    runner, _recorder = recording(model_of(Share))
    with pytest.raises(UnprovenCaptureError, match=r"layer 3 \(Share\)"):
        runner.execute_model(step(whole()))


class Fused(Base):
    """Sums over the ranks and norms in one kernel: its final norm is never called as a module."""

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return self.norm.forward(hidden * RANKS, residual)[0]


def test_a_final_norm_that_a_fused_kernel_stands_in_for() -> None:
    runner, recorder = ranks(Model(Fused(*[Share] * LAYERS)))
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


class Unfinished(Base):
    """Returns the stream before its final norm."""

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return hidden if residual is None else hidden + residual


class NormingHead(Model):
    """Its head norms what the forward returned (Step 3.5)."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked = len(hidden)
        return self.model.norm(hidden) @ torch.ones(8, 3)


class ScalingHead(NormingHead):
    """Scales it before."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(3 * hidden)


class PlainHead(NormingHead):
    """Norms nothing."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.ones(8, 3)


@pytest.mark.parametrize("kind", [NormedPair, Bare])
def test_a_final_norm_in_the_head(kind: Any) -> None:
    runner, recorder = recording(NormingHead(Unfinished(*[kind] * LAYERS)))
    for rows in chunks(PROMPTS, 4):
        runner.execute_model(step(rows))
    assert_right(runner, recorder)
    assert runner.model.asked == 4


def test_a_final_norm_in_the_head_with_ranks_to_sum_over() -> None:
    runner, recorder = ranks(NormingHead(Unfinished(*[NormedPair] * LAYERS)))
    runner.execute_model(step(whole()))
    assert recorder.how == "hidden + residual"
    assert_right(runner, recorder)


@pytest.mark.parametrize("kind", [ScalingHead, PlainHead])
def test_a_head_that_does_not_norm_what_the_forward_returned_proves_nothing(kind: Any) -> None:
    runner, _recorder = recording(kind(Unfinished(*[NormedPair] * LAYERS)))
    with pytest.raises(UnprovenCaptureError, match="no final norm was seen after the last NormedPair, nor in its head"):
        runner.execute_model(step(whole()))


class Leaving(Base):
    """Returns something else than what its layers add up to."""

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return hidden * torch.arange(1, 9)


def test_what_the_head_norms_must_be_the_last_layer_s_stream() -> None:
    runner, _recorder = recording(NormingHead(Leaving(*[NormedPair] * LAYERS)))
    with pytest.raises(UnprovenCaptureError, match=r"layer 3 \(NormedPair\) returns"):
        runner.execute_model(step(whole()))


def test_a_rank_that_does_not_file_follows_only_where_it_must() -> None:
    for kind, calls in ((Share, 3), (NormedPair, 0)):
        runner, recorder = ranks(model_of(kind), files=False)
        runner.execute_model(step(whole()))
        sums: list[int] = []
        recorder.readings = {
            index: type(reading)(reading.items, lambda share, sums=sums: sums.append(1) or share)
            for index, reading in recorder.readings.items()
        }
        runner.execute_model(step(whole()))
        assert len(sums) == calls
        assert not recorder.store._states


def test_a_structure_that_changes_after_it_was_proved_is_refused() -> None:
    runner, recorder = recording(model_of(NormedPair))
    runner.execute_model(step(whole()))
    recorder.store.begin(PROMPTS)
    runner.model.model.layers[2].forward = lambda positions, hidden, residual: (hidden + residual, None)
    with pytest.raises(UnprovenCaptureError, match=r"layer 2 \(NormedPair\) returns \(tensor, None\), and returned"):
        runner.execute_model(step(whole()))


class Blind(torch.nn.Module):
    """Sees no factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (8,), eps=0.0)


def test_two_readings_that_fit_alike_are_refused() -> None:
    normed = [Normed(Blind(), Blind()(ROWS))]
    with pytest.raises(UnprovenCaptureError, match=r"of which .* and .* fit alike"):
        decide("Model", "Layer", (ROWS, ROWS.clone()), normed)


def test_the_one_tensor_that_entered_tells_them_apart() -> None:
    normed = [Normed(Blind(), Blind()(ROWS), ROWS)]
    assert decide("Model", "Layer", (ROWS, 2 * ROWS), normed).name == "hidden"
