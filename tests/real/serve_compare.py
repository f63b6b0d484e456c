"""Compares what clients fetched with transformers: `python serve_compare.py PLAN.json`, in an environment with torch.

PLAN has `prompts`, `reference` (what reference.py wrote), `layer_ids` (the server's), `dtype`, `folders` by client,
`out`, the JSON file to write, and `tally`: only to count how many files are right, which are not and in which way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/eagle3compat/yardstick"))

from reference import compare

CONTROLS = 40
"""Of so many prompts the wrong layer and the shifted row are looked at too."""


def examine(folder: Path, prompts: list[list[int]], layer_ids: list[int], want: Any, dtype: str) -> dict[str, Any]:
    """Every tensor of one client's files against the reference, and against a wrong layer and a row too late."""
    worst, wrong_layer, shifted, wrong, tensors = 0.0, float("inf"), float("inf"), [], 0
    for number, prompt in enumerate(prompts):
        found = load_file(folder / f"hs_{number}.safetensors")
        states = found["hidden_states"]
        assert sorted(found) == ["hidden_states", "token_ids"]
        assert found["token_ids"].tolist() == prompt, (number, "token ids")
        assert states.shape[:2] == (len(prompt), len(layer_ids)), (number, states.shape)
        assert str(states.dtype) == f"torch.{dtype}", states.dtype
        for slot, layer in enumerate(layer_ids):
            streams_here, state = want[number], states[:, slot]
            figure = compare(state, streams_here[layer - 1])["max"]
            tensors += 1
            worst = max(worst, figure)
            if figure > 1e-3:
                wrong.append([number, layer, figure])
            if number >= CONTROLS:
                continue
            wrong_layer = min(wrong_layer, compare(state, streams_here[layer - 2 if layer > 1 else 1])["max"])
            if len(prompt) > 1:
                shifted = min(shifted, compare(state[1:], streams_here[layer - 1][:-1])["max"])
    return {"tensors": tensors, "max": worst, "wrong": wrong, "wrong_layer": wrong_layer, "shifted_row": shifted}


def count(folder: Path, prompts: list[list[int]], layer_ids: list[int], want: Any) -> dict[str, int]:
    """How many files are missing, have other rows than tokens, have wrong rows, and are right."""
    found = {"missing": 0, "length": 0, "wrong": 0, "right": 0}
    for number, prompt in enumerate(prompts):
        path = folder / f"hs_{number}.safetensors"
        states = load_file(path)["hidden_states"] if path.exists() else None
        if states is None:
            found["missing"] += 1
        elif len(states) != len(prompt):
            found["length"] += 1
        else:
            layers = enumerate(layer_ids)
            worst = max(compare(states[:, slot], want[number][layer - 1])["max"] for slot, layer in layers)
            found["right" if worst < 1e-3 else "wrong"] += 1
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    want = torch.load(plan["reference"])
    figures: dict[str, Any] = {}
    for name, folder in plan["folders"].items():
        place = Path(folder)
        if plan["tally"]:
            figures[name] = count(place, plan["prompts"], plan["layer_ids"], want)
            continue
        figures[name] = examine(place, plan["prompts"], plan["layer_ids"], want, plan["dtype"])
        if (place / "chat.safetensors").exists():
            chat, plain = (load_file(place / f"{kind}.safetensors") for kind in ("chat", "plain"))
            figures[name]["chat"] = compare(chat["hidden_states"], plain["hidden_states"])["max"]
            assert torch.equal(chat["token_ids"], plain["token_ids"])
    Path(plan["out"]).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
