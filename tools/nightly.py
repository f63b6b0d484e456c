"""Watches a vLLM that comes out tonight: is what adapters rely on still there, and does an extraction still run?

    python tools/nightly.py check TARGET ...    probe the first TARGET that there is, compare with the last good one
    python tools/nightly.py extract             install that CPU build and extract from a tiny model, if need be
    python tools/nightly.py tell                open, update or close the one issue, with the `gh` command
    python tools/nightly.py accept              make it the last good one, if all is well

Each of the last three takes what `check` wrote, nightly.json or its own `--out`.

Exit codes: 0 all is well, 1 it is not, 2 usage or network. A network fault is never taken for a change in vLLM.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3compat.adapter import Status
from eagle3compat.adapters import ADAPTERS
from eagle3compat.errors import Eagle3CompatError, InputError
from eagle3compat.probe import probe
from eagle3compat.probe.ahead import paths
from eagle3compat.probe.facts import parse, questions, take
from eagle3compat.probe.verdict import Verdict

ROOT = Path(__file__).resolve().parent.parent
GOOD = ROOT / ".github" / "last-known-good.json"
STOCK = ("0.3.0", "0.4.0.1")
EXTRACTED = "0.4.0.1"
EVERY = 7
"""Days after which an extraction is due even if no clause has flipped."""
TITLE = "vLLM nightly: stock extraction does not work with it"
LABEL = "vllm-nightly"
WELL, NOT_WELL, UNKNOWN = 0, 1, 2


def check(targets: Sequence[str], good: dict[str, Any], stock: Sequence[str], install: str) -> dict[str, Any]:
    """What is found out about the first of `targets` that there is, as plain data."""
    verdicts = dict(zip(stock, _verdicts(targets, stock), strict=True))
    first = next(iter(verdicts.values()))
    asked = questions(verdict.surface() for verdict in verdicts.values())
    facts = {path: list(fact) for path, fact in take(first.surface(), asked, "vllm").items()}
    clauses = {f"speculators {release}": dict(_clauses(verdict)) for release, verdict in verdicts.items()}
    flips = list(_flips(clauses, facts, good))
    why = _why(flips, good, install)
    return {
        "vllm": first.vllm.version,
        "origin": first.vllm.origin,
        "url": first.vllm.url,
        "date": _today(),
        "good": good.get("vllm"),
        "healthy": all(verdict.healthy for verdict in verdicts.values()),
        "troubles": [trouble for release, verdict in verdicts.items() for trouble in _troubles(release, verdict)],
        "flips": flips,
        "extract": why,
        "extraction": None,
        "clauses": clauses,
        "facts": facts,
    }


def _verdicts(targets: Sequence[str], stock: Sequence[str]) -> list[Verdict]:
    for target in targets[:-1]:
        try:
            return _of_each(target, stock)
        except InputError as error:  # there is none of this kind tonight; a network fault is another matter
            print(error, file=sys.stderr)
    return _of_each(targets[-1], stock)


def _of_each(target: str, stock: Sequence[str]) -> list[Verdict]:
    first = probe(target, stock[0])
    return [first, *(probe(first.vllm, release) for release in stock[1:])]


def _clauses(verdict: Verdict) -> Iterator[tuple[str, list[Any]]]:
    """Each clause with whether it holds, what was found and the paths that it is about."""
    surface = verdict.surface()
    for adapter in ADAPTERS:
        for clause in (*adapter.stock_needs, *adapter.relies_on):
            finding = clause.evaluate(surface)
            yield f"{adapter.id}: {clause}", [finding.held, finding.found, list(paths(clause))]


def _flips(clauses: dict[str, Any], facts: dict[str, Any], good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The clauses that hold now and did not on the last good vLLM, or the other way round."""
    for stock, found in clauses.items():
        for name, (held, text, about) in found.items():
            before = good.get("clauses", {}).get(stock, {}).get(name)
            if before is not None and before[0] != held:
                adapter, _, clause = name.partition(": ")
                old = [_said(path, good["facts"]) for path in about] or [before[1]]
                new = [_said(path, facts) for path in about] or [text]
                yield {"stock": stock, "adapter": adapter, "clause": clause, "holds": held,
                       "old": "; ".join(old), "new": "; ".join(new)}  # fmt: skip


