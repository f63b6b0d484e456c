"""Broken copies of a model folder, as downloads and copies leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def cut(name: str, part: float) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content[: int(part * len(content))])

    return change


def written(name: str, content: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_text(content)

    return change


def without_classes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    written("config.json", json.dumps(config))(folder)


def of_more_tokens(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    written("config.json", json.dumps({**config, "vocab_size": config["vocab_size"] + 64}))(folder)


MISSING = json.dumps({"weight_map": {"model.norm.weight": WEIGHTS, "lm_head.weight": "model-00002.safetensors"}})
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tokenizer cut short": (cut("tokenizer.json", 0.5), "tokenizer.json is cut short, or no JSON"),
    "tokenizer no JSON": (written("tokenizer.json", "<!doctype html>"), "tokenizer.json is cut short, or no JSON"),
    "tokenizer of nothing": (written("tokenizer.json", "{}"), "does not load"),
    "tokenizer settings cut short": (cut("tokenizer_config.json", 0.5), "tokenizer_config.json is cut short"),
    "config cut short": (cut("config.json", 0.5), "config.json is cut short"),
    "config without classes": (without_classes, "config.json names no architectures"),
    "index cut short": (written(INDEX, MISSING[:40]), f"{INDEX} is cut short"),
    "shard missing": (written(INDEX, MISSING), "1 of 2 files that"),
    "weights cut short": (cut(WEIGHTS, 0.9), f"{WEIGHTS} is damaged"),
    "weights cut in their header": (cut(WEIGHTS, 0.0005), f"{WEIGHTS} is damaged"),
    "vocabulary of another model": (of_more_tokens, "a vocabulary of 704 tokens, and the embeddings in its weights"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "holds no weights"),
}


def broken_copies(model: Path, target: Path) -> None:
    """A folder for each of BROKEN, in `target`; what is not broken is linked."""
    for name, (change, _) in BROKEN.items():
        folder = target / name
        folder.mkdir(parents=True)
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
        change(folder)
