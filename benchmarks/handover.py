"""The driver's part of the hand-over by itself, without a model: shared memory against pickled replies.

    python benchmarks/handover.py [--requests N] [--tokens N] [--hidden N] [--layers N] [--rounds N]

Needs torch and rich alone. Of one call's states in bf16 it measures making the shared memory, having memory for the
results ready (which goes on while the model computes), and taking states out and looking at their values, with as many
threads as an extraction takes; and, for the same bytes, what this was before: pickling, unpickling, stock's copy, and a
look by `isfinite` and `any`. Each thread's torch has one thread, as vLLM sets its driver. Raw figures, in seconds:
out/handover.json.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
FIGURES = ROOT / "out" / "handover.json"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from eagle3compat.capture.segment import Layout, Segment, Sheet
    from eagle3compat.engine.landing import THREADS, Landing

    torch.set_num_threads(1)
    names = tuple(str(number) for number in range(options.requests))
    layout = Layout(names, (options.tokens,) * len(names), options.layers, options.hidden, torch.bfloat16)
    figures: dict[str, Any] = {"bytes": layout.size, "threads": THREADS}
    figures["making the shared memory, once"], segment = timed(lambda: Segment(layout.size))
    sheet = Sheet(layout, segment.data)
    state = torch.randn(options.tokens, options.hidden).to(layout.dtype)
    for place in sheet.places.values():
        place.copy_(state.expand_as(place))
    segment.close_file()
    pool = ThreadPoolExecutor(THREADS)
    tensors = options.requests * options.layers

    def record(name: str, action: Callable[[], Any], times: int = 1) -> Any:
        seconds, value = timed(action)
        figures.setdefault(name, []).append(times * seconds)
        return value

    replies = {name: [0] * options.layers for name in names}
    for _ in range(options.rounds):
        landing = Landing(pool, sheet)
        record("memory for the results", lambda landing=landing: prepared(landing, tensors))
        record("taking out and looking", lambda landing=landing: landing.finish(replies))
        copy = record("before: pickling", lambda: pickle.loads(pickle.dumps(state, 5)), tensors)
        record("before: stock's copy", copy.clone, tensors)
        record("before: looking", lambda copy=copy: bool(torch.isfinite(copy).all()) and bool(copy.any()), tensors)
    return figures


def prepared(landing: Any, tensors: int) -> None:
    while len(landing._targets) < tensors:
        time.sleep(0.0001)
    wait({part.group for part in landing._targets.values()})


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = action()
    return time.perf_counter() - started, value


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description="The driver's part of the hand-over, without a model.")
    for name, value in {"requests": 8, "tokens": 2000, "hidden": 4096, "layers": 4, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    figures = measure(parser.parse_args())
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(figures))
    made = Table(title=f"{figures.pop('bytes') / 1e6:,.0f} MB, {figures.pop('threads')} threads")
    for heading in ("", "seconds, median", "least", "most"):
        made.add_column(heading, justify="right" if heading else "left")
    for name, seconds in figures.items():
        row = seconds if isinstance(seconds, list) else [seconds]
        made.add_row(name, f"{median(row):.3f}", f"{min(row):.3f}", f"{max(row):.3f}")
    Console().print(made)


if __name__ == "__main__":
    main()
