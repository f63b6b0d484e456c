"""Scripts run to their end in processes of their own: started afresh, or forked from one with the imports done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SERVER = Path(__file__).resolve().parents[1] / "tests/families/server.py"
SAID = 300
"""Characters of a log or a message that the evidence keeps as the reason of a failure."""
RAISED = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)(?::.*)?")
"""The line of a traceback that names the exception."""
WRITER = re.compile(r"^\([\w.-]+ pid=\d+\)\s*(?:ERROR \d\d-\d\d [\d:]+ \[[^]]*\] ?)?")
"""What vLLM puts before a line of one of its processes."""
PID = re.compile(r" \(pid \d+\)")


class Afresh:
    """Each script in a new interpreter."""

    def __init__(self, python: str) -> None:
        self.python = python

    def run(self, script: Path, arguments: Sequence[str], log: Path, env: Mapping[str, str], deadline: float) -> int:
        """The exit status; raises subprocess.TimeoutExpired after `deadline` (of the monotonic clock)."""
        with log.open("a") as file:
            started = subprocess.Popen(
                [self.python, str(script), *arguments], stdout=file, stderr=file, env=dict(env), start_new_session=True
            )
            try:
                return started.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, 9)  # its workers are in its process group
                started.wait()
                raise

    def close(self) -> None:
        """Nothing is left running."""


class Forked:
    """Each script in a fork of one interpreter that has imported `modules`."""

    def __init__(self, python: str, modules: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("a") as file:
            self._server = subprocess.Popen(
                [python, str(SERVER), *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                env=dict(env), text=True,
            )  # fmt: skip
        self._condition = threading.Condition()
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._over = False
        self._log = log
        self._asking = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            words = [int(word) for word in line.split()]
            with self._condition:
                if len(words) == 1:
                    self._started.append(words[0])
                else:
                    self._ended[words[0]] = words[1]
                self._condition.notify_all()
        with self._condition:  # it has ended, or will at once
            self._over = True
            self._condition.notify_all()

    def run(self, script: Path, arguments: Sequence[str], log: Path, env: Mapping[str, str], deadline: float) -> int:
        """As in Afresh; the environment is the server's."""
        with self._asking, self._condition:
            assert self._server.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, as is said below
                self._server.stdin.write(json.dumps([str(log), str(script), *arguments]) + "\n")
                self._server.stdin.flush()
            if not self._condition.wait_for(lambda: bool(self._started) or self._over, 300):
                raise RuntimeError("the process that imports for the others does not answer")
            if not self._started:
                said = last_words(self._log.read_text(errors="replace"))
                raise RuntimeError(f"the process that imports for the others ended: {said}")
            pid = self._started.pop()
        with self._condition:
            done = self._condition.wait_for(lambda: pid in self._ended, max(1.0, deadline - time.monotonic()))
        if not done:
            os.killpg(pid, 9)
            raise subprocess.TimeoutExpired(str(script), deadline)
        return self._ended[pid]

    def close(self) -> None:
        """End the server; its forks have ended."""
        assert self._server.stdin is not None
        with suppress(BrokenPipeError):  # what it was asked last was never read
            self._server.stdin.close()
        self._server.wait()


def last_words(log: str) -> str:
    """The line that names the last exception in a log, without the process that wrote it; else its last line."""
    lines = [WRITER.sub("", line).rstrip() for line in log.splitlines()]
    raised = [line for line in lines if RAISED.fullmatch(line)]
    return shortened(next(reversed(raised or [line for line in lines if line]), ""))


def brief(message: str) -> str:
    """What an exception says, on one line. Of this library's, what was said before the remedy and the traceback."""
    said, traceback, _ = message.strip().partition("\n\nTraceback")
    lines = said.splitlines()
    return shortened(PID.sub("", " ".join(line.strip() for line in (lines[:-1] if traceback and lines[1:] else lines))))


def shortened(line: str) -> str:
    """At most SAID characters of a line, to the end of a word."""
    if len(line) <= SAID:
        return line
    return (line[: SAID - 4].rpartition(" ")[0] or line[: SAID - 4]) + " ..."
