"""Tiny random-weight models, made on the spot: `python tiny.py FAMILY DIR [--seed N] [--layers N] [--dtype D]`.

Needs torch, transformers, tokenizers and safetensors, of any release; what is written does not depend on it: the config
is in the older form (`torch_dtype`, `rope_theta`), which transformers 4 and 5 both read, and the weights are drawn by
checkpoint name. The same family, seed and number of layers give the same directory everywhere.

The weights are chosen so that a comparison means something. Every layer moves the residual stream by about
its own size, so the stream of a neighbouring layer or token is far off. And a router never hesitates: see
`_router`.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN = 128
VOCAB = 640
EXPERTS = 8
"""Experts of a mixture, and the number of token classes that their router tells apart."""

PAD, BOS, EOS, TURN = "<|pad|>", "<|begin|>", "<|im_end|>", "<|im_start|>"

GROWTH = 1.25
"""Factor by which a layer scales what the next one writes: the stream grows by it, and each layer's share
stays the same."""

CORPUS = """
A draft model guesses the next few tokens and the target model checks them all in one pass. Where the guess is
right, the target has saved that many steps; where it is wrong, the target's own token stands, so the text is
the same as without a draft. The draft reads what the target was thinking: the residual stream after three of
its layers, one low, one in the middle and one near the end. Those streams are recorded while the target reads
a conversation, and the draft is trained on them later. In the morning the harbour is quiet. The boats come in
with the tide, the nets are dry by noon, and the children count the gulls on the wall until somebody calls
them home. "How many were there today?" asked the old man. "Seventeen," they said, "and one that was black."
He wrote it down, as he had done every day for thirty years, and nobody had ever asked him why. Please write a
short letter to the office about the broken window. Dear all, the window on the second floor does not close
any more, and when it rains the water runs down to the books. Could someone have a look at it this week?
def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else None
for index in range(0, 100, 5):
    print(index, mean([index, index + 1, index + 2]))
{"name": "example", "count": 12, "items": [1, 2, 3], "nested": {"key": "value", "empty": null, "flag": true}}
What is 12 + 30? It is 42. What is 7 * 8? It is 56. And 1000 - 1? That is 999. The answer to each of them is a
number. Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Le cœur déçu mais l'âme plutôt naïve.
El niño comió piña. To make bread you need flour, water, salt and time. Mix them in the evening, let the dough
rest over night, fold it twice, and bake it in a hot oven until the crust is dark. The smell will tell you
when it is done. Do not cut it while it is hot. If the first question is hard, answer the second one first. If
both are hard, say what you know, and what you do not know.
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One architecture: its config.json beyond what all share, given the number of layers, and its scales."""

    config: Callable[[int], Config]
    norm_centre: float = 1.0
    """1 where the norm multiplies by its weight, 0 where it multiplies by one plus its weight (Gemma)."""
    expert_gain: float = 1.2
    """Scale of what a routed expert writes; smaller where a scaling factor enlarges it."""


def _llama(layers: int) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _qwen3(layers: int) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
    }


def _deepseek_v3(layers: int) -> Config:
    # Head sizes are those of the real model: GPUs have MLA kernels for them, and the CPU kernels, which have
    # no MLA, take 128 + 64 as a plain head of 192. YaRN is the real model's too, and needed: with plain
    # rotary embedding vLLM's CPU kernel (csrc/cpu/pos_encoding.cpp) rotates only one head of the
    # three-dimensional query that this model passes.
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
        "pretraining_tp": 1,
    }


FAMILIES: dict[str, Family] = {
    "llama": Family(_llama),
    "qwen3": Family(_qwen3),
    "deepseek_v3": Family(_deepseek_v3, expert_gain=0.4),
}


def build(family: str, directory: str | Path, seed: int = 0, num_layers: int = 6, dtype: str = "bfloat16") -> Path:
    """Write config, tokenizer and bf16 weights of a tiny `family` model to `directory`, and return it.

    `dtype` is what the config asks for: vLLM loads the weights as that. Raises KeyError for an unknown family.
    """
    kind = FAMILIES[family]
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(target)
    config = {**_shared_config(num_layers), **kind.config(num_layers), "torch_dtype": dtype}
    if dtype == "float16" and "routed_scaling_factor" in config:
        config["routed_scaling_factor"] = 1.0  # in float16 vLLM divides DeepSeek's whole residual stream by it
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _special_ids())
    weights = {name: _draw(name, shape, seed, kind) for name, shape in _checkpoint_shapes(target).items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _shared_config(layers: int) -> Config:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        **_special_ids(),
    }


def _special_ids() -> Config:
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _checkpoint_shapes(directory: Path) -> dict[str, list[int]]:
    """Names and shapes in a checkpoint of this config; transformers 5 has others inside the module."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        with safe_open(Path(scratch) / "model.safetensors", framework="pt") as saved:
            return {name: list(saved.get_slice(name).get_shape()) for name in sorted(saved.keys())}


