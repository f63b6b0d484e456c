"""Looks with everything imported: `python -m eagle3compat.deep` in a process of its own, which prints one JSON line.

vLLM's other plugins are loaded and the stock modules imported, so that what is in place there is what a run would meet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from .steps import ask

TIMEOUT = 600
MARK = "eagle3compat-deep:"


def look() -> dict[str, Any]:
    """Ask a child; what it found, or `error`."""
    started = time.monotonic()
    try:
        command = [sys.executable, "-m", "eagle3compat.deep"]
        done = ask(command, TIMEOUT, {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"})
    except subprocess.TimeoutExpired:
        return {"error": f"nothing was found out within {TIMEOUT} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return {"error": f"it ended with exit code {done.returncode}: {''.join(last) or '(nothing was printed)'}"}
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def found() -> dict[str, Any]:
    """In the child: the outcomes of the adapters, live, and what vLLM takes this machine for."""
    import importlib

    import eagle3compat

    from .adapter import GENERATOR, WORKER

    eagle3compat.apply(strict=False)
    facts: dict[str, Any] = {}
    try:
        from vllm.platforms import current_platform
        from vllm.plugins import load_general_plugins

        facts["platform"] = type(current_platform).__name__
        load_general_plugins()
        for module in (GENERATOR, WORKER):
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  whatever does not import is what is to be told
        facts["error"] = f"{type(error).__name__}: {error}"
    return {**facts, **eagle3compat.status().as_dict()}


if __name__ == "__main__":
    print(MARK + json.dumps(found()))
