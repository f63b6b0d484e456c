"""Files of one generation in the layout of the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, InProcess, Server, prompts_of, states_of, to_float8
from datasets import Dataset, load_from_disk
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3compat.cli import main
from eagle3compat.dataset.convert import converted_ids
from eagle3compat.dataset.files import IN_PROCESS, SERVER
from eagle3compat.errors import InputError

Convert = Callable[..., tuple[int, str, str]]


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Convert:
    def run(*arguments: Any) -> tuple[int, str, str]:
        code = main(["convert", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_set_becomes_what_the_server_path_trains_on(in_process: InProcess, tmp_path: Path, convert: Convert) -> None:
    in_process.configure()
    code, out, _ = convert(in_process.folder, tmp_path / "new", "--to", "server", "--num-hidden-layers", 5)
    assert code == 0
    assert "layer ids [2, 3, 5]" in out
    rows = load_from_disk(str(tmp_path / "new"))
    for index, ids in enumerate(in_process.prompts):
        path = tmp_path / "new" / "hidden_states" / f"hs_{index}.safetensors"
        content = load_file(path)
        assert content["token_ids"].tolist() == ids == rows[index]["input_ids"].tolist()
        assert content["token_ids"].dtype == torch.int64
        assert content["hidden_states"].shape == (len(ids), len(LAYERS), 32)
        for layer, state in enumerate(states_of(ids)):
            assert torch.equal(content["hidden_states"][:, layer], state)
        assert rows[index]["seq_len"] == len(ids)
        assert rows[index]["loss_mask"].sum() == len(ids) - 6
        with safe_open(path, framework="pt") as opened:
            assert json.loads(opened.metadata()["layer_ids"]) == [2, 3, 5]
    assert len(rows) == len(in_process.prompts)


def test_there_and_back_is_the_same(in_process: InProcess, tmp_path: Path, convert: Convert) -> None:
    in_process.configure()
    assert convert(in_process.folder, tmp_path / "there", "--to", "server")[0] == 0
    assert convert(tmp_path / "there", tmp_path / "back", "--to", "in-process")[0] == 0
    for index in range(12):
        before = torch.load(in_process.path(index), weights_only=True)
        after = torch.load(tmp_path / "back" / f"data_{index}.pt", weights_only=True)
        assert before.keys() == after.keys()
        assert torch.equal(before["input_ids"], after["input_ids"])
        assert torch.equal(before["loss_mask"], after["loss_mask"])
        assert all(map(torch.equal, before["hidden_states"], after["hidden_states"]))
    assert json.loads((tmp_path / "back" / "eagle3compat.json").read_text())["layer_ids"] == LAYERS
    assert main(["check", str(tmp_path / "back")]) == 0


def test_masks_come_from_the_data_set_of_prepare_data(server: Server, tmp_path: Path, convert: Convert) -> None:
    masks = [[1] * len(ids) for ids in server.prompts]
    Dataset.from_dict({"input_ids": server.prompts, "loss_mask": masks}).save_to_disk(tmp_path / "rows")
    ids = ("--layer-ids", 2, 3, 5)
    code, _, err = convert(server.folder, tmp_path / "without", "--to", "in-process", *ids)
    assert code == 2
    assert "--loss-masks" in err
    arguments = (server.folder, tmp_path / "new", "--to", "in-process", "--loss-masks", tmp_path / "rows", *ids)
    assert convert(*arguments)[0] == 0
    content = torch.load(tmp_path / "new" / "data_3.pt", weights_only=True)
    assert content["loss_mask"].tolist() == masks[3]
    assert all(map(torch.equal, content["hidden_states"], states_of(server.prompts[3])))
    storage = content["hidden_states"][0].untyped_storage()
    assert storage.nbytes() == len(server.prompts[3]) * 32 * 2


def test_a_data_set_in_another_order_is_refused(server: Server, tmp_path: Path, convert: Convert) -> None:
    turned = server.prompts[::-1]
    rows = {"input_ids": turned, "loss_mask": [[1] * len(ids) for ids in turned]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "rows")
    masks = ("--loss-masks", tmp_path / "rows", "--layer-ids", 2, 3, 5)
    code, _, err = convert(server.folder, tmp_path / "new", "--to", "in-process", *masks)
    assert code == 2
    assert "hs_0.safetensors has other token ids" in err


def test_what_check_calls_faulty_is_not_converted(in_process: InProcess, tmp_path: Path, convert: Convert) -> None:
    in_process.configure()
    in_process.edit(3, lambda content: content["hidden_states"][1].zero_())
    code, out, err = convert(in_process.folder, tmp_path / "new", "--to", "server")
    assert code == 1
    assert "data_3.pt" in out
    assert "Nothing was converted" in err
    assert not (tmp_path / "new").exists()
    code, out, _ = convert(in_process.folder, tmp_path / "new", "--to", "server", "--skip-faulty")
    assert code == 1
    assert "1 left out" in out
    assert not (tmp_path / "new" / "hidden_states" / "hs_3.safetensors").exists()
    assert len(list((tmp_path / "new" / "hidden_states").glob("hs_*"))) == 11


def test_a_stopped_conversion_goes_on(
    in_process: InProcess, tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    in_process.configure()
    original, calls = safetensors.torch.save_file, []

    def full_disk(tensors: Any, path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 5:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(tensors, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    code, _, err = convert(in_process.folder, tmp_path / "new", "--to", "server")
    assert code == 1
    assert "No space left on device" in err
    done = tmp_path / "new" / "hidden_states"
    whole = [f"hs_{index}.safetensors" for index in range(4)]
    assert sorted(path.name for path in done.iterdir()) == ["eagle3compat.json", *whole]
    code, out, _ = convert(in_process.folder, tmp_path / "new", "--to", "server")
    assert code == 0
    assert "8 files written, 4 were there" in out
    assert main(["check", str(tmp_path / "new")]) == 0


def test_a_file_that_was_extracted_again_is_converted_again(
    in_process: InProcess, tmp_path: Path, convert: Convert
) -> None:
    in_process.configure()
    assert convert(in_process.folder, tmp_path / "new", "--to", "server")[0] == 0
    content = torch.load(in_process.path(3), weights_only=True)
    shorter = {name: content[name][:-1].clone() for name in ("input_ids", "loss_mask")}
    shorter["hidden_states"] = [state[:-1].clone() for state in content["hidden_states"]]
    torch.save(shorter, in_process.path(3))
    code, out, err = convert(in_process.folder, tmp_path / "new", "--to", "server")
    assert code == 0, err
    assert "1 files written, 11 were there" in out
    found = load_file(tmp_path / "new" / "hidden_states" / "hs_3.safetensors")["hidden_states"]
    assert torch.equal(found, torch.stack(shorter["hidden_states"], dim=1))


def test_a_folder_of_something_else_is_not_written_to(in_process: InProcess, tmp_path: Path, convert: Convert) -> None:
    in_process.configure()
    Server(tmp_path / "new" / "hidden_states", prompts_of(2))
    code, _, err = convert(in_process.folder, tmp_path / "new", "--to", "server")
    assert code == 2
    assert "hs_N.safetensors files already" in err
    assert convert(in_process.folder, tmp_path / "other", "--to", "server")[0] == 0
    code, _, err = convert(in_process.folder, tmp_path / "other", "--to", "server", "--num-hidden-layers", 5)
    assert code == 2
    assert "another conversion" in err
    for source, target, to in (
        (tmp_path / "other", tmp_path / "other" / "hidden_states", "in-process"),
        (tmp_path / "other", tmp_path / "other", "in-process"),
        (in_process.folder, in_process.folder, "server"),
    ):
        code, _, err = convert(source, target, "--to", to)
        assert code == 2
        assert "is the source" in err


def test_float8_becomes_bf16(server: Server, tmp_path: Path, convert: Convert) -> None:
    for index in range(12):
        server.edit(index, lambda content: content.update(loss_mask=torch.ones_like(content["token_ids"])))
        server.edit(index, to_float8)
    assert convert(server.folder, tmp_path / "new", "--to", "in-process", "--layer-ids", 2, 3, 5)[0] == 0
    state = torch.load(tmp_path / "new" / "data_1.pt", weights_only=True)["hidden_states"][2]
    want = states_of(server.prompts[1])[2]
    assert state.dtype == torch.bfloat16
    assert (state - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize(
    ("ids", "layers", "says"),
    [
        ([4, 1], None, "not ascending"),
        ([1, 1, 4], None, "not ascending"),
        ([], None, "no layer ids"),
        ([-1, 4], 5, "no decoder layer"),
        ([1, 5], 5, "beyond the last of 5 layers, 4"),
        ([1, 3], 5, "the last layer id is 3"),
    ],
)
def test_layer_ids_that_cannot_be_are_refused(ids: list[int], layers: int | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        converted_ids(ids, IN_PROCESS, SERVER, layers)


def test_the_embedding_has_no_in_process_id() -> None:
    assert converted_ids([1, 5], SERVER, IN_PROCESS, 5) == [0, 4]
    with pytest.raises(InputError, match="no decoder layer"):
        converted_ids([0, 5], SERVER, IN_PROCESS, 5)


def test_unknown_layer_ids_are_asked_for(in_process: InProcess, tmp_path: Path, convert: Convert) -> None:
    code, _, err = convert(in_process.folder, tmp_path / "new", "--to", "server")
    assert code == 2
    assert "--layer-ids" in err


def test_ids_that_contradict_the_record_are_refused(in_process: InProcess, tmp_path: Path, convert: Convert) -> None:
    in_process.configure()
    code, _, err = convert(in_process.folder, tmp_path / "new", "--to", "server", "--layer-ids", 0, 1, 2)
    assert code == 2
    assert "[0, 1, 2]" in err
    assert str(LAYERS) in err
