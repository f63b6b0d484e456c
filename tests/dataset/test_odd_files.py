"""What nobody plans to lie in a folder of hidden states: each is a fault with a name, and the rest is checked."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, InProcess, Server, Set, prompts_of, states_of
from safetensors.torch import load_file, save_file

from eagle3compat.cli import main
from eagle3compat.dataset import across
from eagle3compat.dataset.check import Findings, check
from eagle3compat.dataset.files import open_folder
from eagle3compat.dataset.sample import opened


def findings_of(folder: Path, **options: Any) -> Findings:
    return check(open_folder(folder), **options)


def said(findings: Findings) -> list[tuple[str, str, str]]:
    return [(fault.kind, fault.file, fault.detail) for fault in findings.faults]


def a_nan(content: dict[str, Any]) -> None:
    content["hidden_states"][1][3] = float("nan")


class TestLayersAreCalledByTheirIds:
    def test_those_of_stock_s_configuration(self, in_process: InProcess) -> None:
        in_process.edit(5, a_nan)
        in_process.edit(6, lambda content: content["hidden_states"].__setitem__(2, content["hidden_states"][1]))
        in_process.configure()
        details = [detail for _, _, detail in said(findings_of(in_process.folder))]
        assert details[:2] == ["layer 2: 1 of 27 rows", "layer 2 and layer 4"]

    def test_the_place_where_none_are_known(self, in_process: InProcess) -> None:
        in_process.edit(5, a_nan)
        assert said(findings_of(in_process.folder))[0][2] == "hidden_states[1]: 1 of 27 rows"

    def test_those_that_convert_wrote_into_the_files(self, in_process: InProcess, tmp_path: Path) -> None:
        in_process.configure()
        for name in ("beside", "inside"):
            out = tmp_path / name
            assert main(["convert", str(in_process.folder), str(out), "--to", "server"]) == 0
            path = out / "hidden_states" / "hs_5.safetensors"
            content = load_file(path)
            content["hidden_states"][3, 1] = float("nan")
            save_file(content, path)
            if name == "inside":
                (out / "hidden_states" / "eagle3compat.json").unlink()
            assert said(findings_of(out))[0][2] == "layer 3: 1 of 27 rows"

    def test_of_files_of_one_prompt(self, in_process: InProcess) -> None:
        in_process.configure()
        ids = in_process.prompts[3]
        states = states_of(ids)
        states[2][-3:] = states[2][:3]
        ones = torch.ones(len(ids)).long()
        in_process.edit(7, lambda c: c.update(input_ids=torch.tensor(ids), hidden_states=states, loss_mask=ones))
        assert "and 3 of" in said(findings_of(in_process.folder))[0][2]
        assert "rows of layer 4 differ" in said(findings_of(in_process.folder))[0][2]


Change = Callable[[Any], Any]

TENSORS: dict[str, tuple[Change, str, str]] = {
    "meta": (lambda state: state.to("meta"), "shape", "a meta tensor, which holds no values"),
    "nested": (lambda state: torch.nested.nested_tensor([state, state[:3]]), "shape", "a nested tensor"),
    "jagged": (
        lambda state: torch.nested.nested_tensor([state, state[:3]], layout=torch.jagged), "shape", "a nested tensor",
    ),
    "sparse": (lambda state: state.float().to_sparse(), "shape", "a sparse_coo tensor"),
    "quantized": (
        lambda state: torch.quantize_per_tensor(state.float(), 0.1, 0, torch.quint8), "shape", "a quantized tensor",
    ),
    "complex": (lambda state: state.to(torch.complex64), "dtype", "complex64"),
    "no width": (lambda state: state[:, :0].clone(), "shape", "no width"),
    "one number": (lambda state: state[0, 0].clone(), "shape", "3 of 3 layers are []"),
    "a row for all": (lambda state: state[:1].clone().expand(10**9, -1), "shape", "[1000000000, 32] over 64 bytes"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TENSORS)
def test_states_of_an_odd_kind(in_process: InProcess, case: str) -> None:
    change, kind, says = TENSORS[case]
    try:
        in_process.edit(5, lambda c: c.update(hidden_states=[change(state) for state in c["hidden_states"]]))
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        pytest.skip(f"this torch does not write one: {error}")
    findings = findings_of(in_process.folder)
    assert {(fault.kind, fault.index) for fault in findings.faults} <= {(kind, 5), ("unreadable", 5)}
    assert findings.redo == [5]
    assert any(says in detail or where == "unreadable" for where, _, detail in said(findings)), findings.faults


def test_parameters_are_as_good_as_tensors(in_process: InProcess) -> None:
    wrap = torch.nn.Parameter
    in_process.edit(5, lambda content: content.update(hidden_states=[wrap(s) for s in content["hidden_states"]]))
    assert findings_of(in_process.folder).faults == []


def test_ids_without_values_or_of_truth_values(in_process: InProcess) -> None:
    in_process.edit(4, lambda content: content.update(input_ids=content["input_ids"].to("meta")))
    in_process.edit(5, lambda content: content.update(input_ids=content["input_ids"].bool()))
    in_process.edit(6, lambda content: content.update(input_ids=torch.zeros(1, dtype=torch.long).expand(10**9)))
    assert [(kind, file[:6]) for kind, file, _ in said(findings_of(in_process.folder))] == [
        ("shape", "data_4"), ("shape", "data_6"), ("dtype", "data_5"),
    ]


PATHS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder": (Path.mkdir, "it is a folder"),
    "a link to nowhere": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "symbolic links"),
    "a pipe": (os.mkfifo, "no regular file"),
    "an empty file": (Path.touch, "empty"),
}


@pytest.mark.parametrize("make", [InProcess, Server])
@pytest.mark.parametrize("case", PATHS)
def test_what_is_no_file(tmp_path: Path, make: type[Set], case: str) -> None:
    data, (put, says) = make(tmp_path / "set", prompts_of(4)), PATHS[case]
    data.path(0).unlink()
    put(data.path(0))
    findings = findings_of(data.folder)
    assert [(fault.kind, fault.index) for fault in findings.faults] == [("unreadable", 0)]
    assert says in findings.faults[0].detail
    assert findings.redo == [0]


@pytest.fixture
def anybody() -> Iterator[Path]:
    """A folder that everybody may enter, and a process that is not root's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    os.seteuid(os.getuid())
    shutil.rmtree(folder)


