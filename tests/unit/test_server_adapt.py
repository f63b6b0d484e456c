"""What is changed in a vLLM server, and in which; a small EngineArgs stands for vLLM's."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import sys
import types
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools import server_docs

from eagle3compat.errors import IncompatibleError, IncompleteFileError, InputError
from eagle3compat.serverpath import adapt, answers, connectors
from eagle3compat.serverpath.connectors import OWN, Connector
from eagle3compat.serverpath.facts import CONNECTOR, METHOD, ServerFacts

SERVERS, _ = server_docs.load()
TRANSFER = {"kv_connector": CONNECTOR, "kv_role": "kv_producer"}


class EngineArgs:
    """As much of vLLM's as the adapters touch."""

    def __init__(self, method: str = METHOD, **transfer: str) -> None:
        self.speculative_config = {"method": method}
        self.kv_transfer_config = SimpleNamespace(**{**TRANSFER, "kv_connector_module_path": None, **transfer})
        self.enable_chunked_prefill: bool | None = None
        self.enable_prefix_caching: bool | None = None
        self.max_num_batched_tokens: int | None = 512
        self.long_prefill_token_threshold = 0
        self.num_layers = 8

    def create_engine_config(self) -> Any:
        """As much of a VllmConfig as is looked at, with these arguments."""
        draft = SimpleNamespace(hf_config=SimpleNamespace(**{adapt.IDS: [2, 8]}))
        return SimpleNamespace(
            args=self, speculative_config=SimpleNamespace(draft_model_config=draft),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(num_hidden_layers=self.num_layers), architecture="LlamaForCausalLM"
            ),
        )  # fmt: skip

    @classmethod
    def from_cli_args(cls, args: Any) -> EngineArgs:
        return cls()

    def settings(self) -> dict[str, Any]:
        module, connector = self.kv_transfer_config.kv_connector_module_path, self.kv_transfer_config.kv_connector
        names = (
            "enable_chunked_prefill", "enable_prefix_caching", "max_num_batched_tokens", "long_prefill_token_threshold"
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "module": module, "connector": connector}


