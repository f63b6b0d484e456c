"""Writes two sections of docs/server.md: which pair needs what, from tests/surfaces/server.json, and what was measured,
from evidence/server.

python tools/server_docs.py [--check] [FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from eagle3compat.probe.facts import unfold
from eagle3compat.probe.versions import key
from eagle3compat.serverpath.facts import ClientFacts, ServerFacts
from eagle3compat.serverpath.verdict import Effect, Finding, ServerVerdict, judge

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "surfaces" / "server.json"
FILE = ROOT / "docs" / "server.md"
EVIDENCE = ROOT / "evidence" / "server"
BEGIN, END = "<!-- pairs: written by tools/server_docs.py from tests/surfaces/server.json -->", "<!-- end of pairs -->"
MEASURED = "<!-- measured: written by tools/server_docs.py from evidence/server -->", "<!-- end of measured -->"
WAYS = {"missing": "lost", "length": "with too few rows", "wrong": "with wrong rows of the right number"}


def load(record: Path = RECORD) -> tuple[dict[str, ServerFacts], dict[str, ClientFacts]]:
    """The facts of every recorded vLLM and of every recorded speculators, by release."""
    held = json.loads(record.read_text(encoding="utf-8"))
    vllm, speculators = (unfold(held[n]["facts"], held[n]["releases"]) for n in ("vllm", "speculators"))
    servers = {v: ServerFacts(**{**f, "partial_models": tuple(f["partial_models"])}) for v, f in vllm.items()}
    return servers, {release: ClientFacts(**facts) for release, facts in speculators.items()}


def section() -> str:
    """The tables, between the two marks."""
    servers, clients = load()
    verdicts_of = {c: [_cell(judge(c, clients[c], v, servers[v])) for v in servers] for c in clients}
    columns = [list(group) for _, group in groupby(clients, key=verdicts_of.__getitem__)]
    lines = [f"| vLLM | {' | '.join('speculators ' + ', '.join(names) for names in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    met: dict[str, Finding] = {}
    for rows, verdicts in _rows(servers, clients, [names[-1] for names in columns]):
        lines.append(f"| {', '.join(rows)} | {' | '.join(map(_cell, verdicts))} |")
        for finding in (finding for verdict in verdicts for finding in verdict.findings):
            met.setdefault(f"{finding.id} ({finding.effect.value})", finding)
    lines += ["", "| what decides | | what to do |", "|---|---|---|"]
    for name, finding in sorted(met.items(), key=lambda item: list(Effect).index(item[1].effect)):
        lines.append(f"| {name} | {finding.what} | {_do(finding)} |")
    return "\n".join([BEGIN, "", *lines, "", END])


def _rows(
    servers: Mapping[str, ServerFacts], clients: Mapping[str, ClientFacts], columns: Sequence[str]
) -> Iterator[tuple[list[str], list[ServerVerdict]]]:
    """Neighbouring releases that get the same verdicts, and these."""

    def cells(release: str) -> list[str]:
        return [_cell(judge(c, clients[c], release, servers[release])) for c in columns]

    for _, group in groupby(servers, key=cells):
        rows = list(group)
        yield rows, [judge(c, clients[c], rows[0], servers[rows[0]]) for c in columns]


def _cell(verdict: ServerVerdict) -> str:
    """`refused: race`; `right with: chunks`; what depends on the model is left to the second table."""
    if verdict.refused:
        return "refused: " + ", ".join(f.id for f in verdict.findings if f.effect is Effect.REFUSED)
    settings = [finding.id for finding in verdict.findings if finding.effect is Effect.SETTING]
    return f"right with settings: {', '.join(settings)}" if settings else "right"


def _do(finding: Finding) -> str:
    done = finding.setting or finding.remedy
    return f"{done}; adapted" if finding.adapted else done


def measured(folder: Path = EVIDENCE) -> str:
    """The table of what was measured, between its two marks."""
    lines = ["| vLLM | stock, by itself | adapted | `eagle3compat serve` |", "|---|---|---|---|"]
    for file in sorted(folder.glob("*.json"), key=lambda file: key(file.stem) or ()):
        held = json.loads(file.read_text(encoding="utf-8"))
        stock, total = held["control"], held["prompts"]
        cells = [_right(held[way]["clients"], total) if way in held else "" for way in ("adapted", "serve")]
        if "does not start" in stock:
            lines.append(f"| {held['vllm']} | does not start | {' | '.join(cells)} |")
            continue
        ways = [f"{stock[way]} {said}" for way, said in WAYS.items() if stock[way]]
        more = [f"the engine ended by {stock['ended by']}"] if "ended by" in stock else []
        more += [f"render answers {stock['render']}"] if "render" in stock else []
        said = "; ".join([f"{stock['client']}: {', '.join(ways)} of {total}", *more])
        lines.append(f"| {held['vllm']} | {said} | {' | '.join(cells)} |")
    return "\n".join([MEASURED[0], "", *lines, "", MEASURED[1]])


def _right(clients: Mapping[str, Mapping[str, Any]], total: int) -> str:
    wrong = sum(len({number for number, *_ in found["wrong"]}) for found in clients.values())
    largest = max(found["max"] for found in clients.values())
    return f"{len(clients) * total} files, {wrong} wrong, at most {largest:.1e}"


def document(file: Path = FILE) -> str:
    """The page with its sections made anew; the rest of it stays. Raises ValueError if it lacks one."""
    text = file.read_text(encoding="utf-8")
    for begin, end, made in ((BEGIN, END, section()), (*MEASURED, measured())):
        head, _, rest = text.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"{file} has no lines {begin!r} and {end!r}")
        text = head + made + tail
    return text


if __name__ == "__main__":
    from pages import page_command  # type: ignore[import-not-found]

    sys.exit(page_command(FILE, document, "tests/surfaces/server.json and evidence/server"))
