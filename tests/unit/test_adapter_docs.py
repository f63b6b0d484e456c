"""docs/adapters.md is generated from the adapters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from eagle3compat.adapters import ADAPTERS

ROOT = Path(__file__).parents[2]


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "tools" / "adapter_docs.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_page_in_the_repository_is_what_the_adapters_say() -> None:
    result = tool("--check")
    assert result.returncode == 0, result.stderr


def test_check_fails_when_the_page_differs_or_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "adapters.md"
    assert tool("--check", str(page)).returncode == 1
    assert tool(str(page)).returncode == 0
    assert tool("--check", str(page)).returncode == 0
    page.write_text(page.read_text() + "\nby hand\n")
    result = tool("--check", str(page))
    assert result.returncode == 1
    assert "run python tools/adapter_docs.py" in result.stderr
    assert page.read_text().endswith("by hand\n")


def test_every_adapter_has_a_row_and_a_section_in_order(tmp_path: Path) -> None:
    page = tmp_path / "adapters.md"
    tool(str(page))
    lines = page.read_text().splitlines()
    ids = [adapter.id for adapter in ADAPTERS]
    assert [line.split("]")[0].removeprefix("| [") for line in lines if line.startswith("| [")] == ids
    assert [line.removeprefix("## ") for line in lines if line.startswith("## ")] == ids


def test_every_row_has_all_five_cells_filled(tmp_path: Path) -> None:
    page = tmp_path / "adapters.md"
    tool(str(page))
    rows = [line for line in page.read_text().splitlines() if line.startswith("| [")]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").replace("\\|", "").split("|")]
        assert len(cells) == 5
        assert all(cells), row
