"""compat_matrix.yaml: built from evidence, never edited by hand, and held against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import evidence
from .evidence import LEVELS, Evidence

HEAD = """\
# Built by `eagle3compat matrix build` from the files in {folder}; not to be edited by hand.
# level: static < import < apply < run < parity. A pair that is not here is untested.
"""


@dataclass(frozen=True)
class Cell:
    """One pair: the lowest level of its evidence, with what held it there."""

    vllm: str
    speculators: str
    pieces: Mapping[str, Evidence]

    @property
    def able(self) -> list[Evidence]:
        """The runs of models that this vLLM can run by itself; all, where it can run none."""
        return [piece for piece in self.pieces.values() if piece.get("alone", "ok") == "ok"] or [*self.pieces.values()]

    @property
    def unable(self) -> list[str]:
        """The models that this vLLM cannot run by itself either."""
        return sorted({piece["model"] for piece in self.pieces.values() if piece.get("alone", "ok") != "ok"})

    @property
    def lowest(self) -> Evidence:
        return min(self.able, key=lambda piece: LEVELS.index(piece["level"]))

    @property
    def level(self) -> str:
        return str(self.lowest["level"])

    @property
    def result(self) -> str:
        alone = self.lowest.get("alone", "ok")
        return str(self.lowest["result"]) if alone == "ok" else f"vLLM by itself: {alone}"

    @property
    def adapters(self) -> list[str]:
        """Those that were applied in any of its runs."""
        lists = (piece["adapters"] or piece["plan"] for piece in self.pieces.values())
        return sorted({adapter for outcomes in lists for adapter, status in outcomes.items() if status == "applied"})

    @property
    def worst(self) -> float:
        """The largest error of any tensor in float32 runs, NaN where none was compared."""
        errors = [evidence.worst(piece) for piece in self.able if piece["dtype"] == "float32"]
        return max(errors, default=float("nan"))


def cells(pieces: Mapping[str, Evidence]) -> list[Cell]:
    """The evidence by pair, in the order of releases."""
    pairs: dict[tuple[str, str], dict[str, Evidence]] = {}
    for name, piece in pieces.items():
        pairs.setdefault((piece["vllm"], piece["speculators"]), {})[name] = piece
    return [Cell(*pair, pairs[pair]) for pair in sorted(pairs, key=lambda pair: [order(part) for part in pair])]


def order(version: str) -> list[tuple[int, str]]:
    """A key that sorts versions by their numbers, and what is no number before any."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"[.\-+]", version)]


def text(pieces: Mapping[str, Evidence], folder: str) -> str:
    """The YAML document."""
    return "\n".join([HEAD.format(folder=folder), *_lines(cells(pieces), folder)]) + "\n"


def _lines(found: list[Cell], folder: str) -> Iterator[str]:
    yield "cells:" if found else "cells: []"
    for cell in found:
        yield f"- vllm: {json.dumps(cell.vllm)}"
        yield f"  speculators: {json.dumps(cell.speculators)}"
        yield f"  level: {cell.level}"
        yield f"  result: {json.dumps(cell.result)}"
        yield f"  adapters: [{', '.join(cell.adapters)}]"
        yield f"  vllm_cannot_run: [{', '.join(cell.unable)}]"
        yield "  evidence:"
        for name, piece in cell.pieces.items():
            yield f"  - file: {folder}/{name}"
            yield f"    digest: {piece['digest']}"


def faults(file: Path, folder: Path, name: str) -> list[str]:
    """Where the file, the evidence and what the evidence claims disagree. `name` is the folder's in the file."""
    pieces = evidence.read(folder)
    found = [fault for piece in pieces.items() for fault in evidence.faults(*piece)]
    if found:
        return found
    if not pieces:
        return [f"there is no evidence in {folder}"]
    if not file.is_file():
        return [f"there is no {file}: run `eagle3compat matrix build`"]
    wanted, there = text(pieces, name).splitlines(), file.read_text(encoding="utf-8").splitlines()
    if wanted == there:
        return []
    place = next((n for n, (one, other) in enumerate(zip(wanted, there, strict=False)) if one != other), None)
    line = min(len(wanted), len(there)) if place is None else place
    says = there[line].strip() if line < len(there) else "nothing"
    shows = wanted[line].strip() if line < len(wanted) else "nothing"
    return [
        f"{file}, line {line + 1}, says {says!r} where the evidence says {shows!r}: run `eagle3compat matrix build`"
    ]
