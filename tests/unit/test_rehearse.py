"""`eagle3compat rehearse` without vLLM: what is read, written and refused, and how a child's end becomes a verdict."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle3compat import hardware
from eagle3compat.cli import main
from eagle3compat.errors import InputError, ModelNotFoundError
from eagle3compat.rehearse import folder, rehearsal
from eagle3compat.rehearse.prompts import plan_of
from eagle3compat.rehearse.shrink import shrink

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rehearsal that fails leaves behind goes with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a large model: config, tokenizer, code of its own, weights that must not be touched."""
    place = tmp_path / "Kimi-K2.5"
    (place / "code").mkdir(parents=True)
    (place / "config.json").write_bytes((CONFIGS / "kimi-k2.5.json").read_bytes())
    for name in ("tokenizer_config.json", "tiktoken.model", "configuration_kimi.py", "code/part.py", "README.md"):
        (place / name).write_text(name)
    (place / "model-00001-of-00064.safetensors").write_text("weights")
    return place


def command(*arguments: str) -> list[str]:
    return ["rehearse", *arguments]


class TestEstimate:
    def test_says_what_the_real_model_needs(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(command("--model", str(model), "--layer-ids", "2,30", "60", "--estimate", "--json")) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["works"] is True
        assert found["ran"] is False
        assert found["estimate"]["layer_ids"] == [2, 30, 60]
        assert found["small_layer_ids"] == [0, 1, 3] or found["small_layer_ids"] == [0, 2, 3]

    def test_a_folder_without_a_tokenizer_is_refused_at_once_where_it_would_be_run(
        self, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eagle3compat.doctor.absent", list)
        for name in ("tokenizer_config.json", "tiktoken.model"):
            (model / name).unlink()
        assert main(command("--model", str(model))) == 2
        assert f"{model} holds no tokenizer" in capsys.readouterr().err
        assert main(command("--model", str(model), "--estimate")) == 0

    def test_a_model_that_this_machine_cannot_hold_is_said(
        self, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eagle3compat.rehearse.rehearsal.host_memory", lambda: 23 * 2**30)
        assert main(command("--model", str(model), "--estimate", "--device", "cpu")) == 0
        assert "this machine cannot hold the real model" in capsys.readouterr().out
        monkeypatch.setattr("eagle3compat.rehearse.rehearsal.host_memory", lambda: 2**50)
        assert main(command("--model", str(model), "--estimate", "--device", "cpu")) == 0
        assert "cannot hold" not in capsys.readouterr().out

    def test_for_people_it_names_the_ids_that_a_draft_is_served_with(
        self, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(command("--model", str(model), "--estimate")) == 0
        said = capsys.readouterr().out
        assert "eagle_aux_hidden_state_layer_ids [3, 31, 59]" in said
        assert "not run" in said

    def test_a_layer_that_does_not_exist_would_fail(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(command("--model", str(model), "--layer-ids", "61", "--estimate")) == 1
        assert "would fail" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--layer-ids", "two"], "'two' is not an integer"),
            (["--tensor-parallel-size", "0"], "tensor-parallel size is 0"),
            (["--max-model-len", "1"], "longest sequence"),
        ],
    )
    def test_what_cannot_be_asked_exits_2(
        self, model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
    ) -> None:
        assert main(command("--model", str(model), "--estimate", *arguments)) == 2
        assert says in capsys.readouterr().err

    def test_a_model_that_is_not_there_exits_2(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(command("--model", str(tmp_path / "nowhere"), "--estimate")) == 2
        assert "no such folder" in capsys.readouterr().err
        (tmp_path / "kimi.json").write_text("{}")
        assert main(command("--model", str(tmp_path / "kimi.json"), "--estimate")) == 2
        assert "is a file. Name the folder that holds the model's config.json" in capsys.readouterr().err

    def test_without_vllm_it_says_so(
        self, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eagle3compat.doctor.absent", lambda: ["vLLM is not installed"])
        assert main(command("--model", str(model))) == 1
        assert "vLLM is not installed" in capsys.readouterr().err


class TestFolder:
    def test_everything_but_weights_is_copied(self, model: Path, tmp_path: Path) -> None:
        small = shrink(folder.read_config(model)).config
        written = folder.write(small, model, tmp_path / "small")
        names = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
        copied = ["configuration_kimi.py", "tiktoken.model", "tokenizer_config.json"]
        assert names == ["code/part.py", "config.json", *copied]
        assert json.loads((written / "config.json").read_text()) == small

    @pytest.mark.parametrize("content", ["", "[1]", "{"])
    def test_a_broken_config_is_named(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError, match=r"config\.json"):
            folder.read_config(tmp_path)

    def test_a_folder_without_a_config_is_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
            folder.source(str(tmp_path))

    def test_a_broken_index_counts_as_none(self, tmp_path: Path) -> None:
        (tmp_path / folder.INDEX).write_text("{")
        assert folder.read_index(tmp_path) is None

    def test_a_hub_that_cannot_be_reached_is_a_network_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "huggingface_hub.py").write_text(
            "def snapshot_download(name, allow_patterns):\n    raise ConnectionError('offline')\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
        assert main(command("--model", "owner/name", "--estimate")) == 2
        assert "owner/name could not be fetched from the hub: ConnectionError: offline" in capsys.readouterr().err

    def test_no_weights_are_asked_of_the_hub(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "huggingface_hub.py").write_text(
            "asked = []\n"
            "def snapshot_download(name, allow_patterns):\n    asked.extend(allow_patterns)\n    return '.'\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
        folder.source("owner/name")
        asked: list[str] = sys.modules["huggingface_hub"].asked
        assert "config.json" in asked
        assert not [name for name in asked if name.endswith((".safetensors", ".bin"))]


class TestPlan:
    def test_the_batch_is_more_than_a_step_takes(self) -> None:
        plan = plan_of(json.loads((CONFIGS / "kimi-k2.5.json").read_text()), "m", [0], 1, 512)
        lengths = [len(prompt) for prompt in plan.batch]
        assert len(lengths) > 32
        assert sum(lengths) > 8192
        cut = plan.alone[-2]  # the prompt over which the first step ends
        assert sum(lengths[:cut]) < 8192 < sum(lengths[: cut + 1])

    @pytest.mark.parametrize("longest", [2, 40, 512])
    def test_no_prompt_is_longer_than_the_model_takes(self, longest: int) -> None:
        plan = plan_of({"num_hidden_layers": 1, "vocab_size": 100}, "m", [0], 1, longest)
        assert max(len(prompt) for prompt in [*plan.short, *plan.batch]) < longest

    def test_tokens_that_mean_an_image_are_left_out(self) -> None:
        config = {"num_hidden_layers": 1, "vocab_size": 400, "text_config": {}, "image_token_id": 300}
        config["text_config"] = {"num_hidden_layers": 1, "vocab_size": 400, "eos_token_id": [301, 302]}
        plan = plan_of(config, "m", [0], 1, 512)
        used = {token for prompt in plan.batch for token in prompt}
        assert used == set(range(200, 400)) - {300, 301, 302}


class TestChild:
    """A child of a rehearsal is stood in for by a script, so that it can end in every way."""

    def run(
        self, monkeypatch: pytest.MonkeyPatch, model: Path, script: str, timeout: float = 600
    ) -> rehearsal.Verdict:
        with self.standing_in(monkeypatch, script):
            options = rehearsal.Options(str(model), [2], device="cpu", timeout=timeout)
            return rehearsal.rehearse(options, lambda said: None)

    @contextmanager
    def standing_in(self, monkeypatch: pytest.MonkeyPatch, script: str) -> Iterator[None]:
        real = subprocess.Popen

        def stand_in(arguments: list[str], **options: Any) -> Any:
            return real([sys.executable, "-c", f"import json, os, sys\n{script}", arguments[-1]], **options)

        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", stand_in)
            yield

    def test_steps_that_end_well_work(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        done = {"step": "load", "state": "done", "seconds": 1.0, "said": "fine"}
        verdict = self.run(monkeypatch, model, f"print(json.dumps({done!r}), file=open(sys.argv[1], 'a'))")
        assert verdict.works
        assert verdict.steps == [done]
        assert verdict.log == ""

    @pytest.mark.parametrize(
        ("trace", "message", "remedy"),
        [
            ("ValueError: ... requires you to execute the file", "no", "fetch its .py files"),
            ("anything", "no", "eagle3compat doctor"),
            ("anything", "eagle3compat: this says itself what to do.", ""),
        ],
    )
    def test_a_step_that_raises_is_the_error_of_the_real_run(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, trace: str, message: str, remedy: str
    ) -> None:
        failed = {
            "step": "load", "state": "failed", "seconds": 1.0, "type": "ValueError", "message": message,
            "traceback": trace,
        }
        verdict = self.run(
            monkeypatch, model, f"print(json.dumps({failed!r}), file=open(sys.argv[1], 'a')); sys.exit(1)"
        )
        assert not verdict.works
        assert verdict.problems[0].said == f"ValueError: {message}"
        assert remedy in verdict.problems[0].remedy
        assert Path(verdict.log).is_file()

    def test_an_exception_without_words_is_told_by_where_it_ended(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trace = (
            "worker:\nTraceback (most recent call last):\n"
            '  File "/a/executor.py", line 1, in run\n    f()\n'
            '  File "/a/cpu_router.py", line 239, in route\n    assert scoring == "softmax"\nAssertionError'
        )
        said = "eagle3compat: a worker failed: AssertionError: (the exception carries no message)"
        failed = {
            "step": "short batch", "state": "failed", "seconds": 1.0, "type": "WorkerError",
            "message": f"{said}\n\nTraceback of {trace}", "traceback": "",
        }
        verdict = self.run(
            monkeypatch, model, f"print(json.dumps({failed!r}), file=open(sys.argv[1], 'a')); sys.exit(1)"
        )
        assert verdict.problems[0].said.endswith('/a/cpu_router.py:239: assert scoring == "softmax"')
        assert "Rehearse on the accelerator" in verdict.problems[0].remedy
        assert verdict.untried

    @pytest.mark.parametrize(("device", "untried"), [("cpu", True), ("cuda", False)])
    def test_what_only_a_cpu_build_lacks_says_nothing_of_the_real_run(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, device: str, untried: bool,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        failed = {
            "step": "load", "state": "failed", "seconds": 1.0, "type": "WorkerError", "traceback": "",
            "message": "eagle3compat: AssertionError: topk_indices_buffer is not supported for DeepseekV2Attention",
        }
        monkeypatch.setattr("eagle3compat.doctor.absent", list)
        monkeypatch.setattr(rehearsal, "accelerators", lambda: [hardware.Accelerator("cuda", "H200", 141 * 2**30)])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with self.standing_in(monkeypatch, f"print(json.dumps({failed!r}), file=open(sys.argv[1], 'a')); sys.exit(1)"):
            assert main(command("--model", str(model), "--device", device)) == (2 if untried else 1)
        said = " ".join(capsys.readouterr().out.split())
        assert ("could not be tried here; of the real run that says nothing" in said) == untried
        assert ("needs MLA, which vLLM's CPU builds lack. Rehearse on the accelerator" in said) == untried

    def test_told_to_end_it_ends_what_it_started(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        places = tmp_path / "places"
        places.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(places))
        monkeypatch.setattr("eagle3compat.doctor.absent", list)
        script = (
            f"import signal, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
            "os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)"
        )
        with self.standing_in(monkeypatch, script):
            assert main(command("--model", str(model), "--device", "cpu")) == 130
        assert "stopped, with all that it had started" in capsys.readouterr().err
        assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
        assert not list(places.iterdir())

    def test_a_long_message_is_cut_and_the_log_has_it_all(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        failed = {
            "step": "load", "state": "failed", "seconds": 1.0, "type": "ValueError", "message": "word " * 5000,
            "traceback": "",
        }
        verdict = self.run(
            monkeypatch, model, f"print(json.dumps({failed!r}), file=open(sys.argv[1], 'a')); sys.exit(1)"
        )
        assert len(verdict.problems[0].said) < 700
        assert "the rest is in the log" in verdict.problems[0].said

    def test_a_child_that_is_killed_is_told_with_its_last_words(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        verdict = self.run(monkeypatch, model, "print('last words', flush=True); os.kill(os.getpid(), 9)")
        assert "exit code -9" in verdict.problems[0].said
        assert "last words" in verdict.problems[0].said

    def test_a_child_that_hangs_is_ended(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        verdict = self.run(monkeypatch, model, "import time; time.sleep(600)", timeout=1)
        assert verdict.problems[0].step == "time"


def test_too_few_devices_are_told_before_anything_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "accelerators", lambda: [hardware.Accelerator("cuda", "H200", 141 * 2**30)] * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    verdict = rehearsal.rehearse(rehearsal.Options(str(model), tensor_parallel_size=2), lambda said: None)
    assert not verdict.ran
    assert verdict.problems[0].step == "devices"
    assert any("a device here has 141 GiB" in note for note in verdict.notes)
