"""What of `check` and `convert` needs no torch: names, ranges, and what stock's script would do next."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from eagle3compat.cli import main
from eagle3compat.dataset.faults import KINDS, Fault, ranges, to_redo, written
from eagle3compat.dataset.files import IN_PROCESS, SERVER, Folder, open_folder
from eagle3compat.dataset.redo import advice, commands, resumes_at


def folder_of(tmp_path: Path, *names: str, config: str = "") -> Folder:
    folder = tmp_path / "a set"
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).touch()
    if config:
        (folder / "data_config.json").write_text(config)
    return open_folder(folder)


def test_indices_are_written_as_ranges() -> None:
    assert ranges([3, 7, 8, 9, 11]) == [(3, 3), (7, 9), (11, 11)]
    assert written([3, 7, 8, 9, 11]) == "3, 7-9, 11"
    assert written([]) == ""
    assert written(range(0, 20, 2), most=2) == "0, 2, ... and 8 more"


def test_only_lost_content_is_redone() -> None:
    kinds = [*KINDS, "zero"]
    faults = [Fault(kind, f"data_{index}.pt", index, "") for index, kind in enumerate(kinds)]
    faults.append(Fault("stray", "x.pt", None, ""))
    assert to_redo(faults) == [index for index, kind in enumerate(kinds) if KINDS[kind].redo]


@pytest.mark.parametrize(
    ("name", "index"),
    [("data_0.pt", 0), ("data_120.pt", 120), ("data_007.pt", None), ("data_-1.pt", None), ("data_1.pt.part", None),
     ("xdata_1.pt", None), ("hs_1.safetensors", None)],
)
def test_only_names_that_stock_writes_are_samples(name: str, index: int | None) -> None:
    assert IN_PROCESS.index(name) == index


def test_layouts_tell_themselves_apart(tmp_path: Path) -> None:
    assert folder_of(tmp_path, "hs_3.safetensors", "hs_1.safetensors").layout is SERVER
    assert list(folder_of(tmp_path).files) == [1, 3]


def test_stock_goes_on_after_the_largest_number_in_any_such_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "data_0.pt", "data_4.pt", "data_5.pt.part")
    assert resumes_at(folder) == 5
    assert resumes_at(folder, without=[4]) == 1
    assert resumes_at(folder_of(tmp_path, "data_0012.pt"), without=[4]) == 13


def test_commands_keep_the_recorded_arguments_and_quote_paths(tmp_path: Path) -> None:
    said = "gen.py --output-dir=old --layer-ids 1 2 --max-samples 9 --start-idx 2 --train-data-path a;b"
    folder = folder_of(tmp_path, "data_0.pt", config='{"reproducibility": {"command": "' + said + '"}}')
    lines = commands(folder, 5, 6)
    scratch = f"'{tmp_path}/a set.redo-5-6'"
    assert lines == [
        f"mkdir -p {scratch}",
        f": > {scratch}/data_4.pt",
        "eagle3compat run gen.py --layer-ids 1 2 --start-idx 2 --train-data-path 'a;b' "
        f"--output-dir {scratch} --max-samples 5",
        f"rm {scratch}/data_4.pt",
        f"mv -n {scratch}/data_*.pt '{tmp_path}/a set'/",
    ]


def test_a_driver_that_fills_gaps_is_run_again_as_before(tmp_path: Path) -> None:
    folder_of(tmp_path, "data_0.pt", "data_2.pt")
    (tmp_path / "a set" / "eagle3compat.json").write_text('{"layer_ids": [1], "written_by": "examples/extract.py"}')
    *_, last = advice(folder_of(tmp_path), [1, 2], None)
    assert last == (
        "examples/extract.py extracts every index that has no file: run it again as before, once the faulty files are "
        "moved aside."
    )


def test_nothing_to_redo_is_nothing_to_say(tmp_path: Path) -> None:
    assert advice(folder_of(tmp_path, "data_0.pt"), [], None) == []


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    folder = folder_of(tmp_path, "data_0.pt", config=content)
    assert [(fault.kind, fault.file) for fault in folder.records.faults] == [("record", "data_config.json")]
    assert folder.layer_ids is None


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here")
def test_without_torch_the_remedy_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, "data_0.pt")
    assert main(["check", str(folder.path)]) == 2
    assert "torch is not installed here" in capsys.readouterr().err
    assert "torch" not in sys.modules


@pytest.mark.parametrize("line", ["check", "check . --sample 0", "convert a b", "check --help"])
def test_usage_is_shown(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == (0 if "--help" in line else 2)
    assert "usage: eagle3compat" in "".join(capsys.readouterr())
