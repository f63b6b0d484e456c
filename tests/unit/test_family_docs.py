"""docs/families.md is generated from the evidence of `make families`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

import family_docs  # type: ignore[import-not-found]  # noqa: E402
from families.table import FAMILIES, LAYERS  # type: ignore[import-not-found]  # noqa: E402


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "family_docs.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def record(family: str, outcome: str, **more: Any) -> dict[str, Any]:
    return {"family": family, "device": "cpu", "versions": {"vllm": "0.32.0"}, "outcome": outcome, **more}


def rows(*records: dict[str, Any]) -> list[list[str]]:
    lines = family_docs.document(list(records)).split("\n## Images")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]


def test_the_page_in_the_repository_is_what_the_evidence_says() -> None:
    result = tool("--check")
    assert result.returncode == 0, result.stderr


def test_check_fails_when_the_page_differs_or_is_missing(tmp_path: Path) -> None:
    page = tmp_path / "families.md"
    assert tool("--check", str(page)).returncode == 1
    assert tool(str(page)).returncode == 0
    assert tool("--check", str(page)).returncode == 0
    page.write_text(page.read_text() + "\nby hand\n")
    assert "run python tools/family_docs.py" in tool("--check", str(page)).stderr


def test_every_family_has_a_row_and_one_without_evidence_says_so() -> None:
    found = {row[0]: row for row in rows(record("llama", "not run", why="no reason"))}
    assert list(found) == [family.title for family in FAMILIES.values()]
    assert found["Qwen2"][3] == "read only"
    assert found["Llama"][3] == "read only"  # was not run either


def test_a_row_tells_the_worst_of_each_dtype_and_the_least_mistake() -> None:
    ran = {"outcome": "equal", "model": "Some", "against": "transformers", "wrong_layer": 0.5, "wrong_row": 0.4}
    dtypes = {"float32": {**ran, "worst": 2e-6}, "bfloat16": {**ran, "worst": 0.02, "wrong_row": 0.3}}
    row = next(row for row in rows(record("llama", "equal", dtypes=dtypes)) if row[0] == "Llama")
    assert row[1:] == ["Some", "0.32.0", "CPU", "right", "equal", "transformers", "2.0e-06", "2.0e-02", "0.30"]


def test_what_failed_is_listed_with_its_reason() -> None:
    page = family_docs.document([record("llama", "failed", why="it broke\nbadly")])
    assert "- Llama, vLLM 0.32.0, CPU: it broke badly" in page


@pytest.mark.parametrize("name", FAMILIES)
def test_every_model_has_layers_enough_and_each_kind(name: str) -> None:
    config = FAMILIES[name].full_config
    text = config.get("text_config", config)
    kinds = text.get("layer_types") or text.get("layers_block_type")
    assert text.get("num_hidden_layers", len(kinds or [])) == LAYERS >= 4
    assert kinds is None or (len(kinds) == LAYERS and len(set(kinds)) > 1)


def test_the_evidence_is_one_line_of_json_a_family() -> None:
    for path in (ROOT / "evidence" / "families").glob("*.jsonl"):
        names = [json.loads(line)["family"] for line in path.read_text().splitlines()]
        assert names == sorted(set(names)), path
