"""What is found out about one vLLM: adapters, what stock alone would meet, what no adapter foresees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..adapter import GENERATOR, PACKAGE, Adapter, Outcome, Status
from ..adapters import ADAPTERS
from ..adapters.speculators_import import CONFIGURATION
from ..contract import Imports
from ..patcher import decide
from ..report import Report
from .ahead import ahead
from .sources import Source
from .types import TypedSurface
from .uses import Use, uses

STOCK = "speculators.data_generation"
LIBRARY = "eagle3compat"
FOLDER = Path(__file__).parent.parent


@dataclass(frozen=True)
class Fault:
    """Something that stock alone would fail on. `adapter` bridges it, empty where none does.

    `where` is the place in stock, `there` that in vLLM (or transformers), as file and line as far as they are known.
    """

    where: str
    there: str
    use: str
    found: str
    adapter: str

    def __str__(self) -> str:
        return f"{self.where}: {self.use}: {self.found}" + (f" ({self.there})" if self.there else "")


@dataclass(frozen=True)
class Verdict:
    """Whether stock extraction would work on a vLLM, adapted, judged from source files alone."""

    vllm: Source
    speculators: Source
    transformers: Source | None
    report: Report
    faults: tuple[Fault, ...] = ()
    own: tuple[Fault, ...] = ()
    """What this library's own code would fail on there, clauses or not."""
    places: tuple[tuple[str, str], ...] = ()
    """Of each adapter that has drifted, by id: where vLLM has, or would have, what it relies on."""

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(source for source in (self.vllm, self.speculators, self.transformers) if source)

    def surface(self) -> TypedSurface:
        """What the verdict was read from."""
        return TypedSurface({source.name: source.place for source in self.sources})

    @property
    def healthy(self) -> bool:
        return self.report.healthy and not self.unforeseen and not self.own

    @property
    def first(self) -> Fault | None:
        """What stock alone would fail on first, as far as source shows."""
        return self.faults[0] if self.faults else None

    @property
    def unforeseen(self) -> tuple[Fault, ...]:
        """What no adapter bridges."""
        return tuple(fault for fault in self.faults if not fault.adapter)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        places = dict(self.places)
        adapters = [
            {**outcome.as_dict(), **({"where": places[outcome.adapter]} if outcome.adapter in places else {})}
            for outcome in self.report
        ]
        return {
            "headline": self.report.headline,
            "healthy": self.healthy,
            **{source.name: {"version": source.version, "origin": source.origin} for source in self.sources},
            "adapters": adapters,
            "stock": {"first": asdict(self.first) if self.first else None, "faults": [asdict(f) for f in self.faults]},
            "library": [asdict(fault) for fault in self.own],
            "unforeseen": [asdict(fault) for fault in self.unforeseen],
            "read": {
                "requests": sum(source.remote.requests for source in self.sources if source.remote),
                "bytes": sum(source.remote.fetched for source in self.sources if source.remote),
            },
        }


def judge(vllm: Source, speculators: Source, transformers: Source | None) -> Verdict:
    """The verdict on these three. Reads files, as few as it takes. Raises NetworkError where one cannot be had."""
    title = f"{speculators.label} on {vllm.label}"
    if not has_generator(speculators):
        reason = "no in-process generator in this speculators"
        outcomes = tuple(adapter.outcome(Status.NOT_NEEDED, reason) for adapter in ADAPTERS)
        headline = f"nothing to adapt: {speculators.label} has no in-process extraction"
        return Verdict(vllm, speculators, transformers, Report(headline, outcomes))
    sources = [source for source in (vllm, speculators, transformers) if source]
    surface = with_library(*sources)
    for source in sources:
        if source.remote:
            ahead(source, surface)
    report = Report(title, decide(surface), planned=True)
    met, own, places = faults(surface, report), own_faults(surface), tuple(_places(surface, report))
    return Verdict(vllm, speculators, transformers, report, met, own, places)


def has_generator(speculators: Source) -> bool:
    """Whether it has the in-process generator that the adapters are for."""
    return (speculators.place / "data_generation" / f"{GENERATOR.rpartition('.')[2]}.py").is_file()


