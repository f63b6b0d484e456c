"""Compares extracted files with transformers: `python demo_check.py MODEL DATA.jsonl FOLDER LAYER ... --out OUT.json`.

Run in a process of its own, in an environment that has torch and transformers. Nothing of vLLM, speculators or
eagle3compat is imported here: prompts, loss masks and residual streams are all made a second time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src/eagle3compat/yardstick"))

import reference  # type: ignore[import-not-found]

FOREIGN = ("vllm", "speculators", "eagle3compat")


def conversations(data: Path) -> list[list[dict[str, str]]]:
    lines = data.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["conversations"] for line in lines]


def tokenize(tokenizer: Any, conversation: list[dict[str, str]], limit: int) -> list[int]:
    ids: list[int] = tokenizer(tokenizer.apply_chat_template(conversation, tokenize=False), add_special_tokens=False)[
        "input_ids"
    ]
    return ids[:limit]


def faults_of(sample: Any, prompt: list[int], said: str, decode: Any, layers: int) -> Iterator[str]:
    """What is wrong with a file apart from its values."""
    if set(sample) != {"input_ids", "hidden_states", "loss_mask"}:
        yield f"holds {sorted(sample)}"
        return
    if sample["input_ids"].tolist() != prompt:
        yield "input_ids are not its conversation's"
        return
    shapes = {tuple(state.shape[:1]) for state in sample["hidden_states"]}
    if len(sample["hidden_states"]) != layers or shapes != {(len(prompt),)}:
        yield f"hidden_states are {[list(state.shape) for state in sample['hidden_states']]}"
    if sample["loss_mask"].shape != sample["input_ids"].shape:
        yield f"loss_mask is {list(sample['loss_mask'].shape)} for {len(prompt)} tokens"
    elif decode(sample["input_ids"][sample["loss_mask"].bool()].tolist()) != said:
        yield "loss_mask does not mark what the assistant said"


def compare(samples: list[Any], streams: list[list[torch.Tensor]], layers: list[int]) -> dict[str, float]:
    """The largest error of any tensor, and of the controls the smallest, which still has to be large."""
    error, wrong_layer, shifted_row = 0.0, float("inf"), float("inf")
    for sample, wanted in zip(samples, streams, strict=True):
        for layer, state in zip(layers, sample["hidden_states"], strict=True):
            neighbour = layer - 1 if layer else 1
            error = max(error, reference.compare(state, wanted[layer])["max"])
            wrong_layer = min(wrong_layer, reference.compare(state, wanted[neighbour])["max"])
            shifted_row = min(shifted_row, reference.compare(state[1:], wanted[layer][:-1])["max"])
    return {"error": error, "wrong_layer": wrong_layer, "shifted_row": shifted_row}


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description="Compare extracted files with transformers.")
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("layers", type=int, nargs="+")
    parser.add_argument("--limit", type=int, required=True, help="tokens to which samples were cut")
    parser.add_argument("--dtype", default="auto", help="in which transformers computes; by default the checkpoint's")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    talks = conversations(options.data)
    prompts = [tokenize(tokenizer, talk, options.limit) for talk in talks]
    files = {path.name for path in options.folder.glob("*.pt")}
    wanted = [f"data_{number}.pt" for number in range(len(talks))]
    faults = [f"{name} is missing" for name in wanted if name not in files]
    faults += [f"{name} should not be there" for name in sorted(files - set(wanted))]
    figures: dict[str, Any] = {"samples": len(talks), "tokens": sum(map(len, prompts)), "tensors": 0}
    if not faults:
        samples = [torch.load(options.folder / name) for name in wanted]
        for name, sample, prompt, talk in zip(wanted, samples, prompts, talks, strict=True):
            said = "".join(turn["content"] for turn in talk if turn["role"] == "assistant")
            found = faults_of(sample, prompt, said, tokenizer.decode, len(options.layers))
            faults += [f"{name}: {fault}" for fault in found]
        if not faults:
            figures |= compare(samples, reference.streams(options.model, prompts, options.dtype), options.layers)
            figures["tensors"] = sum(len(sample["hidden_states"]) for sample in samples)
    faults += [f"{name} was imported: this path is not independent" for name in FOREIGN if name in sys.modules]
    options.out.write_text(json.dumps({**figures, "faults": faults}))


if __name__ == "__main__":
    main()
