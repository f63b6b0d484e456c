"""What is written beside the files of a set, as far as it can be used; what cannot is a fault, not the end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from .faults import Fault

CONFIG = "data_config.json"
"""Stock's, which its in-process script writes at the end of a run."""
RECORD = "eagle3compat.json"
"""What `convert` and `examples/extract.py` write beside the files: the layer ids, and what they were made from."""
REMEDY = "Move it away, or put the right one there"
MOST = 2**53
"""No number beside the files is larger."""


@dataclass
class Records:
    """What is known of a set from CONFIG and RECORD; None where they do not say."""

    layer_ids: list[int] | None = None
    """In the numbering of the files."""
    hidden_size: int | None = None
    samples: int | None = None
    """How many there should be."""
    command: str | None = None
    """Of the run that wrote the files."""
    written_by: str | None = None
    """A driver other than stock's, which extracts whatever has no file."""
    config: dict[str, Any] = field(default_factory=dict)
    """The whole of CONFIG."""
    faults: list[Fault] = field(default_factory=list)


def read(folder: Path, in_process: bool) -> Records:
    """`in_process`: CONFIG numbers layers as the in-process layout does, and says nothing of the other one's."""
    known = Records()
    known.config = _object(folder / CONFIG, known)

    def entry(part: str, name: str, fits: Any, wanted: str) -> Any:
        inside = known.config.get(part)
        value = inside.get(name) if isinstance(inside, dict) else inside
        if value is None or (isinstance(inside, dict) and fits(value)):
            return value
        known.faults.append(_unusable(CONFIG, f"{part}.{name}", value, wanted))
        return None

    known.hidden_size = entry("model", "hidden_size", lambda value: _count(value) and value, "a number of channels")
    known.samples = entry("data", "num_samples", _count, "a number of samples")
    known.command = entry("reproducibility", "command", lambda value: isinstance(value, str), "a command line")
    if in_process:
        known.layer_ids = entry("hidden_states", "layer_ids", is_layer_ids, "a list of layer ids")
    converted = _object(folder / RECORD, known)
    if isinstance(converted.get("written_by"), str):
        known.written_by = converted["written_by"]
    if converted.get("layer_ids") is not None:
        if is_layer_ids(converted["layer_ids"]):
            known.layer_ids = converted["layer_ids"]
        else:
            known.faults.append(_unusable(RECORD, "layer_ids", converted["layer_ids"], "a list of layer ids"))
    return known


def _unusable(name: str, entry: str, value: Any, wanted: str) -> Fault:
    return Fault("record", name, None, f"{entry} is {repr(value)[:60]}, not {wanted}; it is passed over. Correct it")


def _object(path: Path, known: Records) -> dict[str, Any]:
    try:
        return read_json(path)
    except InputError as error:
        known.faults.append(Fault("record", path.name, None, str(error).partition(f"{path} ")[2]))
        return {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file. Raises InputError, which begins with the path."""
    if not path.exists():
        return {}
    try:
        if not path.is_file():
            raise ValueError("it is no regular file")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        said = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read ({said}). {REMEDY}.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object. {REMEDY}.")
    return found


def is_layer_ids(value: Any) -> bool:
    whole = isinstance(value, list) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in value)
    return whole and bool(value) and all(abs(layer) < MOST for layer in value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST
