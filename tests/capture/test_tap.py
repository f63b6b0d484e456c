"""The reference of `make families` that taps vLLM's own forward, where the engine core is a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from families import compare, tap  # noqa: E402

WIDTH, FAMILY, PROMPTS = 4, "llama", [[1, 2, 3], [4, 5]]


class Norm(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return hidden if residual is None else hidden + residual


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()


class Model(torch.nn.Module):
    """Layer `n` of two makes `ids + n` of a prompt, as a sum of two halves, padded to four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.norm = Norm()

    def forward(self, ids: list[int]) -> None:
        rows = torch.tensor([*ids, 0, 0, 0, 0][:4]).float()[:, None].expand(4, WIDTH)
        for number, norm in enumerate((self.layers[1].input_layernorm, self.norm)):
            norm((rows + number) / 2, (rows + number) / 2)


class LLM:
    """vLLM's, whose workers are elsewhere: a reply arrives as what could be sent."""

    def __init__(self, model: str, **options: Any) -> None:
        self.model, self.worker = Model(), tap.Tap()
        self.worker.model_runner, self.worker.rank = SimpleNamespace(model=self.model), 0  # type: ignore[attr-defined]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        return json.loads(json.dumps([getattr(self.worker, method)(*args)]))

    def generate(self, prompts: list[dict[str, Any]], *_: Any, **options: Any) -> None:
        self.model(prompts[0]["prompt_token_ids"])


def test_what_is_tapped_does_not_travel_in_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    monkeypatch.setattr(sys, "argv", ["tap.py", FAMILY, str(tmp_path), str(tmp_path / "prompts.json"), "float32"])
    tap.main()
    got = torch.load(tmp_path / "tap-float32.pt", weights_only=True)
    want = [[torch.tensor(ids).float()[:, None].expand(-1, WIDTH) + layer for layer in range(2)] for ids in PROMPTS]
    figures = compare.figures(got, want)
    assert figures["worst"] == 0
    assert min(figures["wrong_layer"], figures["wrong_row"]) > 0.1
    assert figures["tensors"] == 4


class Headed(torch.nn.Module):
    """Its last layer returns the stream, and its head norms the last row of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), torch.nn.Identity()])
        self.layers[1].input_layernorm = Norm()
        self.norm = Norm()

    def run(self, stream: torch.Tensor, normed: torch.Tensor) -> None:
        self.layers[1].input_layernorm(stream / 2, stream / 2)
        self.layers[1](stream)
        self.norm(normed)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_a_final_norm_in_the_head_gets_the_last_row_of_the_last_layer(off: float, tmp_path: Path) -> None:
    worker: Any = tap.Tap()
    worker.model_runner, worker.rank = SimpleNamespace(model=Headed()), 0
    worker.tap_install()
    stream = torch.arange(12.0).reshape(3, WIDTH)
    worker.model_runner.model.run(torch.cat([stream, torch.zeros(1, WIDTH)]), stream[-1:] + off)
    if off:
        with pytest.raises(RuntimeError, match="of 3 rows the final norm got 1"):
            worker.tap_save(3, str(tmp_path / "tap.pt"))
        return
    worker.tap_save(3, str(tmp_path / "tap.pt"))
    assert torch.equal(torch.load(tmp_path / "tap.pt")[-1], stream)
