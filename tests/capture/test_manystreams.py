"""Models with several residual streams: vLLM's own auxiliary states are taken, counted from 1 there, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import LAYERS, PROMPTS, Base, Layer, Model, NormedPair, Runner, chunks, model_of, recording, step, whole

from eagle3compat.capture.manystreams import has_many_streams
from eagle3compat.capture.recorder import Recorder
from eagle3compat.errors import UnprovenCaptureError

STREAMS = 2


class Connected(Layer):
    """Mixes the streams `[rows, STREAMS, HIDDEN]`."""

    def __init__(self) -> None:
        super().__init__()
        self.hc_mult = STREAMS

    def forward(self, streams: torch.Tensor) -> Any:
        return streams + self.update(streams.mean(1, keepdim=True)), None, None, None


class Connecting(Base):
    """Hands out the mean of its streams where an EAGLE-3 draft wants them."""

    wanted: tuple[int, ...] = ()

    def forward(self, input_ids: Any, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> Any:
        embedded = self.embed(input_ids) + 0.1 * positions[:, None]
        streams = torch.stack([embedded, 2 * embedded], 1)
        states = []
        for number, layer in enumerate(self.layers, 1):
            streams = layer(streams)[0]
            if number in self.wanted:
                states.append(streams.mean(1))
        hidden = self.norm(streams.sum(1))
        return (hidden, states) if states else hidden


class Handing(Model):
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.model.wanted = layers


def expected(base: Base, prompt: list[int]) -> list[torch.Tensor]:
    mean = 1.5 * (base.embed.weight[torch.tensor(prompt)] + 0.1 * torch.arange(len(prompt))[:, None])
    means = []
    for layer in base.layers:
        mean = mean + layer.update(mean)
        means.append(mean)
    return means


def connected(kind: type[Model] = Handing) -> Model:
    return kind(Connecting(*[Connected] * LAYERS))


def test_the_states_that_vllm_hands_to_a_draft_are_taken() -> None:
    runner, recorder = recording(connected())
    for rows in chunks(PROMPTS, 4):
        runner.execute_model(step(rows))
    collected = recorder.store.collect(list(PROMPTS))
    assert recorder.how == "vLLM's auxiliary hidden states"
    for name, prompt in PROMPTS.items():
        want = expected(runner.model.model, prompt)
        for layer, state in zip([2, 0, 3], collected[name], strict=True):
            torch.testing.assert_close(state, want[layer], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(state, want[layer - 1 if layer else 1], atol=1e-2)


def test_the_runner_gets_what_it_would_get_without() -> None:
    plain = Runner(connected(), PROMPTS).execute_model(step(whole()))
    runner, _recorder = recording(connected())
    assert torch.equal(runner.execute_model(step(whole())), plain)
    assert torch.equal(runner.forward(whole()), plain)  # a dummy run


def test_a_model_that_hands_out_none_is_refused_before_any_batch() -> None:
    with pytest.raises(UnprovenCaptureError, match="several residual streams and does not say which"):
        recording(connected(Model))


def test_a_layer_that_is_not_handed_out_is_refused() -> None:
    class Forgetful(Handing):
        def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            super().set_aux_hidden_state_layers(layers[:-1])

    runner, _recorder = recording(connected(Forgetful))
    with pytest.raises(UnprovenCaptureError, match=r"for layers \[0, 2, 3\] it hands out 2 states"):
        runner.execute_model(step(whole()))


def on_two_ranks(other: float, asked: list[int]) -> tuple[Runner, Recorder]:
    """A recorder on one of two ranks; the other's states are `other` times as large."""
    runner = Runner(connected(), PROMPTS)

    def reduce(share: torch.Tensor) -> torch.Tensor:
        return share * (2 if share.numel() == 1 else 1 + other)

    recorder = Recorder(runner, LAYERS, asked, reduce=reduce, agree=list)
    recorder.store.begin(PROMPTS)
    return runner, recorder


def test_states_that_are_the_same_on_all_ranks_are_taken() -> None:
    runner, recorder = on_two_ranks(1.0, [2, 0, 3])
    for rows in chunks(PROMPTS, 4):
        runner.execute_model(step(rows))
    for name, prompt in PROMPTS.items():
        want = expected(runner.model.model, prompt)
        for layer, state in zip([2, 0, 3], recorder.store.collect([name])[name], strict=True):
            torch.testing.assert_close(state, want[layer], rtol=1e-5, atol=1e-5)


def test_states_that_are_a_rank_s_share_are_refused() -> None:
    runner, _recorder = on_two_ranks(0.5, [2, 0])
    with pytest.raises(UnprovenCaptureError, match=r"for layers \[0, 2\] differ from one tensor-parallel rank"):
        runner.execute_model(step(whole()))


@pytest.mark.parametrize(
    ("name", "value", "many"),
    [
        ("hc_mult", 4, True),
        ("attn_hc", torch.nn.Identity(), True),
        ("use_attn_res", True, True),
        ("mhc_post", torch.nn.Identity(), True),
        ("use_attn_res", False, False),
        ("attn_res_block_size", None, False),
        ("hcache", 4, False),
        ("arch_config", 4, False),
    ],
)
def test_what_tells_that_there_are_many(name: str, value: Any, many: bool) -> None:
    _runner, recorder = recording(model_of(NormedPair))
    setattr(recorder.decoder.layers[-1], name, value)
    assert has_many_streams(recorder.decoder) == many
