"""The stock launcher's arguments: those that it takes itself, and those that it passes to `vllm serve`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..adapters.configs import CHOSEN
from ..adapters.results import check_model_path
from ..capture import EXTENSION
from ..errors import InputError, joined

METHOD = "extract_hidden_states"
CONNECTOR = "ExampleHiddenStatesConnector"
IDS = "eagle_aux_hidden_state_layer_ids"
SETTINGS = ("shared_storage_path", "use_synchronization_lock", "num_writer_threads", "allow_custom_save_path")
"""What vLLM's connector reads of its extra configuration (vLLM 0.32)."""
OURS = {**CHOSEN, "enforce_eager": True, "worker_extension_cls": EXTENSION}
"""Engine arguments that extraction needs; states are taken by hooks, which a compiled model does not call."""
ONE = ("data_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
USAGE = "eagle3compat serve MODEL [--hidden-states-path DIR] [--target-layer-ids ID ...] [OPTION of `vllm serve` ...]"
EMBEDDINGS = "layer id 0 is the embeddings, which this server does not capture. Ids here start at 1."


@dataclass(frozen=True)
class Asked:
    """What a command line asks for. `layer_ids` is None where the launcher's own are meant."""

    engine: Mapping[str, Any]
    layer_ids: tuple[int, ...] | None
    last_layer: bool
    folder: Path
    lock: bool
    writers: int
    host: str
    port: int
    names: tuple[str, ...]
    changed: tuple[str, ...]
    """Options whose value was replaced, for people."""
    dry: bool = False
    """Nothing is to be served."""


def add_own(parser: argparse.ArgumentParser) -> None:
    """What this server takes beside the options of vLLM's engine."""
    parser.add_argument("model_tag", metavar="MODEL", help="a model folder, or an id on the hub")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (all)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000); 0: any that is free")
    parser.add_argument("--hidden-states-path", metavar="DIR", help="where files go, as the stock launcher has it")
    parser.add_argument("--hidden-states-backend", default="file", help="as the stock launcher has it; file only")
    parser.add_argument("--dry-run", action="store_true", help="look at the arguments and say what would be served")
    parser.add_argument(
        "--target-layer-ids", type=int, nargs="+", metavar="ID",
        help="id i is transformers' hidden_states[i]; by default those that the stock launcher takes",
    )  # fmt: skip
    parser.add_argument(
        "--include-last-layer", action=argparse.BooleanOptionalAction, default=True,
        help="add the last layer to --target-layer-ids, as the stock launcher does (it does)",
    )  # fmt: skip


def own_help() -> str:
    """What `--help` says. vLLM is not asked: it takes a minute to say what its own `--help` says."""
    parser = argparse.ArgumentParser(
        "eagle3compat serve", USAGE, "Answers speculators 0.5 to 0.9 as a vLLM server with extract_hidden_states does.",
        "Engine options of vLLM are taken too, such as --max-model-len and --tensor-parallel-size: see `vllm serve "
        "--help`. --speculative_config and --kv_transfer_config are taken as the stock launcher passes them.",
    )  # fmt: skip
    add_own(parser)
    return parser.format_help()


def parse(words: Sequence[str]) -> Asked:
    """Raises InputError; argparse's SystemExit for words that no option takes, which it names."""
    if words and not words[0].startswith("-"):
        check_model_path(words[0])  # before vLLM's parser, whose import takes its time
    from vllm.engine.arg_utils import EngineArgs, FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="eagle3compat serve", usage=USAGE)
    add_own(parser)
    EngineArgs.add_cli_args(parser)
    parsed = parser.parse_args([word for word in words if word != "--"])
    check_model_path(parsed.model_tag)
    if parsed.hidden_states_backend != "file":
        raise InputError(
            f"--hidden-states-backend is {parsed.hidden_states_backend!r}; this server writes files. Pass file, to the "
            "client too."
        )
    layer_ids, last_layer = _layer_ids(parsed)
    if layer_ids and 0 in layer_ids:
        raise InputError(EMBEDDINGS)
    connector = _connector(parsed)
    engine = {name: value for name, value in vars(parsed).items() if name in EngineArgs.__dataclass_fields__}
    engine.update(model=parsed.model_tag, speculative_config=None, kv_transfer_config=None)
    media = engine.get("allowed_local_media_path")
    if media and not Path(media).is_dir():
        raise InputError(f"--allowed-local-media-path is {media}, which is no folder: every image would fail.")
    changed = _adapt(engine, parser)
    names = parsed.served_model_name or parsed.model_tag
    return Asked(
        engine, layer_ids, last_layer, Path(connector.get("shared_storage_path", "/tmp")).absolute(),
        bool(connector.get("use_synchronization_lock", True)), int(connector.get("num_writer_threads", 8)),
        parsed.host, parsed.port, tuple([names] if isinstance(names, str) else names), changed, parsed.dry_run,
    )


