"""The reference where transformers has none: vLLM's own forward, tapped where a layer's stream enters the next norm.

    python tap.py FAMILY DIR PROMPTS.json DTYPE

reads DIR/model and writes DIR/tap-DTYPE.pt. Nothing else of eagle3compat, and no speculators, takes part: vLLM's `LLM`
runs each prompt alone and whole, and the norms are named by hand in the table of families.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eagle3compat.yardstick.tap import EXTENSION, Tap  # noqa: F401  Tap: what the extension names
from families.table import FAMILIES


def main() -> None:
    from vllm import LLM, SamplingParams

    family, folder, dtype = FAMILIES[sys.argv[1]], Path(sys.argv[2]), sys.argv[4]
    prompts = json.loads(Path(sys.argv[3]).read_text())
    memory = {"kv_cache_memory_bytes": 2**29} if torch.cuda.is_available() else {}  # no profiling beside others
    settings: dict[str, dict[str, object]] = {}
    for name, value in family.engine.items() if torch.cuda.is_available() else ():
        part, _, setting = name.partition(".")
        settings.setdefault(part, {})[setting] = value
    llm = LLM(
        str(folder / "model"), dtype=dtype, enforce_eager=True, max_model_len=512, gpu_memory_utilization=0.06,
        max_num_seqs=4, worker_extension_cls=EXTENSION, enable_prefix_caching=False, seed=0,
        **memory, **settings,
    )  # fmt: skip
    if not all(llm.collective_rpc("tap_install", args=(family.tap, family.tap_adds))):
        sys.exit(f"the layers of {family.name} have no {family.tap}, or there is no final norm")
    out = folder / f"tap-{dtype}.pt"
    streams: dict[int, list[torch.Tensor]] = {}
    for number in sorted(range(len(prompts)), key=lambda number: -len(prompts[number])):
        # The longest first: in bf16, on a processor with AMX, a first step of four tokens or fewer ends vLLM's worker.
        prompt = prompts[number]
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        llm.collective_rpc("tap_save", args=(len(prompt), str(out)))
        streams[number] = torch.load(out)
    torch.save([streams[number] for number in range(len(prompts))], out)


if __name__ == "__main__":
    main()
