"""Writes docs/families.md from the evidence of `make families`; `--check` exits 1 when the file on disk differs.

python tools/family_docs.py [--check] [FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from families.stock import READ, outcome  # type: ignore[import-not-found]  # noqa: E402
from families.table import FAMILIES  # type: ignore[import-not-found]  # noqa: E402

FILE = ROOT / "docs" / "families.md"
EVIDENCE = ROOT / "evidence" / "families"
PLACES = {"cpu": "CPU", "cuda": "GPU"}
HEAD = """\
<!-- Written by tools/family_docs.py from evidence/families and tests/families. Change it there. -->

# Model families

Each family is a tiny model with random weights, made from its own configuration class, with a layer of every kind that
the family has (`tests/families/table.py`). The stock generator extracts every layer from six prompts of 1 to 300 tokens
through this library, in steps of 128 tokens, so that the longest are taken in chunks; each layer is compared with a
reference: transformers, in float32, or vLLM's own forward with a tap on the norm after each layer, where transformers
has no such model or vLLM itself computes something else. `make families` makes this evidence anew.

An error is the largest difference of any value of any layer and prompt, as a part of the largest value of its layer.
In float32 it is some roundings (at most 1e-4 passes on a CPU, and 1e-3 on a GPU); in bf16, in which stock runs models,
six layers of rounding to 8 bits beside a reference in float32 (at most 0.1 passes). *Mistake* is the least that a
neighbouring layer or a row shifted by one would differ by: a reference that could not tell these apart counts for
nothing.

What stock does by itself was *read only*, in the source of vLLM 0.16.0, 0.24.0 and 0.33.0, and is about its capture
loop: on most releases the generator does not get as far.
"""
FOOT = """\
`equal`: every layer is within the tolerance. `different`: it is not, and is listed so that you know. `refused`: the
library raised `UnprovenCaptureError` and returned nothing. `failed`: vLLM itself, or the tiny model, did not run there.
`timeout`: the time for the run was over. `not run`: it cannot run there, and in its place `read only`: what stock does
was read. `no such kernel`: vLLM has none for that dtype there.

## Images

