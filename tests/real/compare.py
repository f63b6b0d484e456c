"""Compares extracted states with a reference: `python compare.py GOT.pt WANT.pt LAYER_IDS OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/eagle3compat/yardstick"))

from reference import compare


def main() -> None:
    got, want, layer_ids = torch.load(sys.argv[1]), torch.load(sys.argv[2]), json.loads(sys.argv[3])
    errors, wrong_layer, shifted = [], [], []
    for sample, (states, streams) in enumerate(zip(got, want, strict=True)):
        assert len(states) == len(layer_ids), (sample, len(states))
        for layer, state in zip(layer_ids, states, strict=True):
            errors.append(compare(state, streams[layer])["max"])
            neighbour = layer - 1 if layer else 1
            wrong_layer.append(compare(state, streams[neighbour])["max"])
            if len(state) > 1:
                shifted.append(compare(state[1:], streams[layer][:-1])["max"])
    figures = {
        "samples": len(got),
        "tensors": len(errors),
        "max": max(errors),
        "wrong_layer": min(wrong_layer),
        "shifted_row": min(shifted),
    }
    Path(sys.argv[4]).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
