"""Odd arguments and environment variables for every command: an exit code and a sentence, never a traceback."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.cli import main
from eagle3compat.probe import remote

ROUNDS, IN_EACH = 16, 12
"""Seeds, and command lines of each."""
WORDS = [
    "", " ", "-", "--", "0", "-1", "1e9", "9" * 5000, "nan", "\u0663", "\u00b2", "\udcff", "a\nb", "[red]", "None",
    "2,x", "2 30", "--json", "--layer-ids", "--model", "--to", "{tmp}", "{tmp}/nowhere", "{tmp}/file", "{tmp}/empty",
    "{tmp}/set", "{tmp}/odd", "{tmp}/model", "owner/name", "a/b/c", "~", "..", "x" * 300, "{tmp}/" + "y" * 300,
    "http://[", "http://u:secret@[", "http://127.0.0.1:9/x.whl", "file:///etc", "0.99.99", "==1", "latest!",
]
OPTIONS = {
    "doctor": ["--json", "--layer-ids"],
    "plan": ["--json"],
    "explain": [],
    "probe": ["--json", "--speculators", "--transformers", "--index-url"],
    "check": ["--json", "--layout", "--layer-ids", "--count", "--move-bad", "--examples", "--sample", "--seed"],
    "convert": ["--to", "--to server", "--to in-process", "--layer-ids", "--num-hidden-layers", "--loss-masks"],
    "rehearse": [
        "--estimate --model", "--layer-ids", "--tensor-parallel-size", "--max-model-len", "--timeout", "--device",
    ],
    "run": ["-m", "-c"],
}
VARIABLES = {
    "EAGLE3COMPAT": ["", "on", "STRICT", "off", "warn ", "\udcff"],
    "EAGLE3COMPAT_SKIP": ["", ",", "results", "nothing", "results,,capture", "a b"],
    "VLLM_PLUGINS": ["", ",", "eagle3compat", "x"],
    "VLLM_WORKER_MULTIPROC_METHOD": ["", "fork", "forkserver", "5"],
    "CUDA_VISIBLE_DEVICES": ["", "-1", "a", "0,0,9999999"],
    "PIP_DEFAULT_TIMEOUT": ["", "x", "-1", "\u00b2", "9" * 400],
    "PIP_INDEX_URL": ["", "x", "http://[", "ftp://x", "file:///nowhere"],
    "PIP_CONFIG_FILE": ["", "/nowhere", "{tmp}/odd/pip.conf", "{tmp}"],
    "PIP_CERT": ["{tmp}/file"],
    "VLLM_CPU_KVCACHE_SPACE": ["", "x", "-3", "\u00b2", "9" * 30],
    "COLUMNS": ["", "0", "-5", "x", "3"],
}
NETWORK = "http://127.0.0.1:9"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files and folders for the words above; no command has a network."""
    (tmp_path / "file").write_text("5")
    for name in ("empty", "set", "odd", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "set" / "data_0.pt").touch()
    (tmp_path / "odd" / "config.json").write_text("[" * 100_000)
    (tmp_path / "odd" / "data_0.pt").mkdir()
    (tmp_path / "odd" / "data_config.json").write_text('{"a":' * 100_000)
    (tmp_path / "odd" / "pip.conf").write_bytes(b"[global]\nindex-url = \xff\n")
    config = {"model_type": "llama", "architectures": ["A"], "num_hidden_layers": 4, "hidden_size": "x"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "model.safetensors.index.json").write_text("[" * 100_000)
    monkeypatch.chdir(tmp_path)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, NETWORK)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for kept in (remote.trust, remote._opener):  # which remember proxies and certificates
        kept.cache_clear()
    yield tmp_path
    for kept in (remote.trust, remote._opener):
        kept.cache_clear()


def line_of(rng: random.Random, command: str, place: Path) -> list[str]:
    """A command with options that it has, and words that it may not have expected."""
    words = [rng.choice(WORDS)] if rng.random() < 0.8 else []
    for option in rng.sample(OPTIONS[command], min(len(OPTIONS[command]), rng.randint(0, 2))):
        words += [*option.split(), *(rng.choice(WORDS) for _ in range(rng.randint(0, 2)))]
    if rng.random() < 0.2:
        rng.shuffle(words)
    return [command, *(word.replace("{tmp}", str(place)) for word in words)]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_no_command_line_ends_in_a_traceback(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(IN_EACH):
        for name, values in VARIABLES.items():
            if rng.random() < 0.2:
                monkeypatch.setenv(name, rng.choice(values).replace("{tmp}", str(place)))
            else:
                monkeypatch.delenv(name, raising=False)
        if "PIP_INDEX_URL" not in os.environ:
            monkeypatch.setenv("PIP_INDEX_URL", NETWORK)
        words = line_of(rng, rng.choice(sorted(OPTIONS)), place)
        code: Any
        try:
            code = main(words)
        except SystemExit as ended:
            code = ended.code
        except Exception as error:  # noqa: BLE001  which one it is is what the test is about
            pytest.fail(f"{words} raised {type(error).__name__}: {error}")
        assert code in (0, 1, 2), (words, code)
        assert "Traceback" not in "".join(capfd.readouterr()), words


VALUES = [None, 0, -1, "x", "", [], {}, [1], {"a": 1}, True, float("inf"), float("nan"), 10**30, 2.5, [None], "\udcff"]


@pytest.mark.parametrize("seed", range(8))
def test_odd_values_in_a_config_are_named(place: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        path = rng.choice(sorted((Path(__file__).parents[1] / "configs").glob("*.json")))
        config = json.loads(path.read_text())
        part = config.get("text_config", config)
        for name in rng.sample(sorted(part), 2):
            part[name] = rng.choice(VALUES)
        (place / "model" / "config.json").write_text(json.dumps(config))
        code = main(["rehearse", "--estimate", "--model", str(place / "model")])
        said = capsys.readouterr()
        assert code in (0, 1, 2)
        assert bool(said.out) == (code != 2)
        assert "Traceback" not in said.err + said.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["probe", "http://["], "'http://[' is no address"),
        (["probe", "0.30.0", "--speculators", "0.4.0.1", "--index-url", "http://u:secret@["], "[/vllm/ cannot be read"),
        (["probe", "9" * 5000], "is no version"),
        (["doctor", "--layer-ids", "\u00b2"], "is not an integer"),
        (["rehearse", "--estimate", "--model", "{tmp}/odd"], "config.json cannot be read"),
        (["rehearse", "--estimate", "--model", "{tmp}/model"], "hidden_size of its config is 'x', which no model has"),
        (["run", "-m", ""], "usage"),
    ],
)
def test_what_was_not_understood_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main([word.replace("{tmp}", str(place)) for word in words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "secret" not in said
