"""Families whose layers differ in what they return, on a real vLLM: every layer equals transformers.

`make families` runs all; these cover the kinds that a CPU build has, so that they stay right.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Session, execute, once, prompts_of, python_of, run_session, settings

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("families")]

PAIR = ("0.32.0", "0.4.0.1")
KINDS = {
    "exaone4": "hidden",  # a norm after each block, and a residual that is contained in the stream already
    "gemma4": "hidden",  # `(stream, None)`, heads of two sizes
    "granitemoehybrid": "hidden",  # layers of two classes, state-space and attention, with a stale residual
    "nemotron_h_dense": "hidden + residual",  # layers of three classes, and a final norm of another name
    "transformers": "hidden",  # transformers' own model inside vLLM, with a batch dimension
}
MULTIMODAL, IMAGE = "kimi_k25", [[5, 6, 644, 7, 9, 10]]
"""A family that takes images, on a CPU build as well, and a prompt with the token that stands for one."""
LAYERS = list(range(6))
BUDGET = 128
PROMPTS = [*prompts_of(5, 4, 1, 60), *prompts_of(6, 1, 250, 300)]
"""The last is longer than the budget of a step, and is taken in chunks."""
TOLERANCE = 1e-4
"""Of the largest value, in float32: 2e-6 to 2e-5 were measured."""
CONTROL = 0.2


@pytest.fixture(scope="session")
def families(shared: Path) -> Path:
    """For each family a folder with `model` and transformers' streams in `want.pt`."""

    def make(target: Path) -> None:
        target.mkdir()
        (target / "prompts.json").write_text(json.dumps(PROMPTS))
        script = str(ROOT / "tests/families/reference.py")
        command = [python_of(*PAIR), script, ",".join(KINDS), str(target), str(target / "prompts.json")]
        execute(command, shared / "families.log", settings())
        (target / "image.json").write_text(json.dumps(IMAGE))
        command = [python_of(*PAIR), script, MULTIMODAL, str(target), str(target / "image.json")]
        execute(command, shared / "families-image.log", settings())

    return once(shared, "families", make)


@pytest.fixture
def session(shared: Path, families: Path) -> Session:
    plan: list[dict[str, Any]] = [{"name": "apply", "do": "apply"}, {"name": "imports", "do": "imports"}]
    for name in KINDS:
        load = {
            "model_path": str(families / name / "model"),
            "layer_ids": LAYERS,
            "max_model_len": 512,
            "dtype": "float32",
            "edit": {"scheduler_config.max_num_batched_tokens": BUDGET},
            "start_method": "fork",
            "model_impl": "transformers" if name == "transformers" else "auto",
        }
        plan += [
            {"name": f"load {name}", "do": "load", "with": load},
            {"name": name, "do": "generate", "with": {"prompts": PROMPTS, "save": name}},
            {"name": f"attest {name}", "do": "attest"},
            {"name": f"close {name}", "do": "close"},
        ]
    return run_session(shared, "session-families", PAIR, plan)


@pytest.fixture
def image(shared: Path, families: Path) -> Session:
    """A prompt with an image's token, with the check and then without."""
    load = {"model_path": str(families / MULTIMODAL / "model"), "layer_ids": LAYERS, "dtype": "float32"}
    plan: list[dict[str, Any]] = [
        {"name": "apply", "do": "apply"},
        {"name": "imports", "do": "imports"},
        {"name": "load", "do": "load", "with": {**load, "max_model_len": 512}},
        {"name": "refused", "do": "generate", "with": {"prompts": IMAGE}},
        {"name": "text", "do": "generate", "with": {"prompts": [[5, 6, 7]]}},
        {"name": "without", "do": "without_media_check"},
        {"name": "taken", "do": "generate", "with": {"prompts": IMAGE, "save": "taken"}},
        {"name": "close", "do": "close"},
    ]
    return run_session(shared, "session-image", PAIR, plan)


@pytest.mark.parametrize("name", KINDS)
def test_every_layer_equals_transformers(
    session: Session, families: Path, name: str, comparison: Callable[[str, Path, Path, list[int]], dict[str, Any]]
) -> None:
    assert session.value(name)["shapes"] == [[[len(prompt), 256]] * len(LAYERS) for prompt in PROMPTS]
    got, want = session.folder / f"{name}.pt", families / name / "want.pt"
    figures = comparison(f"families-{name}", got, want, LAYERS)
    assert figures["max"] < TOLERANCE, figures
    assert min(figures["wrong_layer"], figures["shifted_row"]) > CONTROL, figures


@pytest.mark.parametrize("name", KINDS)
def test_how_each_is_read(session: Session, name: str) -> None:
    (worker,) = session.value(f"attest {name}")
    assert worker["reading"] == KINDS[name]
    assert worker["tokens_checked"]


def test_a_prompt_with_an_image_s_token_is_refused_and_the_next_call_works(image: Session) -> None:
    error = image.error("refused")
    assert error["error"] == "InputError"
    assert "prompt 0 holds token id 644 at position 2, which is" in error["message"]
    assert image.value("text")["shapes"] == [[[3, 256]] * len(LAYERS)]


def test_the_control_without_the_check_other_states_come_back_without_an_error(
    image: Session, families: Path, comparison: Callable[[str, Path, Path, list[int]], dict[str, Any]]
) -> None:
    """vLLM takes the embedding of the token, and transformers that of token 0: neither has seen an image."""
    assert image.value("taken")["shapes"] == [[[len(IMAGE[0]), 256]] * len(LAYERS)]
    figures = comparison("image", image.folder / "taken.pt", families / MULTIMODAL / "want.pt", LAYERS)
    assert figures["max"] > CONTROL, figures
