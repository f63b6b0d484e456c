"""`eagle3compat check --model` on a real vLLM: a sound set passes, and what only the model can tell is named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import execute, once, prompts_of, python_of, settings
from make_set import BEFORE, LAYERS, SHIFTED, SWAPPED

PAIR = ("0.11.0", "0.4.0.1")
"""In bf16, as stock runs models: the CPU builds of 0.16 cannot, on a processor that has AMX."""
pytestmark = [pytest.mark.real, pytest.mark.xdist_group("-".join(PAIR))]
TIMEOUT = 1200


@pytest.fixture(scope="module")
def data(shared: Path, models: dict[str, Path]) -> Path:
    """The folders `sound` and `broken`: 12 prompts that share no prefix, two of them of one length."""

    def make(target: Path) -> None:
        prompts = prompts_of(7, 12, 20, 90)
        one, other = SWAPPED
        prompts[other] = prompts[other][:20]
        prompts[one] = prompts[one][-20:]
        (shared / "set.json").write_text(json.dumps(prompts))
        script = str(Path(__file__).with_name("make_set.py"))
        command = [python_of(*PAIR), script, str(models["llama"]), str(shared / "set.json"), str(target)]
        execute(command, shared / "set.log", settings())

    return once(shared, "set", make)


def check(folder: Path, model: Path) -> tuple[int, dict[str, Any]]:
    """The exit code of the command and what it printed."""
    command = [python_of(*PAIR), "-m", "eagle3compat", "check", str(folder), "--model", str(model), "--json"]
    done = subprocess.run(
        [*command, "--sample", "12"], env=settings(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode in (0, 1), done.stderr[-6000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, report


def test_a_sound_set_is_equal(data: Path, models: dict[str, Path]) -> None:
    code, report = check(data / "sound", models["llama"])
    assert (code, report["faults"]) == (0, [])
    assert len(report["recomputed"]) == 12
    for row in report["recomputed"]:
        assert [layer["id"] for layer in row["layers"]] == LAYERS
        assert all(layer["median"] < 0.02 and layer["worst"] < 0.1 for layer in row["layers"]), row


def test_each_wrong_file_is_named_with_its_reason(data: Path, models: dict[str, Path]) -> None:
    code, report = check(data / "broken", models["llama"])
    assert code == 1
    one, other = SWAPPED
    reasons = {
        SHIFTED: "rows are shifted by -1",
        one: f"its states are in data_{other}.pt",
        other: f"its states are in data_{one}.pt",
        BEFORE: "layer ids are shifted by -1 (1 holds layer 0, 3 holds layer 2, 4 holds layer 3)",
    }
    assert {(fault["kind"], fault["index"]) for fault in report["faults"]} == {("differs", index) for index in reasons}
    for fault in report["faults"]:
        assert reasons[fault["index"]] in fault["detail"]
    assert report["redo"]["indices"] == sorted(reasons)