Stock's generator passes token ids alone, so through it only text is extracted, from multimodal models too. A prompt
that holds a token in whose place vLLM would put an image, a video or a sound (`image_token_id` and the like in the
model's config) is refused with an `InputError` that names prompt, token and place, before anything is computed: vLLM
would take the token's own embedding, and the states from there on would be those of a word. Tokens around an image,
such as `vision_start_token_id`, are words with an image too, and pass.{refused}

Conversations with images are extracted through [`eagle3compat serve`](server.md#images), from the models that vLLM
takes images for. What is captured is the stream that enters the next layer. Between layers that need not be what a
layer returns: Qwen3-VL adds features of the image to it after its first layers (*deepstack*). vLLM's own auxiliary
hidden states are taken after that addition (`vllm/model_executor/models/qwen3_vl.py`), and so are these;
transformers' `output_hidden_states` are taken before it, and lie 0.2 to 0.4 of the largest value of tiny random models
away at these layers, and nowhere else (transformers 5.24, and the test
`test_every_tensor_is_what_enters_the_next_layer`). There are as many as `deepstack_visual_indexes` in the vision
configuration has, from the first on: with three, the server's ids 1 to 3, and 2 is one of the launcher's defaults.
A draft model is served with vLLM's, so it is trained with these.

So each layer is read from the arguments of the next one in whose place its return value is passed on
(`capture/passing.py`): the first batch shows which these are, and proves them against that layer's norm. A later
batch is read from the same arguments, whether the first had an image or not. Where a layer's return value cannot be
followed so, text is captured as ever, and an image is refused with `UnprovenCaptureError`. After the last layer
nothing may be added that was not there in the first batch.

Run so with images of random pixels were tiny models of these families, on CPUs, against transformers in float32, in
steps that split the images, beside a neighbouring layer, a row too late and another image in the same prompt, which are
off by more than 0.2. *test* is `tests/real/test_images.py`; *tap* is vLLM's own forward, tapped.

| family, with images | vLLM | by | error |
|---|---|---|---|
| Qwen2.5-VL (rotary positions of an image's own) | 0.26.0 | test | 3e-6 |
| Qwen3-VL (rotary positions of an image's own) | 0.16.0, 0.26.0 | test | 3e-6 |
| Qwen3-VL | 0.19.1, 0.22.1 | hand | 3e-6 |
| Kimi-K2.5 | 0.26.0 | test | 3e-6 |
| Kimi-K2.5 (needs no torchvision there) | 0.32.0 | hand | 3e-6 |
| Llama 4 | 0.26.0 | hand | 3e-6, tap 9e-7 |
| InternVL 3 | 0.26.0 | hand | 3e-6 |
| Mistral Small 3.1 | 0.16.0 | hand | 5e-6 |
| Mistral Small 3.1, `--model-impl transformers` (a) | 0.26.0 | hand | 5e-6 |
| LLaVA (transformers 4.57) (a) | 0.16.0 | hand | 2e-6, tap 7e-7 |
| Qwen3.5 in bf16, as vLLM's kernels have it (rotary positions of an image's own) | 0.26.0 | hand | 0.03 |
| Gemma 4, images read one token after another (b) | 0.26.0 | hand | tap 0 |
| Gemma 3; Gemma 4 with `use_bidirectional_attention` for vision | 0.26.0 | test, hand | refused, see below |

(a) vLLM 0.26.0 does not import its classes for Mistral 3 and LLaVA beside transformers 5.24. (b) vLLM itself lies 7e-4
from transformers with an image, and 1e-5 without.

By hand, Qwen3-VL was run on two tensor-parallel ranks with an image in the first batch, Kimi-K2.5 with
`--disable-chunked-mm-input`, and vLLM 0.26.0's own `extract_hidden_states`, asked about the same conversation with an
image, gave the same token ids, and states at most 2e-6 from these at every layer of Qwen3-VL. On a GPU [six of these
families](gpus.md#images) were run, four of them with both of vLLM's model runners.

In Gemma 3, PaliGemma, Molmo 2 and some more (`is_mm_prefix_lm` in vLLM; of Gemma 4 those with
`use_bidirectional_attention` for vision) the tokens of an image attend to each other. vLLM's one attention backend for
CPUs does not have that, and vLLM takes it without a word: its own states (0.26.0) are those of transformers with
attention backwards alone (1.5e-6), and 0.6 to 1.0 of the largest value from those of the model. So `eagle3compat serve`
asks its workers for their backends, and answers 400 to a conversation with an image where one cannot do it, or where a
step may hold a part of an image; text is served. On a GPU vLLM takes a backend that can, and Gemma 3's images are
[right](gpus.md#images) there.

## Several residual streams

Of vLLM 0.32.0's models, DeepSeek-V4 and V4.1, GLM-5-Next and Kimi-K3 carry several residual streams and hand out
states for an EAGLE-3 draft: these are taken, number `k + 1` for layer id `k`. Qwen4-Exp and HY-V4 hand out none, and
are refused before the load. DeepSeek-V4 alone has a class for CPUs, which does not run as it is released (0.30.0 to
0.32.0). With what `tests/families/interpreted` adds to 0.32.0, each layer of a tiny one lay 0.02 to 0.12 from the mean
of transformers' streams, in bf16 with vLLM's cache in FP8; the first stream alone is 0.58 off, a neighbouring layer
0.46.

## Sums that are left to the next norm

On several tensor-parallel ranks, MiniMax-M3, DeepSeek-V3.2 (the class of its own, which GLM-5 has too) and dots3-note
leave each layer's sum over the ranks to the norm after it. What such a layer returns is one rank's share; it is summed
on all ranks before it is filed: MiniMax-M3 on two GPUs is in the table. None of these classes runs on a CPU, so
`tests/real/deferring.py` is vLLM's own Llama put together as they are, by vLLM's own function for the sum and the norm:
on two ranks it equals transformers, and without the sum the first batch refuses it (`tests/real/test_processes.py`).
"""


def evidence(folder: Path = EVIDENCE) -> list[dict[str, Any]]:
    """All records, by family in the order of the table, then by vLLM and device."""
    found = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    order = list(FAMILIES)

    def place(one: dict[str, Any]) -> tuple[Any, ...]:
        return order.index(one["family"]), one["versions"]["vllm"], one["device"], _ranks(one)

    return sorted(found, key=place)


def _ranks(record: dict[str, Any]) -> int:
    """Tensor-parallel size; records from before it was written down are of 1."""
    return int(record.get("ranks", 1))


def _place(record: dict[str, Any]) -> str:
    """Where a family ran."""
    ranks = _ranks(record)
    return PLACES[record["device"]] if ranks == 1 else f"{ranks} {PLACES[record['device']]}s"


def document(records: list[dict[str, Any]]) -> str:
    """The whole page."""
    rows = [row for name in FAMILIES for row in _rows(name, [one for one in records if one["family"] == name])]
    reasons = [line for one in records for line in _reason(one)]
    head = ("family", "class in vLLM", "vLLM", "where", "stock, read only", "this library", "reference",
            "error, float32", "error, bf16", "mistake")  # fmt: skip
    table = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    parts = [HEAD, "\n".join(table) + "\n", FOOT.format(refused=_refused(records))]
    if reasons:
        parts.append("## Why not\n\n" + "\n".join(reasons) + "\n")
    return "\n".join(parts)


def _rows(name: str, records: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    family = FAMILIES[name]
    if not records:
        yield family.title, family.architecture, "0.33", "read only", outcome(name, "0.33"), *("" for _ in range(5))
    for one in records:
        verdicts = one.get("dtypes", {})
        ran = [verdict for verdict in verdicts.values() if "worst" in verdict]
        place = "read only" if one["outcome"] == "not run" else _place(one)
        yield (
            family.title,
            next((verdict["model"] for verdict in ran), family.architecture),
            one["versions"]["vllm"],
            place,
            outcome(name, one["versions"]["vllm"]),
            one["outcome"],
            " or ".join(dict.fromkeys(verdict["against"] for verdict in ran)),
            _error(verdicts.get("float32"), one["device"] in family.no_float32),
            _error(verdicts.get("bfloat16")),
            f"{min(min(verdict['wrong_layer'], verdict['wrong_row']) for verdict in ran):.2f}" if ran else "",
        )


def _error(verdict: dict[str, Any] | None, cannot: bool = False) -> str:
    if verdict is None:
        return ""
    if "worst" in verdict:
        return f"{verdict['worst']:.1e}"
    return "no such kernel" if cannot else str(verdict["outcome"])


def _refused(records: list[dict[str, Any]]) -> str:
    """The families that were asked for an image's token and refused it, in a sentence."""
    verdicts = ((record["family"], verdict) for record in records for verdict in record.get("dtypes", {}).values())
    titles = [FAMILIES[name].title for name, verdict in verdicts if verdict.get("image", "").startswith("InputError: ")]
    return f" Asked so, and refused, were {', '.join(dict.fromkeys(titles))}." if titles else ""


def _reason(record: dict[str, Any]) -> Iterator[str]:
    title = f"{FAMILIES[record['family']].title}, vLLM {record['versions']['vllm']}, {_place(record)}"
    for dtype, verdict in record.get("dtypes", {}).items():
        if not verdict.get("image", "InputError: ").startswith("InputError: "):
            yield f"- {title}, {dtype}: a prompt with an image's token: {verdict['image']}"
        if "from_transformers" in verdict:
            yield (
                f"- {title}, {dtype}: vLLM itself lies {verdict['from_transformers']:.2g} from transformers, so the "
                "reference is its own forward."
            )
    left_out = record.get("reference", {}).get("without llama_4_scaling")
    if left_out is not None:
        yield f"- {title}: a reference that leaves `llama_4_scaling` out lies {left_out:.2g} off, so it is applied."
    why = record.get("why", "").split("\nThe cause is in")[0].split("\n\n")[0].replace("\n", " ").strip()
    if record["outcome"] != "equal" or why:
        yield f"- {title}: {why[:300] or record['outcome']}"


def families_page() -> str:
    """The whole page. Raises ValueError when a family is in one table of tests/families only."""
    if sorted(READ) != sorted(FAMILIES):
        raise ValueError(f"tests/families: the table and what was read differ in {set(READ) ^ set(FAMILIES)}")
    return document(evidence())


if __name__ == "__main__":
    from pages import page_command  # type: ignore[import-not-found]

    sys.exit(page_command(FILE, families_page, "the evidence"))
