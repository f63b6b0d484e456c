"""Files of one generation in the layout of the other, layer ids shifted and recorded.

Server id i is transformers' `hidden_states[i]`, in-process id k is `hidden_states[k + 1]`: the server path numbers the
same tensor one higher. Both end with the last layer before the final norm.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InputError
from .check import Advance
from .files import IN_PROCESS, SERVER, Folder, Layout
from .records import RECORD, read_json
from .sample import Sample, UnreadableError, opened

MASK_NEEDED = "{} has no loss mask: the server path keeps masks in prepare-data's folder. Name that with --loss-masks."


def converted_ids(ids: Sequence[int], source: Layout, target: Layout, layers: int | None) -> list[int]:
    """The ids in the target's convention. `layers` is how many decoder layers the model has. Raises InputError."""
    if list(ids) != sorted(set(ids)):
        raise InputError(
            f"layer ids {list(ids)} are not ascending, each once, as a server writes them and drafts are served. "
            "Extract again with ascending --layer-ids."
        )
    if not ids:
        raise InputError("no layer ids. Name at least one.")
    found = [layer - source.shift + target.shift for layer in ids]
    in_process = [layer - source.shift for layer in ids]
    if in_process[0] < 0:
        raise InputError(f"layer id {ids[0]} of the {source.id} layout is no decoder layer's. Check --layer-ids.")
    if layers is not None and in_process[-1] >= layers:
        last = layers - 1 + source.shift
        raise InputError(f"layer id {ids[-1]} of the {source.id} layout is beyond the last of {layers} layers, {last}.")
    if layers is not None and in_process[-1] != layers - 1:
        raise InputError(
            f"the last layer id is {ids[-1]}; training takes the last for the target, which of {layers} layers is "
            f"{layers - 1 + source.shift}. Check --layer-ids and --num-hidden-layers."
        )
    return found


