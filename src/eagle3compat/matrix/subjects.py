"""The models of a cell, and what is known of them from others: transformers' streams, and what vLLM does by itself."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .. import detect
from ..errors import Eagle3CompatError, InputError
from ..rehearse.config import Model
from ..rehearse.folder import read_config
from ..steps import end, start
from ..yardstick import REFERENCE, TAP, TINY
from .child import Subject

TINY_MODELS = ("llama", "qwen3", "deepseek_v3")
SAID = 400
"""Characters of an error that are kept."""
ERROR = re.compile(r"\b((?:\w+\.)*\w+(?:Error|Exception)): *(\S.*)$", re.M)
ECHO = "initialization failed"
"""In what vLLM's driver says after the error that matters."""

Progress = Callable[[str], None]


class RecordError(Eagle3CompatError, RuntimeError):
    """A cell could not be measured at all: its model or its reference could not be made."""


def version(name: str) -> str:
    found = detect.package(name)
    return (found.version if found else None) or "unknown"


@contextmanager
def locked(scratch: Path) -> Iterator[None]:
    """Hold the folder of models and references, which several recordings may share. The system drops a dead one's."""
    with (scratch / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def subject(name: str, scratch: Path, place: Path, progress: Progress) -> Subject:
    """A model with prompts and transformers' answer, made where `scratch` has none; its states go to `place`."""
    folder = Path(name)
    if name in TINY_MODELS:
        folder = scratch / name
        if not (folder / "model.safetensors").is_file():
            progress(f"making {name}")
            _script([TINY, name, folder])
    elif not (folder / "config.json").is_file():
        raise InputError(f"{name} is no folder with a config.json, nor one of {', '.join(TINY_MODELS)}.")
    model = Model(read_config(folder))
    layers = model.layers
    if layers < 2:
        raise InputError(f"{name} has {layers} decoder layer, and a wrong layer must be told from the right one.")
    calls = prompts(int(model.get("vocab_size", 1000)))
    flat = [prompt for call in calls for prompt in call]
    key = hashlib.sha256(json.dumps([str(folder.resolve()), flat]).encode()).hexdigest()[:12]
    streams = scratch / f"reference-{folder.name}-{key}.pt"
    if not streams.is_file():
        progress(f"asking transformers about {folder.name}")
        asked = streams.with_suffix(".prompts")
        asked.write_text(json.dumps(flat))
        part = streams.with_suffix(".part")
        _script([REFERENCE, folder, asked, part, "--dtype", "float32"])
        made_by = {package: version(package) for package in ("transformers", "torch")}
        streams.with_suffix(".json").write_text(json.dumps(made_by))
        part.replace(streams)
    ids = [layers - 2, 0, layers - 1, layers // 3, layers - 2]  # unsorted, one twice, the last among them
    return Subject(folder.name, str(folder), ids, calls, str(streams), str(place / f"states-{folder.name}.pt"))


def prompts(vocabulary: int) -> list[list[list[int]]]:
    """Two calls: one of twelve samples of any length, one of more than 32 and, together, more than 8,192 tokens."""
    rng = random.Random(0)
    low, high = min(8, vocabulary // 2), min(600, vocabulary)

    def call(count: int, shortest: int, longest: int) -> list[list[int]]:
        lengths = [rng.randint(shortest, longest) for _ in range(count)]
        return [[rng.randrange(low, high) for _ in range(length)] for length in lengths]

    return [call(12, 1, 90), call(40, 215, 250)]


def _script(words: Sequence[str | Path]) -> None:
    """Run a script of the yardstick to its end. Raises RecordError with the end of what it wrote."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, env=environment)
    if done.returncode:
        name = Path(words[0]).name
        raise RecordError(f"eagle3compat: {name} ended with {done.returncode}: {done.stderr.strip()[-SAID:]}")


def alone(one: Subject, dtype: str, environment: Mapping[str, str], timeout: float) -> tuple[str, Path]:
    """What vLLM does with the model by itself: `ok` or its error, and the file of its streams, which need not be there.

    Kept beside the reference, for other cells of the same vLLM.
    """
    streams = Path(f"{Path(one.reference).with_suffix('')}-vllm-{version('vllm')}-{dtype}.pt")
    said = streams.with_suffix(".said")
    if not said.is_file():
        log = streams.with_suffix(".log")
        asked = Path(one.reference).with_suffix(".prompts")
        command = [sys.executable, str(TAP), one.folder, str(asked), str(streams), "--dtype", dtype]
        child = start(command, log, dict(environment))
        try:
            code = child.wait(timeout)
            said.write_text("ok" if code == 0 else first_error(log.read_text(errors="replace"), code))
        except subprocess.TimeoutExpired:
            said.write_text(f"it had not ended after {timeout:.0f} s")
        finally:
            end(child)
    return said.read_text(), streams


def first_error(log: str, code: int) -> str:
    """The first exception in a log that is not an echo of another."""
    found = (match for match in ERROR.finditer(log) if ECHO not in match.group(2))
    first = next(found, None)
    return f"{first.group(1)}: {first.group(2)}"[:SAID] if first else f"it ended with exit code {code}"
