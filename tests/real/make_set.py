"""Writes a set as stock's script does, on a real vLLM, and a copy with files that only the model can tell are wrong.

    python make_set.py MODEL PROMPTS.json OUT

OUT/sound is what stock returns for the layers LAYERS; in OUT/broken the rows of one file are shifted, the states of two
files swapped, and one file holds the layers before.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import eagle3compat

LAYERS = [1, 3, 4]
SHIFTED, SWAPPED, BEFORE = 2, (4, 7), 9


def main() -> None:
    import torch

    model, prompts, out = sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    eagle3compat.apply()
    from speculators.data_generation import VllmHiddenStatesGenerator

    generator = VllmHiddenStatesGenerator(model, layer_ids=list(range(6)), max_model_len=256)
    results = generator.generate(prompts)
    generator.executor.shutdown()
    (out / "sound").mkdir(parents=True)
    for index, result in enumerate(results):
        torch.save(sample(result, LAYERS), out / "sound" / f"data_{index}.pt")
    config = {"model": {"hidden_size": 128}, "hidden_states": {"layer_ids": LAYERS}}
    (out / "sound" / "data_config.json").write_text(json.dumps(config))
    shutil.copytree(out / "sound", out / "broken")
    one, other = SWAPPED
    wrong = {
        SHIFTED: shifted(sample(results[SHIFTED], LAYERS)),
        one: {**sample(results[one], LAYERS), "hidden_states": sample(results[other], LAYERS)["hidden_states"]},
        other: {**sample(results[other], LAYERS), "hidden_states": sample(results[one], LAYERS)["hidden_states"]},
        BEFORE: sample(results[BEFORE], [layer - 1 for layer in LAYERS]),
    }
    for index, content in wrong.items():
        torch.save(content, out / "broken" / f"data_{index}.pt")


def sample(result: dict[str, Any], layers: list[int]) -> dict[str, Any]:
    import torch

    return {
        "input_ids": result["input_ids"],
        "hidden_states": [result["hidden_states"][layer].clone() for layer in layers],
        "loss_mask": torch.ones_like(result["input_ids"]),
    }


def shifted(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "hidden_states": [state.roll(1, 0) for state in content["hidden_states"]]}


if __name__ == "__main__":
    main()
