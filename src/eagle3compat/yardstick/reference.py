"""The independent path: what transformers says the residual streams are, and how far two answers are apart.

    python reference.py MODEL_DIR PROMPTS.json OUT.pt [--dtype float32]

Run in a process of its own: it needs torch and transformers, and never imports vLLM. PROMPTS.json holds a
list of token id lists. OUT.pt, for `torch.load`, holds for each prompt the list of its streams: item k is the
output of decoder layer k before any final norm, `[tokens, hidden_size]`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

Streams = list[torch.Tensor]
"""The output of each decoder layer for one prompt, before any final norm: `[tokens, hidden_size]`."""


def streams(model_dir: str | Path, prompts: Sequence[Sequence[int]], dtype: str = "auto") -> list[Streams]:
    """The streams of each prompt, which runs alone; `dtype` is that of the checkpoint by default.

    transformers' `hidden_states[k + 1]` is the output of layer k, but its last item has been through the
    final norm: the last layer's stream is taken from a hook.
    """
    from transformers import AutoModelForCausalLM

    return streams_of(AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval(), prompts)


def streams_of(model: Any, prompts: Sequence[Sequence[int]]) -> list[Streams]:
    """The streams of each prompt in a loaded transformers model, as `streams` gives them."""
    layers = decoder_layers(model)
    last: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    layers[-1].register_forward_hook(keep)
    found = []
    for prompt in prompts:
        last.clear()
        with torch.inference_mode():
            output = model(torch.tensor([list(prompt)]), output_hidden_states=True, use_cache=False)
        hidden = output.hidden_states
        if len(hidden) != len(layers) + 1 or len(last) != 1:
            counts = f"{len(hidden)} hidden states and {len(last)} outputs of the last layer"
            raise RuntimeError(f"{len(layers)} layers gave {counts}")
        found.append([stream[0].clone() for stream in (*hidden[1:-1], last[0])])
    return found


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The text model's decoder layers: the longest list of modules called `layers`."""
    lists = [m for name, m in model.named_modules() if name.split(".")[-1] == "layers"]
    found = [m for m in lists if isinstance(m, torch.nn.ModuleList)]
    if not found:
        raise RuntimeError(f"{type(model).__name__} has no list of decoder layers called `layers`")
    return max(found, key=len)


def compare(got: torch.Tensor, want: torch.Tensor) -> dict[str, float]:
    """How far `got` is from `want`, in float32; raises ValueError where the shapes differ.

    `max` is the largest difference as a part of the largest value, `median` the median difference as a part
    of the median value. Both are infinite if `got` is not finite.
    """
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: got {tuple(got.shape)}, want {tuple(want.shape)}")
    actual, expected = got.float().cpu(), want.float().cpu()
    if not bool(torch.isfinite(actual).all()):
        return {"max": float("inf"), "median": float("inf")}
    difference = (actual - expected).abs()
    return {
        "max": float(difference.max() / expected.abs().max()),
        "median": float(difference.median() / expected.abs().median()),
    }


def controls(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> dict[str, dict[str, float]]:
    """What `compare` says of two mistakes, at their smallest over all layers: each must be far over any
    tolerance.

    `layer` takes the stream of the layer before, `row` the same stream one token late. Needs two layers and
    two tokens.
    """
    layer = [compare(got[k], want[k + 1]) for k in range(len(want) - 1)]
    row = [compare(actual[:-1], expected[1:]) for actual, expected in zip(got, want, strict=True)]
    return {name: _smallest(figures) for name, figures in (("layer", layer), ("row", row))}


def _smallest(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: min(figure[key] for figure in figures) for key in ("max", "median")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the residual streams that transformers computes.")
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="auto", help="such as float32; by default that of the checkpoint")
    options = parser.parse_args()
    torch.save(streams(options.model, json.loads(options.prompts.read_text()), options.dtype), options.out)


if __name__ == "__main__":
    main()
