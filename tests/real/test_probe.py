"""The probe of what is installed: pairs that are extracted from in these tests are healthy by their source as well."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from conftest import python_of, settings
from test_extraction import PAIRS

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("probe")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_pair_that_works_is_healthy_by_its_source(pair: tuple[str, str]) -> None:
    python = python_of(*pair)
    (vllm,) = Path(python).parent.parent.glob("lib/python*/site-packages/vllm")
    command = [python, "-m", "eagle3compat", "probe", str(vllm), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=settings())
    found = json.loads(done.stdout)
    assert (found["library"], found["unforeseen"]) == ([], [])
    assert done.returncode == 0
