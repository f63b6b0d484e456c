"""Sets of hidden states, written as stock writes them and then broken. They need torch and safetensors; not vLLM."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

WIDTH = 32
LAYERS = [1, 2, 4]
SYSTEM = [7, 9, 11, 13, 15, 17]
"""What every prompt starts with, as chats do."""


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [SYSTEM + [rng.randrange(20, 500) for _ in range(rng.randint(3, 40))] for _ in range(count)]


def states_of(ids: Sequence[int], layer_ids: Sequence[int] = LAYERS) -> list[Any]:
    """What a small causal network with five layers makes of a prompt: one `[S, WIDTH]` in bf16 for each layer id."""
    import torch

    source = torch.Generator().manual_seed(5)
    embedding = torch.randn(500, WIDTH, generator=source)
    stream, outputs = embedding[list(ids)], []
    for _ in range(5):
        weight = torch.randn(WIDTH, WIDTH, generator=source) * WIDTH**-0.5
        mean = stream.cumsum(0) / torch.arange(1, len(stream) + 1)[:, None]
        stream = stream + (stream + mean).tanh() @ weight
        outputs.append(stream)
    return [outputs[layer].to(torch.bfloat16) for layer in layer_ids]


class Set:
    """A set in a folder, and ways to break it."""

    def __init__(self, folder: Path, prompts: list[list[int]]) -> None:
        self.folder, self.prompts = folder, prompts
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, index: int) -> Path:
        raise NotImplementedError

    def edit(self, index: int, change: Callable[[dict[str, Any]], Any]) -> None:
        """Load a file, let `change` alter what is in it, and write it again."""
        raise NotImplementedError


class InProcess(Set):
    def __init__(self, folder: Path, prompts: list[list[int]]) -> None:
        import torch

        super().__init__(folder, prompts)
        for index, ids in enumerate(prompts):
            content = {
                "input_ids": torch.tensor(ids),
                "hidden_states": states_of(ids),
                "loss_mask": (torch.arange(len(ids)) >= len(SYSTEM)).long(),
            }
            torch.save(content, self.path(index))

    def path(self, index: int) -> Path:
        return self.folder / f"data_{index}.pt"

    def edit(self, index: int, change: Callable[[dict[str, Any]], Any]) -> None:
        import torch

        content = torch.load(self.path(index), weights_only=True)
        change(content)
        torch.save(content, self.path(index))

    def configure(self, **changes: Any) -> None:
        """Write data_config.json, as stock does at the end of a run."""
        config: dict[str, Any] = {
            "reproducibility": {"command": "data_generation_offline.py --target-model-path M --output-dir out"},
            "model": {"target_model_path": "M", "hidden_size": WIDTH},
            "data": {"num_samples": len(self.prompts), "max_samples": None, "seed": 0},
            "hidden_states": {"layer_ids": LAYERS},
        }
        for name, part in changes.items():
            config[name].update(part)
        (self.folder / "data_config.json").write_text(json.dumps(config))


class Server(Set):
    def __init__(self, folder: Path, prompts: list[list[int]]) -> None:
        import torch
        from safetensors.torch import save_file

        super().__init__(folder, prompts)
        for index, ids in enumerate(prompts):
            states = torch.stack(states_of(ids), dim=1)
            save_file({"token_ids": torch.tensor(ids), "hidden_states": states}, self.path(index))

    def path(self, index: int) -> Path:
        return self.folder / f"hs_{index}.safetensors"

    def edit(self, index: int, change: Callable[[dict[str, Any]], Any]) -> None:
        from safetensors.torch import load_file, save_file

        content = load_file(self.path(index))
        change(content)
        save_file({name: tensor.clone() for name, tensor in content.items()}, self.path(index))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Random values are the same each time."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def in_process(tmp_path: Path) -> InProcess:
    return InProcess(tmp_path / "set", prompts_of(12))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "set", prompts_of(12))


def to_float8(content: dict[str, Any]) -> None:
    """Store a server file's states as the float8 backend does, with a scale for each row."""
    import torch

    states = content["hidden_states"].float()
    scales = states.abs().amax(dim=(1, 2), keepdim=True) / 448
    content.update(hidden_states=(states / scales).to(torch.float8_e4m3fn), hidden_states_scales=scales)
