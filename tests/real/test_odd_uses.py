"""What happens to a generator that is used as nobody plans, and to a script that forgets its guard."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import pytest
from conftest import execute, once, python_of, settings

PAIR = ("0.32.0", "0.4.0.1")
pytestmark = [pytest.mark.real, pytest.mark.xdist_group("interrupts")]
UNGUARDED = """
import sys, eagle3compat
eagle3compat.apply()
from speculators.data_generation import VllmHiddenStatesGenerator
VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[1], max_model_len=256)
"""


@pytest.fixture
def found(shared: Path, models: dict[str, Path]) -> dict[str, str]:
    def make(target: Path) -> None:
        script = str(Path(__file__).with_name("odd_uses.py"))
        command = [python_of(*PAIR), script, str(models["llama"]), str(target)]
        with tempfile.TemporaryDirectory() as alone:  # where no other process puts sockets; a socket's path is short
            execute(command, shared / "odd.log", settings(TMPDIR=alone))

    said: dict[str, str] = json.loads(once(shared, "odd.json", make).read_text())
    return said


@pytest.mark.parametrize(
    ("use", "says"),
    [
        ("not to be had", "ModelNotFoundError: there is no folder"),
        ("threads", "ok ok ok"),
        ("fork", "GeneratorDeadError: "),
        ("after fork", "ok"),
        ("truth values", "InputError: "),
        ("reverted", "GeneratorDeadError: "),
        ("applied again", "ok"),
        ("other layers", "InputError: "),
        ("interrupted", "KeyboardInterrupt"),
        ("after the interrupt", "GeneratorDeadError: "),
        ("sockets", "True made, 0 left, 0 of others gone"),
        ("not finite", "WorkerError: "),
    ],
)
def test_odd_use(found: dict[str, str], use: str, says: str) -> None:
    assert found[use].replace("eagle3compat: ", "").startswith(says), found[use]


def test_reasons_are_given(found: dict[str, str]) -> None:
    for use, reason in (
        ("fork", "of which this one is a fork"), ("truth values", "prompt 0 holds True"),
        ("reverted", "revert() was called"), ("other layers", "[1, 3]"), ("after the interrupt", "KeyboardInterrupt"),
        ("not finite", "first in what decoder layer 2 returns, and its weight "),
        ("not finite", "layers.2.post_attention_layernorm.weight holds such values. Nothing was returned. Fetch the"),
    ):
        assert reason in found[use]


def test_a_script_without_a_guard_is_told_what_it_lacks(models: dict[str, Path], tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    command = [python_of(*PAIR), str(script), str(models["llama"])]
    env = settings(VLLM_WORKER_MULTIPROC_METHOD="spawn")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode
    last = done.stderr[done.stderr.rindex("eagle3compat.errors.WorkerError") :]
    assert "a spawned worker imports this script again" in last
    assert 'if __name__ == "__main__":' in last
