"""Records one cell in the environment that this process runs in: one piece of evidence a model."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__, detect, plan
from ..doctor import absent
from ..errors import InputError
from ..steps import end, follow, start
from . import evidence
from .child import Plan, Subject
from .subjects import SAID, Progress, RecordError, alone, locked, subject, version

MAX_MODEL_LEN = 256
PACKAGES = ("vllm", "speculators", "torch", "transformers")


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
    options.out.mkdir(parents=True, exist_ok=True)  # before the measurement, which would else be lost
    tempfile.TemporaryFile(dir=options.out).close()
    with tempfile.TemporaryDirectory(prefix="eagle3compat-matrix-") as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        progress("reading source")
        report = plan()
        common = {
            "speculators": version("speculators"),
            "vllm": evidence.release(version("vllm")),
            "plan": {outcome.adapter: outcome.status.value for outcome in report},
            "environment": environment(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }
        place = Path(temporary)
        with locked(scratch):
            subjects = [subject(name, scratch, place, progress) for name in options.models]
        steps, log = _run(options, subjects, place, progress)
        cells = []
        for one in subjects:
            cell = _cell(options, one, steps, log)
            if not evidence.equal(cell):
                progress(f"asking vLLM alone about {one.name}")
                with locked(scratch):
                    said, streams = alone(one, options.dtype, _environment(), options.timeout)
                cell |= _beside(cell, _anywhere(said), _again(one, place, streams))
            cells.append(evidence.write({**common, **cell}, options.out))
        return cells


def _again(one: Subject, place: Path, streams: Path) -> dict[str, Any]:
    """How the states compare with vLLM's own streams; empty where one of them is not there."""
    if not (streams.is_file() and Path(one.states).is_file()):
        return {}
    module = f"{__package__}.child"
    command = [sys.executable, "-m", module, str(place / "plan.json"), "--compare", one.name, str(streams)]
    done = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise RecordError(f"eagle3compat: comparing {one.name} failed: {done.stderr.strip()[-SAID:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def _beside(cell: evidence.Evidence, said: str, figures: dict[str, Any]) -> evidence.Evidence:
    """What changes where transformers did not confirm a cell: what vLLM does alone, its streams being the yardstick."""
    changed: evidence.Evidence = {"alone": said}
    if figures:
        changed |= {
            "errors": figures["errors"], "controls": figures["controls"], "tensors": figures["tensors"],
            "reference": {"vllm": version("vllm")},
            "transformers": {"errors": cell["errors"], "reference": cell["reference"]},
        }
        if evidence.equal({**cell, **changed}):
            off = evidence.worst(cell)
            changed["result"] = f"equal to vLLM's own forward, which is off from transformers' by {off:.1e}"
    return changed


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
    elif not evidence.equal({**compared, "dtype": options.dtype, "layer_ids": one.layer_ids}):
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
    return _anywhere(f"{failed['step']}: {failed['type']}: {' '.join(said.split())}")[:SAID]


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
        "preloaded": [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name],
        "eagle3compat": __version__,
        "source": source_digest(),
    }


def _distribution(name: str) -> str:
    found = detect.package(name)
    return (found.distribution if found else None) or name


def source_digest() -> str:
    """A digest of what runs in an extraction: this package without its commands."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in ("adapters", "capture", "engine"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
