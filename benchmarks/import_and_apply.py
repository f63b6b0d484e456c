"""What `import eagle3compat` and `apply()` cost before anything heavy is imported, beside a bare interpreter.

    python benchmarks/import_and_apply.py [--rounds N]

Every figure is the median over processes of their own, started in turn, in an environment with vLLM 0.16.0 and
speculators 0.3.0. Raw figures, in seconds: out/import_and_apply.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import environments  # type: ignore[import-not-found]  # noqa: E402

PAIR = ("0.16.0", "0.3.0")
OUT = ROOT / "out" / "import_and_apply.json"
HEAVY = ("torch", "vllm", "speculators", "transformers")

BARE = "pass"
IMPORT = "import eagle3compat"
APPLY = f"""
import eagle3compat, sys, time
started = time.perf_counter()
eagle3compat.apply()
print(time.perf_counter() - started)
assert not set({HEAVY}) & set(sys.modules)
"""


def started(python: Path, code: str) -> tuple[float, str]:
    """Seconds from the start of an interpreter to its end, and what it printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLE3COMPAT", "PYTHON"))}
    before = time.perf_counter()
    done = subprocess.run([str(python), "-c", code], env=env, capture_output=True, text=True, check=True)
    return time.perf_counter() - before, done.stdout


def measure(python: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds by name, one a round; the first round, which fills the file cache and writes bytecode, is left out."""
    figures: dict[str, list[float]] = {"bare": [], "import": [], "apply": []}
    for number in range(rounds + 1):
        bare, imported = started(python, BARE)[0], started(python, IMPORT)[0]
        applied = float(started(python, APPLY)[1])
        if number:
            for name, seconds in (("bare", bare), ("import", imported), ("apply", applied)):
                figures[name].append(seconds)
    return figures


def table(figures: dict[str, list[float]]) -> Table:
    bare = median(figures["bare"])
    over_bare = median(i - b for i, b in zip(figures["import"], figures["bare"], strict=True))
    made = Table(title=f"medians of {len(figures['bare'])} processes, vLLM {PAIR[0]}, speculators {PAIR[1]}")
    for heading in ("", "ms", "of a bare start", "target"):
        made.add_column(heading, justify="right" if heading else "left")
    rows = (("bare interpreter", bare, ""), ("import eagle3compat, over it", over_bare, "< 30 ms"))
    for name, seconds, target in (*rows, ("apply(), after the import", median(figures["apply"]), "< 50 ms")):
        made.add_row(name, f"{1000 * seconds:.1f}", f"{seconds / bare:.2f}", target)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description="What import and apply() cost beside a bare interpreter.")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    figures = measure(environments.ensure(*PAIR), options.rounds)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures))
    Console().print(table(figures))


if __name__ == "__main__":
    main()