def start(source: Folder, target: Path, to: Layout, ids: Sequence[int], layers: int | None) -> dict[str, Any]:
    """Claim the target folder for this conversion; the record that is written there. Raises InputError."""
    record = {
        "eagle3compat": __version__,
        "layout": to.id,
        "layer_ids": converted_ids(ids, source.layout, to, layers),
        "num_hidden_layers": layers,
        "converted_from": {
            "directory": str(source.path.resolve()), "layout": source.layout.id, "layer_ids": list(ids),
            "data_config": source.records.config or None,
        },
    }
    if target.resolve() == source.path.resolve():
        raise InputError(f"{target} is the source. Choose another folder.")
    target.mkdir(parents=True, exist_ok=True)
    path = target / RECORD
    if path.exists():
        if without_version(read_json(path)) != without_version(record):
            raise InputError(f"{target} holds another conversion, as {path} says. Choose another folder.")
    elif any(target.glob(f"{to.prefix}*{to.suffix}")):
        raise InputError(f"{target} holds {to.prefix}N{to.suffix} files already. Choose another folder.")
    write_whole(path, lambda part: part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8"))
    return record


def without_version(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "eagle3compat"}


def convert(
    source: Folder, target: Path, record: dict[str, Any], indices: Sequence[int], masks: Any = None,
    advance: Advance | None = None,
) -> int:
    """Write the files `indices` to the target; those that an earlier start made of the same source files are kept.

    A file has the time of its source, to the nanosecond: one whose source was written again since is written again.
    `masks` gives `input_ids` and `loss_mask` by index where the source has none. Returns how many were written.
    """
    written = 0
    for index in indices:
        path = target / (SERVER if source.layout is IN_PROCESS else IN_PROCESS).file(index)
        if not made_of(path, source.files[index]):
            with opened(source.files[index], source.layout) as sample:
                modified = source.files[index].stat().st_mtime_ns
                if source.layout is IN_PROCESS:
                    _write_server(sample, path, record, modified)
                else:
                    row = None if masks is None else masks[index]
                    _write_in_process(sample, path, source.files[index], row, modified)
            written += 1
        if advance is not None:
            advance(source.files[index].stat().st_size)
    return written


def made_of(path: Path, source: Path) -> bool:
    """Whether the file is there and its source is as it was."""
    return path.exists() and path.stat().st_mtime_ns == source.stat().st_mtime_ns


def _write_server(sample: Sample, path: Path, record: dict[str, Any], modified: int) -> None:
    """`token_ids` int64 `[S]`, `hidden_states` `[S, L, H]`; `loss_mask` is kept too, stock's readers pass over it."""
    import torch
    from safetensors.torch import save_file

    tensors = {
        "token_ids": sample.ids.to(torch.int64).clone(),
        "hidden_states": torch.stack(sample.states, dim=1),
        "loss_mask": sample.loss_mask.to(torch.int64).clone(),
    }
    known = {name: json.dumps(record[name]) for name in ("layer_ids", "layout", "num_hidden_layers", "eagle3compat")}
    write_whole(path, lambda part: save_file(tensors, part, metadata=known), modified)


def _write_in_process(sample: Sample, path: Path, source: Path, row: Any, modified: int) -> None:
    """What stock's script writes: no view of a larger buffer, ids and mask in int64."""
    import torch

    mask = sample.loss_mask
    if row is not None:
        if list(row["input_ids"]) != sample.ids.tolist():
            raise InputError(f"{source.name} has other token ids than its row in the data set. Check --loss-masks.")
        mask = torch.as_tensor(row["loss_mask"])
        if mask.shape != sample.ids.shape:
            sizes = f"{len(sample.ids)} tokens and a loss mask {list(mask.shape)}"
            raise InputError(f"{source.name} has {sizes} in the data set. Check --loss-masks.")
    if mask is None:
        raise InputError(MASK_NEEDED.format(source.name))
    content = {
        "input_ids": sample.ids.to(torch.int64).clone(),
        "hidden_states": [state.clone(memory_format=torch.contiguous_format) for state in sample.states],
        "loss_mask": mask.to(torch.int64).clone(),
    }
    write_whole(path, lambda part: torch.save(content, part), modified)


def write_whole(path: Path, write: Any, modified: int | None = None) -> None:
    """The file is there whole or not at all, with this time of modification if one is given, in nanoseconds.

    An unfinished one has no name that stock would read, and no name that another process writes to.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        if modified is not None:
            os.utime(part, ns=(modified, modified))
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def loss_masks(folder: Path) -> Any:
    """The rows of a data set that speculators' prepare-data wrote, each with `input_ids` and `loss_mask`."""
    from datasets import load_from_disk

    try:
        rows = load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} is no data set of prepare-data: {error}. Check --loss-masks.") from None
    lacking = {"input_ids", "loss_mask"} - set(rows.column_names)
    if lacking:
        raise InputError(f"the data set in {folder} lacks {' and '.join(sorted(lacking))}. Check --loss-masks.")
    return rows.with_format(None)


def write_rows(source: Folder, target: Path, indices: Sequence[int]) -> None:
    """The data set that training on the server path wants beside the files, one row a sample.

    As prepare-data writes it: `input_ids`, `loss_mask` and `seq_len`, read as torch tensors. Row N belongs to file N.
    """
    from datasets import Dataset, Features, Value

    try:
        from datasets import List
    except ImportError:  # datasets before 4.0
        from datasets import Sequence as List

    integers = List(Value("int64"))
    features = Features({"input_ids": integers, "loss_mask": integers, "seq_len": Value("int64")})
    with tempfile.TemporaryDirectory(dir=target, prefix="rows.") as scratch:
        try:
            rows = Dataset.from_generator(
                _rows, features=features, cache_dir=scratch, gen_kwargs={"source": source, "indices": list(indices)}
            )
        except Exception as error:
            if isinstance(error.__cause__, UnreadableError):  # which datasets wraps in an error of its own
                raise error.__cause__ from None
            raise
        rows.set_format(type="torch")
        saved = Path(scratch) / "saved"
        rows.save_to_disk(saved)
        for path in sorted(saved.iterdir(), key=lambda path: path.name == "state.json"):  # which is looked for, last
            path.replace(target / path.name)


def _rows(source: Folder, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
    for index in indices:
        with opened(source.files[index], source.layout) as sample:
            yield {
                "input_ids": sample.ids.tolist(), "loss_mask": sample.loss_mask.tolist(), "seq_len": len(sample.ids),
            }


def check_masks(masks: Any, indices: Sequence[int]) -> None:
    """Refuse a data set with fewer rows than there are files."""
    if indices and max(indices) >= len(masks):
        raise InputError(f"the data set has {len(masks)} rows, none for index {max(indices)}. Check --loss-masks.")
