"""What capturing costs as a share of a forward, on CPU: stock's generator on a small Llama.

    python benchmarks/hooks.py [--rounds N] [--layers 32] [--width 1024]

Three ways through one engine with the same prompts, in turn: nothing is recorded; four layers are recorded; stock's
`generate`, which also moves what was recorded to the driver and checks it. Of each way the medians of ratios within a
round, with quartiles. On a machine that does other things too they are wide, so the worker is also asked for the time
in hooks and in filing what they caught, as a share of the rest of the forward: in the first batch, which proves how
layers are read, and in later ones.

The model is small, so this is an upper bound: recording copies the stream, which grows with the hidden size, while the
forward grows with its square. Raw figures, in seconds: out/hooks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

PAIR = ("0.32.0", "0.4.0.1")
OUT = ROOT / "out" / "hooks"
FIGURES = ROOT / "out" / "hooks.json"
LAYERS, HIDDEN = 32, 1024
PROMPTS, LENGTH = 4, 256

Figures = dict[str, list[float]]


def captured(layers: int) -> list[int]:
    """Those that stock takes by default, counted from 0, and the last."""
    return [2, layers // 2, layers - 3, layers - 1]


def make_model(folder: Path, layers: int, width: int) -> None:
    """The tiny Llama of the tests, deeper and wider."""
    sys.path.insert(0, str(ROOT / "src/eagle3compat/yardstick"))
    import tiny  # type: ignore[import-not-found]

    tiny.HIDDEN = width
    tiny.build("llama", folder, num_layers=layers)


class Measured:
    """One engine, and ways through it."""

    def __init__(self, model: Path, layer_ids: list[int]) -> None:
        import eagle3compat

        eagle3compat.apply()
        from speculators.data_generation import vllm_hidden_states_generator as stock

        self.stock = stock
        self.generator = stock.VllmHiddenStatesGenerator(str(model), layer_ids=layer_ids, max_model_len=2 * LENGTH)
        self.captures = len(layer_ids)
        self.executor = self.generator.executor
        self.engine = self.executor.engine
        rng = random.Random(0)
        self.prompts = [[rng.randrange(8, 600) for _ in range(LENGTH)] for _ in range(PROMPTS)]
        self.calls = 0

    def requests(self) -> dict[str, Any]:
        """As stock makes them, with names of their own."""
        self.calls += 1
        parameters = self.stock.SamplingParams(max_tokens=1, temperature=0.0)
        made = [
            self.stock.Request(
                request_id=f"bench_{self.calls}_{index}",
                prompt_token_ids=prompt,
                sampling_params=parameters,
                pooling_params=None,
                eos_token_id=2,
                arrival_time=0.0,
            )
            for index, prompt in enumerate(self.prompts)
        ]
        return {request.request_id: request for request in made}

    def unrecorded(self) -> float:
        requests = self.requests()
        return timed(lambda: self.engine.run(requests))

    def recorded(self) -> float:
        requests = self.requests()
        prompts = {name: request.prompt_token_ids for name, request in requests.items()}
        self.executor.transport.begin(prompts, self.captures)
        seconds = timed(lambda: self.engine.run(requests))
        self.executor.transport.abandon()
        self.engine.call("_reset_capture")
        return seconds

    def generate(self) -> float:
        return timed(lambda: self.generator.generate(self.prompts))

    def rounds(self, number: int) -> Figures:
        ways = {"unrecorded": self.unrecorded, "recorded": self.recorded, "generate": self.generate}
        figures: Figures = {name: [] for name in ways}
        self.unrecorded()  # warm, so that the first batch, which proves the reading, is a forward like others
        self.engine.call(watch)
        self.recorded()
        figures["within: proof"] = [self.captured()[1]]
        for name in ways:
            ways[name]()
        for index in range(number):
            for name in ways if index % 2 else reversed(ways):
                figures[name].append(ways[name]())
        self.captured()
        figures |= {"within: forward": [], "within: capture": []}
        for _ in range(number):
            self.recorded()
            for name, seconds in zip(("forward", "capture"), self.captured(), strict=True):
                figures[f"within: {name}"].append(seconds)
        return figures

    def captured(self) -> tuple[float, float]:
        """Seconds in the worker since last asked: in the model's forward itself, and in capturing."""
        (spent,) = self.engine.call(spent_in)
        return spent["forward"] - spent["hooks"], spent["all"] - spent["forward"] + spent["hooks"]