UNTOUCHED = EngineArgs().settings()
UNSPLIT = {"enable_chunked_prefill": False, "max_num_batched_tokens": None}
OUTLIVES, SURVIVES = (
    {"module": OWN, "connector": f"{first}:{connectors.STOCK}:{CONNECTOR}"} for first in ("Outlives", "Survives")
)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for what holds answers, which needs vLLM; each call is noted."""
    calls: list[str] = []

    def hold(locked: bool) -> bool:
        calls.append("held" if locked else "checked")
        return True

    monkeypatch.setattr(answers, "hold", hold)
    return calls


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, held: list[str]) -> type[EngineArgs]:
    """An EngineArgs of its own that has been adapted twice, in a process with the vLLM named by the test."""
    owner: Any = type("EngineArgs", (EngineArgs,), dict(vars(EngineArgs)))
    module = types.ModuleType(adapt.ARGUMENTS)
    module.EngineArgs = owner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, adapt.ARGUMENTS, module)
    adapt.watch()
    adapted = owner.create_engine_config
    adapt.watch()
    assert owner.create_engine_config is adapted
    found: type[EngineArgs] = owner
    return found


def on(monkeypatch: pytest.MonkeyPatch, vllm: str) -> None:
    found: ServerFacts = SERVERS[vllm]
    monkeypatch.setattr(adapt, "facts", lambda: found)


@pytest.mark.parametrize(
    ("vllm", "changed", "holds", "lines"),
    [
        ("0.19.1", {**UNSPLIT, **SURVIVES}, "checked", 2),
        ("0.22.1", {**UNSPLIT, "enable_prefix_caching": False}, "held", 3),
        ("0.26.0", OUTLIVES, "held", 2),
        ("0.32.0", {}, "held", 1),
    ],
)  # fmt: skip
def test_a_server_gets_what_its_vllm_needs_and_says_each_in_a_line(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], held: list[str], caplog: pytest.LogCaptureFixture,
    vllm: str, changed: dict[str, Any], holds: str, lines: int,
) -> None:  # fmt: skip
    on(monkeypatch, vllm)
    with caplog.at_level(logging.INFO, "vllm.eagle3compat"):
        assert watched().create_engine_config().args.settings() == {**UNTOUCHED, **changed}
    assert held == [holds]
    assert len(caplog.messages) == lines
    assert all(message.startswith("eagle3compat: ") for message in caplog.messages)


@pytest.mark.parametrize("args", [EngineArgs("eagle3"), EngineArgs(kv_connector="NixlConnector"),
                                  EngineArgs(kv_connector_module_path="their.module")])  # fmt: skip
def test_any_other_server_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], held: list[str], args: EngineArgs
) -> None:
    on(monkeypatch, "0.22.1")
    before = args.settings()
    args.__class__ = watched
    assert args.create_engine_config().args.settings() == before
    assert held == []


def test_what_the_user_has_set_so_already_is_neither_changed_nor_said(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, "0.22.1")
    args = watched()
    args.enable_chunked_prefill = args.enable_prefix_caching = False
    with caplog.at_level(logging.INFO, "vllm.eagle3compat"):
        assert args.create_engine_config().args.max_num_batched_tokens == 512
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("vllm", "method", "opened"), [("0.32.0", METHOD, True), ("0.32.0", "eagle3", False),
                                                        ("0.26.0", METHOD, False)])  # fmt: skip
def test_the_render_endpoint_is_opened_where_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], vllm: str, method: str, opened: bool
) -> None:
    on(monkeypatch, vllm)
    args = SimpleNamespace(
        speculative_config={"method": method}, kv_transfer_config=TRANSFER, enable_scale_out=False
    )
    assert isinstance(watched.from_cli_args(args), EngineArgs)
    assert args.enable_scale_out is opened


def test_a_prompt_is_split_by_no_setting(monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs]) -> None:
    on(monkeypatch, "0.19.1")
    args = watched()
    args.enable_chunked_prefill, args.long_prefill_token_threshold = False, 64
    settings = args.create_engine_config().args.settings()
    assert (settings["long_prefill_token_threshold"], settings["max_num_batched_tokens"]) == (0, 512)


@pytest.mark.parametrize(("vllm", "skipped", "changed"), [
    ("0.19.1", "server_chunks,server_writes", {}),
    ("0.22.1", "server_prefix_caching,server_answers", UNSPLIT),
    ("0.26.0", "server_aborts", {}),
])  # fmt: skip
def test_what_the_environment_skips_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], held: list[str], caplog: pytest.LogCaptureFixture,
    vllm: str, skipped: str, changed: dict[str, Any],
) -> None:  # fmt: skip
    on(monkeypatch, vllm)
    monkeypatch.setenv("EAGLE3COMPAT_SKIP", skipped)
    assert watched().create_engine_config().args.settings() == {**UNTOUCHED, **changed}
    assert held == ["held"] * (vllm == "0.26.0")
    for name in skipped.split(","):
        assert f"{name} is needed here and left out" in caplog.text


def test_a_skipped_render_endpoint_stays_closed(monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs]) -> None:
    on(monkeypatch, "0.32.0")
    monkeypatch.setenv("EAGLE3COMPAT_SKIP", "server_render, results")
    args = SimpleNamespace(
        speculative_config={"method": METHOD}, kv_transfer_config=TRANSFER, enable_scale_out=False
    )
    watched.from_cli_args(args)
    assert args.enable_scale_out is False


def test_a_vllm_without_the_method_becomes_this_librarys_server(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs]
) -> None:
    on(monkeypatch, "0.16.0")
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, words: started.append(words[1:]))
    monkeypatch.setattr(sys, "argv", ["main.py", "serve", "model", "--port", "1"])
    other = SimpleNamespace(speculative_config={"method": "eagle3"}, kv_transfer_config=TRANSFER)
    asked = SimpleNamespace(speculative_config={"method": METHOD}, kv_transfer_config=TRANSFER)
    watched.from_cli_args(other)
    monkeypatch.setenv("EAGLE3COMPAT_SKIP", "server_takeover")
    watched.from_cli_args(asked)
    monkeypatch.delenv("EAGLE3COMPAT_SKIP")
    on(monkeypatch, "0.17.1")
    watched.from_cli_args(asked)
    assert started == []
    on(monkeypatch, "0.16.0")
    watched.from_cli_args(asked)
    assert started == [["-m", "eagle3compat", "serve", "model", "--port", "1"]]


def test_an_id_to_skip_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3COMPAT_SKIP", "server_chunk")
    with pytest.raises(InputError, match=r"there is no adapter 'server_chunk'.*server_chunks"):
        adapt.watch()


class Stock:
    """As much of vLLM's connector as is looked at."""

    def request_finished(self) -> None: ...
    def _write_tensors(self) -> None: ...


class Fp8(Stock):
    """As hs-connectors 0.9.0 has it."""

    @staticmethod
    def _write_tensors() -> None: ...


class Saves(Stock):
    def request_finished(self) -> None: ...


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> type[Stock]:
    """The modules of vLLM's connector and of those that inherit from it; the class that stands for vLLM's."""
    stock, module = types.ModuleType(connectors.STOCK), types.ModuleType("theirs")
    stock.ExampleHiddenStatesConnector = Stock  # type: ignore[attr-defined]
    module.Fp8, module.Saves, module.Other = Fp8, Saves, EngineArgs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, connectors.STOCK, stock)
    monkeypatch.setitem(sys.modules, "theirs", module)
    return Stock


def their(name: str) -> EngineArgs:
    return EngineArgs(kv_connector=name, kv_connector_module_path="theirs")


def test_a_connector_that_only_writes_otherwise_is_adapted_as_vllms_own(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], theirs: type[Stock], held: list[str]
) -> None:
    args = their("Fp8")
    args.__class__ = watched
    on(monkeypatch, "0.22.1")
    assert args.create_engine_config().args.enable_prefix_caching is False
    on(monkeypatch, "0.26.0")
    args.create_engine_config()
    assert args.kv_transfer_config.kv_connector == "Outlives:theirs:Fp8"
    assert args.kv_transfer_config.kv_connector_module_path == OWN
    assert held == ["held", "held"]


