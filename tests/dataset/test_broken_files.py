"""Each kind of fault, made by really breaking a file, is named, and nothing else is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, SYSTEM, WIDTH, InProcess, Server, Set, prompts_of, states_of, to_float8

from eagle3compat.cli import main
from eagle3compat.dataset.check import Findings, check
from eagle3compat.dataset.files import open_folder
from eagle3compat.errors import InputError


def findings_of(folder: Path, **options: Any) -> Findings:
    return check(open_folder(folder), **options)


def named(findings: Findings) -> list[tuple[str, int | None]]:
    return [(fault.kind, fault.index) for fault in findings.faults]


Break = Callable[[dict[str, Any]], Any]


def one_layer(number: int, change: Callable[[Any], Any]) -> Break:
    def apply(content: dict[str, Any]) -> None:
        content["hidden_states"][number] = change(content["hidden_states"][number])

    return apply


def every_layer(change: Callable[[Any], Any]) -> Break:
    return lambda content: content.update(hidden_states=[change(state) for state in content["hidden_states"]])


def filled(rows: slice, value: float) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        state[rows] = value
        return state

    return change


def view_of_a_batch(content: dict[str, Any]) -> None:
    def view(state: Any) -> Any:
        batch = torch.zeros(4096, WIDTH, dtype=state.dtype)
        batch[: len(state)] = state
        return batch[: len(state)].contiguous()

    content["hidden_states"] = [view(state) for state in content["hidden_states"]]


BREAKS: dict[str, tuple[Break, str, str]] = {
    "no loss mask": (lambda content: content.pop("loss_mask"), "incomplete", "no loss_mask"),
    "no states": (lambda content: content.update(hidden_states=[]), "incomplete", "no layer"),
    "states are None": (lambda content: content.update(hidden_states=None), "incomplete", "no hidden_states"),
    "one tensor for a list": (
        lambda content: content.update(hidden_states=torch.stack(content["hidden_states"])), "shape", "not a list",
    ),
    "ids as a list": (lambda content: content.update(input_ids=content["input_ids"].tolist()), "shape", "not a tensor"),
    "one row of all": (one_layer(1, lambda state: state[-1].clone()), "shape", f"hidden_states[1] is [{WIDTH}]"),
    "another width in one layer": (one_layer(0, lambda state: state[:, :16].clone()), "shape", "widths 16, 32"),
    "another width": (every_layer(lambda state: state[:, :16].clone()), "shape", "hidden size 16"),
    "a layer less": (lambda content: content["hidden_states"].pop(), "layers", "layers 2, where the set has 3"),
    "a negative token": (lambda content: content["input_ids"].fill_(-3), "shape", "holds -3"),
    "states cut short": (every_layer(lambda state: state[:-2].clone()), "length", "rows"),
    "one layer cut short": (one_layer(2, lambda state: state[:-2].clone()), "length", "rows of hidden_states[2]"),
    "a short mask": (
        lambda content: content.update(loss_mask=content["loss_mask"][:-1].clone()), "length", "a loss mask of",
    ),
    "an empty sample": (
        lambda content: content.update(
            input_ids=torch.tensor([], dtype=torch.long), loss_mask=torch.tensor([], dtype=torch.long),
            hidden_states=[torch.zeros(0, WIDTH)] * 3,
        ),
        "length", "no token",
    ),
    "another dtype": (every_layer(lambda state: state.float()), "dtype", "float32, where the set has bfloat16"),
    "two dtypes": (one_layer(1, lambda state: state.float()), "dtype", "bfloat16 and float32"),
    "ids as floats": (lambda content: content.update(input_ids=content["input_ids"].float()), "dtype", "float32"),
    "a NaN": (one_layer(1, filled(slice(3, 4), float("nan"))), "not finite", "hidden_states[1]: 1 of"),
    "an infinity": (one_layer(2, filled(slice(0, 2), float("inf"))), "not finite", "hidden_states[2]: 2 of"),
    "zero rows": (one_layer(0, filled(slice(-2, None), 0.0)), "zero", "hidden_states[0]: 2 of"),
    "a zero layer": (one_layer(2, filled(slice(None), 0.0)), "zero", "hidden_states[2]: all of it"),
    "a layer twice": (
        lambda content: content.update(hidden_states=[content["hidden_states"][k] for k in (0, 2, 2)]),
        "same layer", "hidden_states[1] and hidden_states[2]",
    ),
    "a view of a batch": (view_of_a_batch, "waste", "bytes of hidden states"),
    "rows one late": (every_layer(lambda state: state.roll(1, 0)), "prefix", "11 files agree"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_broken_file_is_named(in_process: InProcess, case: str) -> None:
    change, kind, says = BREAKS[case]
    in_process.edit(5, change)
    findings = findings_of(in_process.folder)
    # A layer of another depth in a place shows against files with the same prefix, too.
    also = {("prefix", 5)} if case == "a layer twice" else set()
    assert set(named(findings)) - also == {(kind, 5)}
    assert any(says in fault.detail for fault in findings.faults), findings.faults
    assert findings.redo == ([] if kind == "waste" else [5])


@pytest.mark.parametrize("make", [InProcess, Server])
def test_a_sound_set_has_no_fault(make: type[Set], tmp_path: Path) -> None:
    data, read = make(tmp_path / "set", prompts_of(70)), []
    findings = findings_of(data.folder, advance=read.append)
    assert findings.faults == []
    assert findings.notes == []
    assert findings.expected == (len(LAYERS), WIDTH, "bfloat16")
    assert findings.lengths == {index: len(ids) for index, ids in enumerate(data.prompts)}
    assert sum(read) == sum(path.stat().st_size for path in data.folder.iterdir())


@pytest.mark.parametrize("kept", [0, 40, 0.5, 0.99])
def test_a_truncated_file_is_unreadable(in_process: InProcess, server: Server, kept: float) -> None:
    for data in (in_process, server):
        path = data.path(3)
        content = path.read_bytes()
        path.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    for layout in ("in-process", "server"):
        findings = check(open_folder(in_process.folder, layout))
        assert named(findings) == [("unreadable", 3)]
        assert findings.faults[0].detail


def test_what_is_no_such_file_is_unreadable(in_process: InProcess) -> None:
    in_process.path(0).write_bytes(b"not a file of torch at all" * 50)
    torch.save(torch.zeros(3), in_process.path(1))
    torch.save({"input_ids": torch.zeros(3)}, in_process.path(2), _use_new_zipfile_serialization=False)
    assert named(findings_of(in_process.folder)) == [("unreadable", 0), ("unreadable", 1), ("unreadable", 2)]


def test_a_link_to_nowhere_is_unreadable_and_the_rest_is_read(in_process: InProcess) -> None:
    in_process.path(1).unlink()
    in_process.path(1).symlink_to("nowhere")
    assert main(["check", str(in_process.folder)]) == 1
    assert named(findings_of(in_process.folder)) == [("unreadable", 1)]


def test_a_pickle_that_would_run_code_is_not_run(in_process: InProcess, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"input_ids": Hostile()}, in_process.path(4))
    assert named(findings_of(in_process.folder)) == [("unreadable", 4)]
    assert not (tmp_path / "ran").exists()


def test_a_flipped_byte_is_found_by_its_checksum(in_process: InProcess) -> None:
    content = bytearray(in_process.path(6).read_bytes())
    where = content.find(states_of(in_process.prompts[6])[1].view(torch.uint8).numpy().tobytes())
    content[where + 200] ^= 1
    in_process.path(6).write_bytes(content)
    assert named(findings_of(in_process.folder)) == [("checksum", 6)]


def test_gaps_and_a_missing_end_are_named(in_process: InProcess) -> None:
    for index in (0, 4, 5, 11):
        in_process.path(index).unlink()
    assert named(findings_of(in_process.folder)) == [("missing", 0), ("missing", 4)]
    assert findings_of(in_process.folder).redo == [0, 4, 5]
    assert findings_of(in_process.folder, count=13).redo == [0, 4, 5, 11, 12]
    in_process.configure(data={"num_samples": 12})
    assert findings_of(in_process.folder).redo == [0, 4, 5, 11]


def test_states_of_another_prompt_are_named_on_both_sides(in_process: InProcess) -> None:
    # As a stale buffer would leave them: the prompts are of one length and the states are the first one's.
    ids = [*in_process.prompts[2][:-1], 19]
    in_process.edit(8, lambda content: content.update(
        input_ids=torch.tensor(ids), loss_mask=torch.ones(len(ids)).long(),
        hidden_states=states_of(in_process.prompts[2]),
    ))
    findings = findings_of(in_process.folder)
    assert named(findings) == [("same states", 2), ("same states", 8)]
    assert "data_2.pt" in findings.faults[1].detail


def test_one_prompt_with_two_results_is_a_contradiction(in_process: InProcess) -> None:
    def other(content: dict[str, Any]) -> None:
        states = states_of(in_process.prompts[3])
        for state in states:
            state[-3:] = state[:3]
        content.update(input_ids=torch.tensor(in_process.prompts[3]), hidden_states=states)
        content["loss_mask"] = torch.ones(len(in_process.prompts[3])).long()

    in_process.edit(9, other)
    findings = findings_of(in_process.folder)
    assert named(findings) == [("contradiction", 3), ("contradiction", 9)]
    assert "3 of" in findings.faults[0].detail


def test_a_repeated_prompt_with_rounding_is_no_fault(in_process: InProcess) -> None:
    def nearly(content: dict[str, Any]) -> None:
        content.update(input_ids=torch.tensor(in_process.prompts[3]))
        content["hidden_states"] = [state * 1.01 for state in states_of(in_process.prompts[3])]
        content["loss_mask"] = torch.ones(len(in_process.prompts[3])).long()

    in_process.edit(9, nearly)
    assert findings_of(in_process.folder).faults == []


def test_an_exact_copy_is_a_note(in_process: InProcess) -> None:
    in_process.path(7).write_bytes(in_process.path(1).read_bytes())
    findings = findings_of(in_process.folder)
    assert findings.faults == []
    assert "data_7.pt of data_1.pt" in findings.notes[0]


def test_swapped_states_show_where_a_longer_prefix_is_shared(tmp_path: Path) -> None:
    prompts = prompts_of(8)
    prompts[3:6] = [SYSTEM + list(range(100, 120)) + [last] for last in (30, 31, 32)]
    data = InProcess(tmp_path / "set", prompts)
    assert findings_of(data.folder).faults == []
    states = [states_of([*SYSTEM, *range(200, 220), 40])]
    data.edit(4, lambda content: content.update(hidden_states=states[0]))
    assert named(findings_of(data.folder)) == [("prefix", 4)]


def test_when_two_disagree_both_are_named(tmp_path: Path) -> None:
    data = InProcess(tmp_path / "set", [[*SYSTEM, 100, 101, 102], [*SYSTEM, 200, 201, 202]])
    data.edit(0, every_layer(lambda state: state.roll(1, 0)))
    findings = findings_of(data.folder)
    assert named(findings) == [("prefix", 0), ("prefix", 1)]
    assert "one of them is wrong" in findings.faults[0].detail


def test_where_nothing_agrees_all_are_named(tmp_path: Path) -> None:
    data = InProcess(tmp_path / "set", [[*SYSTEM, *range(30 + index, 40 + index)] for index in range(24)])
    for index in range(24):
        data.edit(index, every_layer(lambda state: torch.randn_like(state)))
    assert named(findings_of(data.folder)) == [("prefix", index) for index in range(24)]


def test_the_first_file_may_be_the_wrong_one(in_process: InProcess) -> None:
    in_process.edit(0, every_layer(lambda state: state.roll(1, 0)))
    assert named(findings_of(in_process.folder)) == [("prefix", 0)]


def test_a_layer_that_was_asked_for_twice_may_be_there_twice(in_process: InProcess) -> None:
    for index in range(12):
        in_process.edit(index, lambda content: content["hidden_states"].append(content["hidden_states"][0].clone()))
    assert {kind for kind, _ in named(findings_of(in_process.folder))} == {"same layer"}
    assert findings_of(in_process.folder, layer_ids=[*LAYERS, LAYERS[0]]).faults == []


def test_the_configuration_says_what_the_set_should_be(in_process: InProcess) -> None:
    in_process.configure(hidden_states={"layer_ids": [*LAYERS, 5]})
    assert named(findings_of(in_process.folder)) == [("layers", index) for index in range(12)]
    in_process.configure(model={"hidden_size": 64})
    assert named(findings_of(in_process.folder)) == [("shape", index) for index in range(12)]


def test_lengths_that_are_recorded_wrong_are_named(in_process: InProcess) -> None:
    lengths = {str(index): len(ids) for index, ids in enumerate(in_process.prompts)}
    record = in_process.folder / "sample_lengths.json"
    record.write_text(json.dumps(lengths))
    assert findings_of(in_process.folder).faults == []
    lengths["2"] += 1
    del lengths["4"]
    record.write_text(json.dumps(lengths))
    findings = findings_of(in_process.folder)
    assert named(findings) == [("length record", 2)]
    assert findings.redo == []
    assert "lacks 1 files (4)" in findings.notes[0]
    record.write_text("{")
    assert named(findings_of(in_process.folder)) == [("length record", None)]


def test_leftovers_and_strays_are_named(in_process: InProcess) -> None:
    (in_process.folder / "data_12.pt.part").touch()
    (in_process.folder / "token_freq.pt").touch()
    (in_process.folder / "old").mkdir()
    (in_process.folder / "old" / "data_3.pt").touch()
    (in_process.folder / "data_007.pt").touch()
    findings = findings_of(in_process.folder)
    found = {fault.kind: fault.file for fault in findings.faults}
    assert found["leftover"] == "data_12.pt.part"
    assert [fault.file for fault in findings.faults if fault.kind == "stray"] == [
        "data_007.pt", "old/data_3.pt", "token_freq.pt",
    ]
    assert findings.redo == []


def states_of_file(data: Server, index: int) -> Any:
    from safetensors.torch import load_file

    return load_file(data.path(index))["hidden_states"]


class TestServer:
    def test_each_broken_file_is_named(self, server: Server) -> None:
        def cut(content: dict[str, Any]) -> None:
            content["hidden_states"] = content["hidden_states"][:-3]

        def flat(content: dict[str, Any]) -> None:
            content["hidden_states"] = content["hidden_states"].flatten(1)

        def zero_tail(content: dict[str, Any]) -> None:
            content["hidden_states"][-2:] = 0

        server.edit(1, cut)
        server.edit(2, flat)
        server.edit(3, zero_tail)
        server.edit(4, lambda content: content.pop("token_ids"))
        server.edit(5, lambda content: content.update(hidden_states=content["hidden_states"][:, :2]))
        server.path(6).unlink()
        findings = findings_of(server.folder)
        assert set(named(findings)) == {
            ("length", 1), ("shape", 2), ("zero", 3), ("incomplete", 4), ("layers", 5), ("missing", 6),
        }
        assert findings.redo == [1, 2, 3, 4, 5, 6]

    def test_rows_of_a_cached_prefix_are_told_from_the_others(self, server: Server) -> None:
        # As vLLM 0.22 and 0.23 write them with prefix caching: rows from after the cached part, then strange ones.
        def displaced(content: dict[str, Any]) -> None:
            content["hidden_states"] = content["hidden_states"].roll(-len(SYSTEM), 0)

        server.edit(4, displaced)
        server.edit(7, displaced)
        assert named(findings_of(server.folder)) == [("prefix", 4), ("prefix", 7)]

    def test_files_with_images_agree_only_up_to_the_first(self, tmp_path: Path) -> None:
        prompt = [*SYSTEM, *[440] * 6, *range(30, 50)]
        data = Server(tmp_path / "set", [prompt, prompt, prompt, [*SYSTEM, 7]])

        def another_image(content: dict[str, Any]) -> None:
            content["hidden_states"][len(SYSTEM) :].normal_()

        for index in (0, 1):
            data.edit(index, another_image)
        data.path(2).write_bytes(data.path(1).read_bytes())
        findings = findings_of(data.folder)
        assert findings.faults == []
        assert any("hs_2.safetensors of hs_1.safetensors" in note for note in findings.notes)
        assert any(note.startswith("3 files hold one token id 4 times or more in a row") for note in findings.notes)
        data.edit(0, lambda content: content.update(hidden_states=content["hidden_states"].roll(1, 0)))
        assert named(findings_of(data.folder)) == [("prefix", 0)]

    def test_what_has_the_states_of_another_prompt_with_an_image_is_named(self, tmp_path: Path) -> None:
        data = Server(tmp_path / "set", [[token, *[440] * 6, *range(30, 50)] for token in (5, 6)])
        data.edit(1, lambda content: content.update(hidden_states=states_of_file(data, 0)))
        assert named(findings_of(data.folder)) == [("same states", 0), ("same states", 1)]

    def test_leftovers_of_a_killed_run_are_named(self, server: Server) -> None:
        (server.folder / "hs_3.safetensors.lock").touch()
        (server.folder / "cmpl-1234-0.safetensors").touch()
        assert [fault.kind for fault in findings_of(server.folder).faults] == ["leftover", "leftover"]

    def test_a_folder_of_prepare_data_is_entered(self, tmp_path: Path) -> None:
        Server(tmp_path / "data" / "hidden_states", prompts_of(3))
        assert open_folder(tmp_path / "data").path.name == "hidden_states"

    def test_float8_rows_are_read_with_their_scales(self, server: Server) -> None:
        for index in range(12):
            server.edit(index, to_float8)
        findings = findings_of(server.folder)
        assert findings.faults == []
        assert findings.expected == (3, WIDTH, "float8_e4m3fn")
        server.edit(2, lambda content: content.update(hidden_states_scales=content["hidden_states_scales"][1:]))
        assert named(findings_of(server.folder)) == [("shape", 2)]


def test_a_folder_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no data_N\.pt"):
        open_folder(tmp_path)
    with pytest.raises(InputError, match="no folder"):
        open_folder(tmp_path / "nowhere")
    (tmp_path / "chatcmpl-1.safetensors").touch()
    with pytest.raises(InputError, match=r"no hs_N\.safetensors, but 1 \.safetensors of other names, as a server has"):
        open_folder(tmp_path)


def test_two_layouts_in_one_folder_are_asked_about(in_process: InProcess, server: Server) -> None:
    with pytest.raises(InputError, match="--layout"):
        open_folder(in_process.folder)


@pytest.mark.parametrize("make", [InProcess, Server])
def test_no_damage_ends_the_check(make: type[Set], tmp_path: Path) -> None:
    """Bytes flipped anywhere, the ends cut anywhere: the others are still checked."""
    data, rng = make(tmp_path / "set", prompts_of(60)), random.Random(4)
    for index in range(2, 60):
        content = bytearray(data.path(index).read_bytes())
        for _ in range(rng.randint(1, 4)):
            # Half of them in the first kilobyte, where names, shapes and dtypes are.
            content[rng.randrange(1024 if index % 2 else len(content))] = rng.randrange(256)
        data.path(index).write_bytes(content[: rng.randint(1, len(content))] if index % 10 == 0 else content)
    findings = findings_of(data.folder)
    assert not {0, 1} & set(findings.redo)
    assert {fault.kind for fault in findings.faults} & {"unreadable", "checksum"}


def test_a_sparse_tensor_is_none_of_these(in_process: InProcess) -> None:
    in_process.edit(2, one_layer(0, lambda state: state.float().to_sparse()))
    assert named(findings_of(in_process.folder)) in ([("shape", 2)], [("unreadable", 2)])
