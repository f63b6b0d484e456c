"""Runs stock speculators hidden-state extraction on the installed vLLM, and checks what it returns.

    import eagle3compat
    eagle3compat.apply()

before or after `speculators` is imported. The adapters are loaded with the first call: vLLM imports this package in
every process of its environment, through the plugin's entry point.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from .errors import (
    Eagle3CompatError,
    GeneratorDeadError,
    IncompatibleError,
    InputError,
    ModelClassError,
    ModelNotFoundError,
    ResultError,
    UnprovenCaptureError,
    WorkerError,
    WorkerNotAdaptedError,
)

TYPE_CHECKING = False  # as in typing, whose import takes as long as all of this
if TYPE_CHECKING:
    from .report import Report

__version__ = "0.1.0"

__all__ = [
    "Eagle3CompatError",
    "GeneratorDeadError",
    "IncompatibleError",
    "InputError",
    "ModelClassError",
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

def apply(
    strict: bool = True, only: Collection[str] | None = None, skip: Collection[str] | None = None
) -> Report:
    """Adapt stock speculators to the installed vLLM, in this process and in every worker that it starts.

    Idempotent and thread-safe; may be called before or after speculators is imported. With other arguments than last
    time, the last time is undone first. `only` and `skip` name adapters.

    Raises IncompatibleError where the pair cannot be bridged; `strict=False` logs it instead. The environment
    variables EAGLE3COMPAT (off, warn, strict) and EAGLE3COMPAT_SKIP (ids, comma-separated) override and add.
    What waits for the import of speculators is `deferred`, in tables "waiting"; the generator's constructor checks it
    before a model is loaded.
    """
    from .patcher import PATCHER, Settings

    return PATCHER.apply(Settings.read(strict, only, skip))


def plan(only: Collection[str] | None = None, skip: Collection[str] | None = None) -> Report:
    """What `apply()` would do here, read from source files: nothing is imported and nothing is patched."""
    from .patcher import Settings, plan

    return plan(Settings.read(False, only, skip))


def status() -> Report:
    """The outcome of every adapter in this process now, judged by the objects in place."""
    from .patcher import PATCHER

    return PATCHER.status()


def revert() -> None:
    """Take every adapter out again. Generators that were made while it was applied must not be used afterwards."""
    from .patcher import PATCHER

    PATCHER.revert()


@contextmanager
def applied(
    strict: bool = True, only: Collection[str] | None = None, skip: Collection[str] | None = None
) -> Iterator[Report]:
    """`apply()` on entry and, on exit, what was before: `revert()`, or the `apply()` of whoever is around it.

    Also when `apply()` raises.
    """
    from .patcher import PATCHER

    before = PATCHER.settings
    try:
        yield apply(strict, only, skip)
    finally:
        if before is None:
            revert()
        else:
            PATCHER.apply(before)


def __getattr__(name: str) -> object:
    if name == "Report":
        from .report import Report

        return Report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
