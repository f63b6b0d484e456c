"""Compares files of conversations with images with transformers: `python image_compare.py PLAN.json`, with torch.

PLAN has `reference` (what image_reference.py wrote), `folders`, `token_ids` by conversation, `layer_ids` (the server's)
and `alike`: conversations of one length that differ in an image; and `out`, the JSON file to write.
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


def examine(folder: Path, plan: dict[str, Any], want: Any) -> dict[str, Any]:
    """How far one client's files are from the streams, at most, and from what is not theirs, at least."""
    found: dict[str, Any] = {"tensors": 0, "max": 0.0, "wrong_layer": [], "shifted_row": [], "leaving": {}}
    states = []
    for number, ids in enumerate(plan["token_ids"]):
        file = load_file(folder / f"hs_{number}.safetensors")
        assert file["token_ids"].tolist() == ids, number
        assert file["hidden_states"].shape[:2] == (len(ids), len(plan["layer_ids"])), number
        states.append(file["hidden_states"])
        for slot, layer in enumerate(plan["layer_ids"]):
            state, streams = states[-1][:, slot], want[number]["entering"]
            found["tensors"] += 1
            found["max"] = max(found["max"], compare(state, streams[layer - 1])["max"])
            found["wrong_layer"].append(compare(state, streams[layer - 2])["max"])
            found["shifted_row"].append(compare(state[1:], streams[layer - 1][:-1])["max"])
            off = compare(state, want[number]["leaving"][layer - 1])["max"]
            found["leaving"].setdefault(str(layer), []).append(off)
    one, other = (states[number] for number in plan["alike"])
    found["other_image"] = [compare(one[:, slot], other[:, slot])["max"] for slot in range(len(plan["layer_ids"]))]
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    want = torch.load(plan["reference"])
    told = [compare(s, e)["max"] for w in want for s, e in zip(w["reported"][:-1], w["leaving"], strict=False)]
    figures = {folder: examine(Path(folder), plan, want) for folder in plan["folders"]}
    Path(plan["out"]).write_text(json.dumps({"reported_from_leaving": max(told), "files": figures}))


if __name__ == "__main__":
    main()
