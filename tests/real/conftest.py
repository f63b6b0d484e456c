"""Real vLLM in environments of its own: built on first use, models made on the spot, one process a session.

What is claimed here is shown on real builds in real worker processes. A session runs many steps in one process, as an
import of vLLM takes half a minute; the tests then look at what each step left.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import environments  # noqa: E402
from eagle3compat.yardstick import REFERENCE as REFERENCE_SCRIPT  # noqa: E402
from eagle3compat.yardstick import TINY  # noqa: E402

REFERENCE = ("0.16.0", "0.3.0")
FAMILIES = ("llama", "qwen3", "deepseek_v3")
TIMEOUT = 1500


def settings(**more: str) -> dict[str, str]:
    """The environment of a session: nothing is fetched, little memory is taken, no other copy is on the path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "EAGLE3COMPAT", "PYTHON"))}
    env.update(
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_MLA_DISABLE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_OMP_THREADS_BIND=core(),
        PYTHONUNBUFFERED="1",
    )
    if "EAGLE3COMPAT_ENVS" in os.environ:
        env["EAGLE3COMPAT_ENVS"] = os.environ["EAGLE3COMPAT_ENVS"]
    return {**env, **more}


def core() -> str:
    """A processor core of this test process's own: left alone, vLLM binds the workers of all sessions to the first."""
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return str(cores[number % len(cores)])


def execute(command: list[str], log: Path, env: dict[str, str], timeout: int = TIMEOUT) -> None:
    """Run to the end with its output in `log`; on failure the end of the log is part of the message."""
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env, timeout=timeout, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{log.read_text()[-6000:]}")


def until(condition: Callable[[], bool], seconds: float = 300) -> bool:
    """Wait for `condition`, on a machine that may stand still in between; whether it came true."""
    deadline = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return true


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended and waits for its parent only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or after
        return False


def python_of(vllm: str, speculators: str) -> str:
    return str(environments.ensure(vllm, speculators))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes of this run have in common."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """`folder/name`, made by `make` unless another test process has made it in this run."""
    target = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / f"{name}.done").exists():
            make(target)
            (folder / f"{name}.done").touch()
    return target


def prompts_of(seed: int, count: int, low: int, high: int) -> list[list[int]]:
    """Random prompts of `low` to `high` tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(8, 600) for _ in range(rng.randint(low, high))] for _ in range(count)]


PROMPTS = {
    "mixed": prompts_of(1, 12, 1, 90),
    "over budget": prompts_of(2, 40, 215, 250),
    "shared prefix": [prompts_of(3, 1, 35, 35)[0] + rest for rest in prompts_of(4, 300, 1, 200)],
}
"""Twelve samples sort otherwise as text than as numbers; forty are more than 32 and, together, than 8,192 tokens."""


@pytest.fixture(scope="session")
def models(shared: Path) -> dict[str, Path]:
    """A tiny model of each family."""
    python = python_of(*REFERENCE)

    def make(target: Path) -> None:
        for family in FAMILIES:
            command = [python, str(TINY), family, str(target / family)]
            execute(command, shared / f"tiny-{family}.log", settings())

    folder = once(shared, "models", make)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture(scope="session")
def references(shared: Path, models: dict[str, Path]) -> Callable[[str, str], Any]:
    """What transformers computes, in float32, for a family and a batch of PROMPTS: one tensor a layer and prompt."""
    python = python_of(*REFERENCE)

    def of(family: str, batch: str) -> Path:
        def make(target: Path) -> None:
            prompts = shared / f"{family}-{batch}.json"
            prompts.write_text(json.dumps(PROMPTS[batch]))
            command = [python, str(REFERENCE_SCRIPT), str(models[family]), str(prompts), str(target)]
            log = shared / f"reference-{family}-{batch}.log"
            execute([*command, "--dtype", "float32"], log, settings(OMP_NUM_THREADS="1"))

        return once(shared, f"reference-{family}-{batch}.pt", make)

    return of


@pytest.fixture(scope="session")
def comparison(shared: Path) -> Callable[[str, Path, Path, list[int]], dict[str, Any]]:
    """Compare extracted states with a reference, inside an environment that has torch."""
    python = python_of(*REFERENCE)

    def compare(name: str, got: Path, want: Path, layer_ids: list[int]) -> dict[str, Any]:
        out = shared / f"comparison-{name}.json"
        script = str(Path(__file__).with_name("compare.py"))
        command = [python, script, str(got), str(want), json.dumps(layer_ids), str(out)]
        execute(command, out.with_suffix(".log"), settings())
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures

    return compare


class Session:
    """A finished session: the outcome of every step, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: dict[str, Any] = json.loads((folder / "session.json").read_text())
        self.log = (folder / "log").read_text()

    def value(self, step: str) -> Any:
        """What the step returned; fails with the step's traceback when it raised."""
        outcome = self.outcomes[step]
        assert "error" not in outcome, f"step '{step}' raised:\n{outcome['traceback']}"
        return outcome["value"]

    def error(self, step: str) -> dict[str, Any]:
        """The exception of a step that must raise."""
        outcome = self.outcomes[step]
        assert "error" in outcome, f"step '{step}' was to raise, and returned {str(outcome['value'])[:300]}"
        found: dict[str, Any] = outcome
        return found


def run_session(
    shared: Path, name: str, pair: tuple[str, str], plan: list[dict[str, Any]], **env: str
) -> Session:
    """Run `plan` in the pair's environment, once a test run."""

    def make(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(plan))
        script = str(Path(__file__).with_name("session.py"))
        command = [python_of(*pair), script, str(folder / "plan.json"), str(folder)]
        execute(command, folder / "log", settings(**env))

    return Session(once(shared, name, make))
