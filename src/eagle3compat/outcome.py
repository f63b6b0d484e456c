"""What became of an adapter. Light: `apply()` reports before anything else of this library is loaded."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Status(str, Enum):
    """What became of an adapter. The first three are healthy."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    DEFERRED = "deferred"
    DRIFTED = "drifted"
    DISABLED = "disabled"
    FAILED = "failed"

    @property
    def healthy(self) -> bool:
        return self in (Status.APPLIED, Status.NOT_NEEDED, Status.DEFERRED)

    def word(self, planned: bool) -> str:
        """What people read: of a plan, nothing is applied; and what waits for an import is no failure."""
        if self is Status.APPLIED and planned:
            return "to be applied"
        return "waiting" if self is Status.DEFERRED else self.value


class Outcome(NamedTuple):
    """One adapter's status and the reason for it; `clause` names what was not met, if anything."""

    adapter: str
    seam: str
    status: Status
    reason: str
    clause: str = ""
    expected: str = ""
    found: str = ""

    def as_dict(self) -> dict[str, str]:
        return {
            "adapter": self.adapter,
            "seam": self.seam,
            "status": self.status.value,
            "reason": self.reason,
            **({"clause": self.clause, "expected": self.expected, "found": self.found} if self.clause else {}),
        }
