"""How one file is read."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import IN_PROCESS, SERVER, Layout

SCALES = "hidden_states_scales"


class UnreadableError(Exception):
    """A file is not what its name says; the message says why, and `path` which it is."""

    path: Path | None = None


class NoAccessError(UnreadableError):
    """This user may not read a file."""


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


@contextmanager
def opened(path: Path, layout: Layout, layer_ids: Sequence[int] | None = None) -> Iterator[Sample]:
    """The tensors of a file, read whole; `layer_ids` are for what is said of them. Raises UnreadableError.

    Nothing is mapped into memory: where somebody writes the file meanwhile, that ends the process with a bus error.
    """
    try:
        before = _state(path)
        try:
            sample = _pickled(path, layer_ids) if layout is IN_PROCESS else _safetensors(path)
        finally:
            _unchanged(path, before)
    except UnreadableError as error:
        error.path = path
        raise
    yield sample


def _state(path: Path) -> tuple[int, int, int]:
    """What tells whether a file is written while it is read."""
    try:
        found = path.stat()
    except PermissionError as error:
        raise NoAccessError(_forbidden(error)) from None
    except OSError as error:  # a dangling link, a loop of links, gone meanwhile
        raise UnreadableError(error.strerror or type(error).__name__) from None
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableError("it is a folder" if stat.S_ISDIR(found.st_mode) else "it is no regular file")
    if not found.st_size:
        raise UnreadableError("the file is empty")
    return found.st_size, found.st_mtime_ns, found.st_ino


def _unchanged(path: Path, before: tuple[int, int, int]) -> None:
    if _state(path) != before:
        raise UnreadableError("it is being written; check again when the run that writes it has ended")


def _pickled(path: Path, layer_ids: Sequence[int] | None) -> Sample:
    import torch

    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):  # stock maps the file, which torch does with no other
                raise UnreadableError("it is cut short, or no file of torch.save")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise NoAccessError(_forbidden(error)) from None
    except UnreadableError:
        raise
    except Exception as error:  # noqa: BLE001  an unpickler raises whatever the damaged bytes lead it to
        raise UnreadableError(first_sentence(error)) from None
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
    named += zip(IN_PROCESS.layers(len(sample.states), layer_ids), sample.states, strict=True)
    sample.wrong += [
        f"{name} is a {type(value).__name__}, not a tensor"
        for name, value in named if value is not None and not isinstance(value, torch.Tensor)
    ] + [
        f"{name} is {odd}"
        for name, value in named if isinstance(value, torch.Tensor) and (odd := _odd(value))
    ]
    sample.dtype = " and ".join(sorted({short(state.dtype) for state in sample.states if hasattr(state, "dtype")}))
    return sample


def _odd(tensor: Any) -> str:
    """Why a tensor's values cannot be looked at, in words; empty where they can."""
    import torch

    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a {'nested' if tensor.is_nested else short(tensor.layout)} tensor, not a dense one"
    if tensor.device.type != "cpu":
        return f"a {tensor.device.type} tensor, which holds no values"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"{list(tensor.shape)} over {tensor.untyped_storage().nbytes():,} bytes: it repeats itself"
    return ""


def _safetensors(path: Path) -> Sample:
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
    except PermissionError as error:
        raise NoAccessError(_forbidden(error)) from None
    except Exception as error:  # noqa: BLE001  of the reader in Rust, and of a torch that lacks the dtype
        raise UnreadableError(first_sentence(error)) from None
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


def _forbidden(error: OSError) -> str:
    return f"{error.strerror}; make it readable (chmod u+r), and check again"


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _described(value: Any) -> str:
    return f"tensor {list(value.shape)}" if hasattr(value, "shape") else type(value).__name__


def first_sentence(error: Exception) -> str:
    """The type and the first sentence of an exception; what torch adds to it is advice on checkpoints."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].split('. ')[0][:200]}" if lines else type(error).__name__
