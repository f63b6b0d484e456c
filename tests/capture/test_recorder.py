"""Residual streams recorded from hooks equal a plain loop over the layers, or nothing is returned."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from toys import (
    ASKED,
    HIDDEN,
    PROMPTS,
    Pair,
    Runner,
    SecondRunner,
    Single,
    Stale,
    WithNone,
    chunks,
    model_of,
    recording,
    reference,
    step,
    whole,
)

from eagle3compat.capture.recorder import Recorder
from eagle3compat.capture.segment import Layout, Segment, Sheet
from eagle3compat.errors import ResultError, UnprovenCaptureError


def assert_right(runner: Runner, recorder: Recorder, asked: Sequence[int] = ASKED) -> None:
    """What was recorded is the reference, and neither its neighbouring layer nor its neighbouring row."""
    collected = recorder.store.collect(list(PROMPTS))
    assert list(collected) == list(PROMPTS)
    for name, prompt in PROMPTS.items():
        streams = reference(runner.model.model, prompt)
        assert len(collected[name]) == len(asked)
        for layer, state in zip(asked, collected[name], strict=True):
            assert state.shape == (len(prompt), HIDDEN)
            torch.testing.assert_close(state, streams[layer], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(state, streams[layer - 1 if layer else 1], atol=1e-2)
            assert not torch.allclose(state[1:], streams[layer][:-1], atol=1e-2)


@pytest.mark.parametrize("generation", [Runner, SecondRunner])
@pytest.mark.parametrize(
    ("kind", "reading"),
    [(Pair, "hidden + residual"), (Single, "hidden"), (WithNone, "hidden"), (Stale, "hidden")],
)
def test_streams_are_right(kind: Any, reading: str, generation: type[Runner]) -> None:
    runner, recorder = recording(model_of(kind), generation)
    runner.execute_model(step(whole()))
    assert recorder.how == reading
    assert_right(runner, recorder)


@pytest.mark.parametrize("name", ["last_hidden_state", "other"])
def test_a_model_that_returns_a_mapping_as_those_of_transformers(name: str) -> None:
    """Where vLLM wraps a whole multimodal model of transformers, the base within returns what it does there."""
    model = model_of(Single)
    finish = model.model.finish
    setattr(model.model, "finish", lambda hidden, residual: {name: finish(hidden, residual)})  # noqa: B010
    runner, recorder = recording(model)
    if name == "other":
        with pytest.raises(UnprovenCaptureError, match="its forward returns dict"):
            runner.execute_model(step(whole()))
        return
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


@pytest.mark.parametrize("kind", [Pair, Single])
def test_later_layers_do_write_into_what_earlier_ones_returned(kind: Any) -> None:
    """The control of the test above: with references kept instead of values, these models give wrong streams."""
    model, kept = model_of(kind), []
    model.model.layers[0].register_forward_hook(lambda _m, _a, output: kept.append(output))
    model(torch.tensor(PROMPTS["req_0_2"]), torch.arange(7))
    late = kept[0] if kind is Single else kept[0][0] + kept[0][1]
    assert not torch.allclose(late, reference(model.model, PROMPTS["req_0_2"])[0], atol=1e-2)


def test_the_sum_would_be_wrong_where_the_residual_is_stale() -> None:
    model, sums = model_of(Stale), []
    model.model.layers[2].register_forward_hook(lambda _m, _a, output: sums.append(output[0] + output[1]))
    model(torch.tensor(PROMPTS["req_0_2"]), torch.arange(7))
    assert not torch.allclose(sums[0], reference(model.model, PROMPTS["req_0_2"])[2], atol=1e-2)


@pytest.mark.parametrize("generation", [Runner, SecondRunner])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_chunks_of_prompts_in_any_order(size: int, generation: type[Runner]) -> None:
    runner, recorder = recording(model_of(Pair), generation)
    order = random.Random(size)
    for rows in chunks(PROMPTS, size):
        order.shuffle(rows)
        runner.execute_model(step(rows, sorted({name for name, _, _ in rows}, reverse=True)))
    assert_right(runner, recorder)


def test_the_scheduler_s_order_is_not_the_rows_order() -> None:
    """The control of the test above: the two orders differ, and by the scheduler's the rows would be others."""
    rows = whole()
    assert list(step(rows).num_scheduled_tokens) != [name for name, _, _ in rows]


