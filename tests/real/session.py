"""Runs stock extraction with the library on real models, inside an environment that has a real vLLM.

    python session.py PLAN.json OUT_DIR

PLAN holds a list of steps; each writes its outcome to OUT_DIR/session.json, and tensors to OUT_DIR/NAME.pt. A step
that raises records the exception, and the next one goes on: what to expect is the test's business.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.process
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import eagle3compat

GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"


class Session:
    """One process; at most one generator at a time, as memory is small."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.generator: Any = None

    def apply(self, **options: Any) -> dict[str, Any]:
        started = time.monotonic()
        report = eagle3compat.apply(**options)
        seconds = time.monotonic() - started
        heavy = [name for name in ("torch", "vllm", "speculators", "transformers") if name in sys.modules]
        return {"seconds": seconds, "heavy": heavy, **report.as_dict()}

    def status(self) -> dict[str, Any]:
        return eagle3compat.status().as_dict()

    def stock(self) -> Any:
        import importlib

        return importlib.import_module(GENERATOR).VllmHiddenStatesGenerator

    def imports(self) -> dict[str, Any]:
        """Import the stock generator; what is in place then, and that vLLM's modules are as they were."""
        self.stock()
        return eagle3compat.status().as_dict()

    def load(
        self,
        dtype: str = "auto",
        edit: dict[str, Any] | None = None,
        start_method: str = "",
        model_impl: str = "auto",
        **arguments: Any,
    ) -> dict[str, Any]:
        """Make a generator.

        `dtype` stands in for stock's "auto": in float32 two implementations agree so closely that a wrong row or layer
        cannot hide in rounding. `edit` changes finished config values, by dotted name. `start_method` overrides what
        the CPU platform sets while the config is built. `model_impl` is vLLM's own argument of that name.
        """
        started = time.monotonic()
        generator = edited(self.stock(), edit or {}, start_method)
        with model_fields({"dtype": dtype, "model_impl": model_impl}):
            self.generator = generator(**arguments)
        return {
            "seconds": time.monotonic() - started,
            "workers": self.attest() if eagle3compat.status().outcomes else [],
            "start_method": start_method or os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"),
            "driver_pid": os.getpid(),
        }

    def attest(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.generator.executor.collective_rpc("eagle3compat_attest")
        return workers

    def generate(self, prompts: list[list[int]], save: str = "", repeat: int = 1) -> dict[str, Any]:
        import torch

        for _ in range(repeat):
            results = self.generator.generate(prompts)
        if save:
            torch.save([result["hidden_states"] for result in results], self.out / f"{save}.pt")
        return {
            "shapes": [[list(state.shape) for state in result["hidden_states"]] for result in results],
            "input_ids": [result["input_ids"].tolist() for result in results],
            "transport": self.generator.executor.transport.way,
            "dtypes": sorted({str(state.dtype) for result in results for state in result["hidden_states"]}),
        }

    def alone(self, seed: int, count: int, longest: int) -> dict[str, Any]:
        """Extract the prompts of a bank one by one; later steps compare batches of them with that."""
        from batches import bank, one_by_one

        self.prompts = bank(seed, count, longest)
        self.states = one_by_one(self.generator, self.prompts)
        return {"tokens": sum(len(prompt) for prompt in self.prompts)}

    def count(self, sequences: int, layer_ids: list[int]) -> list[str]:
        """One call of so many sequences, the bank over and over; what is wrong with the results."""
        from batches import differences

        chosen = [number % len(self.prompts) for number in range(sequences)]
        results = self.generator.generate([self.prompts[index] for index in chosen])
        return differences(results, chosen, self.states, layer_ids)

    def random_batches(self, layer_ids: list[int], rounds: int, seed: int) -> dict[str, Any]:
        from batches import random_batches

        return random_batches(self.generator, self.prompts, self.states, layer_ids, rounds, seed)

    def under_pressure(self, layer_ids: list[int], rounds: int, seed: int) -> dict[str, Any]:
        """Random batches, and how many tokens the engine computed for them."""
        from batches import Scheduled, random_batches

        with Scheduled(self.generator) as scheduled:
            figures = random_batches(self.generator, self.prompts, self.states, layer_ids, rounds, seed)
        return {**figures, "steps": scheduled.steps, "computed": scheduled.tokens}

    def use_accelerator(self) -> None:
        """Start CUDA in this process, after which a forked child cannot use it."""
        import torch

        torch.zeros(1, device="cuda")

    def fill_accelerator(self) -> dict[str, Any]:
        """Take all memory that the accelerator has left, as another program would."""
        import torch

        self.filled: list[Any] = []
        for size in (2**30, 2**26, 2**21):
            while True:
                try:
                    self.filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.cuda.OutOfMemoryError:  # none of this size is left: that is what is wanted
                    break
        return {"taken": sum(block.numel() for block in self.filled), "free": torch.cuda.mem_get_info()[0]}

    def release_accelerator(self) -> None:
        """Give it back."""
        import torch

        self.filled = []
        torch.cuda.empty_cache()

    def accelerator_peak(self) -> int:
        """Bytes: the most that torch has had on the accelerator in worker 0 since this was last asked."""
        peak: int = self.generator.executor.engine.call(_peak)[0]
        return peak

    def without_accelerator(self, gib: int) -> None:
        """Give stock, which asks CUDA for free memory, a figure on a machine that has none."""
        import torch

        torch.cuda.mem_get_info = lambda *_: (gib * 2**30, gib * 2**30)

    def register_deferring(self) -> None:
        """Give vLLM the class of deferring.py, in this process and in workers that are forked from it."""
        import deferring

        deferring.register()

    def without_media_check(self) -> None:
        """From now on prompts with tokens that stand for images are taken."""
        from eagle3compat.adapters import results

        results.check_media = lambda prompts, model_config: None

    def without_sums(self) -> None:
        """From now on recorders in forked workers know of no other ranks, as at a tensor-parallel size of 1."""
        from eagle3compat.capture.recorder import Recorder

        made = Recorder.__init__
        alone = {"reduce": None, "agree": None}
        Recorder.__init__ = lambda self, *args, **kwargs: made(self, *args, **{**kwargs, **alone})  # type: ignore[method-assign]

    def transport(self, choice: str) -> None:
        """Have states come this way from now on."""
        self.generator.executor.transport.choice = choice

    def rpc(self, method: str, args: list[Any]) -> Any:
        return self.generator.executor.collective_rpc(method, args=tuple(args))

    def kill_worker(self, rank: int) -> None:
        """End a worker as the kernel does when memory runs out."""
        workers = {worker["rank"]: worker["pid"] for worker in self.attest()}
        os.kill(workers[rank], 9)

    def close(self) -> dict[str, Any]:
        """Shut the generator down; the worker processes that are left."""
        self.generator.executor.shutdown()
        self.generator = None
        return self.children()

    def children(self) -> dict[str, Any]:
        """The worker processes of this one that are alive."""
        deadline = time.monotonic() + 300
        while multiprocessing.active_children() and time.monotonic() < deadline:
            time.sleep(0.1)
        return {"children": [child.name for child in multiprocessing.active_children()]}

    def revert(self) -> None:
        eagle3compat.revert()


def _peak(_worker: Any) -> int:
    import torch

    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(peak)


def edited(generator: Any, edit: dict[str, Any], start_method: str) -> Any:
    """The stock class, its finished configuration changed."""

    class Edited(generator):  # type: ignore[misc]
        def _create_vllm_config(self, *args: Any, **kwargs: Any) -> Any:
            config = super()._create_vllm_config(*args, **kwargs)
            for name, value in edit.items():
                part, _, attribute = name.partition(".")
                target = getattr(config, part)
                if isinstance(target, dict):
                    target[attribute] = value
                else:
                    setattr(target, attribute, value)
            if start_method:
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method
            return config

    return Edited if edit or start_method else generator


@contextmanager
def model_fields(fields: dict[str, Any]) -> Iterator[None]:
    """Within, the module of the stock class gives vLLM's ModelConfig these fields, where they are not "auto"."""
    names = sys.modules[GENERATOR].__dict__
    original = names["ModelConfig"]
    changed = {name: value for name, value in fields.items() if value != "auto"}
    if changed:
        wrapper = functools.wraps(original)  # a replacement that does not show what it wraps is refused
        names["ModelConfig"] = wrapper(lambda **given: original(**{**given, **changed}))
    try:
        yield
    finally:
        names["ModelConfig"] = original


class Started:
    """Counts the processes that multiprocessing starts: vLLM's workers, forked or spawned."""

    def __init__(self) -> None:
        self.count = 0
        original = multiprocessing.process.BaseProcess.start

        def start(process: Any) -> None:
            self.count += 1
            original(process)

        multiprocessing.process.BaseProcess.start = start  # type: ignore[method-assign]


def main() -> None:
    started = Started()
    plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    session, outcomes = Session(out), {}
    for step in plan:
        name, action, arguments = step["name"], step["do"], step.get("with", {})
        began, started.count = time.monotonic(), 0
        try:
            outcomes[name] = {"value": getattr(session, action)(**arguments)}
        except Exception as error:  # noqa: BLE001  the outcome of a step is what the tests look at
            outcomes[name] = {
                "error": type(error).__name__,
                "bases": [base.__name__ for base in type(error).__mro__],
                "message": str(error),
                "traceback": traceback.format_exc(),
            }
        outcomes[name]["processes"] = started.count
        print(f"## {name}: {outcomes[name].get('error', 'ok')} in {time.monotonic() - began:.2f} s", flush=True)
        (out / "session.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
