"""The suites that need an installed vLLM or torch, run inside the environment of each pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT, execute, python_of, settings

pytestmark = pytest.mark.real

PAIRS = [(vllm, speculators) for vllm in ("0.11.0", "0.16.0", "0.32.0") for speculators in ("0.3.0", "0.4.0.1")]
pairs = pytest.mark.parametrize(
    "pair", [pytest.param(pair, id="-".join(pair), marks=pytest.mark.xdist_group("-".join(pair))) for pair in PAIRS]
)
WITH_TORCH = ("0.32.0", "0.4.0.1")
TIMEOUT = 1200


def run_suite(pair: tuple[str, str], suite: str, log: Path) -> str:
    """Run a folder of tests in the pair's environment; pytest's closing line."""
    command = [python_of(*pair), "-m", "pytest", str(ROOT / "tests" / suite), "-p", "no:cacheprovider", "-q"]
    execute([*command, f"--rootdir={ROOT}", f"--confcutdir={ROOT / 'tests' / suite}"], log, settings(), TIMEOUT)
    return log.read_text().rstrip().splitlines()[-1]


@pairs
def test_every_adapter_keeps_the_contract(pair: tuple[str, str], tmp_path: Path) -> None:
    assert " passed" in run_suite(pair, "contract", tmp_path / "log")


@pairs
def test_source_and_live_surface_agree(pair: tuple[str, str], tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("check_surfaces.py"))
    execute([python_of(*pair), script], tmp_path / "log", settings(), TIMEOUT)


@pytest.mark.xdist_group("-".join(WITH_TORCH))
def test_capture_holds_on_toy_models(tmp_path: Path) -> None:
    assert " passed" in run_suite(WITH_TORCH, "capture", tmp_path / "log")


@pytest.mark.xdist_group("-".join(WITH_TORCH))
def test_files_are_checked_and_converted(tmp_path: Path) -> None:
    assert " passed" in run_suite(WITH_TORCH, "dataset", tmp_path / "log")
