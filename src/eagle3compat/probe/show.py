"""A verdict for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from ..adapter import Status
from ..terminal import console, grid
from .sources import Source
from .verdict import Fault, Verdict


def show(verdict: Verdict) -> None:
    """Print it."""
    out = console()
    out.print(grid(_sources(verdict)))
    out.print()
    out.print(verdict.report.brief().table())
    if verdict.faults:
        out.print("\nstock alone would fail on these, in this order, as far as source shows:")
        for fault in verdict.faults:
            out.print(_fault(fault))
    for fault in verdict.own:
        out.print(Text(f"\nthis library would fail: {fault}", style="red"))
    places = dict(verdict.places)
    for outcome in verdict.report:
        if outcome.status is Status.DRIFTED:
            where = f" in {places[outcome.adapter]}" if outcome.adapter in places else ""
            said = f"expected {outcome.expected}; found {outcome.found}{where}"
            out.print(Text(f"\nadapter {outcome.adapter} has drifted: {said}", style="red"))
    out.print(f"\n{'healthy' if verdict.healthy else 'not healthy'}")


def _sources(verdict: Verdict) -> Iterator[tuple[str, str]]:
    for source in (verdict.vllm, verdict.speculators, verdict.transformers):
        if source:
            yield source.name, f"{source.version or 'version unknown'}, {source.origin}{_read(source)}"


def _read(source: Source) -> str:
    if source.remote is None:
        return ""
    return f" ({source.remote.fetched / 2**20:.1f} MiB read in {source.remote.requests} requests)"


def _fault(fault: Fault) -> Text:
    """Two lines: where and what, then why and who bridges it."""
    there = f", {fault.there}" if fault.there else ""
    bridge = f"bridged by {fault.adapter}" if fault.adapter else "not foreseen by any adapter"
    text = Text(f"  {fault.where}: {fault.use}\n      {fault.found}{there}; ")
    return text.append(bridge, style="" if fault.adapter else "red")
