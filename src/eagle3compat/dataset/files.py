"""The two layouts of extracted hidden states on disk, and how one file is read.

In-process extraction (speculators 0.3 and 0.4, `scripts/data_generation_offline.py`) writes `data_N.pt`, a dict of
`input_ids` `[S]`, `hidden_states` (a list of `[S, H]`, one a layer) and `loss_mask` `[S]`. Server extraction (0.5 and
later) writes `hs_N.safetensors` with `token_ids` `[S]` and `hidden_states` `[S, L, H]`, as float8 also
`hidden_states_scales` `[S, 1, 1]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError

SCALES = "hidden_states_scales"
RECORD = "eagle3compat.json"
"""What `convert` writes beside the files: the layer ids, and what they were made from."""


@dataclass(frozen=True)
class Layout:
    """What one layout calls things.

    `ids` is the key of the token ids, `needed` are the keys that a file must have, and `shift` is what an in-process
    layer id is raised by to be one of this layout: server id i is transformers' `hidden_states[i]`.
    """

    id: str
    prefix: str
    suffix: str
    ids: str
    needed: tuple[str, ...]
    shift: int

    def file(self, index: int) -> str:
        return f"{self.prefix}{index}{self.suffix}"

    def index(self, name: str) -> int | None:
        """The number in a file's name; None for what is no sample of this layout."""
        match = re.fullmatch(re.escape(self.prefix) + r"(0|[1-9]\d*)" + re.escape(self.suffix), name)
        return int(match.group(1)) if match else None


IN_PROCESS = Layout("in-process", "data_", ".pt", "input_ids", ("input_ids", "hidden_states", "loss_mask"), 0)
SERVER = Layout("server", "hs_", ".safetensors", "token_ids", ("token_ids", "hidden_states"), 1)
LAYOUTS = {layout.id: layout for layout in (IN_PROCESS, SERVER)}


class UnreadableError(Exception):
    """A file is not what its name says; the message says why."""


@dataclass(frozen=True)
class Folder:
    """What lies in a folder of one layout: samples by index, and what else is of a run."""

    path: Path
    layout: Layout
    files: dict[int, Path]
    leftovers: tuple[Path, ...]
    strays: tuple[Path, ...]
    config: dict[str, Any]
    """Stock's `data_config.json`, which its script writes at the end of a run; empty without one."""
    record: dict[str, Any]
    """RECORD; empty without one."""

    @property
    def layer_ids(self) -> list[int] | None:
        """The layer ids of the files in their own convention, where that is written down."""
        known = self.record.get("layer_ids")
        if known is None and self.layout is IN_PROCESS:
            known = self.configured("hidden_states", "layer_ids")
        return known

    def configured(self, part: str, name: str) -> Any:
        """An entry of data_config.json; None where it has none."""
        found = self.config.get(part)
        return found.get(name) if isinstance(found, dict) else None


@dataclass
class Sample:
    """One file's tensors. `states` is a list of `[S, H]`; where a file holds another shape, that."""

    ids: Any
    states: list[Any]
    loss_mask: Any = None
    dtype: str = ""
    """The dtype of the states as stored; several, joined, where they differ."""
    missing: tuple[str, ...] = ()
    wrong: list[str] = field(default_factory=list)
    """What is not even a tensor, in words."""


def open_folder(path: Path, layout: str | None = None) -> Folder:
    """Look at the names in a folder; nothing is read but the configuration. Raises InputError."""
    if not path.is_dir():
        raise InputError(f"{path} is no folder. Name the folder that holds data_N.pt or hs_N.safetensors files.")
    found = {kind.id: _samples(path, kind) for kind in LAYOUTS.values()}
    if not any(found.values()) and (path / "hidden_states").is_dir():
        path = path / "hidden_states"  # of a folder that speculators' prepare-data wrote
        found = {kind.id: _samples(path, kind) for kind in LAYOUTS.values()}
    holding = [name for name, files in found.items() if files]
    if layout is None and len(holding) > 1:
        raise InputError(f"{path} holds files of both layouts. Choose one with --layout in-process or --layout server.")
    chosen = layout or (holding[0] if holding else "")
    if not chosen or not found[chosen]:
        raise InputError(f"{path} holds no data_N.pt and no hs_N.safetensors. Check the path.")
    kind = LAYOUTS[chosen]
    files = found[chosen]
    leftovers, strays = _others(path, kind, set(files.values()))
    return Folder(path, kind, files, leftovers, strays, read_json(path / "data_config.json"), read_json(path / RECORD))


