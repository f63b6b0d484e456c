"""`eagle3compat serve` without vLLM: layer ids, files that are whole or not there, batches, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle3compat import detect
from eagle3compat.cli import main
from eagle3compat.errors import InputError, WorkerError
from eagle3compat.serve.arguments import Asked, chosen_ids
from eagle3compat.serve.batches import Batches, Job, StoppingError
from eagle3compat.serve.chat import Tokens, cut, plain
from eagle3compat.serve.files import Folder, WriteError

SECONDS = 120
"""For what comes at once, on a machine that may stand still in between."""


def asked(ids: tuple[int, ...] | None, last_layer: bool = True) -> Asked:
    return Asked({}, ids, last_layer, Path("/tmp"), True, 8, "", 8000, ("m",), ())


@pytest.mark.parametrize(
    ("ids", "last_layer", "layers", "chosen"),
    [
        (None, True, 32, (2, 16, 29, 32)),
        ((2, 3), True, 6, (2, 3, 6)),
        ((2, 6), True, 6, (2, 6)),
        ((2, 3), False, 6, (2, 3)),
        ((6, 2), False, 6, (2, 6)),
    ],
)
def test_layer_ids_are_the_launchers(ids: Any, last_layer: bool, layers: int, chosen: tuple[int, ...]) -> None:
    assert chosen_ids(asked(ids, last_layer), layers) == chosen


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ((0, 2), "layer id 0 is the embeddings"),
        ((2, 7), "layer id 7 is out of range: the model has 6 layers"),
        ((-1, 2), "layer id -1 is out of range"),
        ((2, 2), r"layer ids \[2, 2, 6\] name 2 twice. Pass"),
        (None, r"layer ids \[2, 3, 3, 6\] name 3 twice, as the launcher's defaults do for a model of fewer than 7"),
    ],
)
def test_layer_ids_that_cannot_be_served_are_named(ids: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        chosen_ids(asked(ids), 6)


def safetensors(monkeypatch: pytest.MonkeyPatch, save: Any) -> None:
    module = ModuleType("safetensors.torch")
    module.save_file = save  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "safetensors", ModuleType("safetensors"))
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)


def saves(tensors: dict[str, Any], path: Path) -> None:
    path.write_text(str(sorted(tensors)))


def breaks(tensors: dict[str, Any], path: Path) -> None:
    path.write_text("half")
    raise ValueError("No space left on device")


def found(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".eagle3compat-"))


def test_a_file_appears_whole_with_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors(monkeypatch, saves)
    folder = Folder(tmp_path / "new", lock=True)
    path = folder.write("a", {"x": 1})
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("['x']", 0o644)
    assert found(folder.path) == ["a.safetensors", "a.safetensors.lock"]
    folder.close()
    assert sorted(folder.path.iterdir()) == [path, Path(f"{path}.lock")]


def test_without_locks_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors(monkeypatch, saves)
    Folder(tmp_path, lock=False).write("a", {})
    assert found(tmp_path) == ["a.safetensors"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors(monkeypatch, breaks)
    folder = Folder(tmp_path, lock=True)
    with pytest.raises(WriteError, match="could not be written: ValueError: No space left on device"):
        folder.write("a", {})
    assert found(tmp_path) == []
    safetensors(monkeypatch, saves)
    assert folder.write("a", {}).exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from types import ModuleType
from eagle3compat.serve.files import Folder

def save_file(tensors, path):
    Path(path).write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

sys.modules["safetensors"] = ModuleType("safetensors")
sys.modules["safetensors.torch"] = module = ModuleType("safetensors.torch")
module.save_file = save_file
Folder(Path(sys.argv[1]), True).write("a", {})
"""


def test_what_a_killed_server_was_writing_has_no_final_name_and_is_swept(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == -9
    (left,) = tmp_path.iterdir()
    assert (left / "a").read_text() == "half"
    (tmp_path / "b.safetensors.lock").touch()
    (tmp_path / "c.safetensors").touch()
    (tmp_path / "c.safetensors.lock").touch()
    folder = Folder(tmp_path, True)
    assert (folder.swept, left.exists()) == (2, False)
    assert found(tmp_path) == ["c.safetensors", "c.safetensors.lock"]
    assert Folder(tmp_path, True).swept == 0, "a server that is running was swept"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"files cannot be written to .*file/x"):
        Folder(tmp_path / "file" / "x", True)


class FakeExtractor:
    """Computes the length of a prompt; `bad` prompts end the call that they are in."""

    def __init__(self) -> None:
        self.step_tokens, self.dead = 10, ""
        self.calls: list[list[str]] = []
        self.features: dict[str, Any] = {}
        self.entered, self.go = threading.Event(), threading.Event()

    def extract(self, prompts: dict[str, list[int]], features: dict[str, Any]) -> dict[str, Any]:
        self.entered.set()
        assert self.go.wait(SECONDS)
        self.calls.append(list(prompts))
        self.features.update(features)
        if any("bad" in name for name in prompts):
            raise WorkerError("extracting", "ValueError", "bad", "", "the engine", "")
        if any("fatal" in name for name in prompts):
            self.dead = "its worker ended."
            raise WorkerError("extracting", "ValueError", "fatal", "", "the engine", "")
        return {name: InputError("none") if "none" in name else {"n": len(ids)} for name, ids in prompts.items()}


@pytest.fixture
def extractor() -> FakeExtractor:
    return FakeExtractor()


@pytest.fixture
def deaths() -> list[str]:
    return []