def _draw(name: str, shape: list[int], seed: int, family: Family) -> torch.Tensor:
    """The bf16 values of one checkpoint tensor. Linear weights are `[out, in]`."""
    source = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    growth = GROWTH ** int("".join(re.findall(r"layers\.(\d+)\.", name)) or 0)
    values = torch.randn(shape, generator=source)
    if name.endswith("e_score_correction_bias"):
        values = torch.zeros(shape)
    elif len(shape) == 1:
        values = family.norm_centre + 0.15 * values if "norm" in name else 0.1 * values
    elif name.endswith("embed_tokens.weight"):
        values[:, :EXPERTS] = 3 * torch.eye(EXPERTS)[torch.arange(shape[0]) % EXPERTS]
    elif re.search(r"\.(gate|router)\.weight$", name):
        values = _router(shape, source) * growth
    else:
        values *= shape[-1] ** -0.5
        if re.search(r"(o_proj|down_proj)\.weight$", name):
            routed, shared = ".experts." in name, ".shared_experts." in name
            values *= growth * (family.expert_gain if routed else 0.8 if shared else 1.2)
            values[:EXPERTS] = 0
        elif re.search(r"\.(gate_proj|up_proj)\.weight$", name):
            values *= 1.2
    return values.to(torch.bfloat16)


def _router(shape: list[int], source: torch.Generator) -> torch.Tensor:
    """A router that cannot tip: `[EXPERTS, HIDDEN]`.

    A bf16 sum differs in its last bits from one implementation to the next, and with random scores that swaps
    the second and third expert of a few tokens in a hundred, after which their streams have nothing in
    common. So the first EXPERTS channels hold a one-hot class of the token that no layer writes to, and the
    router reads only those: for each class it has eight scores, in an order of its own, with a wide step
    wherever a choice is made.
    """
    # Two experts a group. The same two groups win at every scale, by the sum of their scores as by the
    # largest, by which the kernel that vLLM 0.11 takes from IPEX goes. That kernel also adds the correction
    # bias to the weights, so it is 0.
    groups = torch.tensor([[1.2, -0.2], [0.9, 0.2], [0.5, -1.8], [-1.2, -1.5]])
    weight = torch.zeros(shape)
    for token_class in range(EXPERTS):
        order = groups[torch.randperm(len(groups), generator=source)]
        flip = torch.rand(len(groups), generator=source) < 0.5
        weight[:, token_class] = torch.where(flip[:, None], order.flip(1), order).flatten()
    return weight


def _write_tokenizer(directory: Path) -> None:
    """A byte-level BPE of VOCAB tokens. transformers 5 would save it under a class that 4 does not know."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    wanted = {"vocab_size": VOCAB, "special_tokens": [PAD, BOS, EOS, TURN], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(**wanted, show_progress=False)
    tokenizer.train_from_iterator([CORPUS], trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens of {VOCAB}: make it longer")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 8192,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [TURN],
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: Config) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random-weight model.")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    print(build(options.family, options.directory, options.seed, options.layers, options.dtype))


if __name__ == "__main__":
    main()
