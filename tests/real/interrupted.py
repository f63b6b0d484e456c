"""A driver that extracts until a signal ends it: `python interrupted.py MODEL OUT.json [TENSOR_PARALLEL_SIZE]`.

SIGUSR1 makes the call raise, and nobody catches that.
OUT.json says which processes there are, once a call is under way; after Ctrl-C, also what the next calls gave.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle3compat

PROMPTS = [[9 + (number + place) % 500 for place in range(100)] for number in range(8000)]
"""One call of them takes minutes: a signal that comes after its first steps comes while it computes."""
FEW = PROMPTS[:2]


def outcome(call: Any) -> str:
    """`ok`, or the exception's type and message."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  which exception it is is what the test asks
        return f"{type(error).__name__}: {error}"
    return "ok"


def fail(_number: int, _frame: Any) -> None:
    raise RuntimeError("as a user's script may")


def main() -> None:
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Python leaves it ignored if it was started so
    model, out, ranks = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    eagle3compat.apply()
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    def make() -> Any:
        return VllmHiddenStatesGenerator(
            model, [1, 3], max_model_len=256, gpu_memory_utilization=0.3, tensor_parallel_size=ranks
        )

    generator = make()
    generator.generate(FEW)
    workers = [worker["pid"] for worker in generator.executor.collective_rpc("eagle3compat_attest")]
    found: dict[str, Any] = {"driver": os.getpid(), "workers": workers}
    try:
        tell_under_way(generator, lambda: _write(out, found))
        while True:
            generator.generate(PROMPTS)
    except KeyboardInterrupt:
        found["next call"] = outcome(lambda: generator.generate(FEW))
        found["new generator"] = outcome(lambda: make().generate(FEW))
        _write(out, found)


def tell_under_way(generator: Any, tell: Callable[[], None], steps: int = 3) -> None:
    """Call `tell` within a call of the generator, once vLLM has run so many steps of it."""
    executor = generator.executor.engine._core.model_executor
    execute, done = executor.execute_model, itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(done) == steps:
            tell()
        return execute(*args, **kwargs)

    executor.execute_model = counted


def _write(out: Path, found: dict[str, Any]) -> None:
    scratch = out.with_suffix(".part")
    scratch.write_text(json.dumps(found))
    scratch.replace(out)


if __name__ == "__main__":
    main()
