"""Writes docs/releases.md from the surface record in tests/surfaces; `--check` exits 1 when the file on disk differs.

python tools/release_docs.py [--check] [FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle3compat.adapter import Adapter, Outcome
from eagle3compat.adapters import ADAPTERS
from eagle3compat.patcher import decide
from eagle3compat.probe.facts import RecordedSurface, unfold
from eagle3compat.report import Report

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "surfaces"
FILE = ROOT / "docs" / "releases.md"
HEAD = """\
<!-- Written by tools/release_docs.py from tests/surfaces. Make that anew with tools/surface_record.py. -->

# vLLM releases

What the source of every vLLM release says about stock speculators, read by `eagle3compat probe` with nothing installed:
{count} releases, {first} to {last}. It is what can be known without running anything. What was run is in the README.

Where vLLM leaves the choice of transformers, it is the newest transformers 4 that both allow.
"""
BRIDGED = """\
On every one of them, for each of these stock releases, every adapter that is needed has what it relies on, and what
this library's own code uses is there.
"""
NEEDED = """\
## Which adapter starts to be needed where

The vLLM releases on which something that stock counts on at an adapter's seam does not hold. An adapter marked *always*
is applied on every release, since stock is wrong there on its own vLLM as well.
"""
ALONE = """\
## What stock alone fails on

The first thing in vLLM that does not fit, as far as source shows; faults that only show at run time are not seen here.
Where vLLM requires transformers 5, `import speculators` itself fails before that: see speculators_import above.
"""


@dataclass(frozen=True)
class Record:
    """The surface record: facts by vLLM release, stock by release of speculators."""

    releases: tuple[str, ...]
    facts: dict[str, dict[str, Any]]
    transformers: dict[str, dict[str, str]]
    faults: dict[str, dict[str, list[dict[str, str]]]]
    library: dict[str, dict[str, list[dict[str, str]]]]
    stock: dict[str, dict[str, Any]]
    of_transformers: dict[str, dict[str, Any]]

    def surface(self, vllm: str, speculators: str) -> RecordedSurface:
        """What the pair answers, with the transformers that it would have."""
        stock = self.stock[speculators]
        transformers = self.of_transformers[self.transformers[vllm][speculators]]
        return RecordedSurface({**self.facts[vllm], **stock["facts"], **transformers}, stock)


@cache
def load(folder: Path = FOLDER) -> Record:
    vllm, stock, transformers = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("vllm", "speculators", "transformers")
    )
    releases = vllm["releases"]
    unfolded = {name: unfold(vllm[name], releases) for name in ("facts", "transformers", "faults", "library")}
    return Record(tuple(releases), stock=stock, of_transformers=transformers, **unfolded)


@cache
def outcomes(vllm: str, speculators: str) -> tuple[Outcome, ...]:
    """The plan for a pair."""
    return decide(load().surface(vllm, speculators))


@cache
def unmet(adapter: str, speculators: str) -> str:
    """The releases on which stock's clauses at a seam do not hold: `0.11.0, 0.17.0 -`."""
    record = load()
    clauses = next(a for a in ADAPTERS if a.id == adapter).stock_needs
    surfaces = {release: record.surface(release, speculators) for release in record.releases}
    missing = {r for r, surface in surfaces.items() if not all(c.evaluate(surface).held for c in clauses)}
    return ranges(record.releases, missing)


def ranges(releases: Sequence[str], chosen: Collection[str]) -> str:
    """Runs of neighbours, open where the newest is in it: `0.11.0, 0.13.0 to 0.16.0, 0.30.0 on`."""
    runs: list[list[str]] = []
    for before, release in zip(["", *releases], releases, strict=False):
        if release in chosen:
            if before in chosen:
                runs[-1].append(release)
            else:
                runs.append([release])
    return ", ".join(_run(run, releases[-1]) for run in runs) or "none"


def _run(run: Sequence[str], newest: str) -> str:
    if run[-1] == newest:
        return f"{run[0]} on"
    return run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"


def alike(releases: Sequence[str]) -> list[tuple[str, ...]]:
    """Releases of speculators with the same stock code, together."""
    groups: dict[str, list[str]] = {}
    for release in releases:
        groups.setdefault(json.dumps(load().stock[release], sort_keys=True), []).append(release)
    return [tuple(group) for group in groups.values()]


def document() -> str:
    record = load()
    groups = alike(list(record.stock))
    head = HEAD.format(count=len(record.releases), first=record.releases[0], last=record.releases[-1])
    parts = [head, _bridged(), NEEDED, "\n".join(_needed(groups)), ALONE]
    for group in groups:
        parts += [f"### speculators {' and '.join(group)}\n", "\n".join(_alone(group[0]))]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _bridged() -> str:
    """That all is well, or else where it is not."""
    record = load()
    off = {
        release
        for release in record.releases
        for speculators in record.stock
        if not Report("", outcomes(release, speculators)).healthy or record.library[release]["faults"]
    }
    return f"Not bridged as far as source shows: vLLM {ranges(record.releases, off)}.\n" if off else BRIDGED


def _needed(groups: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| adapter | {' | '.join(f'speculators {_names(group)}' for group in groups)} |"
    yield f"|---|{'---|' * len(groups)}"
    for adapter in ADAPTERS:
        yield f"| {_link(adapter)} | {' | '.join(unmet(adapter.id, group[0]) for group in groups)} |"


def _names(group: Sequence[str]) -> str:
    return ", ".join(group)


def _link(adapter: Adapter) -> str:
    return f"[{adapter.id}](adapters.md#{adapter.id})" + (" (*always*)" if adapter.always else "")


def _alone(speculators: str) -> Iterator[str]:
    yield "| vLLM | stock fails with | at | bridged by |"
    yield "|---|---|---|---|"
    record = load()
    seen: dict[tuple[str, str, str], list[str]] = {}
    for release in record.releases:
        of_vllm = (fault for fault in record.faults[release][speculators] if fault["use"] != "import speculators")
        fault = next(of_vllm, None)
        told = (fault["found"], fault["where"], fault["adapter"]) if fault else ("nothing that source shows", "", "")
        seen.setdefault(told, []).append(release)
    for (found, where, adapter), releases in seen.items():
        where = f"`{where.removeprefix('speculators/data_generation/')}`" if where else ""
        yield f"| {ranges(record.releases, releases)} | {found} | {where} | {adapter} |"


if __name__ == "__main__":
    from pages import page_command  # type: ignore[import-not-found]

    sys.exit(page_command(FILE, document, "the surface record"))
