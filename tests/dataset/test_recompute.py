"""What recomputing says of files, a toy network in the model's place; tests/real has the real thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LAYERS, InProcess, Server, prompts_of, states_of

from eagle3compat.cli import main
from eagle3compat.dataset import command
from eagle3compat.dataset import recompute as module
from eagle3compat.dataset.check import Findings, check
from eagle3compat.dataset.files import open_folder
from eagle3compat.dataset.recompute import Plan, choose, recompute, with_neighbours
from eagle3compat.errors import InputError


def rounded(state: Any) -> Any:
    """The state as another kernel would give it in bf16."""
    return state * (1 + 0.01 * torch.randn_like(state))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The calls that the toy generator gets."""
    calls: list[list[list[int]]] = []

    class Generator:
        def __init__(self, asked: list[int]) -> None:
            self.asked = asked

        def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
            calls.append(prompts)
            return [{"hidden_states": [rounded(state) for state in states_of(ids, self.asked)]} for ids in prompts]

    @contextmanager
    def generator_of(plan: Plan, longest: int) -> Iterator[Any]:
        yield Generator(plan.asked)

    monkeypatch.setattr(module, "generator_of", generator_of)
    return calls


def recomputed(folder: Path, count: int = 100, layer_ids: list[int] = LAYERS) -> Findings:
    findings = check(open_folder(folder))
    recompute(findings, choose(findings, count, 0), Plan("toy", layer_ids, with_neighbours(layer_ids, 5)))
    return findings


def differing(findings: Findings) -> dict[int | None, str]:
    return {fault.index: fault.detail for fault in findings.faults if fault.kind == "differs"}


@pytest.fixture
def apart(tmp_path: Path) -> InProcess:
    """Prompts that share no prefix, so that only recomputing can tell."""
    return InProcess(tmp_path / "apart", [ids[6 + index % 2 :] for index, ids in enumerate(prompts_of(12))])


def test_a_sound_set_is_equal(in_process: InProcess) -> None:
    findings = recomputed(in_process.folder)
    assert findings.faults == []
    assert len(findings.recomputed) == 12
    for row in findings.recomputed:
        assert row["tolerance"] == 0.05
        assert [layer["id"] for layer in row["layers"]] == LAYERS
        assert all(0 < layer["median"] < 0.03 for layer in row["layers"])


def test_files_with_images_are_left_out(tmp_path: Path, toy: list[list[list[int]]]) -> None:
    pictured = [5, *[440] * 6, 7]
    data = Server(tmp_path / "set", [pictured, *prompts_of(3)])
    ids = [layer + 1 for layer in LAYERS]
    plan = Plan("toy", LAYERS, with_neighbours(LAYERS, 5), media={440: "image_token_id"})
    findings = check(open_folder(data.folder), ids)
    assert 0 not in choose(findings, 3, 0)
    assert findings.notes[-1] == "Files that may hold images are not recomputed, as token ids do not carry them: 0."
    recompute(findings, [0, 1], plan)
    assert [row["file"] for row in findings.recomputed] == ["hs_1.safetensors"]
    assert findings.notes[-1] == "Files with images cannot be recomputed from their token ids: 0."
    calls = len(toy)
    recompute(findings, [0], plan)  # nothing is left, so nothing is loaded
    assert len(toy) == calls


@pytest.mark.parametrize(("more", "code"), [([], 2), ([[9, 8, 7]], 0)])
def test_a_set_of_which_nothing_was_recomputed_is_not_called_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[list[int]], code: int
) -> None:
    data = Server(tmp_path / "set", [[5, *[440] * 6, 7], *more])
    plan = Plan("toy", LAYERS, with_neighbours(LAYERS, 5), media={440: "image_token_id"})
    monkeypatch.setattr(command, "_plan", lambda *_asked: plan)
    asked = ["--layer-ids", *(str(layer + 1) for layer in LAYERS)]
    assert main(["check", str(data.folder), "--model", "toy", *asked]) == code
    assert main(["check", str(data.folder), *asked]) == 0


def test_shifted_rows_are_recognised(apart: InProcess) -> None:
    for index, step in ((2, 1), (5, -2)):
        apart.edit(index, lambda content, step=step: content.update(
            hidden_states=[state.roll(step, 0) for state in content["hidden_states"]]
        ))
    found = differing(recomputed(apart.folder))
    assert found.keys() == {2, 5}
    assert "rows are shifted by -1" in found[2]
    assert "rows are shifted by 2" in found[5]


