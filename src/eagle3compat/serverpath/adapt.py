"""Makes the files of a vLLM server right, in the server's own processes.

The one seam is vLLM's `EngineArgs`: what a server does follows from the arguments that it is started with, and they
pass there in the API server's process before they are used. A server that is not asked for hidden states is left alone.
What is changed is decided by `facts`, read from the source of this vLLM, and each change is one line of the log.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .facts import CONNECTOR, METHOD, ServerFacts, server_facts

LOG = logging.getLogger("vllm.eagle3compat")
"""vLLM shows what its own loggers say, and this is below them."""
ARGUMENTS = "vllm.engine.arg_utils"
OWN_CONNECTOR = "eagle3compat.serverpath.connector"
_MARK = "_eagle3compat"


def watch() -> None:
    """Adapt the servers of this process that are asked for hidden states. Idempotent, and imports nothing of vLLM."""
    arguments = sys.modules.get(ARGUMENTS)
    owner = getattr(arguments, "EngineArgs", None)
    if owner is None or hasattr(owner.create_engine_config, _MARK):
        return
    owner.create_engine_config = _adapting(owner.create_engine_config)
    owner.from_cli_args = classmethod(_opening(owner.from_cli_args.__func__))


def _adapting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        if extracts(self):
            adapt(self, facts())
        return original(self, *arguments, **options)

    setattr(create_engine_config, _MARK, original)
    return create_engine_config


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: type, args: Any) -> Any:
        if extracts(args) and facts().render_gated and getattr(args, "enable_scale_out", None) is False:
            args.enable_scale_out = True  # the application is built from the same object, after this
            LOG.info("eagle3compat: render endpoint opened, as --enable-scale-out does: prepare-data calls it")
        return original(cls, args)

    return from_cli_args


def extracts(args: Any) -> bool:
    """Whether a server with these arguments is to write hidden states with vLLM's own connector."""
    speculative, transfer = getattr(args, "speculative_config", None), getattr(args, "kv_transfer_config", None)
    own = _get(transfer, "kv_connector") == CONNECTOR and not _get(transfer, "kv_connector_module_path")
    return own and _get(speculative, "method") == METHOD


@functools.cache
def facts() -> ServerFacts:
    """Of the vLLM that runs here."""
    return server_facts(Path(os.path.dirname(str(sys.modules["vllm"].__file__))))


def adapt(args: Any, found: ServerFacts) -> None:
    """Change the arguments of a server so that its files are right, and see to its answers and aborts."""
    if found.refuses_chunks and args.enable_chunked_prefill is not False:
        args.enable_chunked_prefill = False
        args.max_num_batched_tokens = None  # vLLM then takes one that any prompt fits into
        LOG.info("eagle3compat: chunked prefill off, with which this vLLM refuses the connector")
    if found.step_rows and args.enable_prefix_caching is not False:
        args.enable_prefix_caching = False
        LOG.info("eagle3compat: prefix caching off, as the connector would read others' rows for a cached prefix")
    if found.abort_kills:
        _set(args.kv_transfer_config, "kv_connector_module_path", OWN_CONNECTOR)
        LOG.info("eagle3compat: connector replaced by one that outlives requests that end before they are scheduled")
    if found.background_write:
        from .answers import hold

        if hold():
            LOG.info("eagle3compat: answers held until their file is whole, as the connector writes it afterwards")


def _get(config: Any, name: str) -> Any:
    """Of a configuration as an object or, as a command line has it, a dictionary."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _set(config: Any, name: str, value: Any) -> None:
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)