@pytest.mark.parametrize("name", ["Saves", "Other", "Absent"])
def test_a_connector_that_is_no_such_is_left_alone(theirs: type[Stock], name: str) -> None:
    assert connectors.connector_of(their(name)) is None


@pytest.mark.parametrize("mode", ["strict", "warn"])
def test_a_connector_whose_writing_would_not_be_called_is_refused(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], theirs: type[Stock],
    caplog: pytest.LogCaptureFixture, mode: str,
) -> None:  # fmt: skip
    monkeypatch.delattr(theirs, "_write_tensors")
    monkeypatch.setenv("EAGLE3COMPAT", mode)
    on(monkeypatch, "0.19.1")
    args = their("Fp8")
    args.__class__ = watched
    if mode == "strict":
        with pytest.raises(IncompatibleError, match=r"would not be quantized.*--hidden-states-backend file"):
            args.create_engine_config()
    else:
        args.create_engine_config()
        assert "would not be quantized" in caplog.text


@pytest.mark.parametrize(("vllm", "layers", "refused"), [
    ("0.17.1", 8, True), ("0.17.1", 9, False), ("0.19.1", 8, False),
])  # fmt: skip
def test_a_last_layer_that_is_never_taken_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], vllm: str, layers: int, refused: bool
) -> None:
    monkeypatch.setenv("EAGLE3COMPAT", "strict")
    on(monkeypatch, vllm)
    args = watched()
    args.num_layers = layers
    if not refused:
        args.create_engine_config()
        return
    with pytest.raises(IncompatibleError, match=r"the last layer's output.*eagle3compat serve"):
        args.create_engine_config()


def test_a_model_whose_last_layer_is_never_taken_is_known_by_its_file(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs]
) -> None:
    registry: Any = types.ModuleType("registry")
    held = {"LlamaForCausalLM": SimpleNamespace(module_name="vllm.model_executor.models.deepseek_v2")}
    registry.ModelRegistry = SimpleNamespace(models=held)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.registry", registry)
    monkeypatch.setenv("EAGLE3COMPAT", "strict")
    on(monkeypatch, "0.19.1")
    with pytest.raises(IncompatibleError, match="of deepseek_v2"):
        watched().create_engine_config()


def test_nothing_happens_where_vllm_has_not_read_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, adapt.ARGUMENTS, raising=False)
    adapt.watch()


def written(path: Path, missing: int = 0) -> Path:
    """A file in the layout of safetensors, `missing` bytes short."""
    header = json.dumps({"hidden_states": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(8)
    path.write_bytes(data[: len(data) - missing])
    return path


@pytest.mark.parametrize("missing", [0, 1, 8, 40, 80])
def test_a_file_is_whole_if_it_is_as_long_as_its_header_says(tmp_path: Path, missing: int) -> None:
    assert answers.is_whole(str(written(tmp_path / "a.safetensors", missing))) is (missing == 0)


def test_a_file_that_is_not_there_is_not_whole(tmp_path: Path) -> None:
    assert not answers.is_whole(str(tmp_path / "absent"))


async def outputs(path: str) -> list[tuple[Any, bool]]:
    """What a held engine yields, and whether the file was whole then; its writer ends a moment after the answer."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def write() -> None:
        if "fails" not in path:
            written(Path(path))
        os.close(lock)

    async def generate(engine: object, name: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(finished=False, kv_transfer_params=None)
        asyncio.get_running_loop().call_later(0.05, write)
        yield SimpleNamespace(finished=True, kv_transfer_params={"hidden_states_path": path})

    held = answers.holding(generate)
    return [(output, answers.is_whole(path)) async for output in held(object(), "request")]


def test_an_answer_is_held_until_its_file_is_whole(tmp_path: Path) -> None:
    found = asyncio.run(outputs(str(tmp_path / "a.safetensors")))
    assert [(output.finished, whole) for output, whole in found] == [(False, False), (True, True)]
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_writer_that_fails_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    written(tmp_path / "fails.safetensors", missing=3)
    with pytest.raises(IncompleteFileError, match="not written to its end"):
        asyncio.run(outputs(str(tmp_path / "fails.safetensors")))
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(answers.settled(str(tmp_path / "absent")), 60))


@pytest.mark.parametrize("missing", [0, 3])
def test_a_file_that_was_written_before_the_answer_is_looked_at_all_the_same(tmp_path: Path, missing: int) -> None:
    file = written(tmp_path / "a.safetensors", missing)
    if not missing:
        asyncio.run(answers.settled(str(file), locked=False))
        return
    with pytest.raises(IncompleteFileError):
        asyncio.run(answers.settled(str(file), locked=False))
    assert not file.exists()


def test_facts_that_are_recorded_decide_for_each_release() -> None:
    kills = replace(SERVERS["0.32.0"], abort_kills=True)
    args = EngineArgs()
    adapt.adapt(args, replace(kills, background_write=False), Connector(CONNECTOR))
    assert args.settings() == {**UNTOUCHED, **OUTLIVES}
