"""Writes docs/matrix.md, docs/matrix.svg and the README's table from evidence/matrix.

python tools/matrix_docs.py [--check]: with `--check` nothing is written, and the exit code is 1 where a file differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from eagle3compat.matrix import evidence
from eagle3compat.matrix.book import Cell, cells, order
from release_docs import load, ranges  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "evidence" / "matrix"
BEGIN, END = "<!-- matrix: written by tools/matrix_docs.py -->\n", "<!-- end of matrix -->\n"
STOCK = ("0.3.0", "0.4.0", "0.4.0.1")
UNTESTED = "untested"
COLOURS = {
    "parity": "#1a7f37", "run": "#7bc96f", "apply": "#d4a72c", "import": "#e08c3c", "static": "#9aa4b2",
    "none": "#cf222e", UNTESTED: "#ffffff",
}
SIDE, LEFT, TOP = 22, 130, 74
LONGEST = 110

HEAD = """\
<!-- Written by tools/matrix_docs.py from evidence/matrix. -->

# The measured matrix

Every pair here was run: the stock generator, unmodified, on a real CPU build of that vLLM, in an environment of its own
and in vLLM's own worker process, on {models} models with random weights. `eagle3compat matrix record` wrote a file of
evidence for each, which says what was installed, which adapters applied, and how far every layer was from transformers.
`compat_matrix.yaml` is built from these files, and a test holds the two together.

![The matrix as a picture: a square for each pair](matrix.svg)

A level is reached only where the one before it is:

| level | what was shown |
|---|---|
| static | every adapter has what it relies on, as the source of that vLLM says |
| import | the stock generator imports, adapted |
| apply | every adapter is healthy with everything imported |
| run | the stock generator extracted, in vLLM's own workers |
| parity | every tensor equals that of transformers |

Parity is shown in float32: no value differs by more than {tolerance:g} of the largest one, while a wrong layer and a
shifted row are off by more than {control}. After the level stands the largest difference.

"""
OTHERWISE = """\

(a) What this build of vLLM computes by itself is not what transformers computes for one of the models, without this
library as well: the states equal those of vLLM's own forward, tapped in `vllm.LLM`.
"""
LAST = """\

(b) This build of vLLM cannot run that model by itself either, or computes other states for two prompts in one batch
than for each alone, so that there is nothing to be equal to. The evidence has its words. It can rest on the processor:
on one with AMX 0.24.0 does not load DeepSeek-V3, and on the one where speculators 0.4.0 was measured it does.

0.33.0 has no build for CPUs yet: its CUDA build was installed beside the packages of 0.32.0, which shows that
everything imports and every adapter is healthy, and no more (`tools/matrix.py 0.33.0 --beside 0.32.0`).