def _samples(path: Path, layout: Layout) -> dict[int, Path]:
    numbered = ((layout.index(entry.name), entry) for entry in path.iterdir())
    return dict(sorted((index, entry) for index, entry in numbered if index is not None))


def _others(path: Path, layout: Layout, samples: set[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Leftovers of interrupted runs, and what stock's in-process trainer would take for a sample.

    That trainer (`speculators/train/data.py`, 0.3.0 to 0.4.0.1) reads every file below the folder whose name ends in
    "pt", whatever it is.
    """
    part = re.compile(r".*\.(lock|tmp|part|partial)|.*\.safetensors\..+|.*\.pt\..+|(cmpl|chatcmpl)-.*\.safetensors")
    leftovers = tuple(sorted(entry for entry in path.iterdir() if part.fullmatch(entry.name)))
    if layout is SERVER:
        return leftovers, ()
    endings = (entry for entry in path.rglob("*") if entry.name.endswith("pt") and entry.is_file())
    return leftovers, tuple(sorted(entry for entry in endings if entry not in samples and entry not in leftovers))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file. Raises InputError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}). Move it away, or put the right one there.") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object. Move it away, or put the right one there.")
    return found


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none behind the name, as behind a dangling link."""
    try:
        return path.stat().st_size
    except OSError:  # opening it says what is wrong
        return 0


@contextmanager
def opened(path: Path, layout: Layout) -> Iterator[Sample]:
    """The tensors of a file, mapped into memory and not read yet. Raises UnreadableError."""
    try:
        empty = path.stat().st_size == 0
    except OSError as error:  # a dangling link, a loop of links
        raise UnreadableError(error.strerror or type(error).__name__) from None
    if empty:
        raise UnreadableError("the file is empty")
    yield _pickled(path) if layout is IN_PROCESS else _safetensors(path)


def _pickled(path: Path) -> Sample:
    import torch

    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # noqa: BLE001  an unpickler raises whatever the damaged bytes lead it to
        raise UnreadableError(_first_sentence(error)) from None
    if not isinstance(content, dict):
        raise UnreadableError(f"it holds a {type(content).__name__}, not a dict of tensors")
    missing = tuple(key for key in IN_PROCESS.needed if content.get(key) is None)
    sample = Sample(content.get("input_ids"), [], content.get("loss_mask"), missing=missing)
    states = content.get("hidden_states")
    if isinstance(states, (list, tuple)):
        sample.states = list(states)
    elif states is not None:
        sample.wrong.append(f"hidden_states is a {_described(states)}, not a list of tensors, one a layer")
    named = [("input_ids", sample.ids), ("loss_mask", sample.loss_mask)]
    named += [(f"layer {number} of hidden_states", state) for number, state in enumerate(sample.states)]
    sample.wrong += [
        f"{name} is a {type(value).__name__}, not a tensor"
        for name, value in named if value is not None and not isinstance(value, torch.Tensor)
    ] + [
        f"{name} is a {value.layout} tensor"
        for name, value in named if isinstance(value, torch.Tensor) and value.layout is not torch.strided
    ]
    sample.dtype = " and ".join(sorted({short(state.dtype) for state in sample.states if hasattr(state, "dtype")}))
    return sample


def _safetensors(path: Path) -> Sample:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as content:
            tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118  it is no dict
    except Exception as error:  # noqa: BLE001  of the reader in Rust, and of a torch that lacks the dtype
        raise UnreadableError(_first_sentence(error)) from None
    missing = tuple(key for key in SERVER.needed if key not in tensors)
    sample = Sample(tensors.get("token_ids"), [], tensors.get("loss_mask"), missing=missing)
    states, scales = tensors.get("hidden_states"), tensors.get(SCALES)
    if states is None:
        return sample
    sample.dtype = short(states.dtype)
    if states.dim() != 3:
        sample.wrong.append(f"hidden_states is {_described(states)}, not [S, layers, H]")
    elif scales is not None and scales.numel() != len(states):
        sample.wrong.append(f"{SCALES} is {_described(scales)} for {len(states)} rows")
    else:
        sample.states = [_scaled(layer, scales) for layer in states.unbind(1)]
    return sample


def _scaled(state: Any, scales: Any) -> Any:
    """A float8 layer `[S, H]` with the scales of its rows `[S, 1, 1]` applied, in bf16."""
    import torch

    return state if scales is None else (state.float() * scales.reshape(-1, 1).float()).to(torch.bfloat16)


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: Any) -> str:
    return f"tensor {list(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def _first_sentence(error: Exception) -> str:
    """The type and the first sentence of an exception; what torch adds to it is advice on checkpoints."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].split('. ')[0][:200]}" if lines else type(error).__name__
