"""Ctrl-C and a killed driver: nothing keeps running, nothing stays in shared memory, the next call says what is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import alive, python_of, settings, until

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("interrupts")]

PAIR = ("0.32.0", "0.4.0.1")
START_SECONDS, END_SECONDS = 600, 300
SHARED_MEMORY = "/dev/shm/"


@contextmanager
def extracting(model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any], Path]]:
    """A driver in a process group of its own that is in the middle of a call, and what it has said."""
    out = folder / "found.json"
    command = [python_of(*PAIR), str(Path(__file__).with_name("interrupted.py")), str(model), str(out)]
    with (folder / "log").open("w") as log:
        driver = subprocess.Popen(command, stdout=log, stderr=log, env=settings(), start_new_session=True)
    try:
        until(lambda: out.exists() or driver.poll() is not None, START_SECONDS)
        assert out.exists(), (folder / "log").read_text()[-3000:]
        yield driver, json.loads(out.read_text()), out
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(END_SECONDS)


def shared_memory_of(pid: int) -> set[str]:
    """The files in shared memory that a process has mapped and that still have a name."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in lines if SHARED_MEMORY in line}
    return {name for name in names if not name.endswith("(deleted)")}


@pytest.mark.parametrize("whole_group", [True, False], ids=["as a terminal sends it", "to the driver alone"])
def test_after_control_c_the_generator_says_what_is_and_a_new_one_works(
    models: dict[str, Path], tmp_path: Path, whole_group: bool
) -> None:
    with extracting(models["llama"], tmp_path) as (driver, found, out):
        (os.killpg if whole_group else os.kill)(driver.pid, signal.SIGINT)
        assert driver.wait(START_SECONDS) == 0, (tmp_path / "log").read_text()[-3000:]
        said = json.loads(out.read_text())
        assert said["next call"].startswith("GeneratorDeadError")
        assert "KeyboardInterrupt" in said["next call"]
        assert said["new generator"] == "ok"
        assert until(lambda: not any(alive(pid) for pid in found["workers"]), END_SECONDS)


def test_a_killed_driver_leaves_no_worker_and_no_shared_memory(models: dict[str, Path], tmp_path: Path) -> None:
    with extracting(models["llama"], tmp_path) as (driver, found, _out):
        names = set().union(*(shared_memory_of(pid) for pid in (driver.pid, *found["workers"])))
        os.kill(driver.pid, signal.SIGKILL)
        assert until(lambda: not any(alive(pid) for pid in found["workers"]), END_SECONDS)
        assert until(lambda: not any(os.path.exists(name) for name in names), END_SECONDS), sorted(names)
