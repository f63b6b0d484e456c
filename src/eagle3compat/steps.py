"""A child process in steps, which its parent follows: one JSON line as each step begins, and one as it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.2


class Events:
    """The child's side."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def step(self, name: str) -> Iterator[dict[str, Any]]:
        """One step; what is put into the dict that it gives is told with it. An exception is told, and goes on."""
        started, told = time.monotonic(), {"step": name}
        self._write({**told, "state": "begun"})
        facts: dict[str, Any] = {}
        try:
            yield facts
        except BaseException as error:
            self._write({
                **told, "state": "failed", "type": type(error).__name__, "message": str(error),
                "seconds": time.monotonic() - started, "traceback": traceback.format_exc(),
            })
            raise
        self._write({**told, **facts, "state": "done", "seconds": time.monotonic() - started})

    def _write(self, event: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


def exit_code(run: Callable[[], None]) -> int:
    """Run the child's steps: 0, or 1 where one raised. The parent has that from the events; the log shows it too."""
    try:
        run()
    except Exception:  # noqa: BLE001  told already; what is left to do is to end
        traceback.print_exc()
        return 1
    return 0


def ask(
    command: list[str], seconds: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command that may hang to its end, for so many seconds at most. Raises OSError, subprocess.TimeoutExpired.

    Whatever it has started ends with it: `subprocess.run` would wait for a grandchild that holds its output open.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            code = child.wait(seconds)
        finally:
            end(child)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """The child, in a process group of its own with the workers that it will start; what it prints goes to `log`."""
    with log.open("w") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )


def follow(child: subprocess.Popen[bytes], events: Path, timeout: float) -> Iterator[dict[str, Any]]:
    """The parent's side: events as they come, until the child has ended. Raises TimeoutError after so many seconds."""
    deadline = time.monotonic() + timeout
    read = 0
    while True:
        ended = child.poll() is not None
        lines = events.read_text(encoding="utf-8").splitlines(keepends=True) if events.exists() else []
        for line in lines[read:]:
            if line.endswith("\n"):
                read += 1
                yield json.loads(line)
        if ended:
            return
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(POLL_SECONDS)


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, SIGTERM is a KeyboardInterrupt, as Ctrl-C is, so that who is told to end can end what it has started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end(child: subprocess.Popen[bytes]) -> None:
    """End the child and the workers that it started, which are in its process group."""
    with suppress(ProcessLookupError):  # all of them have ended by themselves
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
