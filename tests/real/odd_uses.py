"""Uses of one generator that nobody plans and somebody makes: `python odd_uses.py MODEL OUT.json`.

OUT.json says for each what came of it: `ok`, or the exception.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle3compat

PROMPTS = [[9 + number + place for place in range(50)] for number in range(12)]
LAYERS = [1, 3]
WEIGHTS, DAMAGED = "model.safetensors", "model.layers.2.post_attention_layernorm.weight"
"""A norm's: those of linear layers are no longer there as they were once a CPU build has repacked them."""


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  which exception it is is what the test asks
        return f"{type(error).__name__}: {error}"
    return "ok"


def in_threads(generator: Any) -> str:
    """Three threads at once, each with prompts of a length of its own."""
    said: list[str] = []

    def extract(length: int) -> None:
        for _ in range(5):
            results = generator.generate([prompt[:length] for prompt in PROMPTS])
            assert all(state.shape[0] == length for result in results for state in result["hidden_states"])

    threads = [
        threading.Thread(target=lambda length=length: said.append(outcome(lambda: extract(length))))
        for length in (20, 21, 22)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return " ".join(said)


def in_a_fork(generator: Any) -> str:
    """A child that extracts, and ends as a script does."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        signal.alarm(300)
        os.write(writer, outcome(lambda: generator.generate(PROMPTS)).encode())
        sys.exit(0)
    os.close(writer)
    os.wait()
    return os.read(reader, 10_000).decode()


def interrupted_while_a_reply_is_awaited(generator: Any) -> str:
    (worker,) = (found["pid"] for found in generator.executor.collective_rpc("eagle3compat_attest"))
    inner = generator.executor.engine._core.model_executor
    call = inner.collective_rpc

    def interrupt(number: int, frame: Any) -> None:
        """The worker goes on only after the interrupt, however late that is noticed."""
        threading.Timer(1, os.kill, (worker, signal.SIGCONT)).start()
        signal.default_int_handler(number, frame)

    def held_up(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "eagle3compat_collect":
            os.kill(worker, signal.SIGSTOP)
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return call(method, *args, **kwargs)

    signal.signal(signal.SIGINT, interrupt)
    inner.collective_rpc = held_up
    return outcome(lambda: generator.generate(PROMPTS))


def sockets() -> set[Path]:
    return {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}


def damaged(model: Path, folder: Path) -> Path:
    """A copy of the model with one value of layer 2, which is not extracted, that is not a number."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    weights = load_file(model / WEIGHTS)
    weights[DAMAGED][0] = float("nan")
    (folder / WEIGHTS).unlink()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    eagle3compat.apply()
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    def make(path: Any) -> Any:
        return VllmHiddenStatesGenerator(path, layer_ids=list(LAYERS), max_model_len=256)

    found: dict[str, str] = {"not to be had": outcome(lambda: make("nobody/nothing"))}
    before = sockets()
    generator = make(model)
    made = sockets() - before

    def extract() -> Any:
        return generator.generate(PROMPTS)

    found["threads"] = in_threads(generator)
    found["fork"] = in_a_fork(generator)
    found["after fork"] = outcome(extract)
    found["truth values"] = outcome(lambda: generator.generate([[True, True]]))
    eagle3compat.revert()
    found["reverted"] = outcome(extract)
    eagle3compat.apply()
    found["applied again"] = outcome(extract)
    generator.layer_ids[0] = 2
    found["other layers"] = outcome(extract)
    generator.layer_ids[0] = 1
    found["interrupted"] = interrupted_while_a_reply_is_awaited(generator)
    found["after the interrupt"] = outcome(extract)
    found["sockets"] = f"{len(made) > 0} made, {len(sockets() & made)} left, {len(before - sockets())} of others gone"
    generator = make(damaged(model, out.with_suffix(".damaged")))
    found["not finite"] = outcome(extract)
    generator.executor.shutdown()
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
