"""The process of `eagle3compat serve`. Exit codes: 0 stopped by a signal, 1 it failed, 2 usage."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ..engine.model_class import named_faults
from ..errors import Eagle3CompatError, InputError
from .arguments import Asked, chosen_ids, parse
from .files import Folder

STOPPED, FAILED, USAGE = 0, 1, 2
GRACE_SECONDS = 5
"""How long requests that are under way may take once the server is told to stop."""
KEEP_ALIVE_SECONDS = 600
"""How long a connection may be idle. httpx, which stock's clients use, closes its own after 5 s, and uvicorn's 5 s race
with that: a request on a connection that the server is just closing is lost."""


def run(words: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    try:
        asked = parse(words)
        if not asked.dry:
            return serve(asked)
        layers = "the launcher's own" if asked.layer_ids is None else str(list(asked.layer_ids))
        layers += " and the last layer's" if asked.last_layer else ""
        where = f"{asked.host}:{asked.port}, layer ids {layers}, files in {asked.folder}"
        say(f"would serve {asked.names[0]} on {where}; the model was not looked at")
        return STOPPED
    except InputError as error:
        print(error, file=sys.stderr)
        return USAGE
    except (Eagle3CompatError, ValueError, OSError) as error:  # vLLM says by ValueError and OSError what it refuses
        print(f"eagle3compat serve: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return STOPPED


def interrupt(_number: int, _frame: Any) -> None:
    """Stop; what is ended then is not interrupted by a second signal."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def serve(asked: Asked) -> int:
    """Load the model, answer requests, and end what was started."""
    with ExitStack() as ending:
        folder = Folder(asked.folder, asked.lock)
        ending.callback(folder.close)
        if folder.swept:
            say(f"removed {folder.swept} leftovers of servers that were killed from {asked.folder}")
        listening = bound(asked.host, asked.port)
        ending.callback(listening.close)
        return _serve(asked, folder, listening, ending)


def _serve(asked: Asked, folder: Folder, listening: socket.socket, ending: ExitStack) -> int:
    import uvicorn
    from vllm.engine.arg_utils import EngineArgs

    from .app import Service
    from .batches import Batches
    from .extractor import Extractor

    for change in asked.changed:
        say(f"extraction needs it: {change}")
    with named_faults():
        config = EngineArgs.from_cli_args(argparse.Namespace(**asked.engine)).create_engine_config()
    if config.speculative_config is not None:
        raise InputError(
            f"{asked.engine['model']} or an option asks for speculative decoding, of which this server does none. "
            "Serve the target model alone."
        )
    layer_ids = chosen_ids(asked, int(config.model_config.hf_text_config.num_hidden_layers))
    extractor = Extractor(config, layer_ids)
    ending.callback(extractor.shutdown)

    def stop() -> None:
        server.should_exit = True

    batches = Batches(extractor, folder, asked.writers, stop)
    ending.callback(batches.close, GRACE_SECONDS)
    app = Service(extractor, batches, asked.names).app()
    settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_keep_alive": KEEP_ALIVE_SECONDS}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=GRACE_SECONDS, **settings))
    listening.listen()  # who reads the next line and connects at once is not refused
    host, port = listening.getsockname()[:2]
    say(
        f"serving {asked.names[0]} on http://{host}:{port}, layer ids {list(layer_ids)}, files in {asked.folder}, "
        f"{extractor.runner} model runner"
    )
    if extractor.no_images:
        say(f"images will be refused: {extractor.no_images}")
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn has ended in good order, and raises again the signal that it was told by
        say("stopping")
    if extractor.dead:
        say(f"the engine can no longer be used: {extractor.dead}")
        return FAILED
    return STOPPED


def bound(host: str, port: int) -> socket.socket:
    """A socket on that address, taken before the model is loaded. Raises InputError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InputError(f"cannot listen on {host}:{port}: {error}. Choose another --port.") from error
    return listening


def say(text: str) -> None:
    print(f"eagle3compat serve: {text}", file=sys.stderr, flush=True)
