"""What `apply()`, `plan()` and `status()` return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .outcome import Outcome, Status

if TYPE_CHECKING:
    from rich.table import Table

COLOURS = {
    Status.APPLIED: "green",
    Status.NOT_NEEDED: "dim",
    Status.DEFERRED: "cyan",
    Status.DISABLED: "yellow",
    Status.DRIFTED: "red",
    Status.FAILED: "red",
}


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the source that runs in workers, so that a worker with another copy of it is noticed."""
    import hashlib
    from pathlib import Path

    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "capture").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Report:
    """The outcome of every adapter, in the order in which an extraction meets them.

    `planned`: it says what would be done, and nothing of it is.
    """

    def __init__(self, title: str | Callable[[], str], outcomes: tuple[Outcome, ...], planned: bool = False) -> None:
        self.title, self.outcomes, self.planned = title, outcomes, planned

    @property
    def headline(self) -> str:
        """What the outcomes are about, such as `speculators 0.4.0.1 on vllm 0.32.0`."""
        return self.title if isinstance(self.title, str) else self.title()

    @property
    def heading(self) -> str:
        """The headline for people: whether it is a plan, and how much of it waits."""
        if self.planned:
            return f"plan, nothing is changed by it: {self.headline}"
        found = {outcome.status for outcome in self.outcomes}
        if Status.DEFERRED not in found or Status.APPLIED in found:
            return self.headline
        return f"{self.headline}: adapters go in when speculators is imported"

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Report) and self.outcomes == other.outcomes
        return same and isinstance(other, Report) and self.heading == other.heading

    def __hash__(self) -> int:
        return hash(self.outcomes)

    def __repr__(self) -> str:
        return f"Report({self.headline!r}, {self.outcomes!r}, {self.planned!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Report, (self.headline, self.outcomes, self.planned)

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)

    def __getitem__(self, adapter: str) -> Outcome:
        for outcome in self.outcomes:
            if outcome.adapter == adapter:
                return outcome
        raise KeyError(f"no adapter '{adapter}'; there are: {', '.join(o.adapter for o in self.outcomes)}")

    @property
    def healthy(self) -> bool:
        """Whether nothing has drifted or failed. An adapter that the user disabled is the user's choice."""
        return all(outcome.status.healthy or outcome.status is Status.DISABLED for outcome in self.outcomes)

    @property
    def fingerprint(self) -> str:
        """Names this library's code and which adapters are switched off: equal in the driver and in its workers."""
        import hashlib
        import json

        disabled = [outcome.adapter for outcome in self.outcomes if outcome.status is Status.DISABLED]
        return hashlib.sha256(json.dumps([source_digest(), disabled]).encode()).hexdigest()[:16]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {
            "headline": self.headline,
            "healthy": self.healthy,
            "fingerprint": self.fingerprint,
            "adapters": [outcome.as_dict() for outcome in self.outcomes],
        }

    def brief(self) -> Report:
        """The same with each reason cut before a list of parameters, which `explain` and --json give in full."""
        brief = (outcome._replace(reason=outcome.reason.split("; its parameters are")[0]) for outcome in self.outcomes)
        return Report(self.title, tuple(brief), self.planned)

    def table(self) -> Table:
        """A rich table: adapter, seam, status, reason."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.heading), title_justify="left", expand=False)
        for heading in ("adapter", "seam", "status", "why"):
            table.add_column(heading, overflow="fold")
        for outcome in self.outcomes:
            status = Text(outcome.status.word(self.planned), style=COLOURS[outcome.status])
            table.add_row(Text(outcome.adapter), Text(outcome.seam), status, Text(outcome.reason))
        return table

    def __str__(self) -> str:
        width = max((len(outcome.adapter) for outcome in self.outcomes), default=0)
        words = [outcome.status.word(self.planned) for outcome in self.outcomes]
        column = max(map(len, words), default=0)
        pairs = zip(self.outcomes, words, strict=True)
        lines = [f"  {o.adapter:<{width}}  {word:<{column}}  {o.reason}" for o, word in pairs]
        return "\n".join([self.heading, *lines])
