"""`eagle3compat check` as a user runs it: what it prints, what it moves, and what stock then does."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import InProcess, Server, prompts_of

from eagle3compat.cli import main

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    def run(*arguments: Any) -> tuple[int, str, str]:
        code = main(["check", *map(str, arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def broken(data: InProcess, *indices: int) -> None:
    for index in indices:
        data.path(index).write_bytes(b"")


def stock_extracts(folder: Path, samples: int, max_samples: int, start_idx: int = 0) -> list[int]:
    """The file indices that stock's script writes: where it starts by its rule, as its source has it, to the end."""
    largest = max((int(path.stem[5:]) for path in folder.glob("data_*.pt")), default=-1)
    first = largest + 1 - start_idx
    return [largest + 1 + number for number in range(min(samples, max_samples) - first)]


def test_a_clean_set_exits_0(in_process: InProcess, check: Check) -> None:
    code, out, err = check(in_process.folder)
    assert (code, err) == (0, "")
    assert "12 files, in-process, 3 layers of 32 in bfloat16" in out
    assert "no fault found" in out


def test_faults_exit_1_in_a_table_by_kind(in_process: InProcess, check: Check) -> None:
    broken(in_process, 1, 2, 3, 7)
    code, out, _ = check(in_process.folder, "--examples", 2)
    assert code == 1
    assert "unreadable: truncated, or not such a file" in out
    assert "2 more" in out
    assert "To redo, 4: 1-3, 7" in out
    assert "goes on at index 12, whatever is missing or broken before" in out


def test_json_is_one_object_with_every_fault(in_process: InProcess, check: Check) -> None:
    broken(in_process, 1, 2, 3, 7)
    code, out, err = check(in_process.folder, "--json", "--examples", 1)
    report = json.loads(out)
    assert (code, err) == (1, "")
    assert report["clean"] is False
    assert [fault["index"] for fault in report["faults"]] == [1, 2, 3, 7]
    assert report["redo"]["indices"] == [1, 2, 3, 7]
    assert report["redo"]["stock_resumes_at"] == 12
    assert report["expected"] == {"layers": 3, "hidden_size": 32, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{tmp}/nowhere"], "no folder"),
        (["{tmp}"], "holds no data_N.pt"),
        (["{tmp}/set", "--move-bad", "{tmp}/set/bad"], "lies in"),
        (["{tmp}/set", "--model", "M"], "--layer-ids"),
        (["{tmp}/set", "--model", "{tmp}/nowhere", "--layer-ids", "1", "2", "4"], "--model"),
    ],
)
def test_usage_exits_2(in_process: InProcess, tmp_path: Path, check: Check, arguments: list[str], says: str) -> None:
    code, out, err = check(*[argument.format(tmp=tmp_path) for argument in arguments])
    assert (code, out) == (2, "")
    assert says in err
    assert len(list(in_process.folder.iterdir())) == 12


def test_bad_files_are_moved_not_deleted(in_process: InProcess, tmp_path: Path, check: Check) -> None:
    broken(in_process, 4, 11)
    in_process.path(7).unlink()
    code, out, _ = check(in_process.folder, "--move-bad", tmp_path / "aside")
    assert code == 1
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == ["data_11.pt", "data_4.pt"]
    assert "goes on at index 11" in out
    assert "Run again as before, it extracts 11." in out
    assert "It would not redo 4, 7." in out
    broken(in_process, 4)
    code, _, err = check(in_process.folder, "--move-bad", tmp_path / "aside")
    assert code == 2
    assert "is there already" in err
    assert in_process.path(4).exists()


def test_a_fault_that_needs_no_redoing_is_not_moved(in_process: InProcess, tmp_path: Path, check: Check) -> None:
    (in_process.folder / "token_freq.pt").touch()
    code, out, _ = check(in_process.folder, "--move-bad", tmp_path / "aside")
    assert code == 1
    assert "token_freq.pt" in out
    assert "To redo" not in out
    assert (in_process.folder / "token_freq.pt").exists()


@pytest.mark.parametrize(
    ("bad", "start_idx"),
    [([0], 0), ([0, 1, 2], 0), ([4], 0), ([4, 5, 6], 0), ([3, 8], 0), ([9, 10], 0), ([4, 5, 6], 3), ([3, 8], 3)],
)
def test_the_commands_make_stock_redo_the_gaps_and_nothing_else(
    in_process: InProcess, tmp_path: Path, check: Check, bad: list[int], start_idx: int
) -> None:
    replaced = "--output-dir o --max-samples 50"
    command = f"data_generation_offline.py {replaced} --target-model-path M --start-idx {start_idx}"
    in_process.configure(reproducibility={"command": command}, data={"num_samples": 12})
    broken(in_process, *bad)
    advice = json.loads(check(in_process.folder, "--move-bad", tmp_path / "aside", "--json")[1])["redo"]["advice"]
    shell = [line for line in advice if line.startswith(("mkdir", ": >", "eagle3compat run", "rm ", "mv "))]
    redone = []
    for line in shell:
        if not line.startswith("eagle3compat run"):
            subprocess.run(line, shell=True, check=True)
            continue
        words = shlex.split(line)
        assert words.count("--max-samples") == words.count("--output-dir") == 1
        assert words[words.index("--target-model-path") + 1] == "M"
        scratch = Path(words[words.index("--output-dir") + 1])
        limit = int(words[words.index("--max-samples") + 1])
        written = stock_extracts(scratch, 12, limit, start_idx)
        for index in written:
            (scratch / f"data_{index}.pt").write_text("redone")
        redone += written
    assert redone == bad
    assert [in_process.path(index).read_text() for index in bad] == ["redone"] * len(bad)
    assert sorted(path.name for path in in_process.folder.glob("*.pt")) == sorted(f"data_{n}.pt" for n in range(12))


def test_the_end_is_redone_by_running_again(in_process: InProcess, check: Check) -> None:
    broken(in_process, 10, 11)
    _, out, _ = check(in_process.folder)
    assert "With the faulty files moved aside it would go on at 10, and redo 10-11." in out
    assert "mkdir" not in out


def test_many_gaps_are_offered_in_one_run(tmp_path: Path, check: Check) -> None:
    data = InProcess(tmp_path / "set", prompts_of(30))
    broken(data, *range(1, 29, 2))
    _, out, _ = check(data.folder)
    assert out.count("eagle3compat run data_generation_offline.py YOUR_ARGUMENTS") == 5
    assert "... and so on for 11, 13, 15" in out
    assert "move everything from data_1.pt on aside and run it as before: 29 samples for 14" in out


def test_the_server_path_redoes_what_has_no_file(server: Server, tmp_path: Path, check: Check) -> None:
    server.path(3).write_bytes(b"cut")
    server.path(5).unlink()
    _, out, _ = check(server.folder)
    assert "once the faulty files are moved aside" in out
    _, out, _ = check(server.folder, "--move-bad", tmp_path / "aside")
    assert "run it again as before." in out
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == ["hs_3.safetensors"]
