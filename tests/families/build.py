"""Makes a family's tiny model: `python build.py FAMILY DIR`. Needs torch and transformers, not vLLM.

Prints what transformers has of the family as JSON. Where it has the model, its own `save_pretrained` writes the
weights, drawn so that a comparison means something (see `tiny.py`): every layer moves the stream by about its own
size, and a router reads channels that no layer writes to, so that rounding cannot tip it. Where it has not, they are
written under the names of the hub's checkpoints.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src/eagle3compat/yardstick"))

import tiny

from families.checkpoints import CHECKPOINTS
from families.table import EXPERTS, FAMILIES, HIDDEN, Family

WRITES = re.compile(r"(o_proj|o_b_proj|down_proj|out_proj|output_linear|\bdense|w2|fc2)(\.weight)?$")
ROUTER = re.compile(r"(gate|router|router\.layer|router\.proj)\.weight$")
READS = re.compile(r"(gate_proj|up_proj|gate_up_proj|input_linear|w1|w3)(\.weight)?$")
IMAGE_TOKENS = [f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end", "media_pad")]


def build(family: Family, directory: Path) -> tuple[Any, dict[str, Any]]:
    """Write the model; transformers' own with these weights, with its class (`model`) or why there is none (`missing`).

    transformers' own is in float32, with the bf16 values that were written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    for name, content in {"generation_config.json": tiny._special_ids(), **family.files}.items():
        tiny._write_json(directory / name, content)
    try:
        model = make(family)
    except (AttributeError, KeyError, ImportError, ValueError) as error:
        if family.name in CHECKPOINTS:
            write_checkpoint(family, directory)
        return None, {"missing": f"{type(error).__name__}: {error}"}
    fill(model, family)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(directory)  # of the model itself, frequencies would suffer
    rename(family, directory / "model.safetensors")
    finish_config(family, directory)
    return model, {"model": type(model).__name__}


def rename(family: Family, path: Path) -> None:
    """Give weights the names of the hub's checkpoints."""
    if not family.renamed:
        return
    weights = load_file(path)
    for old, new in family.renamed.items():
        weights = {new + name.removeprefix(old) if name.startswith(old) else name: w for name, w in weights.items()}
    save_file(weights, path, {"format": "pt"})


def write_checkpoint(family: Family, directory: Path) -> None:
    """The model in the hub's form, where transformers cannot write it."""
    config = {**family.full_config, "model_type": family.model_type, "torch_dtype": "bfloat16"}
    tiny._write_json(directory / "config.json", {"architectures": [family.architecture], **config})
    shapes = CHECKPOINTS[family.name](config)
    weights = {}
    for name, shape in shapes.items():
        drawn = draw(name, torch.zeros(shape), family)
        weights[name] = (torch.zeros(shape) if drawn is None else drawn).to(torch.bfloat16)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})


def make(family: Family) -> Any:
    """The family's transformers model, in float32; raises AttributeError, KeyError or ImportError if it has none."""
    import transformers

    config = transformers.AutoConfig.for_model(family.model_type, **family.full_config)
    model_class = getattr(transformers, family.transformers_class or family.architecture)
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    model.set_attn_implementation("eager")  # the default leaves out what it has no kernel for (Gemma 2's soft cap)
    return model


def finish_config(family: Family, directory: Path) -> None:
    """What vLLM reads and transformers leaves out when it saves: names of the hub's configuration, and classes."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [family.architecture]
    config = {key: value for key, value in config.items() if key not in family.unsaved}
    if family.text is None:
        config = {**{key: value for key, value in family.config.items() if key not in config}, **config}
    path.write_text(json.dumps(config, indent=2))


def fill(model: torch.nn.Module, family: Family) -> None:
    """Draw the weights, by name; what is neither a matrix nor a norm nor a bias stays as the model made it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = draw(name, parameter, family)
            if values is not None:
                parameter.copy_(values)
            parameter.copy_(parameter.to(torch.bfloat16))
        for name, table in model.named_buffers():
            if name.endswith("tid2eid"):  # DeepSeek-V4's experts of each token
                tokens, chosen = torch.arange(len(table))[:, None], torch.arange(table.shape[1])[None]
                table.copy_((7 * tokens + 13 * chosen) % family.config["n_routed_experts"])


def draw(name: str, old: torch.Tensor, family: Family) -> torch.Tensor | None:
    source = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(old.shape, generator=source)
    match = re.search(r"layers\.(\d+)\.", name)
    growth = tiny.GROWTH ** (int(match.group(1)) if match else 0)
    if "correction_bias" in name or "conv" in name or re.search(r"(A_log|dt_bias|\.D|layer_scalar|sinks|scale)$", name):
        return None
    if old.dim() == 1 or name.endswith("bias"):
        if "norm" in name or name.endswith(("ln_f.weight",)):
            return float(old.float().mean().round()) + 0.15 * values
        return 0.1 * values
    if re.search(r"embed_tokens\.weight$", name):
        values[:, :EXPERTS] = 3 * torch.eye(EXPERTS)[torch.arange(old.shape[0]) % EXPERTS]
        return values * family.embedding
    if ROUTER.search(name) and old.shape == (EXPERTS, HIDDEN):
        return tiny._router(list(old.shape), source) * growth
    stacked_the_other_way = old.dim() == 3 and (
        old.shape[1] == HIDDEN if READS.search(name) else old.shape[2] == HIDDEN and old.shape[1] != HIDDEN
    )
    values *= old.shape[-2 if stacked_the_other_way else -1] ** -0.5
    if WRITES.search(name) and "vision" not in name and "visual" not in name:
        routed, shared = "experts" in name and "shared" not in name, "shared_expert" in name
        values *= growth * (family.expert_gain if routed else 0.8 if shared else 1.2)
        if stacked_the_other_way:
            values[..., :EXPERTS] = 0
        elif old.shape[-2] == HIDDEN:
            values[..., :EXPERTS, :] = 0
    elif READS.search(name):
        values *= 1.2
    return values


def write_tokenizer(directory: Path) -> None:
    """That of `tiny.py`, with the tokens that stand for images."""
    from tokenizers import Tokenizer

    tiny._write_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(IMAGE_TOKENS)
    tokenizer.save(str(path))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] = [*settings["additional_special_tokens"], *IMAGE_TOKENS]
    tiny._write_json(directory / "tokenizer_config.json", settings)


def main() -> None:
    print(json.dumps(build(FAMILIES[sys.argv[1]], Path(sys.argv[2]))[1]))


if __name__ == "__main__":
    main()