def watch(worker: Any) -> None:
    """In the worker: time the forward, the hooks in it, and it with what is done before and after."""
    recorder = worker._eagle3compat_recorder
    recorder.spent = {"all": 0.0, "forward": 0.0, "hooks": 0.0}

    def timing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                recorder.spent[name] += time.perf_counter() - started

        return call

    recorder._forward = timing("forward", recorder._forward)
    recorder.decoder.base.forward = timing("all", recorder.decoder.base.forward)
    for module in (*recorder.decoder.layers, *recorder.decoder.after.values()):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.update({key: timing("hooks", hook) for key, hook in hooks.items()})


def spent_in(worker: Any) -> dict[str, float]:
    """In the worker: the seconds since last asked."""
    recorder = worker._eagle3compat_recorder
    spent = dict(recorder.spent)
    recorder.spent.update(dict.fromkeys(spent, 0.0))
    return spent


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def share(of: Sequence[float], to: Sequence[float], less: float = 0.0) -> tuple[str, str]:
    """The median of the ratios, and their quartiles, in per cent."""
    low, middle, high = (100 * (q - less) for q in quantiles([a / b for a, b in zip(of, to, strict=True)]))
    return f"{middle:.2f} %", f"{low:.2f} to {high:.2f} %"


def print_table(figures: Figures, layers: int, width: int) -> None:
    from rich.console import Console
    from rich.table import Table

    rounds, tokens = len(figures["unrecorded"]), PROMPTS * LENGTH
    taken = len(captured(layers))
    about = f"Llama, {layers} layers of {width}, {taken} captured, {tokens} tokens, vLLM {PAIR[0]} on CPU"
    made = Table(title=f"{about}, {rounds} rounds")
    for heading in ("", "tokens/s", "more than unrecorded", "quartiles", "target"):
        made.add_column(heading, justify="right" if heading else "left")
    for name in ("unrecorded", "recorded", "generate"):
        more = share(figures[name], figures["unrecorded"], less=1) if name != "unrecorded" else ()
        made.add_row(name, f"{tokens / median(figures[name]):,.0f}", *more)
    within = share(figures["within: capture"], figures["within: forward"])
    made.add_row("within the worker", "", *within, "< 1 %")
    forwards = figures["within: proof"][0] / median(figures["within: forward"])
    made.add_row("the first batch, which proves", "", f"{100 * forwards:.2f} %", "of one forward, once")
    Console(width=110).print(made)


def inside(options: argparse.Namespace) -> None:
    """In the environment with vLLM."""
    model = OUT / f"llama-{options.layers}-{options.width}"
    make_model(model, options.layers, options.width)
    FIGURES.write_text(json.dumps(Measured(model, captured(options.layers)).rounds(options.rounds)))


def main() -> None:
    parser = argparse.ArgumentParser(description="What capturing costs as a share of a forward.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=HIDDEN)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options)
        return
    sys.path.insert(0, str(ROOT / "tools"))
    import environments  # type: ignore[import-not-found]

    python = environments.ensure(*PAIR)
    OUT.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = OUT / "log"
    print(f"measuring {options.rounds} rounds; vLLM's output goes to {log.relative_to(ROOT)}", flush=True)
    with log.open("w") as file:
        command = [str(python), __file__, "--inside"]
        for name in ("rounds", "layers", "width"):
            command += [f"--{name}", str(getattr(options, name))]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env)
    if done.returncode:
        sys.exit(f"the measurement failed; the end of its output:\n{log.read_text()[-3000:]}")
    print_table(json.loads(FIGURES.read_text()), options.layers, options.width)


if __name__ == "__main__":
    main()
