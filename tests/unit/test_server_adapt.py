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

from eagle3compat.errors import IncompleteFileError
from eagle3compat.serverpath import adapt, answers
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

    def create_engine_config(self) -> EngineArgs:
        return self

    @classmethod
    def from_cli_args(cls, args: Any) -> EngineArgs:
        return cls()

    def settings(self) -> dict[str, Any]:
        module = self.kv_transfer_config.kv_connector_module_path
        names = ("enable_chunked_prefill", "enable_prefix_caching", "max_num_batched_tokens")
        return {**{name: getattr(self, name) for name in names}, "module": module}


UNTOUCHED = EngineArgs().settings()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for what holds answers, which needs vLLM; each call is noted."""
    calls: list[str] = []

    def hold() -> bool:
        calls.append("held")
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
        ("0.18.0", {}, False, 0),
        (
            "0.22.1",
            {"enable_chunked_prefill": False, "max_num_batched_tokens": None, "enable_prefix_caching": False},
            True, 3,
        ),
        ("0.26.0", {"module": adapt.OWN_CONNECTOR}, True, 2),
        ("0.32.0", {}, True, 1),
    ],
)  # fmt: skip
def test_a_server_gets_what_its_vllm_needs_and_says_each_in_a_line(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], held: list[str], caplog: pytest.LogCaptureFixture,
    vllm: str, changed: dict[str, Any], holds: bool, lines: int,
) -> None:  # fmt: skip
    on(monkeypatch, vllm)
    with caplog.at_level(logging.INFO, "vllm.eagle3compat"):
        assert watched().create_engine_config().settings() == {**UNTOUCHED, **changed}
    assert held == ["held"] * holds
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
    assert args.create_engine_config().settings() == before
    assert held == []


def test_what_the_user_has_set_so_already_is_neither_changed_nor_said(
    monkeypatch: pytest.MonkeyPatch, watched: type[EngineArgs], caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, "0.22.1")
    args = watched()
    args.enable_chunked_prefill = args.enable_prefix_caching = False
    with caplog.at_level(logging.INFO, "vllm.eagle3compat"):
        assert args.create_engine_config().max_num_batched_tokens == 512
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
    asyncio.run(asyncio.wait_for(answers.settled(str(tmp_path / "absent")), 5))


def test_facts_that_are_recorded_decide_for_each_release() -> None:
    kills = replace(SERVERS["0.32.0"], abort_kills=True)
    args = EngineArgs()
    adapt.adapt(args, replace(kills, background_write=False))
    assert args.settings() == {**UNTOUCHED, "module": adapt.OWN_CONNECTOR}