def stock_uses(surface: TypedSurface) -> list[Use]:
    """What stock's data generation uses of vLLM: the generator first, then the modules beside it."""
    modules = sorted(surface.modules(STOCK), key=lambda name: name != GENERATOR)
    return uses(surface, [name for name in modules if surface.module(name).mentions("vllm")], "vllm")


def faults(surface: TypedSurface, report: Report) -> tuple[Fault, ...]:
    """What stock alone would fail on, in the order in which it would."""
    met = [_of_package(surface, outcome) for outcome in report if _breaks_the_package(outcome)]
    for use in stock_uses(surface):
        if use.fault and not use.guarded:
            met.append(_fault(surface, use, bridge(use, report)))
    return tuple(dict.fromkeys(met))


def _fault(surface: TypedSurface, use: Use, adapter: str) -> Fault:
    where = f"{use.module.replace('.', '/')}.py:{use.line}"
    return Fault(where, surface.location(use.path) or "", use.text, use.fault, adapter)


ELSEWHERE = ("probe", "serve", "serverpath", "matrix", "yardstick")
"""Parts of this library without which an extraction goes on."""


def own_faults(surface: TypedSurface) -> tuple[Fault, ...]:
    """What the code of this library would fail on, where it uses vLLM in a process that extracts."""
    used = uses(surface, list(own_modules()), "vllm")
    met = (use for use in used if use.fault and not use.guarded)
    return tuple(dict.fromkeys(_fault(surface, use, adapter="") for use in met))


def with_library(*sources: Source) -> TypedSurface:
    """These packages, and this library."""
    return TypedSurface({LIBRARY: FOLDER, **{source.name: source.place for source in sources}})


def own_modules() -> Iterator[str]:
    """The modules of this library that run in a process that extracts: what serves, reads or measures does not."""
    for file in sorted(FOLDER.rglob("*.py")):
        parts = file.relative_to(FOLDER.parent).with_suffix("").parts
        if parts[1] not in ELSEWHERE and parts[-1] != "__init__" and b"vllm" in file.read_bytes():
            yield ".".join(parts)


def bridge(use: Use, outcomes: Iterable[Outcome]) -> str:
    """The id of the adapter that makes a use harmless where it is applied; empty if none does."""
    applied = {outcome.adapter for outcome in outcomes if outcome.status is Status.APPLIED}
    for adapter in (adapter for adapter in ADAPTERS if adapter.id in applied):
        if use.kind == "import":
            if any(isinstance(c, Imports) and c.caller == use.module for c in adapter.stock_needs):
                return adapter.id
        elif use.module == adapter.retires or _replaced(adapter, use):
            return adapter.id
    return ""


def _replaced(adapter: Adapter, use: Use) -> bool:
    """Whether the adapter rebinds what is used, and does not have vLLM make the object all the same."""
    handed_back = use.inherited and use.root in adapter.hands_back
    return use.module == adapter.target and use.root in adapter.replaces and not handed_back


def _breaks_the_package(outcome: Outcome) -> bool:
    adapter = next(adapter for adapter in ADAPTERS if adapter.id == outcome.adapter)
    return adapter.target == PACKAGE and outcome.status is Status.APPLIED


def _of_package(surface: TypedSurface, outcome: Outcome) -> Fault:
    """`import speculators` itself fails."""
    there = surface.location(f"{CONFIGURATION}:PretrainedConfig") or surface.location(CONFIGURATION) or ""
    return Fault("speculators/__init__.py", there, "import speculators", outcome.reason, outcome.adapter)


def _places(surface: TypedSurface, report: Report) -> Iterable[tuple[str, str]]:
    for outcome in report:
        adapter = next(adapter for adapter in ADAPTERS if adapter.id == outcome.adapter)
        clause = next((c for c in adapter.relies_on if str(c) == outcome.clause), None)
        place = surface.location(getattr(clause, "path", "")) if hasattr(clause, "path") else None
        if outcome.status is Status.DRIFTED and place:
            yield outcome.adapter, place
