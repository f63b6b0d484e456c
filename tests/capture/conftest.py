"""Unit tests of the worker side on toy models. They need torch, and are run where it is installed; not vLLM."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