@pytest.mark.parametrize("make", [InProcess, Server])
def test_a_file_that_may_not_be_read_is_not_to_be_redone(anybody: Path, make: type[Set]) -> None:
    data = make(anybody / "set", prompts_of(4))
    findings_of(data.folder)  # what is imported on the way may not be readable to others
    for path in data.folder.iterdir():
        path.chmod(0o644 if path != data.path(2) else 0)
    if os.getuid() == 0:
        os.seteuid(65534)
    findings = findings_of(data.folder)
    assert [(fault.kind, fault.index) for fault in findings.faults] == [("no access", 2)]
    assert "chmod u+r" in findings.faults[0].detail
    assert findings.redo == []


def test_a_folder_that_may_not_be_listed_is_refused(
    anybody: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = InProcess(anybody / "set", prompts_of(2))
    data.folder.chmod(0)
    if os.getuid() == 0:
        os.seteuid(65534)
    assert main(["check", str(data.folder)]) == 2
    assert "cannot be listed: Permission denied" in capsys.readouterr().err


class TestWrittenMeanwhile:
    @pytest.mark.parametrize("make", [InProcess, Server])
    def test_nothing_is_mapped(self, tmp_path: Path, make: type[Set]) -> None:
        data = make(tmp_path / "set", prompts_of(1))
        want = torch.stack(states_of(data.prompts[0]))
        with opened(data.path(0), open_folder(data.folder).layout) as sample:
            os.truncate(data.path(0), 1)  # of a mapped file, the next look would end the process with a bus error
            assert torch.equal(torch.stack(list(sample.states)), want)

    def test_a_file_that_changes_while_it_is_read(
        self, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = torch.load

        def slow(path: Path, **options: Any) -> Any:
            content = load(path, **options)
            if path.name == "data_3.pt":
                os.truncate(path, 5)
            return content

        monkeypatch.setattr(torch, "load", slow)
        assert [(kind, file) for kind, file, _ in said(findings_of(in_process.folder))] == [("unreadable", "data_3.pt")]

    def test_a_file_that_is_another_one_when_it_is_compared(
        self, in_process: InProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(across, "CACHED", 0)
        read: list[int] = []

        def advance(size: int) -> None:
            read.append(size)
            if len(read) == 2:
                in_process.path(0).write_bytes(b"cut")

        findings = findings_of(in_process.folder, advance=advance)
        assert ("unreadable", 0) in [(fault.kind, fault.index) for fault in findings.faults]
        assert {fault.index for fault in findings.faults} <= {0}
        assert "check again when the run" in findings.faults[0].detail


DEEP = "[" * 100_000
CONFIGS = [
    "{", "[]", "null", '"x"', DEEP, '{"a":' * 50_000, "\xff",
    '{"data": {"num_samples": ' + "9" * 5000 + "}}", '{"data": {"num_samples": "many"}}',
    '{"data": {"num_samples": -5}}', '{"data": {"num_samples": 1e3}}', '{"data": {"num_samples": true}}', '{"data": 5}',
    '{"data": {"num_samples": 900000000}}', '{"model": {"hidden_size": "32"}}', '{"model": {"hidden_size": NaN}}',
    '{"model": {"hidden_size": 0}}', '{"hidden_states": {"layer_ids": 7}}', '{"hidden_states": {"layer_ids": "124"}}',
    '{"hidden_states": {"layer_ids": [1, "2", null]}}', '{"hidden_states": {"layer_ids": []}}',
    '{"hidden_states": {"layer_ids": [[1], [2], [4]]}}', '{"reproducibility": {"command": ["a"]}}',
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_odd_json_beside_the_files_is_named_and_passed_over(in_process: InProcess, number: int) -> None:
    (in_process.folder / "data_config.json").write_text(CONFIGS[number], encoding="latin-1")
    findings = findings_of(in_process.folder)
    assert [(fault.kind, fault.file) for fault in findings.faults] == [("record", "data_config.json")]
    assert findings.faults[0].detail.endswith(("there.", "Correct it"))
    assert findings.redo == []
    assert findings.expected == (3, 32, "bfloat16")


@pytest.mark.parametrize("content", ["{", "[]", DEEP, '{"x": 5}', '{"0": 1e400}', '{"0": null}', '{"0": [33]}'])
def test_odd_lengths_beside_the_files_are_named(in_process: InProcess, content: str) -> None:
    (in_process.folder / "sample_lengths.json").write_text(content)
    assert [fault.kind for fault in findings_of(in_process.folder).faults] == ["length record"]


def test_unusable_layer_ids_are_asked_for(
    in_process: InProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_process.folder / "data_config.json").write_text('{"hidden_states": {"layer_ids": "1 2 4"}}')
    command = ["convert", str(in_process.folder), str(tmp_path / "out"), "--to", "server"]
    assert main(command) == 2
    assert "layer_ids is '1 2 4', not a list of layer ids" in capsys.readouterr().err
    assert main([*command, "--layer-ids", *map(str, LAYERS)]) == 0


class TestGaps:
    def test_one_of_hundreds_of_thousands_is_one_fault(
        self, in_process: InProcess, capsys: pytest.CaptureFixture[str]
    ) -> None:
        in_process.path(5).rename(in_process.path(900_000))
        findings = findings_of(in_process.folder)
        assert said(findings) == [
            ("missing", "data_5.pt", "no such file; later ones are there"),
            ("missing", "data_12.pt", "no such file, nor any up to data_899999.pt; later ones are there"),
        ]
        assert findings.redo == [5, *range(12, 900_000)]
        assert main(["check", str(in_process.folder)]) == 1
        out = capsys.readouterr().out
        assert "2 faults in 899,989 files" in out
        assert "To redo, 899989: 5, 12-899999" in out

    def test_a_number_that_cannot_be_is_named(self, in_process: InProcess) -> None:
        in_process.path(3).rename(in_process.path(10**9))
        findings = findings_of(in_process.folder)
        assert [(kind, file) for kind, file, _ in said(findings)] == [
            ("missing", "data_3.pt"), ("number", "data_1000000000.pt"),
        ]
        assert findings.redo == [3]

    def test_a_number_that_no_machine_counts_to_is_no_sample(self, in_process: InProcess) -> None:
        in_process.path(3).rename(in_process.path(10**30))
        assert [kind for kind, _, _ in said(findings_of(in_process.folder))] == ["missing", "stray"]

    def test_a_count_that_cannot_be_is_passed_over(self, in_process: InProcess) -> None:
        assert [(kind, file) for kind, file, _ in said(findings_of(in_process.folder, count=10**12))] == [
            ("record", "--count")
        ]


def test_names_that_are_no_text_are_shown(in_process: InProcess, capfd: pytest.CaptureFixture[str]) -> None:
    for name in (b"data_\xff.pt", b"[red]x.pt", b"new\nline.pt", "data_\u0663.pt".encode()):
        Path(os.fsdecode(os.fsencode(in_process.folder) + b"/" + name)).touch()
    assert main(["check", str(in_process.folder)]) == 1
    assert "4" in capfd.readouterr().out
    assert [fault.kind for fault in findings_of(in_process.folder).faults] == ["stray"] * 4
    report = json.dumps([fault.as_dict() for fault in findings_of(in_process.folder).faults])
    assert "[red]x.pt" in report


class TestConverting:
    """What `check` does not ask to redo, and a conversion cannot take."""

    def convert(self, source: Path, target: Path, *more: str) -> int:
        ids = [str(layer) for layer in LAYERS]
        return main(["convert", str(source), str(target), "--to", "server", "--layer-ids", *ids, *more])

    def test_a_number_far_beyond_is_left_out(self, in_process: InProcess, tmp_path: Path) -> None:
        in_process.path(11).rename(in_process.path(10**9))
        assert self.convert(in_process.folder, tmp_path / "out") == 1
        assert not (tmp_path / "out").exists()
        assert self.convert(in_process.folder, tmp_path / "out", "--skip-faulty") == 1
        assert len(list((tmp_path / "out" / "hidden_states").glob("*.safetensors"))) == 11

    @pytest.mark.parametrize("reads", [2, 3])
    def test_a_file_that_is_gone_meanwhile_is_named(
        self, in_process: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str], reads: int,
    ) -> None:
        load, seen = torch.load, []

        def last(path: Path, **options: Any) -> Any:
            if path.name == "data_3.pt":
                seen.append(path)
            if len(seen) == reads and path.name == "data_3.pt":
                path.write_bytes(b"another")
            return load(path, **options)

        monkeypatch.setattr(torch, "load", last)
        assert self.convert(in_process.folder, tmp_path / "out") == 1
        assert "data_3.pt: it is being written" in capsys.readouterr().err
