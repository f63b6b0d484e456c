"""How extraction grows: seconds a token against plain prefill, by sequence length, sequences, layers and ranks.

    python benchmarks/growth.py [--rounds N]                 # a small Qwen3 on CPU, in an environment made for it
    python benchmarks/growth.py --here --shape qwen3-8b      # in this interpreter, which has vLLM, on its accelerator

At each point the same prompts go through one engine in turn, captured and not (as `extraction.py` has it). A ratio
that stays where it was says that capture grows as the forward does. Medians of ratios within a round are printed; raw
seconds go to out/growth-SHAPE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from extraction import Extraction, device_peak, timed, versions
from workload import SHAPES, calls_of, interpreter, make_model

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out"
PAIR = ("0.32.0", "0.4.0.1")
TOKENS = 4096
"""Of a call, where the number of sequences is not what grows."""
LENGTHS = (32, 64, 128, 256, 512, 1024)
SEQUENCES = (1, 4, 16, 64, 256)
LAYERS = (1, 4, 8)

AXES = ("tokens", "sequences", "layers", "ranks")

Point = dict[str, Any]


def points(shape: dict[str, Any], ranks: int) -> list[Point]:
    """What is measured; points with the same layers and ranks share an engine."""
    layers = shape["layer_ids"]
    found = [{"axis": "tokens in a sequence", "at": n, "tokens": n, "prompts": TOKENS // n} for n in LENGTHS]
    found += [{"axis": "sequences in a call", "at": n, "tokens": 64, "prompts": n} for n in SEQUENCES]
    made = [{**point, "layer_ids": layers, "ranks": 1} for point in found]
    total = shape["model"]["num_hidden_layers"]
    for count in LAYERS:
        spread = [total * (index + 1) // count - 1 for index in range(count)]
        usual = {"tokens": 256, "prompts": TOKENS // 256, "ranks": 1}
        made.append({"axis": "layers captured", "at": count, "layer_ids": spread, **usual})
    for size in range(1, ranks + 1) if ranks > 1 else ():
        usual = {"tokens": 256, "prompts": TOKENS // 256, "layer_ids": layers}
        made.append({"axis": "tensor-parallel ranks", "at": size, "ranks": size, **usual})
    return made


def measure(model: Path, shape: dict[str, Any], rounds: int, ranks: int, axes: Sequence[str]) -> list[Point]:
    wanted = [point for point in points(shape, ranks) if any(name in point["axis"].split() for name in axes)]
    measured: Extraction | None = None
    made_for: Any = None
    for point in wanted:
        settings = (point["layer_ids"], point["ranks"])
        if measured is None or settings != made_for:
            if measured is not None:
                measured.executor.shutdown()
            options = argparse.Namespace(
                layer_ids=point["layer_ids"], tokens=max(LENGTHS), prompts=1, batch=1,
                tensor_parallel_size=point["ranks"],
            )
            measured, made_for = Extraction(model, options), settings
        call = argparse.Namespace(tokens=point["tokens"], prompts=point["prompts"], batch=point["prompts"])
        measured.calls = calls_of(call)
        ways = {"plain": measured.plain, "shared": lambda it=measured: it.extract("shared")}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        measured.executor.engine.call(device_peak)
        for index in range(rounds + 1):  # the first is not counted
            for name in ways if index % 2 else reversed(ways):
                took = timed(ways[name])
                if index:
                    seconds[name].append(took)
        point |= {"seconds": seconds, "device_peak_bytes": measured.executor.engine.call(device_peak)[0]}
        print(f"## {point['axis']} {point['at']}: {shown(point)}", flush=True)
    assert measured is not None
    measured.executor.shutdown()
    return wanted


def shown(point: Point) -> str:
    seconds = point["seconds"]
    low, middle, high = quantiles([p / s for p, s in zip(seconds["plain"], seconds["shared"], strict=True)])
    tokens = point["tokens"] * point["prompts"]
    each = 1e6 * median(seconds["shared"]) / tokens
    return f"{middle:.3f} of plain ({low:.3f} to {high:.3f}), {each:,.0f} us a token"


def main() -> None:
    parser = argparse.ArgumentParser(description="How extraction grows.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1, help="measure tensor-parallel sizes up to this")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES, help="what grows; all by default")
    parser.add_argument("--here", action="store_true", help="in this interpreter, which has vLLM and speculators")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    model, result = OUT / f"model-{options.shape}", OUT / f"growth-{options.shape}.json"
    shape = SHAPES[options.shape]
    if options.run:
        make_model(model, shape["model"])
        found = measure(model, shape, options.rounds, options.ranks, options.axes)
        about = {"versions": versions(), "cores": len(os.sched_getaffinity(0)), "rounds": options.rounds,
                 "shape": options.shape, "date": datetime.date.today().isoformat()}  # fmt: skip
        result.write_text(json.dumps({**about, "points": found}, indent=1))
        return
    python = interpreter(PAIR, options.here)
    OUT.mkdir(exist_ok=True)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    words = ["--shape", options.shape, "--rounds", str(options.rounds), "--ranks", str(options.ranks), "--run"]
    words += ["--axes", *options.axes]
    log = OUT / f"growth-{options.shape}.log"
    with log.open("w") as file, subprocess.Popen(
        [python, __file__, *words], stdout=subprocess.PIPE, stderr=file, env=env, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            file.write(line)
            if line.startswith("## "):
                print(line[3:], end="", flush=True)
    if child.returncode:
        sys.exit(f"it failed; the end of its output:\n{log.read_text()[-4000:]}")


if __name__ == "__main__":
    main()
