"""`eagle3compat rehearse` as a user calls it, on real vLLM: from a model's config to a verdict."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import TIMEOUT, python_of, settings

pytestmark = pytest.mark.real

CASES = [
    pytest.param(pair, family, id=f"{'-'.join(pair)}-{family}", marks=pytest.mark.xdist_group("-".join(pair)))
    for pair, family in ((("0.32.0", "0.4.0.1"), "deepseek_v3"), (("0.16.0", "0.3.0"), "llama"))
]


@pytest.mark.parametrize(("pair", "family"), CASES)
def test_a_model_that_works_is_said_to_work(
    pair: tuple[str, str], family: str, models: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"  # without weights, which a rehearsal must not need
    folder.mkdir()
    for file in models[family].glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    if family == "llama":  # vLLM 0.16 asks for AMX kernels in bf16 where the processor has AMX, and was built without
        config["torch_dtype"] = "float16"
        (folder / "config.json").write_text(json.dumps(config))
    verdict = rehearse(pair, folder, "--layer-ids", "5", "0", "3", "5", "--device", "cpu")
    assert verdict["works"], verdict
    assert verdict["small_layer_ids"] == [3, 0, 2, 3]
    steps = {step["step"]: step for step in verdict["steps"]}
    assert list(steps) == [
        "apply", "import", "load", "short batch", "workers", "over-budget batch", "batch against alone", "shutdown",
    ]
    assert f"torch.{config['torch_dtype']}" in steps["over-budget batch"]["said"]
    assert verdict["log"] == ""


def test_a_model_that_vllm_does_not_know_would_fail(models: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((models["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["NobodyKnowsForCausalLM"]}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((models["llama"] / name).read_bytes())
    verdict = rehearse(("0.16.0", "0.3.0"), tmp_path, "--device", "cpu")
    assert not verdict["works"]
    problem = verdict["problems"][0]
    assert "NobodyKnowsForCausalLM" in problem["said"]
    assert "take a release that does" in problem["remedy"]
    assert Path(verdict["log"]).is_file()


def rehearse(pair: tuple[str, str], model: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    command = [python_of(*pair), "-m", "eagle3compat", "rehearse", "--model", str(model), "--json", *arguments]
    env = settings(**variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.stdout, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if verdict["works"] else 1)
    return verdict
