"""Refuses a model folder that is broken, from names, sizes and headers, before anything of it is loaded.

Each file of weights is opened and its header read: for a model of 10^12 parameters in 160 files that is some 20 MB, by
several threads at a time, as each file of a network disk is waited for.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..header import HeaderError, read_header
from ..rehearse.config import text_part
from ..rehearse.loader import REHEARSAL

JSON_FILES = (
    "config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)
"""What transformers reads as JSON while stock and vLLM load config, tokenizer and processor, and fails on in its own
words. Without `generation_config.json`: vLLM goes on where it is broken."""
INDICES = {"*.safetensors": "model.safetensors.index.json", "*.bin": "pytorch_model.bin.index.json"}
"""In the order in which vLLM looks for weights: where there is one of the first, it takes no other."""
OTHER_FORM = "consolidated"
"""How names of weights begin that are there once more, in Mistral's own form."""
FROM_FILES = ("auto", "hf", "safetensors", "pt")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
EMBEDDINGS = [[name, "weight"] for name in ("embed_tokens", "wte", "word_embeddings", "tok_embeddings")]
"""How the names of the token embeddings end in published checkpoints."""
NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)")
POINTER = b"version https://git-lfs"
THREADS = 16
AGAIN = "Fetch it again"


def check_folder(folder: Path) -> None:
    """Raises InputError, which names the file and the remedy. Takes what is there: weights may be elsewhere."""
    for name in JSON_FILES:
        if (folder / name).is_symlink() or (folder / name).exists():
            _object(folder / name)
    config = _object(folder / "config.json")
    named = config.get("architectures")
    if not (isinstance(named, list) and named and isinstance(named[0], str)) and "auto_map" not in config:
        raise InputError(
            f"{folder / 'config.json'} names no architectures, by which vLLM chooses the model's class. Take the "
            'config of the published model, or add them, such as "architectures": ["LlamaForCausalLM"].'
        )
    files = weights_of(folder)
    if not files:
        return
    with ThreadPoolExecutor(THREADS) as pool:
        looked = list(pool.map(_look, files, files.values()))
    wrong = [fault for fault, _rows in looked if fault]
    if wrong:
        more = f", and {len(wrong) - 1} more files are damaged" if len(wrong) > 1 else ""
        raise InputError(f"{wrong[0]}{more}.")
    _check_vocabulary(folder, config, max(rows for _fault, rows in looked))


def _check_vocabulary(folder: Path, config: dict[str, Any], rows: int) -> None:
    """Raises InputError where the config speaks of more tokens than the embeddings have `rows`; 0 where none is known.

    Fewer pass: some models keep rows of their own after those of the vocabulary.
    """
    said = next((part["vocab_size"] for part in (_text(config), config) if type(part.get("vocab_size")) is int), 0)
    if 0 < rows < said:
        raise InputError(
            f"{folder / 'config.json'} speaks of a vocabulary of {said} tokens, and the embeddings in its weights have "
            f"{rows} rows. Config and weights are of different models: fetch both again, or set vocab_size to {rows}."
        )


def _text(config: dict[str, Any]) -> dict[str, Any]:
    try:
        return text_part(config)[1]
    except InputError:  # no language model that is known: what its vocabulary is called is not known either
        return {}


def check_weights(folder: Path, load_format: str) -> None:
    """Raises InputError for a folder without any, where the load format wants them there."""
    if load_format not in FROM_FILES or not folder.is_dir() or os.environ.get(REHEARSAL):
        return
    if not any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        raise InputError(f"{folder} holds no weights ({', '.join(WEIGHTS)}). Fetch them, or check the path.")