@pytest.fixture
def batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extractor: FakeExtractor, deaths: list[str]
) -> Iterator[Batches]:
    safetensors(monkeypatch, saves)
    made = Batches(extractor, Folder(tmp_path, True), 2, lambda: deaths.append("dead"))
    yield made
    extractor.go.set()
    assert made.close(SECONDS)


def submitted(batches: Batches, *names: str, tokens: int = 3) -> list[Future[Path]]:
    jobs = [Job(name, [1] * tokens) for name in names]
    for job in jobs:
        batches.submit(job)
    return [job.path for job in jobs]


def test_what_waits_is_computed_together_up_to_a_step(batches: Batches, extractor: FakeExtractor) -> None:
    first = submitted(batches, "0")
    assert extractor.entered.wait(SECONDS)  # what comes from now on is not in its batch
    rest = submitted(batches, *"12345")
    extractor.go.set()
    assert [path.result(SECONDS).stem for path in [*first, *rest]] == list("012345")
    assert extractor.calls == [["0"], ["1", "2", "3"], ["4", "5"]]


def test_a_prompt_over_a_step_is_computed(batches: Batches, extractor: FakeExtractor) -> None:
    extractor.go.set()
    (path,) = submitted(batches, "long", tokens=50)
    assert path.result(SECONDS).exists()


def test_of_a_batch_only_the_one_at_fault_fails(batches: Batches, extractor: FakeExtractor, tmp_path: Path) -> None:
    first = submitted(batches, "0")
    assert extractor.entered.wait(SECONDS)  # what comes from now on is not in its batch
    a, bad, none = submitted(batches, "a", "bad", "none")
    extractor.go.set()
    assert a.result(SECONDS).exists()
    assert first[0].result(SECONDS).exists()
    with pytest.raises(WorkerError):
        bad.result(SECONDS)
    with pytest.raises(InputError):
        none.result(SECONDS)
    assert found(tmp_path) == ["0.safetensors", "0.safetensors.lock", "a.safetensors", "a.safetensors.lock"]


def test_a_request_that_is_cancelled_while_it_waits_is_not_computed(batches: Batches, extractor: FakeExtractor) -> None:
    submitted(batches, "0")
    assert extractor.entered.wait(SECONDS)  # what comes from now on is not in its batch
    gone, stays = submitted(batches, "gone", "stays")
    assert gone.cancel()
    extractor.go.set()
    assert stays.result(SECONDS).exists()
    assert extractor.calls == [["0"], ["stays"]]


def test_a_dead_engine_is_told_and_what_waits_is_answered(
    batches: Batches, extractor: FakeExtractor, deaths: list[str]
) -> None:
    (fatal,) = submitted(batches, "fatal")
    assert extractor.entered.wait(SECONDS)  # what comes from now on is not in its batch
    waiting, held = submitted(batches, "waiting", "held", tokens=8)
    extractor.go.set()
    with pytest.raises(WorkerError):
        fatal.result(SECONDS)
    with pytest.raises(StoppingError):
        waiting.result(SECONDS)
    with pytest.raises(StoppingError):
        held.result(SECONDS)
    assert deaths == ["dead"]
    with pytest.raises(StoppingError):
        submitted(batches, "late")


def test_prompts_are_cut_from_the_side_that_is_asked() -> None:
    ids = list(range(10))
    assert cut(ids, {}, 5) == ids
    assert cut(ids, {"truncate_prompt_tokens": 3}, 5) == [7, 8, 9]
    assert cut(ids, {"truncate_prompt_tokens": 3, "truncation_side": "right"}, 5) == [0, 1, 2]
    assert cut(ids, {"truncate_prompt_tokens": -1}, 5) == [5, 6, 7, 8, 9]
    assert cut(ids, {"truncate_prompt_tokens": 0}, 5) == []
    with pytest.raises(InputError, match="truncate_prompt_tokens is 6"):
        cut(ids, {"truncate_prompt_tokens": 6}, 5)
    with pytest.raises(InputError, match="truncation_side is 'top'"):
        cut(ids, {"truncate_prompt_tokens": 3, "truncation_side": "top"}, 5)


def test_images_go_with_their_requests(batches: Batches, extractor: FakeExtractor) -> None:
    jobs = [Job("text", [1]), Job("image", [1, 2], ["an image"])]
    for job in jobs:
        batches.submit(job)
    extractor.go.set()
    assert [job.path.result(SECONDS).stem for job in jobs] == ["text", "image"]
    assert extractor.features == {"image": ["an image"]}


def test_messages_of_parts_become_text() -> None:
    assert plain({"role": "user", "content": "a"}) == {"role": "user", "content": "a"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain({"role": "user", "content": parts}) == {"role": "user", "content": "a\nb"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"}, "A template is a program"),
        (
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "A template is a program",
        ),
        ({"messages": 5}, "messages is 5, not a list"),
    ],
)
def test_what_a_conversation_may_not_hold(body: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokens, "_tokenizer", lambda self: None)
    with pytest.raises(InputError, match=says):
        Tokens(None).of_chat(body)


def test_text_that_is_no_unicode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokens, "_tokenizer", lambda self: None)
    with pytest.raises(InputError, match="the text is no Unicode"):
        Tokens(None).of_text("\ud800x")


def test_without_vllm_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(detect, "package", lambda name: None)
    assert main(["serve", "model"]) == 1
    assert "vLLM is not installed here" in capsys.readouterr().err
