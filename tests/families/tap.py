"""The reference where transformers has none: vLLM's own forward, tapped where a layer's stream enters the next norm.

    python tap.py FAMILY DIR PROMPTS.json DTYPE

reads DIR/model and writes DIR/tap-DTYPE.pt. Nothing of eagle3compat or speculators takes part: vLLM's `LLM` runs each
prompt alone and whole, and the norms are named by hand in the table of families.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from families.table import FAMILIES


class Tap:
    """Worker extension: keeps what enters the norm after each decoder layer; the sum, where it adds a residual.

    The worker writes the file: where the engine core is a process of its own, as on a GPU, vLLM sends no tensors, and
    one in a reply arrives as a list of its dtype, its shape and the number of a buffer.
    """

    def tap_install(self, norm: str, adds: bool) -> str:
        worker: Any = self
        lists = [
            (module, child)
            for module in worker.model_runner.model.modules()
            for name, child in module.named_children()
            if name == "layers" and isinstance(child, torch.nn.ModuleList)
        ]
        base, layers = max(lists, key=lambda found: len(found[1]))
        final = next(child for name, child in base.named_children() if name in ("norm", "norm_f", "final_layernorm"))
        norms = [*(getattr(layer, norm) for layer in list(layers)[1:]), final]
        worker.tapped, worker.prompts = [None] * len(norms), []
        for index, module in enumerate(norms):
            module.register_forward_pre_hook(self._tap_keep(index, adds))
        return type(base).__name__

    def _tap_keep(self, index: int, adds: bool) -> Any:
        worker: Any = self

        def keep(_module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            parts = [part for part in args if isinstance(part, torch.Tensor)]
            worker.tapped[index] = (parts[0] + parts[1] if adds and len(parts) > 1 else parts[0]).clone()

        return keep

    def tap_take(self, rows: int) -> None:
        """Keep the streams of the prompt that was run last."""
        worker: Any = self
        worker.prompts.append([stream.reshape(-1, stream.shape[-1])[:rows].cpu().clone() for stream in worker.tapped])

    def tap_save(self, path: str) -> None:
        worker: Any = self
        torch.save(worker.prompts, path)


def main() -> None:
    from vllm import LLM, SamplingParams

    family, folder, dtype = FAMILIES[sys.argv[1]], Path(sys.argv[2]), sys.argv[4]
    prompts = json.loads(Path(sys.argv[3]).read_text())
    memory = {"kv_cache_memory_bytes": 2**29} if torch.cuda.is_available() else {}  # no profiling beside others
    llm = LLM(
        str(folder / "model"), dtype=dtype, enforce_eager=True, max_model_len=512, gpu_memory_utilization=0.06,
        max_num_seqs=4, worker_extension_cls="families.tap.Tap", enable_prefix_caching=False, seed=0,
        **memory,
    )  # fmt: skip
    llm.collective_rpc("tap_install", args=(family.tap, family.tap_adds))
    for prompt in prompts:
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        llm.collective_rpc("tap_take", args=(len(prompt),))
    llm.collective_rpc("tap_save", args=(str(folder / f"tap-{dtype}.pt"),))


if __name__ == "__main__":
    main()
