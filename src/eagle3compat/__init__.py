"""Runs stock speculators hidden-state extraction on the installed vLLM, and checks what it returns.

    import eagle3compat
    eagle3compat.apply()

before or after `speculators` is imported. Nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from .errors import (
    Eagle3CompatError,
    GeneratorDeadError,
    IncompatibleError,
    InputError,
    ModelNotFoundError,
    ResultError,
    UnprovenCaptureError,
    WorkerError,
    WorkerNotAdaptedError,
)
from .patcher import Patcher, Settings
from .patcher import plan as _plan
from .report import Report

__version__ = "0.1.0"

__all__ = [
    "Eagle3CompatError",
    "GeneratorDeadError",
    "IncompatibleError",
    "InputError",
    "ModelNotFoundError",
    "Report",
    "ResultError",
    "UnprovenCaptureError",
    "WorkerError",
    "WorkerNotAdaptedError",
    "applied",
    "apply",
    "plan",
    "revert",
    "status",
]

_patcher = Patcher()


def apply(
    strict: bool = True, only: Collection[str] | None = None, skip: Collection[str] | None = None
) -> Report:
    """Adapt stock speculators to the installed vLLM, in this process and in every worker that it starts.

    Idempotent and thread-safe; may be called before or after speculators is imported. With other arguments than last
    time, the last time is undone first. `only` and `skip` name adapters.

    Raises IncompatibleError where the pair cannot be bridged; `strict=False` logs it instead. The environment
    variables EAGLE3COMPAT (off, warn, strict) and EAGLE3COMPAT_SKIP (ids, comma-separated) override and add.
    What waits for an import is reported as deferred; the generator's constructor checks it before a model is loaded.
    """
    return _patcher.apply(Settings.read(strict, only, skip))


def plan(only: Collection[str] | None = None, skip: Collection[str] | None = None) -> Report:
    """What `apply()` would do here, read from source files: nothing is imported and nothing is patched."""
    return _plan(Settings.read(False, only, skip))


def status() -> Report:
    """The outcome of every adapter in this process now, judged by the objects in place."""
    return _patcher.status()


def revert() -> None:
    """Take every adapter out again. Generators that were made while it was applied stay adapted until deleted."""
    _patcher.revert()


@contextmanager
def applied(
    strict: bool = True, only: Collection[str] | None = None, skip: Collection[str] | None = None
) -> Iterator[Report]:
    """`apply()` on entry, `revert()` on exit."""
    report = apply(strict, only, skip)
    try:
        yield report
    finally:
        revert()
