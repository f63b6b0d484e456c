"""The light table that `apply()` works from, and what is not loaded because of it."""

from __future__ import annotations

import subprocess
import sys

from eagle3compat.adapters import ADAPTERS
from eagle3compat.registry import REGISTRY

UNNEEDED = ("dataclasses", "inspect", "eagle3compat.adapter", "eagle3compat.contract", "logging")


def test_the_table_says_what_the_adapters_say() -> None:
    assert [(a.id, a.seam, a.target) for a in ADAPTERS] == [(r.id, r.seam, r.target) for r in REGISTRY]
    assert [registered.load() for registered in REGISTRY] == list(ADAPTERS)


def test_applying_loads_no_adapter_before_a_stock_module_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import eagle3compat; eagle3compat.apply(strict=False); "
        f"print(sorted(set({UNNEEDED}) & (set(sys.modules) - before)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
