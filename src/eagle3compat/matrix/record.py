"""Records one cell in the environment that this process runs in: one piece of evidence a model."""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__, detect, plan
from ..doctor import absent
from ..errors import Eagle3CompatError, InputError
from ..rehearse.config import Model
from ..rehearse.folder import read_config
from ..steps import end, follow, start
from ..yardstick import REFERENCE, TINY
from . import evidence
from .child import Plan, Subject

TINY_MODELS = ("llama", "qwen3", "deepseek_v3")
MAX_MODEL_LEN = 256
SAID = 400
"""Characters of an error that are kept."""
PACKAGES = ("vllm", "speculators", "torch", "transformers")

Progress = Callable[[str], None]


class RecordError(Eagle3CompatError, RuntimeError):
    """A cell could not be measured at all: its model or its reference could not be made."""


@dataclass(frozen=True)
class Options:
    """What to record. `models` are names of tiny models or folders; `scratch` keeps models and references.

    `timeout` in seconds, of the extraction. An empty start method leaves the choice to vLLM.
    """

    models: Sequence[str]
    out: Path
    tensor_parallel_size: int = 1
    start_method: str = ""
    dtype: str = "float32"
    scratch: Path | None = None
    timeout: float = 900.0


def record(options: Options, progress: Progress) -> list[Path]:
    """Measure, and write the evidence; the files. Raises InputError, RecordError."""
    if options.tensor_parallel_size < 1:
        raise InputError(f"the tensor-parallel size is {options.tensor_parallel_size}. It must be 1 or more.")
    missing = absent()
    if missing:
        raise InputError("\n".join([*missing, "Run this in the environment that is to be measured."]))
    with tempfile.TemporaryDirectory(prefix="eagle3compat-matrix-") as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        progress("reading source")
        report = plan()
        common = {
            "speculators": version("speculators"),
            "vllm": release(version("vllm")),
            "plan": {outcome.adapter: outcome.status.value for outcome in report},
            "environment": environment(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }
        with locked(scratch):
            subjects = [subject(name, scratch, progress) for name in options.models]
        steps, log = _run(options, subjects, Path(temporary), progress)
        return [
            evidence.write({**common, **_cell(options, one, steps, log)}, options.out) for one in subjects
        ]


@contextmanager
def locked(scratch: Path) -> Iterator[None]:
    """Hold the folder of models and references, which several recordings may share. The system drops a dead one's."""
    with (scratch / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def subject(name: str, scratch: Path, progress: Progress) -> Subject:
    """A model with prompts and transformers' answer to them, made where `scratch` has none."""
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
    return Subject(folder.name, str(folder), ids, calls, str(streams))


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


def _run(
    options: Options, subjects: Sequence[Subject], place: Path, progress: Progress
) -> tuple[dict[str, dict[str, Any]], Path]:
    """The child's steps by name, and its log. A child that ends or hangs leaves the step that it was in."""
    planned = Plan(
        list(subjects), options.tensor_parallel_size, options.start_method, options.dtype, MAX_MODEL_LEN
    )
    planned.write(place / "plan.json")
    events, log = place / "events.jsonl", place / "log"
    command = [sys.executable, "-m", "eagle3compat.matrix.child", str(place / "plan.json"), str(events)]
    child = start(command, log, _environment())
    steps: dict[str, dict[str, Any]] = {}
    why = "the process ended in it"
    try:
        for event in follow(child, events, options.timeout):
            steps[event["step"]] = event
            if event["state"] == "begun":
                progress(event["step"])
    except TimeoutError:
        why = f"it had not ended after {options.timeout:.0f} s"
    finally:
        end(child)
    for event in steps.values():
        if event["state"] == "begun":
            event.update(state="failed", type="", message=why, seconds=0.0)
    return steps, log


def _environment() -> dict[str, str]:
    """This process's environment, with what a CPU build needs where it is not set, and no hub."""
    vllm = detect.package("vllm")
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1"} if vllm and vllm.cpu_build else {}
    return {**usual, **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


def _cell(options: Options, one: Subject, steps: dict[str, dict[str, Any]], log: Path) -> dict[str, Any]:
    """What was found out about one model."""
    own = {
        name.removesuffix(f" {one.name}"): event
        for name, event in steps.items()
        if " " not in name or name.endswith(f" {one.name}")
    }
    failed = next((event for event in own.values() if event["state"] == "failed"), None)
    generated, compared = own.get("generate", {}), own.get("compare", {})
    result = "ok"
    if failed is not None:
        result = _said(failed)
    elif "compare" not in own:
        result = f"the process ended early: {_last_line(log)}"
    elif not evidence.equal({**compared, "dtype": options.dtype}):
        figures = {**compared["controls"], "error": evidence.worst(compared)}
        result = f"not shown to be equal: {', '.join(f'{name} {value:.2g}' for name, value in figures.items())}"
    return {
        "model": one.name,
        "tensor_parallel_size": options.tensor_parallel_size,
        "asked_start_method": options.start_method,
        "start_method": generated.get("start_method", ""),
        "dtype": options.dtype,
        "result": result,
        "steps": {name: event["state"] for name, event in own.items()},
        "seconds": {name: round(event["seconds"], 1) for name, event in own.items()},
        "adapters": own.get("apply", {}).get("adapters", {}),
        "workers": generated.get("workers", 0),
        "layer_ids": one.layer_ids,
        "samples": sum(map(len, one.calls)),
        "tokens": generated.get("tokens", 0),
        "tensors": compared.get("tensors", 0),
        "errors": compared.get("errors", {}),
        "controls": compared.get("controls", {}),
        "reference": json.loads(Path(one.reference).with_suffix(".json").read_text()),
    }


def _said(failed: dict[str, Any]) -> str:
    """The step that failed and its error, without what is of this machine only."""
    said = failed["message"].partition("\n\nTraceback of ")[0].strip()
    said = said or failed.get("traceback", "").strip().rpartition("\n")[2] or "no message"
    return _anywhere(f"{failed['step']}: {failed['type']}: {said}")[:SAID]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return _anywhere(lines[-1] if lines else "it printed nothing")[:SAID]


def _anywhere(text: str) -> str:
    """The text with this machine's folders and process ids left out."""
    for folder, name in ((sys.prefix, "ENVIRONMENT"), (str(Path(__file__).parents[2]), "SOURCE")):
        text = text.replace(folder, name)
    text = re.sub(r"\(pid \d+\)|pid \d+", "pid N", text)
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\S*", "TEMPORARY", text)


def environment() -> dict[str, Any]:
    """What the cell was run with."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {_distribution(name): version(name) for name in PACKAGES},
        "eagle3compat": __version__,
        "source": source_digest(),
    }


def _distribution(name: str) -> str:
    found = detect.package(name)
    return (found.distribution if found else None) or name


def version(name: str) -> str:
    found = detect.package(name)
    return (found.version if found else None) or "unknown"


def release(found: str) -> str:
    """A version without what names another build of the same release: `0.11.0` of `0.11.0.post2+cpu`."""
    return found.partition("+")[0].partition(".post")[0]


def source_digest() -> str:
    """A digest of what runs in an extraction: this package without its commands."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in ("adapters", "capture", "engine"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
