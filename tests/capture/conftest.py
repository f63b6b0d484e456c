"""Unit tests of the worker side on toy models. They need torch, and are run where it is installed; not vLLM."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random values are the same each time."""
    import torch

    torch.manual_seed(0)
