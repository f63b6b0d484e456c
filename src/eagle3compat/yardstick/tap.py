"""vLLM by itself: does it run the model, and what are its residual streams.

    python tap.py MODEL_DIR PROMPTS.json OUT.pt [--dtype float32]

Neither speculators nor this library takes part: `vllm.LLM` runs each prompt alone and whole, and what enters the norm
at the head of each decoder layer, and the final norm, is kept. That is the path for a build whose own forward is
another than transformers', or that cannot run the model at all. OUT.pt is as reference.py writes it; it is not written
for a model whose layers do not begin with `input_layernorm`. Ends with an error where vLLM computes other streams for
two prompts in one batch than for each alone: there is then nothing to be equal to.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

EXTENSION = "eagle3compat.yardstick.tap.Tap"
FINAL = ("norm", "norm_f", "final_layernorm")
TOLERANCE = 0.1
"""Of the largest value: rounding in a batch is far below, another token's position far above."""


class Tap:
    """Worker extension: keeps what enters the norm after each decoder layer, the sum where it adds a residual.

    The worker writes a file: where the engine core is a process of its own, as on a GPU, vLLM sends no tensors, and one
    in a reply arrives as a list of its dtype, its shape and the number of a buffer.
    """

    def tap_install(self, norm: str = "input_layernorm", adds: bool = True) -> bool:
        """Tap the norm of this name in each layer; whether the model has it."""
        worker: Any = self
        lists = [
            (module, child)
            for module in worker.model_runner.model.modules()
            for name, child in module.named_children()
            if name == "layers" and isinstance(child, torch.nn.ModuleList)
        ]
        if not lists:
            return False
        base, layers = max(lists, key=lambda found: len(found[1]))
        heads = [getattr(layer, norm, None) for layer in list(layers)[1:]]
        final = next((child for name, child in base.named_children() if name in FINAL), None)
        if final is None or None in heads:
            return False
        norms = [*heads, final]
        worker.tapped, worker.tapped_last = [None] * len(norms), None
        for index, module in enumerate(norms):
            module.register_forward_pre_hook(self._tap_keep(index, adds))
        layers[-1].register_forward_hook(self._tap_last)
        return True

    def _tap_last(self, _module: torch.nn.Module, _arguments: Any, output: Any) -> None:
        worker: Any = self
        worker.tapped_last = output.clone() if isinstance(output, torch.Tensor) else None

    def _tap_keep(self, index: int, adds: bool) -> Any:
        worker: Any = self

        def keep(_module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            parts = [part for part in arguments if isinstance(part, torch.Tensor)]
            worker.tapped[index] = (parts[0] + parts[1] if adds and len(parts) > 1 else parts[0]).clone()

        return keep

    def tap_save(self, rows: int, path: str) -> None:
        """Write what the last forward left.

        A final norm in the model's head (Step 3.5) gets the last row alone: the stream is then what the last layer
        returned, if that is one tensor and its last row is the norm's. Raises RuntimeError otherwise.
        """
        worker: Any = self
        streams = [stream.reshape(-1, stream.shape[-1]) for stream in worker.tapped]
        if len(streams[-1]) < rows:
            last, row = worker.tapped_last, streams[-1][0]
            if last is None or not torch.equal(last.reshape(-1, last.shape[-1])[rows - 1], row):
                got = len(streams[-1])
                raise RuntimeError(f"of {rows} rows the final norm got {got}, which the last layer did not return")
            streams[-1] = last.reshape(-1, last.shape[-1])
        if worker.rank == 0:
            torch.save([stream[:rows].cpu() for stream in streams], path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the residual streams that vLLM by itself computes.")
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that prompts given together are computed together
    from vllm import LLM, SamplingParams

    prompts = json.loads(options.prompts.read_text())
    llm = LLM(
        options.model, dtype=options.dtype, enforce_eager=True, max_model_len=max(map(len, prompts)) + 2,
        max_num_seqs=4, worker_extension_cls=EXTENSION, enable_prefix_caching=False, seed=0,
    )
    tapped = all(llm.collective_rpc("tap_install"))
    one = options.out.with_suffix(".one")

    def compute(*batch: list[int]) -> list[torch.Tensor]:
        asked = [{"prompt_token_ids": prompt} for prompt in batch]
        llm.generate(asked, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        if not tapped:
            return []
        llm.collective_rpc("tap_save", args=(sum(map(len, batch)), str(one)))
        found: list[torch.Tensor] = torch.load(one)
        return found

    streams = [compute(prompt) for prompt in (prompts if tapped else prompts[:1])]
    if not tapped:
        return
    torch.save(streams, options.out)
    together = compute(*prompts[:2])[-1]
    one.unlink()
    off = min(
        float((together - torch.cat(order)).abs().max() / together.abs().max())
        for order in ([streams[0][-1], streams[1][-1]], [streams[1][-1], streams[0][-1]])
    )
    if not off < TOLERANCE:
        raise RuntimeError(f"vLLM computes other states for two prompts together than for each alone, off by {off:.2g}")


if __name__ == "__main__":
    main()