@pytest.mark.parametrize("generation", [Runner, SecondRunner])
@pytest.mark.parametrize("kind", [Pair, Single])
def test_streams_go_to_shared_memory(kind: Any, generation: type[Runner]) -> None:
    """In chunks: those of the first batch, which proves, and later ones, whose rows leave from within the forward."""
    runner, recorder = recording(model_of(kind), generation)
    layout = Layout(tuple(PROMPTS), tuple(map(len, PROMPTS.values())), len(ASKED), HIDDEN, torch.float32)
    segment = Segment(layout.size)
    recorder.store.attach(segment.address)
    recorder.store.begin(PROMPTS, layout)
    for rows in chunks(PROMPTS, 2):
        runner.execute_model(step(rows))
    assert recorder.store.collect(list(PROMPTS)) == {name: [0] * len(ASKED) for name in PROMPTS}
    sheet = Sheet(layout, segment.data)
    for name, prompt in PROMPTS.items():
        streams = reference(runner.model.model, prompt)
        for row, layer in enumerate(ASKED):
            torch.testing.assert_close(sheet.places[name][row], streams[layer], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(sheet.places[name][row], streams[layer - 1 if layer else 1], atol=1e-2)
    segment.close_file()


@pytest.mark.parametrize("first", ["tail", "head"])
def test_chunks_of_one_prompt_in_any_order(first: str) -> None:
    runner, recorder = recording(model_of(Pair))
    parts = [[("req_0_2", 4, 3)], [("req_0_2", 0, 4)]]
    for rows in parts if first == "tail" else parts[::-1]:
        runner.execute_model(step(rows))
    runner.execute_model(step(whole()[1:]))
    assert_right(runner, recorder)


def test_rows_computed_again_after_preemption_take_the_place_of_the_first() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.execute_model(step([("req_0_2", 0, 5)]))
    runner.execute_model(step(whole()[1:]))
    runner.execute_model(step([("req_0_2", 0, 7)]))
    assert_right(runner, recorder)


def test_tokens_sampled_past_the_prompt_are_not_filed() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.execute_model(step(whole()))
    runner.execute_model(step([(name, len(prompt), 1) for name, prompt in PROMPTS.items()]))
    runner.execute_model(step([("req_0_10", 2, 3)]))
    assert_right(runner, recorder)


@pytest.mark.parametrize("kind", [Pair, Single])
def test_padding_rows_are_left_out(kind: Any) -> None:
    runner, recorder = recording(model_of(kind))
    runner.padding = 5
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


def test_padding_rows_that_are_not_finite_do_no_harm() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.padding, runner.dirt, runner.as_embeddings = 5, float("nan"), True
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


def test_embeddings_instead_of_token_ids_are_placed_by_position_and_said_to_be_unchecked() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.as_embeddings = True
    runner.execute_model(step(whole()))
    assert not recorder.checked_tokens
    assert_right(runner, recorder)


def test_rotary_positions_of_three_rows() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.rotary = True
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


IMAGES = {"req_0_2": (2, 5), "req_0_0": (0, 4)}
"""Where images are: a rotary embedding gives all tokens of one the same position, and the next ones follow that."""


def recording_images(generation: type[Runner] = Runner) -> tuple[Runner, Recorder]:
    runner, recorder = recording(model_of(Pair), generation)
    runner.rotary, runner.images, runner.as_embeddings = True, IMAGES, True
    recorder.store.begin(PROMPTS, leads={name: start for name, (start, _stop) in IMAGES.items()})
    return runner, recorder


@pytest.mark.parametrize("generation", [Runner, SecondRunner])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_rows_of_images_are_placed_by_what_is_computed(size: int, generation: type[Runner]) -> None:
    runner, recorder = recording_images(generation)
    order = random.Random(size)
    for rows in chunks(PROMPTS, size):
        order.shuffle(rows)
        runner.execute_model(step(rows, sorted(name for name, _, _ in rows)))
    for name, states in recorder.store.collect(list(PROMPTS)).items():
        positions = [runner.rotated(name, place) for place in range(len(PROMPTS[name]))]
        assert (positions != list(range(len(positions)))) == (name in IMAGES)
        streams = reference(runner.model.model, PROMPTS[name], positions)
        for layer, state in zip(ASKED, states, strict=True):
            torch.testing.assert_close(state, streams[layer], rtol=1e-5, atol=1e-5)
            assert not torch.allclose(state[1:], streams[layer][:-1], atol=1e-2)


def test_rotary_positions_of_an_image_that_was_not_announced_are_refused() -> None:
    runner, recorder = recording_images()
    recorder.store.clear()
    recorder.store.begin(PROMPTS)
    with pytest.raises(ResultError, match="the rows of req_0_2 do not have consecutive positions"):
        runner.execute_model(step(whole()))


@pytest.mark.parametrize("generation", [Runner, SecondRunner])
def test_what_is_computed_must_agree_with_the_positions_of_text(generation: type[Runner]) -> None:
    runner, _recorder = recording_images(generation)
    runner.ahead = 1
    with pytest.raises(ResultError, match="the rows of req_0_2 do not have consecutive positions"):
        runner.execute_model(step([("req_0_2", 0, 2)]))


def test_a_runner_that_does_not_say_what_it_has_computed_takes_no_images() -> None:
    runner, recorder = recording_images()
    runner.ahead = None
    with pytest.raises(ResultError, match="does not say how much of a prompt it has computed"):
        runner.execute_model(step(whole()))
    runner.images = {}
    recorder.store.clear()
    recorder.store.begin(PROMPTS)
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


@pytest.mark.parametrize("generation", [Runner, SecondRunner])
def test_tokens_from_which_the_runner_makes_embeddings_are_checked(generation: type[Runner]) -> None:
    runner, recorder = recording(model_of(Pair), generation)
    runner.as_embeddings = runner.says_tokens = True
    runner.execute_model(step(whole()))
    assert recorder.checked_tokens
    assert_right(runner, recorder)
    recorder.store.begin(PROMPTS)
    runner.wrong_token_at = 8
    with pytest.raises(ResultError, match="rows taken for req_0_10 were computed from other tokens than its prompt"):
        runner.execute_model(step(whole()))


def test_duplicated_and_unsorted_layer_ids_are_kept_once_in_the_order_asked() -> None:
    runner, recorder = recording(model_of(Pair), asked=[3, 1, 3, 0, 1])
    runner.execute_model(step(whole()))
    assert_right(runner, recorder, [3, 1, 0])


def test_a_dummy_run_records_nothing_and_proves_nothing() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.forward(whole())
    assert recorder.how is None
    with pytest.raises(ResultError, match="only 0 of 7 rows of req_0_2 were computed"):
        recorder.store.collect(list(PROMPTS))


def test_a_batch_of_others_is_left_alone() -> None:
    runner, recorder = recording(model_of(Pair))
    recorder.store.clear()
    runner.execute_model(step(whole()))
    assert recorder.how is None


def test_what_the_model_returns_is_untouched() -> None:
    plain, (runner, _recorder) = model_of(Pair), recording(model_of(Pair))
    want = Runner(plain, PROMPTS).execute_model(step(whole()))
    for _ in range(2):  # the first batch proves, the second does not
        assert torch.equal(runner.execute_model(step(whole())), want)


def test_two_calls_do_not_mix() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.execute_model(step(whole()))
    recorder.store.clear()
    recorder.store.begin(PROMPTS)
    with pytest.raises(ResultError, match="only 0 of"):
        recorder.store.collect(["req_0_0"])
    recorder.store.begin(PROMPTS)
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


def test_an_exception_in_the_model_leaves_the_recorder_usable() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.sampled = 10**6  # no such embedding
    with pytest.raises(IndexError):
        runner.execute_model(step([("req_0_10", 0, 4)]))
    runner.sampled = 3
    runner.execute_model(step(whole()))
    assert_right(runner, recorder)


def test_a_wrong_token_under_a_row_is_refused() -> None:
    runner, _recorder = recording(model_of(Pair))
    runner.wrong_token_at = 8
    with pytest.raises(ResultError, match="rows taken for req_0_10 were computed from other tokens than its prompt"):
        runner.execute_model(step(whole()))


def test_rows_that_were_never_computed_are_named_with_figures() -> None:
    runner, recorder = recording(model_of(Pair))
    runner.execute_model(step([("req_0_2", 0, 4)]))
    with pytest.raises(ResultError, match="only 4 of 7 rows of req_0_2 were computed"):
        recorder.store.collect(["req_0_2"])
