"""What `doctor` found, on one screen."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .conflicts import OWN
from .detect import Installed
from .doctor import Checkup
from .hardware import visible
from .serverpath.verdict import ADAPTED, Finding, ServerVerdict
from .terminal import console, grid
from .traps import size

if TYPE_CHECKING:
    from rich.console import Console


def show(checkup: Checkup) -> None:
    """Print it for people."""
    out = console()
    out.print(grid(_facts(checkup)))
    if checkup.plan is not None:
        out.print()
        out.print(checkup.plan.brief().table())
        out.print("`eagle3compat explain ADAPTER` says all about one of them.")
    if checkup.server is not None:
        _server(out, checkup.server)
    for heading, lines in (("conflicts", checkup.conflicts), ("notes", checkup.notes), ("problems", checkup.problems)):
        if lines:
            out.print(f"\n{heading}")
            out.print(grid((("-", line) for line in lines), padding=1))
    out.print(f"\n{'healthy' if checkup.healthy else 'not healthy'}")


def _server(out: Console, verdict: ServerVerdict) -> None:
    """The verdict on the server path: one line, and one for each thing that decides it."""
    out.print(f"\nserver path: {verdict.client} with a server of {verdict.server}: {verdict.effect}", markup=False)
    out.print(grid(((f"- {f.effect.value}", _say(f)) for f in verdict.findings), padding=1))


def _say(finding: Finding) -> str:
    if finding.remedy:
        return f"{finding.what}. Use {finding.remedy}."
    if not finding.setting:
        return f"{finding.what}."
    return f"{finding.what}. Pass {finding.setting}{f'; or {ADAPTED}' if finding.adapted else ''}."


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
    facts.append(("accelerators", _accelerators(checkup)))
    workers = checkup.workers
    plugin = "found" if workers.entry_point else "not found (eagle3compat is not installed as a distribution)"
    others = [name for name in workers.general_plugins if name != OWN]
    facts += [
        ("workers", f"{'adapted' if workers.adapted else 'not adapted'}: {workers.why}"),
        ("start method", workers.start_method),
        ("plugin", plugin + (f"; others: {', '.join(others)}" if others else "")),
    ]
    if checkup.deep is not None and "error" not in checkup.deep:
        platform_name, seconds = checkup.deep.get("platform"), checkup.deep["seconds"]
        facts.append(("imported", f"every adapter looked at live, in {seconds} s; vLLM takes this for {platform_name}"))
    facts += [(name, "not set" if value is None else repr(value)) for name, value in checkup.environment.items()]
    memory = checkup.shared_memory
    facts.append(("/dev/shm", f"{size(memory['total'])}, {size(memory['free'])} free" if memory else "none"))
    return facts


def _package(found: Installed | None) -> str:
    if found is None:
        return "not installed"
    said = [f"distribution {found.distribution}"] if found.distribution else []
    said += [f"commit {found.commit[:12]}"] if found.commit else []
    named = f" ({', '.join(said)})" if said else ""
    return f"{found.version or 'version unknown'}{named} in {found.directory}"


def _accelerators(checkup: Checkup) -> str:
    found = checkup.accelerators
    if not found:
        return "none"
    memory = f", {size(found[0].memory)} each" if found[0].memory else ""
    return f"{len(found)} x {found[0].name}{memory}; {visible(found)} visible"
