"""Where a model's config and tokenizer come from, and the small model on disk. No weights are read or written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError, ModelNotFoundError
from .config import Config

PATTERNS = (
    "config.json", "generation_config.json", "tokenizer*", "*.model", "vocab*", "merges*", "*.tiktoken", "tiktoken*",
    "tekken.json", "special_tokens_map.json", "added_tokens.json", "chat_template*", "*processor_config.json", "*.py",
)
"""All that a model folder has beside its weights: config, tokenizer, processors, code of its own."""
TOKENIZERS = ("tokenizer*", "*.model", "vocab*", "*.tiktoken", "tiktoken*", "tekken.json")
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
LARGEST = 256 * 2**20


def source(model: str) -> Path:
    """The folder that holds the model's config: the folder named, or files of the hub's `owner/name`.

    Raises ModelNotFoundError for a folder that is no model, and NetworkError where the hub's files are not to be had.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"{model} holds no config.json, so it is not a model folder. Check the path.")
        return folder
    if folder.is_file():
        raise ModelNotFoundError(f"{model} is a file. Name the folder that holds the model's config.json.")
    if os.path.isabs(model) or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelNotFoundError(f"there is no model at {model}: no such folder. Check the path.")
    return _from_hub(model)


class NetworkError(InputError):
    """Files of a model on the hub could not be had."""


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise NetworkError(
            f"{model} is no folder here, and huggingface_hub, which would fetch its config, does not import ({error}). "
            "Install it, or pass the folder of the model."
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=[*PATTERNS, INDEX]))
    except Exception as error:  # of several libraries; each means that there are no files
        said = (str(error).strip().splitlines() or ["(no message)"])[0].rstrip(".")
        raise NetworkError(
            f"the config of {model} could not be fetched from the hub: {type(error).__name__}: "
            f"{said}. Check the name, the network, HF_HUB_OFFLINE and, for a gated model, the token; "
            "or pass the folder of the model."
        ) from error


def read_config(folder: Path) -> Config:
    """The config.json of a model folder. Raises InputError where it is not JSON with an object in it."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}. Check the download.") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} holds no JSON object. Check the download.")
    return config


def check_tokenizer(folder: Path) -> None:
    """Raises InputError for a folder in which nothing looks like a tokenizer: stock loads it first of all."""
    if not any(True for pattern in TOKENIZERS for _ in folder.glob(pattern)):
        raise InputError(
            f"{folder} holds no tokenizer, which an extraction loads first. Put the model's tokenizer files beside its "
            "config.json (--estimate needs none)."
        )


def read_index(folder: Path) -> dict[str, Any] | None:
    """The index of the model's weights, which says how large they are; None where there is none."""
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # a broken index: the size is then worked out from the config
        return None
    return index if isinstance(index, dict) else None


def write(small: Config, real: Path, target: Path) -> Path:
    """Write the small config, and beside it what the real model's folder has for the tokenizer and its own code."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(set(_beside(real))):
        place = target / file.relative_to(real)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    (target / "config.json").write_text(json.dumps(small, indent=2) + "\n", encoding="utf-8")
    return target


def _beside(real: Path) -> Iterator[Path]:
    for pattern in PATTERNS:
        for file in real.rglob(pattern) if pattern == "*.py" else real.glob(pattern):
            if file.is_file() and file.suffix not in WEIGHTS and file.stat().st_size <= LARGEST:
                yield file
