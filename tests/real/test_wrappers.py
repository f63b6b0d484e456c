"""Rehearsals of vision wrappers from published configs: the whole wrapper on a CPU build, or what it lacks.

vLLM 0.16 runs them beside the torchvision that belongs to its torch. The environments of later CPU builds have a torch
beside which no torchvision of the package index loads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import once
from test_rehearsal import rehearse

import environments

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("0.16.0-0.4.0.1")]

TESTS = Path(__file__).parents[1]
PAIR, WITHOUT_VISION = ("0.16.0", "0.4.0.1"), ("0.32.0", "0.4.0.1")
TORCHVISION = "torchvision==0.25.0"
"""For torch 2.10, which vLLM 0.16 has."""
SPECIAL = {
    "kimi-k2.5": {"<|media_pad|>": 163605},
    "qwen3-vl-235b-a22b": {
        "<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656,
    },
}
"""Tokens that a processor looks for, under their published ids."""
CLASSES = {"kimi-k2.5": {"auto_map": {"AutoConfig": "media.Config"}}, "qwen3-vl-235b-a22b": {}}


@pytest.fixture(scope="session")
def torchvision(shared: Path) -> Path:
    def make(target: Path) -> None:
        environments.uv("pip", "install", "--quiet", "--no-deps", "--target", str(target), TORCHVISION)

    return once(shared, "torchvision", make)


def published(name: str, model: Path, target: Path) -> Path:
    """A folder with the published config, processors as it has them, and the tests' tokenizer; no weights."""
    shutil.copytree(TESTS / "wrappers" / name, target)
    config = json.loads((TESTS / "configs" / f"{name}.json").read_text("utf-8")) | CLASSES[name]
    # vLLM 0.16 asks for AMX kernels in bf16 where the processor has AMX, and was built without. It loads float32 in
    # bf16, and in float16 it divides DeepSeek's stream by a factor other than 1, which is refused.
    for part in (config, config["text_config"]):
        part["torch_dtype"] = "float16"
        part.pop("dtype", None)
    if "routed_scaling_factor" in config["text_config"]:
        config["text_config"]["routed_scaling_factor"] = 1.0
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
    like = tokenizer["added_tokens"][0]
    tokenizer["model"]["vocab"].update(SPECIAL[name])
    tokenizer["added_tokens"] += [{**like, "id": number, "content": word} for word, number in SPECIAL[name].items()]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    about = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    about["tokenizer_class"] = "Qwen2Tokenizer" if name.startswith("qwen") else about["tokenizer_class"]
    (target / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return target


def run(pair: tuple[str, str], folder: Path, **variables: str) -> dict[str, Any]:
    return rehearse(pair, folder, "--device", "cpu", **variables)


@pytest.mark.parametrize("name", SPECIAL)
def test_the_whole_wrapper_is_rehearsed(
    name: str, models: dict[str, Path], torchvision: Path, tmp_path: Path
) -> None:
    verdict = run(PAIR, published(name, models["llama"], tmp_path / "model"), PYTHONPATH=str(torchvision))
    assert verdict["works"], verdict["problems"]
    assert verdict["small_config"]["vision_config"], "the wrapper was not made into its text model"
    steps = {step["step"]: step for step in verdict["steps"]}
    assert steps["workers"]["said"] == "residual stream: hidden + residual; proved by the final norm"
    assert "39 samples" in steps["over-budget batch"]["said"]


def test_what_a_vision_model_lacks_is_said_with_the_remedy(models: dict[str, Path], tmp_path: Path) -> None:
    name = "qwen3-vl-235b-a22b"
    fresh = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}  # vLLM keeps what it found of a class
    verdict = run(WITHOUT_VISION, published(name, models["llama"], tmp_path / "model"), **fresh)
    assert not verdict["works"]
    (problem,) = verdict["problems"]
    assert problem["step"] == "load"
    assert problem["said"] == (
        "ModelClassError: eagle3compat: vLLM cannot import its class for Qwen3VLMoeForConditionalGeneration: "
        "ModuleNotFoundError: No module named 'torchvision'. Install torchvision, the build that belongs to your torch."
    )