To measure one more: `eagle3compat matrix record` in its environment, then `eagle3compat matrix build`. `make matrix`
does it for every pair and goes on where it stopped: {seconds:.0f} seconds a pair and processor core, with environments
of some gigabytes each, which it deletes as it goes.
"""


def by_pair() -> dict[tuple[str, str], Cell]:
    return {(cell.vllm, cell.speculators): cell for cell in cells(evidence.read(FOLDER))}


def releases(found: dict[tuple[str, str], Cell]) -> list[str]:
    """Those of the surface record, and what else was measured."""
    return sorted({*load().releases, *(vllm for vllm, _ in found)}, key=order)


def level(cell: Cell | None) -> str:
    return cell.level if cell else UNTESTED


def said(cell: Cell | None) -> str:
    if cell is None:
        return UNTESTED
    text = f"{cell.level}: {shortened(cell.result)}"
    if cell.level == "parity":
        text = f"parity, {cell.worst:.0e}"
    if cell.level == "parity" and any("vllm" in piece["reference"] for piece in cell.able):
        text += " (a)"
    if cell.unable and len(cell.unable) < len({piece["model"] for piece in cell.pieces.values()}):
        text += f" (b: {', '.join(cell.unable)})"
    return text.replace("|", "\\|")


def shortened(result: str) -> str:
    """The innermost error, and not all of it: the evidence has the rest."""
    errors = re.findall(r"\w+(?:Error|Exception): (?:(?!\w+(?:Error|Exception): ).)+", " ".join(result.split()))
    text = errors[-1].strip() if errors else " ".join(result.split())
    where = "vLLM by itself: " if result.startswith("vLLM by itself: ") else ""
    return where + (text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " ...")


def page() -> str:
    found = by_pair()
    pieces = evidence.read(FOLDER)
    models = " and ".join(sorted({piece["model"] for piece in pieces.values()}))
    head = HEAD.format(models=models, tolerance=evidence.TOLERANCES["float32"], control=evidence.CONTROL)
    table = [f"| vLLM | {' | '.join(f'speculators {stock}' for stock in STOCK)} |", "|---|---|---|---|"]
    for release in releases(found):
        table.append(f"| {release} | {' | '.join(said(found.get((release, stock))) for stock in STOCK)} |")
    spent: dict[tuple[str, str], float] = {}
    for piece in pieces.values():
        pair = (piece["vllm"], piece["speculators"])
        shared = {name: value for name, value in piece["seconds"].items() if name in ("import", "apply")}
        own = sum(piece["seconds"].values()) - sum(shared.values())
        spent[pair] = spent.get(pair, sum(shared.values())) + own
    seconds = sorted(spent.values())[len(spent) // 2] if spent else float("nan")
    otherwise = OTHERWISE if any("(a)" in row for row in table) else ""
    return head + "\n".join(table) + "\n" + otherwise + LAST.format(seconds=seconds)


def readme_part() -> str:
    """The table by runs of releases that are alike."""
    found = by_pair()
    names = releases(found)
    rows: dict[tuple[str, ...], list[str]] = {}
    for release in names:
        rows.setdefault(tuple(level(found.get((release, stock))) for stock in STOCK), []).append(release)
    lines = [f"| vLLM | {' | '.join(f'speculators {stock}' for stock in STOCK)} |", "|---|---|---|---|"]
    lines += [f"| {ranges(names, set(some))} | {' | '.join(levels)} |" for levels, some in rows.items()]
    return "\n".join(lines) + "\n"


def picture() -> str:
    found = by_pair()
    names = releases(found)
    return "\n".join(_svg(found, names)) + "\n"


def _svg(found: dict[tuple[str, str], Cell], names: Sequence[str]) -> Iterator[str]:
    width, height = LEFT + SIDE * len(names) + 34, TOP + SIDE * len(STOCK) + 44
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" role="img">'
    )
    yield "<title>vLLM releases by speculators releases, coloured by the level that was measured</title>"
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    for column, release in enumerate(names):
        x = LEFT + SIDE * column + SIDE // 2 + 4
        yield f'<text x="{x}" y="{TOP - 6}" transform="rotate(-60 {x} {TOP - 6})" fill="#1f2328">{release}</text>'
    yield f'<text x="8" y="{TOP - 8}" fill="#1f2328">vLLM</text>'
    for row, stock in enumerate(STOCK):
        y = TOP + SIDE * row
        yield f'<text x="8" y="{y + 15}" fill="#1f2328">speculators {stock}</text>'
        for column, release in enumerate(names):
            cell = found.get((release, stock))
            yield (
                f'<rect x="{LEFT + SIDE * column}" y="{y}" width="{SIDE - 3}" height="{SIDE - 3}" rx="3" '
                f'fill="{COLOURS[level(cell)]}" stroke="#8c959f" stroke-width="0.7">'
                f"<title>vLLM {release}, speculators {stock}: {level(cell)}</title></rect>"
            )
    x, y = LEFT, TOP + SIDE * len(STOCK) + 16
    for name, colour in COLOURS.items():
        yield f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{colour}" stroke="#8c959f"/>'
        yield f'<text x="{x + 19}" y="{y + 12}" fill="#1f2328">{name}</text>'
        x += 34 + 8 * len(name)
    yield "</svg>"


def outputs() -> dict[Path, str]:
    """Every file that is written, with its text."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return {
        ROOT / "docs" / "matrix.md": page(),
        ROOT / "docs" / "matrix.svg": picture(),
        ROOT / "README.md": f"{before}{BEGIN}\n{readme_part()}\n{END}{after}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write what shows the measured matrix.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    options = parser.parse_args()
    differ = [file for file, text in outputs().items() if not file.is_file() or file.read_text("utf-8") != text]
    if options.check:
        for file in differ:
            print(f"{file} is not what the evidence says: run python tools/matrix_docs.py", file=sys.stderr)
        return int(bool(differ))
    for file, text in outputs().items():
        file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
