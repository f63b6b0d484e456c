"""Some hundred sets damaged at random: `check` and `convert` name what is wrong, and nothing ends in a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import InProcess, Server, Set, prompts_of
from safetensors.torch import save_file

from eagle3compat.cli import main

FILES, SOUND, ROUNDS, MOST = 10, {0, 1, 2}, 12, 5
"""Of each set, of which no damage is done to these; sets of each layout; and damaged files in one of them."""

DTYPES = [
    getattr(torch, name) for name in ("float64", "float32", "float16", "int8", "int64", "bool", "complex64", "uint8",
    "float8_e4m3fn", "float8_e5m2", "uint16", "uint64") if hasattr(torch, name)
]  # fmt: skip
Random = random.Random


def flipped(rng: Random, path: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 8, 200))):
        # Half of them where names, shapes and dtypes are.
        content[rng.randrange(min(600, len(content)) if rng.random() < 0.5 else len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(rng: Random, path: Path) -> None:
    content = path.read_bytes()
    start, end = sorted(rng.randrange(len(content)) for _ in range(2))
    path.write_bytes(rng.choice((content[:end], content[start:], content[:start] + content[end:])))


def spliced(rng: Random, path: Path) -> None:
    """Zeros, other bytes or the file's own beginning in the middle."""
    content = bytearray(path.read_bytes())
    start, length = rng.randrange(len(content)), rng.randrange(2000)
    content[start : start + length] = rng.choice((bytes(length), rng.randbytes(length), bytes(content[:length])))
    path.write_bytes(content)


def odd_tensor(rng: Random, tensor: torch.Tensor) -> Any:
    shape = list(tensor.shape)
    change = rng.randrange(9)
    if change == 0:
        return tensor.to(rng.choice(DTYPES))
    if change == 1:
        return tensor.reshape(-1)
    if change == 2:
        return tensor[: rng.randrange(len(tensor))].clone()
    if change == 3:
        return tensor[..., : rng.randrange(shape[-1])].clone()
    if change == 4:
        return tensor[None].clone()
    if change == 5:
        return torch.zeros([0] * rng.randint(0, 4), dtype=tensor.dtype)
    if change == 6:
        return tensor.transpose(0, -1).contiguous()
    if change == 7:
        return torch.full_like(tensor, rng.choice((0, 1, 120)))
    return tensor.view(torch.uint8).clone() if tensor.dim() else tensor


def edited(rng: Random, data: Set, index: int) -> None:
    """Another tensor, or another thing, in one of a file's entries."""

    def change(content: dict[str, Any]) -> None:
        name = rng.choice(sorted(content))
        value = content[name]
        if isinstance(value, list):
            place = rng.randrange(len(value))
            value[place] = odd_tensor(rng, value[place])
            if rng.random() < 0.2:
                content[name] = rng.choice(([], value[:1], value * 2, tuple(value), {"0": value[0]}, None, 5, "text"))
        elif rng.random() < 0.2:
            del content[name]
        else:
            content[name] = odd_tensor(rng, value)

    if isinstance(data, InProcess):
        data.edit(index, change)
        return
    from safetensors.torch import load_file

    content = load_file(data.path(index))
    change(content)
    save_file({name: tensor.contiguous().clone() for name, tensor in content.items()}, data.path(index))


def renamed_header(rng: Random, data: Set, index: int) -> None:
    """Another shape, dtype or place in the header of a safetensors file; of an archive, other bytes."""
    path = data.path(index)
    if isinstance(data, InProcess):
        flipped(rng, path)
        return
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header[rng.choice(sorted(header))]
    entry.update(rng.choice((
        {"dtype": rng.choice(("F32", "BF16", "I64", "F8_E4M3", "F4", "C64", "?"))}, {"shape": [2**62, 4]},
        {"shape": []}, {"shape": [-1, 3]}, {"data_offsets": [0, 2**63]}, {"data_offsets": [9, 3]}, {"shape": None},
    )))  # fmt: skip
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


DAMAGES: list[Callable[[Random, Set, int], None]] = [
    lambda rng, data, index: flipped(rng, data.path(index)),
    lambda rng, data, index: cut(rng, data.path(index)),
    lambda rng, data, index: spliced(rng, data.path(index)),
    edited, edited, renamed_header,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [InProcess, Server])
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_damage_is_named_and_the_rest_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: type[Set], seed: int
) -> None:
    rng = Random(seed)
    data = make(tmp_path / "set", prompts_of(FILES, seed))
    for index in rng.sample(sorted(set(range(FILES)) - SOUND), rng.randint(1, MOST)):
        rng.choice(DAMAGES)(rng, data, index)
    code = main(["check", str(data.folder), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == int(bool(report["faults"]))
    assert not SOUND & set(report["redo"]["indices"]), report["faults"]
    masks = tmp_path / "masks"
    command = ["convert", str(data.folder), str(tmp_path / "out"), "--layer-ids"]
    if make is InProcess:
        command += ["1", "2", "4", "--to", "server"]
    else:
        datasets = pytest.importorskip("datasets")
        rows = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in data.prompts]
        datasets.Dataset.from_list(rows).save_to_disk(str(masks))
        command += ["2", "3", "5", "--to", "in-process", "--loss-masks", str(masks)]
    first = main([*command, "--skip-faulty"])
    said = capsys.readouterr()
    assert first in (0, 1, 2)
    assert "Traceback" not in said.err + said.out
    if first == 2:  # an undamaged file's tokens that are not those of the data set, say
        assert "eagle3compat: " in said.err
        return
    out = tmp_path / "out" / "hidden_states" if make is InProcess else tmp_path / "out"
    assert main(["check", str(out)]) in (0, 1)
    assert len([path for path in out.iterdir() if path.suffix in (".pt", ".safetensors")]) >= len(SOUND)
