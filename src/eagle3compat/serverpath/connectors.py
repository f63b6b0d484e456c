"""Which connector a server is asked for: vLLM's own, one that inherits from it, or one that is left alone."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

from .facts import CONNECTOR, METHOD

LOG = logging.getLogger("vllm.eagle3compat")
"""vLLM shows what its own loggers say, and this is below them."""
STOCK = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
OWN = "eagle3compat.serverpath.connector"
WRITES = "_write_tensors"
"""The method that puts tensors into a file, which speculators' FP8 connector replaces (hs-connectors 0.9.0)."""


@dataclass(frozen=True)
class Connector:
    """vLLM's own, or a class that inherits from it and replaces no more than how a file is written.

    `module` is where that class is, empty for vLLM's own; `unheard` is a replaced method that this vLLM never calls.
    """

    name: str
    module: str = ""
    unheard: str = ""


def connector_of(args: Any) -> Connector | None:
    """The connector that writes the files of a server with these arguments; None where nothing is to be adapted."""
    if _get(getattr(args, "speculative_config", None), "method") != METHOD:
        return None
    transfer = getattr(args, "kv_transfer_config", None)
    name, module = _get(transfer, "kv_connector"), _get(transfer, "kv_connector_module_path")
    if not module:
        return Connector(name) if name == CONNECTOR else None
    return _inheriting(str(name), str(module)) if module != OWN else None


def _inheriting(name: str, module: str) -> Connector | None:
    try:
        base = getattr(importlib.import_module(STOCK), CONNECTOR)
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):  # vLLM loads the same next, and says what is missing
        return None
    if not (isinstance(found, type) and issubclass(found, base)):
        return None
    own = found.__mro__[: found.__mro__.index(base)]
    replaced = {method for part in own for method, value in vars(part).items() if _is_method(value)}
    others = sorted(replaced - {WRITES})
    if others:
        LOG.warning("eagle3compat: connector %s left alone, as it has a %s of its own", name, others[0])
        return None
    return Connector(name, module, WRITES if WRITES in replaced and not hasattr(base, WRITES) else "")


def _is_method(value: Any) -> bool:
    return callable(value) or isinstance(value, (staticmethod, classmethod, property))


def put_before(transfer: Any, connector: Connector, first: str) -> None:
    """Have vLLM load `connector` with the class `first` of the module OWN put before it."""
    _put(transfer, "kv_connector", f"{first}:{connector.module or STOCK}:{connector.name}")
    _put(transfer, "kv_connector_module_path", OWN)


def _get(config: Any, name: str) -> Any:
    """Of a configuration as an object or, as a command line has it, a dictionary."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _put(config: Any, name: str, value: Any) -> None:
    if isinstance(config, dict):
        config[name] = value
    else:
        setattr(config, name, value)