def test_shifted_layers_are_recognised(apart: InProcess) -> None:
    apart.edit(3, lambda content: content.update(hidden_states=states_of(content["input_ids"].tolist(), [0, 1, 3])))
    apart.edit(4, lambda content: content["hidden_states"].reverse())
    found = differing(recomputed(apart.folder))
    assert found.keys() == {3, 4}
    assert "layer ids are shifted by -1 (1 holds layer 0, 2 holds layer 1, 4 holds layer 3)" in found[3]
    assert "layers are swapped (1 holds layer 4, 4 holds layer 1)" in found[4]


def test_swapped_files_are_recognised_in_a_sample(tmp_path: Path) -> None:
    prompts = prompts_of(40, seed=3)
    prompts = [prompt[6:] for prompt in prompts]
    prompts[9], prompts[20] = list(range(30, 90)), list(range(130, 190))  # the longest: any sample has one of them
    data = InProcess(tmp_path / "set", prompts)
    data.edit(9, lambda content: content.update(hidden_states=states_of(prompts[20])))
    data.edit(20, lambda content: content.update(hidden_states=states_of(prompts[9])))
    found = differing(recomputed(data.folder, count=3))
    assert found.keys() in ({9}, {20}, {9, 20})
    assert all(f"its states are in data_{29 - index}.pt" in said for index, said in found.items())


def test_rows_that_are_wrong_are_counted(apart: InProcess) -> None:
    def stale(content: dict[str, Any]) -> None:
        for state in content["hidden_states"]:
            state[-2:] = state[:2].flip(0)

    apart.edit(8, stale)
    length = len(apart.prompts[8])
    assert f"2 of {length} rows are wrong, from row {length - 2}" in differing(recomputed(apart.folder))[8]


def test_float32_is_held_to_its_own_tolerance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = torch.ones(4, 8)
    assert module.tolerance("float32", computed) == 1e-4
    assert module.tolerance("float32", computed.bfloat16()) == 0.05
    assert module.tolerance("bfloat16", computed) == 0.05
    assert module.tolerance("float8_e4m3fn", computed) == 0.15


def test_a_neighbouring_layer_within_the_tolerance_is_told_apart() -> None:
    want = torch.randn(20, 64)
    states = {1: want, 2: want + 0.03 * torch.randn(20, 64)}
    assert module._nearer_to_another(states[2], 1, states, module.compare(states[2], want)["median"], 0.05)
    assert not module._nearer_to_another(states[1] * 1.002, 1, states, 0.002, 0.05)


def test_server_ids_are_one_higher(tmp_path: Path) -> None:
    data = Server(tmp_path / "set", prompts_of(5))
    shown = open_folder(data.folder)
    plan = Plan("toy", [layer - shown.layout.shift for layer in (2, 3, 5)], [0, 1, 2, 3, 4])
    findings = check(shown)
    recompute(findings, choose(findings, 5, 0), plan)
    assert findings.faults == []
    assert [layer["id"] for layer in findings.recomputed[0]["layers"]] == [2, 3, 5]


def test_the_choice_is_seeded_and_spread(tmp_path: Path) -> None:
    data = InProcess(tmp_path / "set", prompts_of(60))
    findings = check(open_folder(data.folder))
    chosen = choose(findings, 6, 1)
    assert chosen == choose(findings, 6, 1) != choose(findings, 6, 2)
    assert len(chosen) == 6
    lengths = [len(ids) for ids in data.prompts]
    assert {min(lengths), max(lengths)} <= {lengths[index] for index in chosen}
    assert min(chosen) < 20
    assert max(chosen) >= 40
    findings.faults = [fault for fault in check(open_folder(data.folder), count=61).faults]
    assert choose(findings, 100, 0) == list(range(60))


def test_long_prompts_go_in_batches_of_their_own(tmp_path: Path, toy: list[list[list[int]]]) -> None:
    data = InProcess(tmp_path / "set", [[number] * 5000 for number in (20, 21)] + [[22] * 30, [23] * 30])
    assert recomputed(data.folder).faults == []
    assert [len(call) for call in toy] == [1, 3]


def test_layers_that_the_model_has_not_are_refused() -> None:
    assert with_neighbours([0, 4], 5) == [0, 1, 3, 4]
    with pytest.raises(InputError, match="layer 5 is beyond the model's 5 layers"):
        with_neighbours([1, 5], 5)
