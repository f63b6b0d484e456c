"""What one file holds: its faults, and the figures by which it is compared with the others."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from .files import IN_PROCESS, Layout, size_of
from .sample import NoAccessError, Sample, UnreadableError, first_sentence, opened, short

ROWS = 2048
"""Rows that are looked at at a time: 2048 of 7168 in float32 are 56 MiB."""
HEADS = (4, 16, 64)
"""Lengths of the prompt prefixes by which files are compared with each other."""
RUN = 4
"""So many times one token id in a row may stand for an image, of which the ids say nothing more."""
WASTE = 1.25
"""A buffer larger than the tensors in it by this factor is named."""


@dataclass
class Facts:
    """Of one file; `faults` are pairs of kind and detail. The rest is there if its shapes fit."""

    index: int
    name: str
    faults: list[tuple[str, str]] = field(default_factory=list)
    size: int = 0
    """Bytes of the file."""
    length: int = 0
    """Tokens."""
    signature: tuple[int, int, str] | None = None
    """Layers, hidden size and dtype; None where the layers of the file are not even alike."""
    told: int = 0
    """Tokens before what may be an image: the rows up to there depend on token ids alone."""
    ids_digest: bytes = b""
    """Of the token ids; where there may be an image, of the states as well, which they do not tell."""
    states_digest: bytes = b""
    prefix_digests: tuple[bytes, ...] = ()
    """Of the first 4, 16 and 64 token ids, as far as they tell the rows."""
    heads: Any = None
    """The states of the longest of these prefixes, `[layers, rows, H]`, as stored."""


def inspect(index: int, path: Path, layout: Layout, layer_ids: Sequence[int] | None = None) -> Facts:
    """Read one file whole, some rows at a time. `layer_ids`, where known, tell which layers may be alike."""
    facts = Facts(index, path.name)
    try:
        facts.size = size_of(path)
        with opened(path, layout, layer_ids) as sample:
            _examine(sample, layout, facts, layer_ids)
        if layout is IN_PROCESS:
            _verify_checksums(path, facts)
    except NoAccessError as error:
        facts.faults.append(("no access", str(error)))
    except (UnreadableError, OSError) as error:
        facts.faults.append(("unreadable", str(error)))
    except Exception as error:  # noqa: BLE001  torch keeps dtypes on disk that it cannot compute with
        facts.faults.append(("unreadable", f"its tensors cannot be looked at: {first_sentence(error)}"))
        facts.signature = None
    return facts


def _examine(sample: Sample, layout: Layout, facts: Facts, layer_ids: Sequence[int] | None) -> None:
    if sample.missing:
        facts.faults.append(("incomplete", f"no {', no '.join(sample.missing)}"))
    facts.faults += [("shape", wrong) for wrong in sample.wrong]
    if sample.missing or sample.wrong:
        return
    if not sample.states:
        facts.faults.append(("incomplete", "hidden_states holds no layer"))
        return
    names = layout.layers(len(sample.states), layer_ids)
    if not _shapes_fit(sample, layout, names, facts):
        return
    facts.length = len(sample.ids)
    facts.signature = (len(sample.states), sample.states[0].shape[1], sample.dtype)
    _digest(sample, layout, facts)
    _examine_values(sample.states, facts, names)
    if layout is IN_PROCESS:
        _examine_storage(sample.states, facts)


def _shapes_fit(sample: Sample, layout: Layout, names: list[str], facts: Facts) -> bool:
    """Whether ids, mask and states are of one length and kind; what is not is added to the faults."""
    before = len(facts.faults)
    for name, value in ((layout.ids, sample.ids), ("loss_mask", sample.loss_mask)):
        if value is None:
            continue
        if value.dim() != 1:
            facts.faults.append(("shape", f"{name} is {list(value.shape)}, not [S]"))
        if value.is_floating_point() or value.is_complex() or (name == layout.ids and short(value.dtype) == "bool"):
            facts.faults.append(("dtype", f"{name} is {short(value.dtype)}, not of integers"))
    flat = [number for number, state in enumerate(sample.states) if state.dim() != 2]
    if flat:
        first = list(sample.states[flat[0]].shape)
        which = f"{names[flat[0]]} is" if len(flat) == 1 else f"{len(flat)} of {len(names)} layers are"
        facts.faults.append(("shape", f"{which} {first}, not [S, H]"))
    widths = sorted({state.shape[1] for state in sample.states if state.dim() == 2})
    if widths == [0]:
        facts.faults.append(("shape", "layers of no width at all"))
    if len(widths) > 1:
        facts.faults.append(("shape", f"layers of the widths {', '.join(map(str, widths))} in one file"))
    if not all(state.is_floating_point() for state in sample.states) or " and " in sample.dtype:
        facts.faults.append(("dtype", f"hidden_states is of {sample.dtype}"))
    if len(facts.faults) > before:
        return False
    lengths = {layout.ids: len(sample.ids)}
    if sample.loss_mask is not None:
        lengths["loss_mask"] = len(sample.loss_mask)
    rows = [len(state) for state in sample.states]
    if len({*lengths.values(), *rows}) > 1:
        facts.faults.append(("length", _lengths_said(lengths, dict(zip(names, rows, strict=True)), layout)))
    elif not lengths[layout.ids]:
        facts.faults.append(("length", "no token at all"))
    elif int(sample.ids.min()) < 0:
        facts.faults.append(("shape", f"{layout.ids} holds {int(sample.ids.min())}, and no token id is negative"))
    return len(facts.faults) == before


def _lengths_said(lengths: dict[str, int], rows: dict[str, int], layout: Layout) -> str:
    tokens = lengths[layout.ids]
    said = [f"{tokens} {layout.ids}"]
    if len(set(rows.values())) == 1:
        said.append(f"{next(iter(rows.values()))} rows")
    else:
        said += [f"{length} rows of {name}" for name, length in rows.items() if length != tokens]
    if lengths.get("loss_mask", tokens) != tokens:
        said.append(f"a loss mask of {lengths['loss_mask']}")
    return ", ".join(said)


def _digest(sample: Sample, layout: Layout, facts: Facts) -> None:
    ids: list[int] = sample.ids.tolist()
    facts.told = len(ids) if layout is IN_PROCESS else before_images(ids)
    facts.states_digest = _hash(_bytes(state) for state in sample.states)
    facts.ids_digest = _hash([_packed(ids), *([facts.states_digest] if facts.told < len(ids) else [])])
    lengths = [length for length in HEADS if length <= facts.told]
    facts.prefix_digests = tuple(_hash([_packed(ids[:length])]) for length in lengths)
    if lengths:
        facts.heads = heads(sample.states, lengths[-1])


def before_images(ids: Sequence[int]) -> int:
    """How many tokens come before the first run of RUN of one id, as an image has them; all if there is none."""
    length = 0
    for place, token in enumerate(ids):
        length = length + 1 if place and token == ids[place - 1] else 1
        if length == RUN:
            return place + 1 - RUN
    return len(ids)


def heads(states: Sequence[Any], rows: int) -> Any:
    """The first rows of every layer, `[layers, rows, H]`, in memory of their own."""
    import torch

    return torch.stack([state[:rows] for state in states]).clone()


def _packed(ids: list[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


def _hash(parts: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _bytes(state: Any) -> Any:
    import torch

    return state.detach().contiguous().view(torch.uint8).numpy()


def _examine_values(states: Sequence[Any], facts: Facts, names: list[str]) -> None:
    zero, sick = {}, {}
    for number, state in enumerate(states):
        peaks = row_peaks(state)
        sick[number] = int((~peaks.isfinite()).sum())
        zero[number] = (peaks == 0).nonzero().flatten().tolist()
    for number in [number for number, count in sick.items() if count]:
        facts.faults.append(("not finite", f"{names[number]}: {sick[number]} of {facts.length} rows"))
    for number, rows in zero.items():
        if len(rows) == facts.length:
            facts.faults.append(("zero", f"{names[number]}: all of it"))
        elif rows:
            where = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} of {facts.length} rows, the first {rows[0]}"
            facts.faults.append(("zero", f"{names[number]}: {where}"))
    for first, second in combinations(range(len(states)), 2):
        empty = len(zero[first]) == facts.length
        if names[first] != names[second] and not empty and _same(states[first], states[second]):
            facts.faults.append(("same layer", f"{names[first]} and {names[second]}"))


def row_peaks(state: Any) -> Any:
    """The largest absolute value of each row, `[S]` in float32; NaN where a row holds one."""
    import torch

    if state.dtype not in (torch.float32, torch.bfloat16, torch.float16):  # float8 has no arithmetic of its own
        return torch.cat([part.float().abs().amax(dim=-1) for part in state.split(ROWS)])
    return torch.cat([part.abs().amax(dim=-1) for part in state.split(ROWS)]).float()


def _same(first: Any, second: Any) -> bool:
    return _bytes(first[-1]).tobytes() == _bytes(second[-1]).tobytes() and bool((_bytes(first) == _bytes(second)).all())


def _examine_storage(states: Sequence[Any], facts: Facts) -> None:
    """Stock keeps what a tensor views: a slice of a batch takes the whole batch to disk, once a file."""
    used: dict[int, int] = {}
    whole: dict[int, int] = {}
    for state in states:
        storage = state.untyped_storage()
        key = storage.data_ptr()
        used[key] = used.get(key, 0) + state.numel() * state.element_size()
        whole[key] = storage.nbytes()
    stored, needed = sum(whole.values()), sum(min(used[key], whole[key]) for key in whole)
    if stored > WASTE * needed:
        facts.faults.append(("waste", f"{stored:,} bytes of hidden states on disk for {needed:,}"))


def _verify_checksums(path: Path, facts: Facts) -> None:
    """`torch.save` writes a zip archive, whose checksums a mapped load does not compare."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # noqa: BLE001  zipfile raises whatever damaged headers lead it to
        damaged = f"{type(error).__name__}: {error}"
    if damaged:
        facts.faults.append(("checksum", damaged))
