"""A broken model folder is refused by the generator's constructor before anything of it is loaded."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eagle3compat.adapters.results import checked_constructor
from eagle3compat.adapters.tokenizer import TrustingTokenizer
from eagle3compat.engine.checkpoint import check_folder, check_weights
from eagle3compat.errors import InputError
from eagle3compat.header import HeaderError, read_header
from eagle3compat.rehearse.loader import REHEARSAL

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]


def weights(*shapes: int, first: int = 0, **named: list[int]) -> bytes:
    """A safetensors file of float16 vectors, `layer.FIRST` and on, and tensors of these names and shapes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    vectors = {f"layer.{number}": [length] for number, length in enumerate(shapes, first)}
    for name, shape in {**vectors, **named}.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of three shards and their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text('{"model": {}}')
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for number, name in enumerate(SHARDS):
        (folder / name).write_bytes(weights(40, 100, first=2 * number))
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"layer.{n}": SHARDS[n // 2] for n in range(6)}}))
    return folder


def write(name: str, content: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str, end: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:end])


def gone(*names: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def moved(name: str) -> Callable[[Path], Any]:
    """A link of the hub's cache whose file is gone."""
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("blobs/0123")

    return change


def in_turn(*changes: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda folder: [change(folder) for change in changes]


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tokenizer cut short": (write("tokenizer.json", '{"model": {"vo'), "tokenizer.json is cut short, or no JSON"),
    "tokenizer empty": (write("tokenizer.json", ""), "tokenizer.json is cut short, or no JSON: it is empty"),
    "tokenizer of bytes": (write("tokenizer.json", b"\xff\xfe{}"), "tokenizer.json is cut short"),
    "tokenizer is a page": (write("tokenizer.json", "<!doctype html>"), "tokenizer.json is cut short, or no JSON"),
    "tokenizer without end": (write("tokenizer.json", "[" * 100_000), "tokenizer.json is cut short, or no JSON"),
    "tokenizer is a pointer": (write("tokenizer.json", POINTER), "tokenizer.json is a git-lfs pointer"),
    "tokenizer is a folder": (
        in_turn(gone("tokenizer.json"), lambda f: (f / "tokenizer.json").mkdir()), "tokenizer.json cannot be read",
    ),
    "tokenizer moved": (moved("tokenizer.json"), "tokenizer.json cannot be read: No such file"),
    "settings cut short": (cut("tokenizer_config.json", 5), "tokenizer_config.json is cut short"),
    "settings no object": (write("tokenizer_config.json", "[1]"), "tokenizer_config.json holds no JSON object"),
    "config cut short": (cut("config.json", 20), "config.json is cut short, or no JSON"),
    "config without classes": (write("config.json", '{"model_type": "llama"}'), "config.json names no architectures"),
    "config with no class": (write("config.json", '{"architectures": []}'), "names no architectures"),
    "config with odd classes": (write("config.json", '{"architectures": {"a": 1}}'), "names no architectures"),
    "index cut short": (cut(INDEX, 30), f"{INDEX} is cut short, or no JSON"),
    "index without names": (write(INDEX, '{"metadata": {}}'), f"{INDEX} does not say which file"),
    "index of a list": (write(INDEX, '{"weight_map": ["a"]}'), f"{INDEX} does not say which file"),
    "index of numbers": (write(INDEX, '{"weight_map": {"a": 1}}'), f"{INDEX} does not say which file"),
    "shard missing": (gone(SHARDS[1]), f"1 of 3 files that .*{INDEX} names are not there: {SHARDS[1]}. Fetch"),
    "every shard missing": (gone(*SHARDS), "3 of 3 files that"),
    "shard missing, no index": (gone(INDEX, SHARDS[1]), r"holds 2 of the 3 files of weights model-\.\.\.-of-00003"),
    "shard is another": (
        write(SHARDS[1], weights(40, 100)), f"{SHARDS[1]} is another file: it lacks 2 of 2 weights .* such as layer.2",
    ),
    "shard is a pipe": (in_turn(gone(SHARDS[1]), lambda f: os.mkfifo(f / SHARDS[1])), f"not there: {SHARDS[1]}"),
    "shard is a pipe, no index": (
        in_turn(gone(INDEX, SHARDS[1]), lambda f: os.mkfifo(f / SHARDS[1])), f"{SHARDS[1]} is no file",
    ),
    "tokenizer is a pipe": (
        in_turn(gone("tokenizer.json"), lambda f: os.mkfifo(f / "tokenizer.json")), "tokenizer.json is no file",
    ),
    "shard moved": (moved(SHARDS[1]), f"not there: {SHARDS[1]}"),
    "shard cut short": (cut(SHARDS[2], -1), rf"{SHARDS[2]} is damaged: it has \d+ bytes of the \d+ that"),
    "shard too long": (lambda f: (f / SHARDS[2]).write_bytes(weights(4) + b"x"), f"{SHARDS[2]} is damaged"),
    "shard cut in its header": (cut(SHARDS[0], 40), f"{SHARDS[0]} is damaged: it is cut short"),
    "shard empty": (write(SHARDS[0], b""), f"{SHARDS[0]} is damaged: it is cut short"),
    "shard is a page": (write(SHARDS[0], "<!doctype html>" * 9), f"{SHARDS[0]} is damaged: it is cut short"),
    "shard of zeros": (write(SHARDS[0], bytes(1000)), f"{SHARDS[0]} is damaged: its header is no header"),
    "shard is a pointer": (write(SHARDS[0], POINTER), f"{SHARDS[0]} is a git-lfs pointer"),
    "two shards cut short": (in_turn(cut(SHARDS[0], -1), cut(SHARDS[2], -1)), "and 1 more files are damaged"),
    "no index, cut short": (in_turn(gone(INDEX), cut(SHARDS[2], -1)), f"{SHARDS[2]} is damaged"),
    "an archive cut short": (
        in_turn(gone(INDEX, *SHARDS), write("pytorch_model.bin", b"PK\3\4" + bytes(500))), r"pytorch_model\.bin is cut",
    ),
    "an archive missing": (
        in_turn(gone(INDEX, *SHARDS), write("pytorch_model.bin.index.json", '{"weight_map": {"a": "b.bin"}}')),
        "1 of 1 files that",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_by_name(model: Path, case: str) -> None:
    change, says = BROKEN[case]
    change(model)
    with pytest.raises(InputError, match=says) as refused:
        checked_constructor(lambda *_: pytest.fail("stock's constructor ran"))(object(), str(model))
    assert str(model) in str(refused.value)
    assert str(refused.value).endswith((".", "there")), "the remedy is a sentence"


SOUND: dict[str, Callable[[Path], Any]] = {
    "as published": lambda folder: None,
    "without an index": gone(INDEX),
    "with an index that names a head that is tied": write(
        INDEX, json.dumps({"weight_map": {**{f"layer.{n}": SHARDS[n // 2] for n in range(6)}, "head": SHARDS[0]}}),
    ),
    "with no weights, as a rehearsal's": gone(INDEX, *SHARDS),
    "with a stray file beside the index's": write("extra.safetensors", "cut short"),
    "with the same in Mistral's form": in_turn(gone(INDEX), write("consolidated.safetensors", "cut short")),
    "with an index of weights in another form": in_turn(gone(*SHARDS), write("pytorch_model.bin", b"\x80\2legacy")),
    "with a class of its own code": write("config.json", '{"auto_map": {}}'),
    "with a generation_config that vLLM passes over": write("generation_config.json", "{"),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_would_load_is_let_through(model: Path, case: str) -> None:
    SOUND[case](model)
    check_folder(model)


class TestVocabulary:
    """A config that speaks of more tokens than the embeddings have fails in a worker, on an assertion."""

    TEXT: ClassVar[dict[str, Any]] = {"num_hidden_layers": 2, "vocab_size": 100}

    def folder(self, model: Path, config: dict[str, Any], **embeddings: list[int]) -> Path:
        (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
        (model / SHARDS[1]).write_bytes(weights(4, 4, first=2, **embeddings))
        return model

    @pytest.mark.parametrize("config", [TEXT, {"text_config": TEXT}, {"text_config": TEXT, "vocab_size": 9}])
    @pytest.mark.parametrize(
        "name", ["model.embed_tokens", "transformer.wte", "word_embeddings", "model.language_model.embed_tokens"]
    )
    def test_more_tokens_than_the_embeddings_have_are_refused(
        self, model: Path, config: dict[str, Any], name: str
    ) -> None:
        self.folder(model, config, **{f"{name}.weight": [99, 8]})
        says = r"config\.json speaks of a vocabulary of 100 tokens, and .* have 99 rows.*fetch both again"
        with pytest.raises(InputError, match=says):
            check_folder(model)

    @pytest.mark.parametrize("rows", [100, 108])
    def test_as_many_or_more_rows_pass(self, model: Path, rows: int) -> None:
        check_folder(self.folder(model, self.TEXT, **{"model.embed_tokens.weight": [rows, 8]}))

    @pytest.mark.parametrize("name", ["embed_tokens_per_layer.weight", "embed_tokens.bias", "pos_embeddings.weight"])
    def test_what_are_no_token_embeddings_say_nothing(self, model: Path, name: str) -> None:
        check_folder(self.folder(model, self.TEXT, **{name: [99, 8]}))

    @pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 2}, {"vocab_size": "100"}, {"text_config": None}])
    def test_a_config_that_names_no_vocabulary_refuses_nothing(self, model: Path, config: dict[str, Any]) -> None:
        check_folder(self.folder(model, config, **{"model.embed_tokens.weight": [99, 8]}))

    def test_the_largest_embeddings_count_where_there_are_several(self, model: Path) -> None:
        found = {"talker.embed_tokens.weight": [30, 8], "model.embed_tokens.weight": [100, 8]}
        check_folder(self.folder(model, self.TEXT, **found))


class TestNoWeights:
    @pytest.fixture(autouse=True)
    def nothing(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gone(INDEX, *SHARDS)(model)
        monkeypatch.delenv(REHEARSAL, raising=False)

    def test_a_folder_without_any_is_refused(self, model: Path) -> None:
        with pytest.raises(InputError, match=r"model holds no weights .*\. Fetch them"):
            check_weights(model, "auto")
        (model / "x.gguf").touch()
        check_weights(model, "auto")

    def test_unless_they_come_from_elsewhere(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        check_weights(model, "dummy")
        check_weights(Path("owner/name"), "auto")
        monkeypatch.setenv(REHEARSAL, "1")
        check_weights(model, "auto")


def test_a_file_that_may_not_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("eagle3compat.engine.checkpoint.read_header", forbid)
    with pytest.raises(InputError, match=rf"{SHARDS[0]} cannot be read: Permission denied\. Make it readable"):
        check_folder(model)


def test_a_hub_id_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def stock(self: Any, model_path: str, layer_ids: Any) -> None:
        raise KeyError(model_path)

    with pytest.raises(KeyError, match="owner/name"):
        checked_constructor(stock)(object(), "owner/name")


def test_a_header_is_read_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(weights(3))
    assert list(read_header(path)) == ["__metadata__", "layer.0"]
    with path.open("r+b") as file:
        file.truncate(2**40)  # a hole, which takes no time and no disk
    with pytest.raises(HeaderError, match=r"1,099,511,627,776 bytes"):
        read_header(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HeaderError, match="no regular file"):
        read_header(path)


def test_a_tokenizer_that_does_not_load_is_an_input_error_for_a_folder(tmp_path: Path) -> None:
    class Auto:
        @staticmethod
        def from_pretrained(model: str, **options: Any) -> None:
            raise Exception("expected value at line 1\nand more")  # as the tokenizers library does

    said = r"does not load: Exception: expected value at line 1 and more\. Fetch its files and config"
    with pytest.raises(InputError, match=said):
        TrustingTokenizer(Auto).from_pretrained(str(tmp_path))
    with pytest.raises(Exception, match="expected value") as kept:
        TrustingTokenizer(Auto).from_pretrained("owner/name")
    assert not isinstance(kept.value, InputError)
