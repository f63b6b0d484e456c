"""What benchmarks run: models of several shapes with random weights, and prompts."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model": {"num_hidden_layers": 8, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 640},
        "prompts": 16, "tokens": 256, "batch": 8, "layer_ids": [2, 4, 5, 7], "rounds": 7,
    },
    "qwen3-8b": {
        "model": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        "prompts": 64, "tokens": 2000, "batch": 8, "layer_ids": [2, 16, 29, 31], "rounds": 5,
    },
}


def make_model(folder: Path, shape: dict[str, int]) -> None:
    """A config of Qwen3 and the tokenizer of the tests; weights are vLLM's dummies."""
    sys.path.insert(0, str(ROOT / "src/eagle3compat/yardstick"))
    import tiny  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    config = tiny._shared_config(shape["num_hidden_layers"]) | tiny._qwen3(shape["num_hidden_layers"]) | shape
    tiny._write_tokenizer(folder)
    tiny._write_json(folder / "config.json", config)
    tiny._write_json(folder / "generation_config.json", tiny._special_ids())


def interpreter(pair: tuple[str, str], here: bool) -> str:
    """A python that has vLLM and speculators: this one, or that of an environment made for the pair."""
    if here:
        return sys.executable
    sys.path.insert(0, str(ROOT / "tools"))
    import environments  # type: ignore[import-not-found]

    return str(environments.ensure(*pair))


def calls_of(options: argparse.Namespace) -> list[list[list[int]]]:
    """The prompts, in calls."""
    rng = random.Random(0)
    prompts = [[rng.randrange(8, 600) for _ in range(options.tokens)] for _ in range(options.prompts)]
    return [prompts[start : start + options.batch] for start in range(0, len(prompts), options.batch)]


def max_length(options: argparse.Namespace) -> int:
    return int(options.tokens) + 48


def save_model(folder: Path, shape: dict[str, int]) -> None:
    """The same with random weights on disk, for those who cannot make their own. Needs transformers."""
    make_model(folder, shape)
    import tiny
    from safetensors.torch import save_file

    shapes = tiny._checkpoint_shapes(folder)
    weights = {name: tiny._draw(name, size, 0, tiny.FAMILIES["qwen3"]) for name, size in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    save_model(Path(sys.argv[1]), SHAPES[sys.argv[2]]["model"])
