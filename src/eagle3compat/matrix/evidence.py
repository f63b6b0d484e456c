"""Evidence of one cell: what was run, how far it got, and figures that say so themselves.

Levels: `static` (every adapter has what it relies on, as source says) < `import` (the stock generator imports, adapted)
< `apply` (every adapter is healthy with everything imported) < `run` (the stock generator extracted in vLLM's own
workers) < `parity` (every tensor equals that of transformers, and a wrong layer and a shifted row do not). A level is
reached only where the one below it is.

The digest is no signature: who edits evidence can seal it again. So what it says is held against what else it says: its
level against its figures, its pair against the packages that it ran with, its place against both.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LEVELS = ("none", "static", "import", "apply", "run", "parity")
HEALTHY = ("applied", "not needed", "deferred")
TOLERANCES = {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.1}
"""Largest difference, of the largest value, between two implementations that compute in this dtype and in float32."""
CONTROL = 0.3
"""What a wrong layer and a shifted row must be off by at the least."""

SAID = {
    "vllm", "speculators", "model", "level", "result", "digest", "plan", "adapters", "steps", "errors", "environment",
}
"""Without which it is no evidence."""

Evidence = dict[str, Any]


def digest(evidence: Mapping[str, Any]) -> str:
    """SHA-256 of the evidence without its digest, as JSON with sorted keys."""
    content = {name: value for name, value in evidence.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def level(evidence: Mapping[str, Any]) -> str:
    """The level that the content of the evidence supports, whatever it claims."""
    steps = evidence["steps"]
    reached = "none"
    for name, shown in (
        ("static", _well(evidence["plan"])),
        ("import", steps.get("import") == "done"),
        ("apply", steps.get("apply") == "done" and _well(evidence["adapters"])),
        ("run", steps.get("generate") == "done" and evidence["workers"] >= evidence["tensor_parallel_size"] >= 1),
        ("parity", steps.get("compare") == "done" and equal(evidence)),
    ):
        if not shown:
            break
        reached = name
    return reached


def _well(outcomes: Mapping[str, str]) -> bool:
    return bool(outcomes) and all(status in HEALTHY for status in outcomes.values())


def equal(evidence: Mapping[str, Any]) -> bool:
    """Whether the figures say that every tensor was right and both mistakes would have been seen."""
    errors = [float(value) for value in evidence["errors"].values()]
    controls = [float(evidence["controls"].get(name, "nan")) for name in ("wrong_layer", "shifted_row")]
    numbers = all(math.isfinite(value) and value >= 0 for value in (*errors, *controls))
    every = set(evidence["errors"]) == {str(layer) for layer in evidence["layer_ids"]}
    if not (errors and every and numbers):
        return False
    return max(errors) < TOLERANCES[evidence["dtype"]] and min(controls) > CONTROL


def worst(evidence: Mapping[str, Any]) -> float:
    """The largest error of any tensor, of its largest value; NaN where none was compared."""
    return max((float(value) for value in evidence["errors"].values()), default=float("nan"))


def write(evidence: Evidence, folder: Path) -> Path:
    """Seal the evidence with its level and digest and write it to its place below `folder`, which is returned."""
    sealed = {**evidence, "level": level(evidence)}
    sealed["digest"] = digest(sealed)
    path = folder / place(evidence)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    scratch.write_text(json.dumps(sealed, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)
    return path


def place(evidence: Mapping[str, Any]) -> Path:
    """Where a cell's evidence lies: `0.16.0/0.3.0-llama.json`, what is not usual after it."""
    rank = evidence["tensor_parallel_size"]
    unusual = [f"tp{rank}"] if rank > 1 else []
    unusual += [evidence[name] for name in ("asked_start_method",) if evidence[name]]
    unusual += [evidence["dtype"]] if evidence["dtype"] != "float32" else []
    name = "-".join([evidence["speculators"], evidence["model"], *unusual])
    return Path(evidence["vllm"]) / f"{name}.json"


def ran_with(evidence: Mapping[str, Any], package: str) -> list[str]:
    """The releases of a package that its environment, and vLLM's own streams where they were the yardstick, name."""
    packages = [*evidence["environment"]["packages"].items(), *evidence.get("reference", {}).items()]
    return sorted({release(found) for name, found in packages if name.partition("-")[0] == package})


def release(found: str) -> str:
    """A version without what names another build of the same release: `0.11.0` of `0.11.0.post2+cpu`."""
    return found.partition("+")[0].partition(".post")[0]


def read(folder: Path) -> dict[str, Evidence]:
    """All evidence below `folder`, by path relative to it; empty for a file that holds no JSON object."""
    return {path.relative_to(folder).as_posix(): _object(path) for path in sorted(folder.glob("*/*.json"))}


def _object(path: Path) -> Evidence:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # cut short, or no text: `faults` names it
        return {}
    return found if isinstance(found, dict) else {}


def faults(name: str, evidence: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a piece of evidence itself."""
    try:
        silent = sorted(SAID - set(evidence))
        if silent:
            yield f"{name}: it is damaged, or no evidence: it says nothing of {', '.join(silent)}"
            return
        if digest(evidence) != evidence["digest"]:
            yield f"{name}: its content is not what its digest was made of"
        if level(evidence) != evidence["level"]:
            yield f"{name}: it claims {evidence['level']}, and its figures show {level(evidence)}"
        if place(evidence).as_posix() != name:
            yield f"{name}: it is evidence of {place(evidence)}"
        for package in ("vllm", "speculators"):
            found = ran_with(evidence, package)
            if found != [evidence[package]]:
                yield f"{name}: it is of {package} {evidence[package]}, and ran with {' and '.join(found) or 'none'}"
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # a file that is no evidence, or was cut
        yield f"{name}: it cannot be read as evidence ({type(error).__name__}: {error})"