def _said(path: str, facts: dict[str, Any]) -> str:
    """A path with its signature, or why it is not there."""
    missing, signature = facts.get(path) or ("it was not recorded", None)
    return missing or (f"{path}{parse(signature).shown()}" if signature else f"{path} is there")


def _why(flips: Sequence[Any], good: dict[str, Any], install: str) -> str:
    """Why an extraction is due; empty if none is."""
    if install != "changed":
        return "it was asked for" if install == "always" else ""
    if flips:
        return f"{len(flips)} clauses have flipped"
    last = good.get("extracted")
    if last is None:
        return "there was none yet"
    days = (datetime.date.fromisoformat(_today()) - datetime.date.fromisoformat(last)).days
    return f"the last one was {days} days ago" if days >= EVERY else ""


def _troubles(release: str, verdict: Verdict) -> Iterator[dict[str, str]]:
    places = dict(verdict.places)
    for outcome in verdict.report:
        if outcome.status in (Status.DRIFTED, Status.FAILED):
            what = f"{outcome.clause}: expected {outcome.expected}" if outcome.clause else outcome.reason
            where = places.get(outcome.adapter, "")
            yield {"stock": f"speculators {release}", "adapter": outcome.adapter, "what": what,
                   "found": outcome.found or outcome.reason, "where": where}  # fmt: skip
    for fault in (*verdict.unforeseen, *verdict.own):
        yield {"stock": f"speculators {release}", "adapter": "not foreseen by any adapter", "what": fault.use,
               "found": fault.found, "where": fault.there}  # fmt: skip


def extract(result: dict[str, Any]) -> dict[str, Any] | None:
    """Install the CPU build that was probed and extract from a tiny model; None if that is not due or there is none."""
    if not result["extract"]:
        print("no extraction is due: no clause has flipped")
        return None
    if "cpu" not in re.split(r"[-_+.]", urllib.parse.unquote(result["url"]).rpartition("/")[2]):
        print(f"no extraction: {result['origin']} is no CPU build")
        return None
    sys.path.insert(0, str(ROOT / "tools"))
    import demo  # type: ignore[import-not-found]
    import environments  # type: ignore[import-not-found]

    print(f"extracting, since {result['extract']}", flush=True)
    try:
        python = environments.ensure(result["vllm"], EXTRACTED, result["url"])
        assert_installed(python, result)
        demo.OUT.mkdir(parents=True, exist_ok=True)
        demo.make_models(python)
        figures = demo.extract_and_compare(python, demo.MODELS[0])
        faults = list(demo.faults_of(demo.MODELS[0], figures))
    except (demo.DemoError, environments.CommandFailedError, NotTheNightlyError) as error:
        faults = [str(error)]
    return {"well": not faults, "said": "\n".join(faults) or "every tensor equals that of transformers"}


class NotTheNightlyError(Exception):
    """The vLLM in the environment is not the one that was probed."""


def assert_installed(python: Path, result: dict[str, Any]) -> None:
    """Raise unless the environment holds the very wheel that was probed, by version and by address."""
    distribution = Path(result["url"]).name.partition("-")[0]
    code = "import importlib.metadata as m, sys; d = m.distribution(sys.argv[1]); " \
           "print(d.version); print(d.read_text('direct_url.json'))"  # fmt: skip
    done = subprocess.run([str(python), "-c", code, distribution], capture_output=True, text=True)
    version, _, origin = done.stdout.partition("\n")
    address = json.loads(origin).get("url", "") if origin.startswith("{") else ""
    if version != result["vllm"] or urllib.parse.unquote(address) != urllib.parse.unquote(result["url"]):
        found = f"{version or done.stderr.strip()} from {origin.strip() or 'nowhere'}"
        raise NotTheNightlyError(f"installed is {distribution} {found}, not {result['vllm']} from {result['url']}")


def well(result: dict[str, Any]) -> bool:
    """Whether the clauses and, where there was one, the extraction are."""
    return bool(result["healthy"] and (result["extraction"] or {"well": True})["well"])


def due(result: dict[str, Any]) -> bool:
    """Whether an extraction is due that has not been run, as where a flipped clause came without a CPU build."""
    return bool(result["extract"] and result["extraction"] is None)