def _layer_ids(parsed: argparse.Namespace) -> tuple[tuple[int, ...] | None, bool]:
    """The layer ids, in the server's convention, and whether the last layer is to be added to them."""
    method = parsed.speculative_config
    if method is None:
        ids = parsed.target_layer_ids
        return None if ids is None else tuple(ids), parsed.include_last_layer
    if parsed.target_layer_ids is not None:
        raise InputError("layer ids are given by --target-layer-ids and by --speculative-config. Leave one out.")
    if method.get("method") != METHOD:
        raise InputError(
            f"the method of --speculative-config is {method.get('method')!r}; this server has {METHOD!r} only."
        )
    config = dict((method.get("draft_model_config") or {}).get("hf_config") or {})
    ids = config.pop(IDS, None)
    _refuse_others("--speculative-config", method, ("method", "num_speculative_tokens", "draft_model_config"))
    _refuse_others("draft_model_config of --speculative-config", method.get("draft_model_config") or {}, ("hf_config",))
    _refuse_others("hf_config of --speculative-config", config, ())
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        raise InputError(f"{IDS} of --speculative-config is {ids!r}, not a list of layer ids.")
    return tuple(ids), False


def _connector(parsed: argparse.Namespace) -> dict[str, Any]:
    """The extra configuration of the connector that writes files."""
    config = parsed.kv_transfer_config
    if config is None:
        return {"shared_storage_path": parsed.hidden_states_path or "/tmp/hidden_states"}  # the launcher's own
    if parsed.hidden_states_path is not None:
        raise InputError("a folder is given by --hidden-states-path and by --kv-transfer-config. Leave one out.")
    if config.kv_connector != CONNECTOR:
        raise InputError(
            f"the connector is {config.kv_connector!r}; this server writes files, as {CONNECTOR!r} does. "
            "Start the stock launcher with --hidden-states-backend file."
        )
    extra = dict(config.kv_connector_extra_config or {})
    _refuse_others("kv_connector_extra_config of --kv-transfer-config", extra, SETTINGS)
    if extra.get("allow_custom_save_path"):
        raise InputError("allow_custom_save_path is on; this server chooses the names of its files. Leave it out.")
    return extra


def _refuse_others(where: str, found: Mapping[str, Any], known: Sequence[str]) -> None:
    others = [str(name) for name in found if name not in known]
    if others:
        raise InputError(f"{joined(others)} in {where} would be ignored by this server. Leave it out.")


def _adapt(engine: dict[str, Any], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Set what extraction needs; the options that the user had set otherwise, in words."""
    for name in ONE:
        if (engine.get(name) or 1) > 1:
            raise InputError(
                f"--{name.replace('_', '-')} is {engine[name]}: this server has one engine, of tensor-parallel ranks. "
                "For several, start a server each, on ports of their own."
            )
    changed = []
    for name, value in OURS.items():
        if name not in engine:
            continue
        given = engine[name]
        if given not in (value, parser.get_default(name), None):
            changed.append(f"{name}={given} is {name}={value} here")
        engine[name] = value
    return tuple(changed)


def chosen_ids(asked: Asked, num_layers: int) -> tuple[int, ...]:
    """The layer ids in the order of a file's rows, which is ascending as vLLM's is. Raises InputError.

    Id `i` is transformers' `hidden_states[i]`; `num_layers` is the last layer's output before the final norm.
    """
    ids = list(asked.layer_ids if asked.layer_ids is not None else (2, num_layers // 2, num_layers - 3))
    if num_layers not in ids and asked.last_layer:
        ids.append(num_layers)
    for layer in ids:
        if layer == 0:
            raise InputError(EMBEDDINGS)
        if not 0 < layer <= num_layers:
            raise InputError(
                f"layer id {layer} is out of range: the model has {num_layers} layers, and id i is the output of the "
                f"i-th, from 1 to {num_layers}."
            )
    twice = sorted({layer for layer in ids if ids.count(layer) > 1})
    if twice:
        default = ", as the launcher's defaults do for a model of fewer than 7 layers" if not asked.layer_ids else ""
        raise InputError(f"layer ids {ids} name {twice[0]} twice{default}. Pass --target-layer-ids, each id once.")
    return tuple(sorted(ids))
