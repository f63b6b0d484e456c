"""Writes docs/gpus.md from evidence/gpus.

python tools/gpu_docs.py [--check] [FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER, FILE = ROOT / "evidence" / "gpus", ROOT / "docs" / "gpus.md"
TITLES = {"llama": "Llama", "deepseek_v3": "DeepSeek-V3"}
HEAD = """\
<!-- Written by tools/gpu_docs.py from evidence/gpus. -->

# On GPUs

The [measured matrix](matrix.md) is of CPU builds. What only a GPU shows was run with `tools/gpus.py` on two H200s of
one host: vLLM's CUDA builds, NCCL, latent attention (MLA) and both model runners, with random weights in bf16, as
stock runs models. [Model families](families.md) and [performance](performance.md) have more.

## One and two GPUs

The stock generator, adapted, extracts layers 0, 2, 4 and 5 from 12 prompts of 1 to 90 tokens, and from 48 prompts of
200 to 250 tokens, which are more than a step takes. Every tensor is `[tokens, hidden_size]` in full at both
tensor-parallel sizes, and is compared with transformers in float32. *error* is the largest difference of any value,
as a part of its layer's largest value; six layers of rounding to 8 bits beside float32 make 0.1 the limit. *mistake*
is the least that another layer or the next row would differ by. Every rank attests that the library is in it; rank 0
captures.
"""
FAULTS = """\
## Memory and faults

vLLM {vllm}, speculators {speculators}, one GPU, Llama.

**Memory does not grow with a call.** The most that torch had on the GPU:

{flat}

**A full GPU.** Another process took all that was left of the GPU's memory while the generator stood ready, and later
before a load:

{memory}

**A fork after CUDA was used.** The driver had used CUDA, and the start method was `fork`, with which CUDA cannot work
in a worker: {fork}.

**`eagle3compat serve`** on one GPU, asked by unmodified stock clients, against the same references:

{served}
"""
ENDS = {"interrupt": "Ctrl-C", "exception": "an exception", "kill": "SIGKILL"}
LEFT = """\
## What is left on a GPU

Memory in use on the GPUs before a driver, while it extracts, and after it has ended. A driver that is interrupted
finds its generator dead, makes a new one, which works, and ends. What has no row was not run.
"""
IMAGES = """\
## Images

On one GPU, conversations with images through `eagle3compat serve`, beside text in the same steps. A step of several
prompts has at most 20 tokens of each, so that images are split; Gemma 3's, whose tokens attend to each other, are not.
The stream that enters the next layer is compared with transformers in float32; *mistake* is the least that another
layer, the next row or another image would differ by.

In float32 factors were rounded to 10 bits (TF32), as is the default on a GPU for Triton's products, in which vLLM
computes attention then, and for torch's convolutions, through which pictures enter; [families](families.md) were run
with Triton told not to.

In bf16 Llama 4's mixture, which takes one expert for a token, takes another one here and there than in float32: of the
same prompts, transformers in bf16 lies 0.50 from itself in float32. That row says nothing; the one in float32 does.
vLLM 0.25.1 does not import its classes for Mistral 3 and LLaVA beside transformers 5.17. A time limit ended the run
before Qwen3.5 was done.
"""


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def sizes(records: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """A row for each vLLM, speculators, family and size."""
    for record in records:
        versions = record["versions"]
        for size, found in record["sizes"].items():
            for family, title in TITLES.items():
                batches = [figures for name, figures in found.items() if name.startswith(f"{family} ")]
                workers = found["steps"].get(f"attest {family}", {}).get("value")
                if not batches or workers is None:
                    continue
                mistake = min(min(figures["wrong_layer"], figures["shifted_row"]) for figures in batches)
                yield (
                    versions["vllm"], workers[0]["runner"], versions["speculators"], title, size.removeprefix("tp"),
                    f"{sum(bool(worker['extension']) for worker in workers)} of {len(workers)}",
                    str(sum(figures["tensors"] for figures in batches)),
                    f"{max(figures['max'] for figures in batches):.3f}", f"{mistake:.2f}",
                )  # fmt: skip


def steps(found: dict[str, Any]) -> Iterator[Sequence[str]]:
    """What was done, and what came of it."""
    for name, outcome in found["steps"].items():
        if name not in ("apply", "close", "close at last"):
            said = outcome["message"].split(". ")[0].replace("|", "/") if "error" in outcome else "works"
            yield name, f"`{said}`" if "error" in outcome else said


def flat(found: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, outcome in found["steps"].items():
        if name.startswith("peak of"):
            yield f"{int(name.split()[-1]):,} sequences of 250 tokens", f"{outcome['value']:,} bytes"


def served(found: dict[str, Any]) -> Iterator[Sequence[str]]:
    for client, figures in found.items():
        mistake = min(figures["wrong_layer"], figures["shifted_row"])
        yield client, str(figures["samples"]), f"{figures['max']:.3f}", f"{mistake:.2f}", str(len(figures["errors"]))


def ends(records: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """A row for each way in which a driver ended while it extracted."""
    for record in records:
        for how in ENDS:
            if how in record:
                found = record[how]
                yield (
                    record["versions"]["vllm"], str(record["gpus"]), ENDS[how],
                    *(" and ".join(f"{each:,}" for each in found[when]) for when in ("before", "during", "after")),
                    str(len(found["alive"])),
                )  # fmt: skip


def images(records: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """A row for each vLLM, model, dtype and model runner."""
    rows = dict.fromkeys(tuple(row) for record in records for row in _images(record))  # what failed has no runner
    yield from sorted(rows)


def _images(record: dict[str, Any]) -> Iterator[Sequence[str]]:
    for name, figures in record.get("images", {}).items():
        family, dtype = name.split()
        if "error" in figures:
            said = figures["error"].strip().splitlines()[-1].replace("|", "/")
            outcome = ("", "", f"`{said}`", "")
        else:
            mistake = min(figures[control] for control in ("wrong_layer", "shifted_row", "other_image"))
            outcome = (figures["runner"], str(figures["tensors"]), f"{figures['max']:.1e}", f"{mistake:.2f}")
        yield record["versions"]["vllm"], f"`{family}`", dtype, *outcome


def document() -> str:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))]
    head = ("vLLM", "model runner", "speculators", "family", "GPUs", "attested", "tensors", "error", "mistake")
    parts = [HEAD, table(head, sizes(records)) + "\n"]
    for record in records:
        if "flat" in record:
            fork = record["fork"]["steps"]
            works = all("error" not in outcome for outcome in fork.values())
            parts.append(
                FAULTS.format(
                    **record["versions"],
                    flat=table(("call", "peak"), flat(record["flat"])),
                    memory=table(("step", "outcome"), steps(record["out of memory"])),
                    fork="workers were spawned instead, and the batch came back" if works else "refused",
                    served=table(("client", "samples", "error", "mistake", "failed"), served(record["served"])),
                )
            )
    if any(how in record for record in records for how in ENDS):
        columns = ("vLLM", "GPUs", "driver ended by", "MiB before", "while it extracts", "after", "workers alive")
        parts.append(LEFT + "\n" + table(columns, ends(records)) + "\n")
    if any("images" in record for record in records):
        columns = ("vLLM", "model", "dtype", "model runner", "tensors", "error", "mistake")
        parts.append(IMAGES + "\n" + table(columns, images(records)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    from pages import page_command  # type: ignore[import-not-found]

    sys.exit(page_command(FILE, document, "evidence/gpus"))