def tell(result: dict[str, Any]) -> str:
    """Open or update the one issue, or close it where all is well; what was done. Runs `gh`."""
    listed = _gh("issue", "list", "--state", "open", "--label", LABEL, "--json", "number", "--limit", "1")
    numbers = [str(issue["number"]) for issue in json.loads(listed or "[]")]
    if well(result):
        for number in numbers:
            _gh("issue", "close", number, "--comment", f"It works again, on vLLM {result['vllm']}.")
        return "closed" if numbers else "nothing to tell"
    if numbers:
        _gh("issue", "edit", numbers[0], "--body-file", "-", given=body(result))
        return "updated"
    _gh("label", "create", LABEL, "--force", "--description", "vLLM's nightly build and stock extraction")
    _gh("issue", "create", "--title", TITLE, "--label", LABEL, "--body-file", "-", given=body(result))
    return "opened"


def _gh(*words: str, given: str | None = None) -> str:
    return subprocess.run(["gh", *words], input=given, capture_output=True, text=True, check=True).stdout


def body(result: dict[str, Any]) -> str:
    """The issue: what does not fit, with the old and the new signature."""
    good = result["good"] or "none yet"
    lines = [f"vLLM {result['vllm']} ({result['origin']}), {result['date']}. Last good one: {good}."]
    for trouble in result["troubles"]:
        where = f" (`{trouble['where']}`)" if trouble["where"] else ""
        lines += [f"\n### {trouble['adapter']}, {trouble['stock']}"]
        lines += [f"- {trouble['what']}", f"- found: {trouble['found']}{where}"]
    for flip in result["flips"]:
        state = "holds again" if flip["holds"] else "no longer holds"
        lines += [f"\n### {flip['adapter']}: {flip['clause']} {state} ({flip['stock']})"]
        lines += [f"- old: `{flip['old']}`", f"- new: `{flip['new']}`"]
    if result["extraction"] and not result["extraction"]["well"]:
        lines += ["\n### The extraction", "```", result["extraction"]["said"][-3000:], "```"]
    lines += [f"\n`eagle3compat probe {result['url'] or result['vllm']}` shows the same."]
    return "\n".join(lines) + "\n"


def accept(result: dict[str, Any], good: dict[str, Any]) -> dict[str, Any]:
    """What is to be known of the last good vLLM."""
    extracted = result["date"] if result["extraction"] else good.get("extracted")
    kept = {name: result[name] for name in ("vllm", "date", "clauses", "facts")}
    return {**kept, "extracted": extracted}


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(words)
    good = _read(options.good)
    if options.command == "check":
        try:
            result = check(options.targets, good, STOCK, options.install)
        except Eagle3CompatError as error:
            print(error, file=sys.stderr)
            return UNKNOWN
        _write(options.out, result)
        print(body(result))
        return WELL if result["healthy"] else NOT_WELL
    result = _read(options.result)
    if not result:
        print(f"there is no {options.result}: run `check` first", file=sys.stderr)
        return UNKNOWN
    if options.command == "extract":
        result["extraction"] = extract(result)
        _write(options.result, result)
        if result["extraction"]:
            print(result["extraction"]["said"])
    elif options.command == "tell":
        print(tell(result))
        return WELL
    elif well(result) and due(result):
        print("the last good one stays: an extraction is due, and there was none")
    elif well(result):
        _write(options.good, accept(result, good))
        print(f"last known good: vLLM {result['vllm']}")
    return WELL if well(result) else NOT_WELL


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Watch a vLLM that comes out tonight.")
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser("check", help="probe it, compare with the last good one")
    checks.add_argument("targets", nargs="+", metavar="TARGET", help="as `eagle3compat probe` takes it")
    checks.add_argument("--out", type=Path, default=Path("nightly.json"))
    checks.add_argument("--install", choices=("changed", "always", "never"), default="changed")
    for name, what in (("extract", "extract, if due"), ("tell", "the one issue"), ("accept", "move the last good one")):
        commands.add_parser(name, help=what).add_argument("result", type=Path, nargs="?", default=Path("nightly.json"))
    for command in commands.choices.values():
        command.add_argument("--good", type=Path, default=GOOD, help="the file of the last good one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
