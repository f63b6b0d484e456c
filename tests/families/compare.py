"""Compares extracted streams with a reference, layer by layer: `python compare.py GOT.pt WANT.pt OUT.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/eagle3compat/yardstick"))

from reference import compare, controls


def figures(got: list[list[torch.Tensor]], want: list[list[torch.Tensor]]) -> dict[str, Any]:
    """The largest difference of each layer over all prompts, and the least that a wrong layer or row differs by."""
    by_layer = [
        max(compare(streams[layer], expected[layer])["max"] for streams, expected in zip(got, want, strict=True))
        for layer in range(len(want[0]))
    ]
    mistakes = [controls(streams, expected) for streams, expected in zip(got, want, strict=True) if len(streams[0]) > 1]
    return {
        "layers": by_layer,
        "worst": max(by_layer),
        "wrong_layer": min(mistake["layer"]["max"] for mistake in mistakes),
        "wrong_row": min(mistake["row"]["max"] for mistake in mistakes),
        "tensors": sum(len(streams) for streams in got),
    }


def main() -> None:
    got, want = (torch.load(path, map_location="cpu", weights_only=True) for path in sys.argv[1:3])
    Path(sys.argv[3]).write_text(json.dumps(figures(got, want)))


if __name__ == "__main__":
    main()
