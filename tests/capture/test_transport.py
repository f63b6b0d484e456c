"""Both ways give the driver the same tensors; shared memory is kept, grown and given back; without it, one warning."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3compat.capture import segment as segments
from eagle3compat.capture.rows import Step
from eagle3compat.capture.store import Store
from eagle3compat.engine.transport import Transport, chosen
from eagle3compat.errors import InputError, ResultError

HIDDEN, LAYERS = 16, (3, 1)
Prompts = Mapping[str, Sequence[int]]
SMALL: Prompts = {"a": [1, 2, 3], "b": [4, 5]}
LARGE: Prompts = {"c": list(range(70_000)), "d": [7]}


class Engine:
    """Two ranks, of which the first captures, in this process."""

    def __init__(self) -> None:
        model = SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.store = Store(LAYERS)
        self.calls: list[str] = []
        self.refuses = False
        self.missing = 0
        self.dtype = torch.float32

    def call(self, method: str, *args: Any) -> list[Any]:
        self.calls.append(method)
        if method == "eagle3compat_attach":
            if self.refuses:
                return ["PermissionError: no", ""]
            self.store.attach(*args)
            return ["", ""]
        reply = getattr(self.store, method.removeprefix("eagle3compat_"))(*args)
        return [reply, None]

    def run(self, prompts: Prompts) -> None:
        for name, prompt in prompts.items():
            count = len(prompt) - self.missing
            step = Step((name,), (count,))
            pieces = self.store.pieces(step, torch.arange(count), torch.tensor(prompt[:count]))
            for layer in LAYERS:
                self.store.put(layer, step, pieces, rows(name, prompt, layer)[:count].to(self.dtype))
            self.store.end_step()


def rows(name: str, prompt: Sequence[int], layer: int) -> torch.Tensor:
    return torch.tensor(prompt, dtype=torch.float32)[:, None] + torch.arange(HIDDEN) + 100 * layer + ord(name)


def extract(transport: Transport, engine: Engine, prompts: Prompts) -> dict[str, list[torch.Tensor]]:
    engine.store.clear()
    transport.begin(prompts, len(LAYERS))
    engine.run(prompts)
    states = transport.collect(prompts)
    return {name: [state.clone().cpu() for state in states[name]] for name in prompts}


def assert_right(states: Mapping[str, Sequence[torch.Tensor]], prompts: Prompts) -> None:
    assert list(states) == list(prompts)
    for name, prompt in prompts.items():
        for layer, state in zip(LAYERS, states[name], strict=True):
            assert torch.equal(state, rows(name, prompt, layer))
            assert not torch.equal(state, rows(name, prompt, layer + 1))
            assert state.untyped_storage().nbytes() == state.nbytes


def mapped() -> bool:
    return "memfd:eagle3compat" in Path("/proc/self/maps").read_text()


@pytest.fixture(autouse=True)
def _clean() -> None:
    """What earlier tests mapped is gone, though it hung in a circle of references."""
    gc.collect()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def transport(engine: Engine) -> Iterator[Transport]:
    made = Transport(engine, "auto")  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.mark.parametrize("choice", ["auto", "shared", "pickled"])
def test_both_ways_give_the_same(choice: str, engine: Engine) -> None:
    transport = Transport(engine, choice)  # type: ignore[arg-type]
    for prompts in (SMALL, LARGE, SMALL):
        assert_right(extract(transport, engine, prompts), prompts)
        assert transport.way == ("pickled" if choice == "pickled" else "shared")
    assert mapped() == (choice != "pickled")
    if transport._pool is not None:  # its threads leave the cores to the worker
        assert transport._pool.submit(torch.get_num_threads).result() == 1
    transport.close()


def test_shared_memory_is_kept_and_grown(transport: Transport, engine: Engine) -> None:
    attached = []
    for prompts in (SMALL, SMALL, LARGE, SMALL, LARGE):
        extract(transport, engine, prompts)
        attached.append(engine.calls.count("eagle3compat_attach"))
        assert Path("/proc/self/maps").read_text().count("memfd:eagle3compat") == 2  # both sides' map of the one
    assert attached == [1, 1, 3, 3, 3]  # the small one is given back before the large one is made


def test_results_outlive_shared_memory(transport: Transport, engine: Engine) -> None:
    states = extract(transport, engine, LARGE)
    extract(transport, engine, SMALL)
    transport.close()
    engine.store.attach(None)
    assert not mapped()
    assert_right(states, LARGE)


@pytest.mark.parametrize("fault", ["memory", "worker"])
def test_without_shared_memory_states_come_pickled_and_that_is_said_once(
    fault: str, transport: Transport, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "memory":
        monkeypatch.setattr(segments, "available_memory", lambda: 2**20)
    engine.refuses = fault == "worker"
    with caplog.at_level(logging.WARNING, "eagle3compat"):
        for prompts in (LARGE, SMALL):
            assert_right(extract(transport, engine, prompts), prompts)
    (record,) = caplog.records
    for words in ("pickled", "MiB", "docker run --memory", "fewer prompts", "EAGLE3COMPAT_TRANSPORT=pickled"):
        assert words in record.getMessage()
    assert ("9 MiB" if fault == "memory" else "PermissionError: no") in record.getMessage()


def test_a_call_that_is_too_large_does_not_spoil_the_next(
    transport: Transport, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "available_memory", lambda: 8 * 2**20)
    for prompts, way in ((SMALL, "shared"), (LARGE, "pickled"), (SMALL, "shared")):
        assert_right(extract(transport, engine, prompts), prompts)
        assert transport.way == way


def test_shared_memory_that_was_asked_for_and_cannot_be_had_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "available_memory", lambda: 2**20)
    with pytest.raises(InputError, match=r"EAGLE3COMPAT_TRANSPORT is 'shared', but 1 MiB of shared memory"):
        extract(Transport(engine, "shared"), engine, SMALL)  # type: ignore[arg-type]


def test_a_stream_of_another_dtype_comes_pickled_once(transport: Transport, engine: Engine) -> None:
    """Some models keep their residual stream in float32; the configuration tells their weights' dtype."""
    engine.dtype = torch.float64
    for way in ("pickled", "shared"):
        for layer, state in zip(LAYERS, extract(transport, engine, SMALL)["a"], strict=True):
            assert torch.equal(state, rows("a", SMALL["a"], layer).double())
        assert transport.way == way


def test_a_call_that_failed_leaves_shared_memory_usable(transport: Transport, engine: Engine) -> None:
    extract(transport, engine, LARGE)
    engine.missing = 1
    with pytest.raises(ResultError, match="only 2 of 3 rows of a were computed"):
        extract(transport, engine, SMALL)
    engine.missing = 0
    transport.begin(LARGE, len(LAYERS))
    transport.abandon()
    assert_right(extract(transport, engine, SMALL), SMALL)
    assert engine.calls.count("eagle3compat_attach") == 1


@pytest.mark.parametrize(("value", "choice"), [("", "auto"), ("shared", "shared"), (" PICKLED ", "pickled")])
def test_the_setting_is_read(value: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3COMPAT_TRANSPORT", value)
    assert chosen() == choice


def test_an_unknown_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3COMPAT_TRANSPORT", "fast")
    with pytest.raises(InputError, match=r"EAGLE3COMPAT_TRANSPORT is 'fast'\. Set it to auto, shared or pickled"):
        chosen()
