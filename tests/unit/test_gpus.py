"""What tools/gpus.py makes of the sessions that it runs; a GPU's evidence comes from no test."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpus  # type: ignore[import-not-found]  # noqa: E402


def test_a_session_is_told_step_by_step(tmp_path: Path) -> None:
    steps = [{"name": "report", "do": "status"}, {"name": "unknown", "do": "what"}]
    found = gpus.session(tmp_path, steps, None)
    assert found["exit"] == 0
    assert found["steps"]["report"]["value"]["headline"] == "eagle3compat is not applied in this process"
    said = "'Session' object has no attribute 'what'"
    assert found["steps"]["unknown"] == {"error": "AttributeError", "message": said}
