"""Writes tests/surfaces: what the clauses ask of every vLLM release, read from the package index, nothing installed.

    python tools/surface_record.py [--index-url URL] [--first RELEASE]

Some minutes for all releases. Names and signatures only; no source text is stored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from eagle3compat.errors import Eagle3CompatError
from eagle3compat.patcher import decide
from eagle3compat.probe import index, sources
from eagle3compat.probe.facts import Fact, fold, questions, take, take_stock
from eagle3compat.probe.sources import Source
from eagle3compat.probe.types import TypedSurface
from eagle3compat.probe.verdict import faults, own_faults, with_library
from eagle3compat.probe.versions import final, key
from eagle3compat.report import Report

FOLDER = Path(__file__).parent.parent / "tests" / "surfaces"
STOCK = ("0.3.0", "0.4.0", "0.4.0.1")
FIRST = "0.11.0"


def releases(first: str, indexes: Sequence[str]) -> list[str]:
    """The final vLLM releases from `first` on, in order."""
    offered = [version for version in index.versions("vllm", indexes) if final(version)]
    return sorted((v for v in offered if (key(v) or ()) >= (key(first) or ())), key=lambda v: key(v) or ())


def record(first: str, indexes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The contents of each file of the record, by its name."""
    stock = {release: sources.locate(release, "speculators", indexes) for release in STOCK}
    surfaces = {release: TypedSurface({"speculators": source.place}) for release, source in stock.items()}
    asked = questions(surfaces.values())
    vllm: dict[str, dict[str, Any]] = {}
    beside: dict[str, dict[str, str]] = {}
    met: dict[str, dict[str, Any]] = {}
    own: dict[str, dict[str, Any]] = {}
    transformers: dict[str, Source] = {}
    names = releases(first, indexes)
    for name in track(names, description="vLLM releases", console=Console(stderr=True)):
        source = sources.locate(name, "vllm", indexes)
        vllm[name] = _plain(take(TypedSurface({"vllm": source.place}), asked, "vllm").items())
        own[name] = {"faults": [asdict(fault) for fault in own_faults(with_library(source))]}
        beside[name], met[name] = {}, {}
        for release, speculators in stock.items():
            chosen = sources.transformers(source, speculators, indexes)
            chosen = transformers.setdefault(chosen.version or "", chosen)
            beside[name][release] = chosen.version or ""
            met[name][release] = _faults(source, speculators, chosen)
        if source.remote:
            source.remote.close()
    return {
        "vllm.json": {"releases": names, "facts": fold(vllm), "transformers": fold(beside), "faults": fold(met),
                      "library": fold(own)},
        "speculators.json": {
            release: {
                **take_stock(surface),
                "facts": _plain(take(surface, asked, "speculators").items()),
            }
            for release, surface in surfaces.items()
        },
        "transformers.json": {
            version: _plain(take(TypedSurface({"transformers": source.place}), asked, "transformers").items())
            for version, source in sorted(transformers.items(), key=lambda item: key(item[0]) or ())
        },
    }


def _plain(facts: Iterable[tuple[str, Fact]]) -> dict[str, list[str | None]]:
    return {path: list(fact) for path, fact in facts}


def _faults(vllm: Source, speculators: Source, transformers: Source) -> list[dict[str, str]]:
    """What stock alone would fail on, with what bridges it."""
    surface = TypedSurface({source.name: source.place for source in (vllm, speculators, transformers)})
    return [asdict(fault) for fault in faults(surface, Report("", decide(surface)))]


def write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """One line a fact: a new release then changes few lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(_lines(content), encoding="utf-8")


def _lines(content: dict[str, Any]) -> str:
    parts = []
    for name, value in content.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            parts.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what the clauses ask of every vLLM release.")
    parser.add_argument("--index-url", help="the package index; default: pip's")
    parser.add_argument("--first", default=FIRST, help=f"the first release; default: {FIRST}")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    try:
        files = record(arguments.first, [arguments.index_url] if arguments.index_url else index.configured())
    except Eagle3CompatError as error:
        print(error, file=sys.stderr)
        return 2
    write(arguments.folder, files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
