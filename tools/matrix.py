"""Measures every pair of vLLM and speculators, in an environment each; the evidence goes to evidence/matrix.

    python tools/matrix.py [VLLM ...] [--speculators 0.3.0 ...] [--model llama ...] [--jobs N] [--again]
    python tools/matrix.py 0.33.0 --beside 0.32.0    a release that has no CPU build yet: whether all of it imports

Goes on where it stopped: a cell whose evidence is there is passed over. Environments that it made are deleted as it
goes. At the end compat_matrix.yaml and docs/matrix.md are written anew.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import environments  # type: ignore[import-not-found]
from eagle3compat.matrix.evidence import release

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence" / "matrix"
STOCK = ("0.3.0", "0.4.0", "0.4.0.1")
MODELS = ("llama", "deepseek_v3")
SCRATCH = Path(tempfile.gettempdir()) / "eagle3compat-matrix"


def releases() -> list[str]:
    """Every release of vLLM that the surface record knows."""
    found: list[str] = json.loads((ROOT / "tests/surfaces/vllm.json").read_text(encoding="utf-8"))["releases"]
    return found


def recorded(vllm: str, speculators: str, model: str) -> bool:
    return (EVIDENCE / release(vllm) / f"{speculators}-{model}.json").is_file()


@dataclass
class Run:
    """A run over many cells: what is left to do, and what is told of it."""

    models: Sequence[str]
    cells: list[tuple[str, str]]
    beside: str | None = None
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, vllm: str, speculators: str, said: str) -> None:
        with self.lock:
            self.done += 1
            passed = time.monotonic() - self.started
            left = passed / self.done * (len(self.cells) - self.done)
            place = f"[{self.done} of {len(self.cells)}, about {left / 60:.0f} min left]"
            print(f"{place} vLLM {vllm}, speculators {speculators}: {said}", flush=True)

    def measure(self, vllm: str, core: int) -> None:
        """All cells of one release of vLLM, on one processor core."""
        for speculators in [stock for of, stock in self.cells if of == vllm]:
            there = (environments.location(vllm, speculators) / environments.COMPLETE).is_file()
            try:
                python = environments.ensure(vllm, speculators, beside=self.beside)
            except environments.CommandFailedError as error:
                self.tell(vllm, speculators, f"no environment: {error.stderr.strip()[-300:]}")
                continue
            try:
                self.tell(vllm, speculators, extract(python, self.models, core))
            finally:
                if not there:
                    environments.remove(vllm, speculators)


def extract(python: Path, models: Sequence[str], core: int) -> str:
    """Record one cell; what became of it. Where vLLM wants libraries preloaded that are there, once more with them."""
    said = _extract(python, models, core, "")
    there = [ctypes.util.find_library("tcmalloc_minimal"), *map(str, python.parent.parent.glob("lib/libiomp5.so"))]
    libraries = ":".join(filter(None, there))
    return _extract(python, models, core, libraries) if libraries and "LD_PRELOAD" in said else said


def _extract(python: Path, models: Sequence[str], core: int, preload: str) -> str:
    words = [word for model in models for word in ("--model", model)]
    command = [str(python), "-m", "eagle3compat", "matrix", "record", *words]
    command += ["--scratch", str(SCRATCH), "--evidence", str(EVIDENCE)]
    strange = ("VLLM", "EAGLE3COMPAT", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    started = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT,
        env={**kept, "VLLM_CPU_OMP_THREADS_BIND": str(core), **({"LD_PRELOAD": preload} if preload else {})},
    )
    said = [line.partition("evidence/matrix/")[2] or line for line in done.stdout.splitlines()]
    if not said:
        said = [f"nothing recorded: {done.stderr.strip()[-300:]}"]
    return f"{time.monotonic() - started:.0f} s: {'; '.join(said)}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure every pair of vLLM and speculators.")
    parser.add_argument("vllm", nargs="*", help="releases of vLLM; by default every one that the surface record knows")
    parser.add_argument("--speculators", nargs="+", default=STOCK, metavar="RELEASE")
    parser.add_argument("--model", nargs="+", default=MODELS, metavar="MODEL")
    parser.add_argument("--jobs", type=int, default=2, help="releases at a time, on a processor core each (2)")
    parser.add_argument(
        "--beside", metavar="RELEASE", help="where there is no CPU build: the CUDA build with RELEASE's packages"
    )
    parser.add_argument("--again", action="store_true", help="measure cells that have evidence, too")
    options = parser.parse_args(words)
    wanted = options.vllm or releases()
    cells = [
        (vllm, stock)
        for vllm in wanted
        for stock in options.speculators
        if options.again or not all(recorded(vllm, stock, model) for model in options.model)
    ]
    environments.find_uv()  # that there is none is said before anything; and two threads must not be the first to ask
    run = Run(options.model, cells, options.beside)
    print(f"{len(cells)} of {len(wanted) * len(options.speculators)} cells to measure", flush=True)
    cores = sorted(os.sched_getaffinity(0))
    free = [cores[number % len(cores)] for number in range(options.jobs)]

    def work(vllm: str) -> None:
        with run.lock:
            core = free.pop()
        try:
            run.measure(vllm, core)
        finally:
            with run.lock:
                free.append(core)

    with ThreadPoolExecutor(options.jobs) as pool:
        for _ in pool.map(work, list(dict.fromkeys(vllm for vllm, _ in cells))):
            pass
    built = subprocess.run([sys.executable, "-m", "eagle3compat", "matrix", "build"], cwd=ROOT)
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
