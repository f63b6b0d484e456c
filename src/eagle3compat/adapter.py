"""What an adapter is, and how it is decided whether one applies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import ClassVar

from .contract import Clause, Surface
from .ledger import Ledger
from .outcome import Outcome, Status
from .registry import GENERATOR, PACKAGE, WORKER

__all__ = ["GENERATOR", "PACKAGE", "WORKER", "Adapter", "Outcome", "Status"]


class Adapter(ABC):
    """One seam between stock speculators and vLLM.

    The class attributes are the documentation: `docs/adapters.md` is generated from them.
    """

    id: ClassVar[str]
    seam: ClassVar[str]
    breaks: ClassVar[str]
    """What fails without it, and how that looks to the user."""
    target: ClassVar[str] = GENERATOR
    """The stock module whose import this adapter waits for."""
    stock_needs: ClassVar[tuple[Clause, ...]] = ()
    """What stock counts on at this seam. The adapter is needed when one of these does not hold."""
    always: ClassVar[str] = ""
    """Why stock is wrong here on every vLLM, its own included; empty where it is not."""
    relies_on: ClassVar[tuple[Clause, ...]] = ()
    """What the adapter itself counts on. It has drifted when one of these does not hold."""
    replaces: ClassVar[tuple[str, ...]] = ()
    """The names of the target module that it rebinds: what vLLM has under them no longer matters to stock."""
    hands_back: ClassVar[tuple[str, ...]] = ()
    """Of these, those that still give stock an object of vLLM's own."""
    retires: ClassVar[str] = ""
    """A stock module whose code no longer runs."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Adapters without which this one makes no sense."""
    where: ClassVar[str] = "driver"
    upstream: ClassVar[str] = ""
    remove_when: ClassVar[str] = ""

    def decide(self, surface: Surface) -> Outcome:
        """Needed, not needed or drifted, judged on `surface` alone."""
        unmet = [finding for finding in (c.evaluate(surface) for c in self.stock_needs) if not finding.held]
        if not unmet and not self.always:
            return self.outcome(Status.NOT_NEEDED, "what stock counts on here is as it expects")
        for clause in self.relies_on:
            finding = clause.evaluate(surface)
            if not finding.held:
                return Outcome(
                    self.id, self.seam, Status.DRIFTED, f"relies on {clause}, which has changed",
                    str(clause), finding.expected, finding.found,
                )
        reason = "; ".join(f"{finding.clause}: {finding.found}" for finding in unmet) or self.always
        return self.outcome(Status.APPLIED, reason)

    def outcome(self, status: Status, reason: str) -> Outcome:
        return Outcome(self.id, self.seam, status, reason)

    @contextmanager
    def during_import(self) -> Iterator[None]:
        """Around the execution of the target module; the default does nothing."""
        yield

    @abstractmethod
    def install(self, module: ModuleType, ledger: Ledger) -> None:
        """Rebind what has to be rebound in the imported target `module`, through `ledger`."""