def weights_of(folder: Path) -> dict[Path, frozenset[str]]:
    """The files of weights that vLLM would load, each with the names of the weights that the index has in it.

    These are the files that the index names, or all where there is none. Raises InputError.
    """
    found = {pattern: sorted(folder.glob(pattern)) for pattern in INDICES}
    for pattern, index in INDICES.items():
        files, indexed = found[pattern], (folder / index).is_file()
        if not files and (any(found.values()) or not indexed):
            continue
        if not indexed:
            loaded = [file for file in files if not file.name.startswith(OTHER_FORM)] or files
            _check_count(loaded)
            return dict.fromkeys(loaded, frozenset())
        shards = _shards(folder / index)
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{len(missing)} of {len(shards)} files that {folder / index} names are not there: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Fetch them again."
            )
        return {folder / name: names for name, names in shards.items()}
    return {}


def _check_count(files: Sequence[Path]) -> None:
    """Raises InputError where files that are numbered `-00002-of-00003` are fewer than they say."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for file in files:
        numbered = NUMBERED.fullmatch(file.stem)
        if numbered:
            name, number, count = numbered.groups()
            numbers.setdefault((name, int(count)), set()).add(int(number))
    for (name, count), there in numbers.items():
        if len(there) < count:
            raise InputError(
                f"{files[0].parent} holds {len(there)} of the {count} files of weights {name}-...-of-{count:05}, and "
                "no index that names fewer. Fetch the others."
            )


def _shards(index: Path) -> dict[str, frozenset[str]]:
    """The names of the files, in order, with the weights that are in each."""
    weights = _object(index).get("weight_map")
    if not isinstance(weights, dict) or not weights or not all(isinstance(name, str) for name in weights.values()):
        raise InputError(f"{index} does not say which file holds which weight. {AGAIN}.")
    names: dict[str, set[str]] = {}
    for weight, file in weights.items():
        names.setdefault(file, set()).add(weight)
    return {file: frozenset(names[file]) for file in sorted(names)}


def _object(path: Path) -> dict[str, Any]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InputError(f"{path} is no file. {AGAIN}.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. {_remedy(error)}.") from error
    if content.startswith(POINTER):
        raise InputError(f"{path} is a git-lfs pointer. Run `git lfs pull` in {path.parent}.")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        said = str(error) if content.strip() else "it is empty"
        raise InputError(f"{path} is cut short, or no JSON: {said}. {AGAIN}.") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object. {AGAIN}.")
    return found


def _remedy(error: OSError) -> str:
    return "Make it readable (chmod u+r)" if isinstance(error, PermissionError) else AGAIN


def _look(path: Path, wanted: frozenset[str]) -> tuple[str, int]:
    """What is wrong with one file of weights, with the remedy, or nothing; and the rows of embeddings in it.

    `wanted` are the weights that an index has in it. An index may name some that are left out, such as a head that is
    tied to the embeddings: that most are is another file's content.
    """
    if not path.is_file():
        return f"{path} is no file. {AGAIN}", 0
    try:
        with path.open("rb") as file:
            start = file.read(len(POINTER))
            if start == POINTER:
                return f"{path} is a git-lfs pointer, not the weights. Run `git lfs pull` in {path.parent}", 0
            if path.suffix == ".safetensors":
                header = read_header(path)
                missing = sorted(wanted - header.keys())
                if 2 * len(missing) > len(wanted):
                    lacks = f"{len(missing)} of {len(wanted)} weights that the index has in it, such as {missing[0]}"
                    return f"{path} is another file: it lacks {lacks}. {AGAIN}", 0
                return "", _rows(header)
            if start.startswith(b"PK") and not zipfile.is_zipfile(file):
                return f"{path} is cut short. {AGAIN}", 0
    except HeaderError as error:
        return f"{path} is damaged: {error}. {AGAIN}", 0
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}. {_remedy(error)}", 0
    return "", 0


def _rows(header: dict[str, Any]) -> int:
    """How many tokens the embeddings in a file of weights have; 0 where it holds none."""
    shapes = (entry.get("shape") for name, entry in header.items() if name.split(".")[-2:] in EMBEDDINGS)
    return max((shape[0] for shape in shapes if isinstance(shape, list) and len(shape) == 2), default=0)
