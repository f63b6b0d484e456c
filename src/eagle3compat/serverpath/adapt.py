"""Makes the files of a vLLM server right, in the server's own processes.

The one seam is vLLM's `EngineArgs`: what a server does follows from the arguments that it is started with, and they
pass there in the API server's process before they are used. A server that is not asked for hidden states is left alone.
What is changed is decided by `facts`, read from the source of this vLLM, and each change is one line of the log.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..errors import IncompatibleError, InputError
from ..patcher import MODE, SKIP, skipped_by_environment
from ..registry import REGISTRY, SERVER
from .connectors import LOG, Connector, connector_of, put_before
from .facts import METHOD, ServerFacts, server_facts

ARGUMENTS = "vllm.engine.arg_utils"
IDS = "eagle_aux_hidden_state_layer_ids"
_MARK = "_eagle3compat"


def watch() -> None:
    """Adapt the servers of this process that are asked for hidden states. Idempotent, and imports nothing of vLLM.

    Raises InputError for an id in EAGLE3COMPAT_SKIP that is none.
    """
    names = [*(registered.id for registered in REGISTRY), *SERVER]
    for name in skipped_by_environment():
        if name not in names:
            raise InputError(f"{SKIP}: there is no adapter '{name}'. The adapters are: {', '.join(sorted(names))}.")
    arguments = sys.modules.get(ARGUMENTS)
    owner = getattr(arguments, "EngineArgs", None)
    if owner is None or hasattr(owner.create_engine_config, _MARK):
        return
    owner.create_engine_config = _adapting(owner.create_engine_config)
    owner.from_cli_args = classmethod(_opening(owner.from_cli_args.__func__))


def _adapting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *arguments: Any, **options: Any) -> Any:
        connector = connector_of(self)
        if connector is None:
            return original(self, *arguments, **options)
        adapt(self, facts(), connector)
        config = original(self, *arguments, **options)
        refuse_missing_layer(config, facts())
        return config

    setattr(create_engine_config, _MARK, original)
    return create_engine_config


def _opening(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: type, args: Any) -> Any:
        if connector_of(args) is not None:
            if not facts().method and sys.argv[1:2] == ["serve"] and wanted("server_takeover"):
                take_over(sys.argv[2:])
            closed = getattr(args, "enable_scale_out", None) is False
            if closed and facts().render_gated and wanted("server_render"):
                args.enable_scale_out = True  # the application is built from the same object, after this
                LOG.info("eagle3compat: render endpoint opened, as --enable-scale-out does: prepare-data calls it")
        return original(cls, args)

    return from_cli_args


def take_over(words: Sequence[str]) -> NoReturn:
    """Become `eagle3compat serve` with the arguments of this `vllm serve`, whose vLLM has no such method."""
    LOG.info("eagle3compat: this vLLM has no method %s, and `eagle3compat serve` takes over", METHOD)
    os.execv(sys.executable, [sys.executable, "-m", "eagle3compat", "serve", *words])


def wanted(change: str) -> bool:
    """Whether a change that is needed is to be made; says so if it is not."""
    if change in skipped_by_environment():
        LOG.warning("eagle3compat: %s is needed here and left out, as %s asks: the files may be wrong", change, SKIP)
        return False
    return True


@functools.cache
def facts() -> ServerFacts:
    """Of the vLLM that runs here."""
    return server_facts(Path(os.path.dirname(str(sys.modules["vllm"].__file__))))


def adapt(args: Any, found: ServerFacts, connector: Connector) -> None:
    """Change the arguments of a server so that its files are right, and see to its answers and aborts.

    Raises IncompatibleError where EAGLE3COMPAT is `strict` and this connector's files would not be what they say.
    """
    if connector.unheard:
        refuse(
            "server_connector", f"{connector.name}.{connector.unheard} in {connector.module}",
            "a vLLM whose own connector calls it", "one that writes its files without it: they would not be quantized",
            "Start the launcher with --hidden-states-backend file, or take vLLM 0.22 or later.",
        )  # fmt: skip
    if not found.saves_at_end:
        _whole_prompts(args)
    if found.step_rows and args.enable_prefix_caching is not False and wanted("server_prefix_caching"):
        args.enable_prefix_caching = False
        LOG.info("eagle3compat: prefix caching off, as the connector would read others' rows for a cached prefix")
    if found.abort_kills and wanted("server_aborts"):
        put_before(args.kv_transfer_config, connector, "Outlives")
        LOG.info("eagle3compat: connector replaced by one that outlives requests that end before they are scheduled")
    if not (found.background_write or found.saves_at_end) and wanted("server_writes"):
        put_before(args.kv_transfer_config, connector, "Survives")
        LOG.info("eagle3compat: connector replaced by one that goes on where a file cannot be written")
        hold(locked=False)
    if found.background_write and wanted("server_answers") and hold(locked=True):
        LOG.info("eagle3compat: answers held until their file is whole, as the connector writes it afterwards")


def hold(locked: bool) -> bool:
    """`answers.hold`, which needs vLLM's engine."""
    from . import answers

    return answers.hold(locked)


def _whole_prompts(args: Any) -> None:
    """Have every prompt computed in one step: these connectors take a prompt's rows step by step, and lose some."""
    splits = args.enable_chunked_prefill is not False
    threshold = getattr(args, "long_prefill_token_threshold", 0) or 0
    if not (splits or threshold) or not wanted("server_chunks"):
        return
    if splits:
        args.enable_chunked_prefill = False
        args.max_num_batched_tokens = None  # vLLM then takes one that any prompt fits into
    if threshold:
        args.long_prefill_token_threshold = 0  # the scheduler splits by it, chunked prefill or not
    LOG.info("eagle3compat: chunked prefill off, as this vLLM's connector loses rows of a prompt that is split")


def refuse_missing_layer(config: Any, found: ServerFacts) -> None:
    """Raise IncompatibleError where the last layer is asked for and this vLLM never takes it from this model.

    The engine would die on the first request; found before the model is loaded.
    """
    ids = getattr(config.speculative_config.draft_model_config.hf_config, IDS, None) or ()
    layers = int(config.model_config.hf_text_config.num_hidden_layers)
    file = _model_file(config.model_config)
    if layers in ids and (not found.last_layer or file in found.partial_models):
        refuse(
            "server_last_layer", f"layer id {layers}, the last layer's output, of {file or 'this model'}",
            "a vLLM whose forward takes it", "one that takes no states after the last layer",
            "Use `eagle3compat serve`, or leave that id out (--no-include-last-layer).",
        )  # fmt: skip


def _model_file(model_config: Any) -> str:
    """The module that has the model's forward, without its package; empty where vLLM's registry does not say."""
    registry = getattr(sys.modules.get("vllm.model_executor.models.registry"), "ModelRegistry", None)
    registered = getattr(registry, "models", {}).get(getattr(model_config, "architecture", None))
    return str(getattr(registered, "module_name", "")).rpartition(".")[2]


def refuse(adapter: str, clause: str, expected: str, found: str, remedy: str) -> None:
    """Raise IncompatibleError, or log it where EAGLE3COMPAT is not `strict`."""
    error = IncompatibleError(adapter, clause, expected, found, remedy)
    if os.environ.get(MODE, "").strip().lower() == "strict":
        raise error
    LOG.warning("%s", error)
