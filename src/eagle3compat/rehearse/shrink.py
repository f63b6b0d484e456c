"""A small config of the same architecture: few layers that keep each kind, few experts, small sizes.

Kept as they are: what a kernel or a branch of the model's code depends on (head sizes, MLA's ranks, experts a token,
expert groups, windows, rope scaling, vocabulary). Made small: how many there are of a thing, and how wide it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from .config import (
    DENSE_LEAD,
    DRAFT_LAYERS,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PATTERN,
    Config,
    Model,
)

FEWEST_LAYERS = 4
MOST_LAYERS = 24
WIDTH = 256
"""The hidden size where nothing else decides it."""
POSITIONS = 131072
"""Longer rotary tables than this take hundreds of MiB and show nothing."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's CPU attention kernels have (vllm/v1/attention/backends/cpu_attn.py, 0.11 to 0.32)."""
INDICES = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs", "cross_attention_layers")
"""Lists of layer numbers, counted from 0."""
COUNTS = (*DENSE_LEAD, "max_window_layers", "moe_layer_end_index", "num_hash_layers")
"""Numbers of layers from the start."""
WEIGHT_FORMATS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True)
class Small:
    """A small config; `layers` are the real model's layers that its layers stand for; `notes` say what else changed."""

    config: Config
    layers: tuple[int, ...]
    real_layers: int
    notes: tuple[str, ...]

    def layer_ids(self, real: Sequence[int]) -> list[int]:
        """Layer ids of the small model for ids of the real one: the same order, the first and the last kept."""
        last, small_last = self.real_layers - 1, len(self.layers) - 1
        return [round(layer * small_last / last) if last else 0 for layer in real]


def shrink(config: Config, tensor_parallel_size: int = 1, device: str = "cuda") -> Small:
    """The small config. `device` is `cuda` or `cpu`; sizes stay divisible by `tensor_parallel_size`.

    Pure: `config` is left as it is. Raises InputError where it has no text model.
    """
    small = copy.deepcopy(config)
    real = Model(config)
    text = Model(small).text
    notes: list[str] = []
    layers = _choose_layers(real)
    _cut(text, real.layers, layers)
    _heads(real, text, tensor_parallel_size, device, notes)
    hidden = _hidden(real, text)
    _linear(real, text, hidden, tensor_parallel_size)
    _feed_forward(text, tensor_parallel_size)
    _experts(real, text)
    wrappers = _wrappers(small, real.path)
    for part in _parts(small):
        for name in WEIGHT_FORMATS:
            if part.pop(name, None) is not None:
                notes.append(f"{name} is left out: the small weights are not quantized, the real ones are")
        if any(part is wrapper for wrapper in wrappers):
            _set_equal(part, LAYERS, real.layers, len(layers))
            _set_equal(part, tuple(part), real.hidden, Model(small).hidden)
        elif part is not text:
            _tower(part, real.hidden, Model(small).hidden)
    _limits(text)
    return Small(small, layers, real.layers, tuple(dict.fromkeys(notes)))


def _choose_layers(real: Model) -> tuple[int, ...]:
    """The fewest layers, from the start, under which the small config has every kind of the real one."""
    wanted = set(real.kinds())
    lead = min(int(real.get(DENSE_LEAD, 0)), real.layers)
    for count in range(min(FEWEST_LAYERS, real.layers), min(MOST_LAYERS, real.layers) + 1):
        chosen = tuple([*range(min(lead, 1)), *range(lead, real.layers)][:count])
        if set(_kinds_of(real, chosen)) >= wanted:
            return chosen
    kinds = real.kinds()
    firsts = {kinds.index(kind) for kind in wanted}
    return tuple(sorted({*range(min(FEWEST_LAYERS, real.layers)), *firsts}))


def _kinds_of(real: Model, chosen: Sequence[int]) -> list[Any]:
    text = copy.deepcopy(real.text)
    _cut(text, real.layers, chosen)
    return Model(text).kinds()


def _cut(text: Config, layers: int, chosen: Sequence[int]) -> None:
    """Leave only the chosen layers in every field that speaks of layers."""
    lengths = {layers, layers + sum(int(text.get(name) or 0) for name in DRAFT_LAYERS)}
    for part in (text, text.get("linear_attn_config") or {}):
        first = 0 if part is text else 1
        for name, value in part.items():
            if name in INDICES or (name.endswith("_layers") and isinstance(value, list) and part is not text):
                part[name] = [chosen.index(index - first) + first for index in value or () if index - first in chosen]
            elif isinstance(value, list) and len(value) in lengths:
                part[name] = [value[index] for index in chosen]
    if isinstance(text.get(PATTERN), str):
        text[PATTERN] = "".join(text[PATTERN][index] for index in chosen)
    for name in COUNTS:
        if isinstance(text.get(name), int):
            text[name] = sum(index < text[name] for index in chosen)
    for name in LAYERS:
        if name in text:
            text[name] = len(chosen)
    for name in DRAFT_LAYERS:
        if text.get(name):
            text[name] = 0
    if text.get("num_kv_shared_layers"):
        text["num_kv_shared_layers"] = min(text["num_kv_shared_layers"], len(chosen) // 2)


def _heads(real: Model, text: Config, ranks: int, device: str, notes: list[str]) -> None:
    if not real.heads:
        return
    if real.mla:
        heads = kv_heads = lcm(ranks, min(real.heads, 16))
    else:
        kv_heads = min(real.kv_heads, max(2, ranks))
        heads = lcm(kv_heads * min(max(real.heads // real.kv_heads, 1), 4), ranks)
    _set(text, HEADS, heads)
    _set(text, KV_HEADS, kv_heads)
    if text.get("q_lora_rank"):
        text["q_lora_rank"] = min(text["q_lora_rank"], WIDTH)
    named = next((name for name in HEAD_DIM if text.get(name) is not None), None)
    if device == "cpu" and not real.mla and real.head_dim not in CPU_HEAD_DIMS:
        near = next((size for size in CPU_HEAD_DIMS if size >= real.head_dim), CPU_HEAD_DIMS[-1])
        text[named or "head_dim"] = near
        notes.append(f"heads of {near} in place of {real.head_dim}, which vLLM's CPU kernels do not have")


def _hidden(real: Model, text: Config) -> int:
    """Sets and returns the small hidden size; where the head size follows from it, it follows from the heads."""
    explicit = any(text.get(name) is not None for name in HEAD_DIM) or real.mla or not real.heads
    hidden = min(WIDTH, real.hidden) if explicit else Model(text).heads * real.head_dim
    _set(text, HIDDEN, hidden)
    return hidden


def _linear(real: Model, text: Config, hidden: int, ranks: int) -> None:
    """Linear attention and Mamba: fewer heads and groups, their sizes kept."""
    keys, values = text.get("linear_num_key_heads"), text.get("linear_num_value_heads")
    if keys and values:
        text["linear_num_key_heads"] = lcm(min(keys, 2), ranks)
        text["linear_num_value_heads"] = text["linear_num_key_heads"] * max(values // keys, 1)
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict) and linear.get("num_heads"):
        linear["num_heads"] = lcm(min(linear["num_heads"], 4), ranks)
    for heads_name, size_name, groups_name in (
        ("mamba_num_heads", "mamba_head_dim", "n_groups"), ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ):
        if not text.get(heads_name) or not text.get(size_name):
            continue
        groups = lcm(min(text.get(groups_name) or 1, 2), ranks if (text.get(groups_name) or 1) > 1 else 1)
        heads = lcm(8, groups, ranks)
        expand = text.get("mamba_expand", text.get("expand"))
        if expand and expand * real.hidden == text[heads_name] * text[size_name]:  # the code derives one from the other
            heads = lcm(heads, max(expand * hidden // text[size_name], 1))
            _set(text, HIDDEN, heads * text[size_name] // expand)
        if groups_name in text:
            text[groups_name] = groups
        text[heads_name] = heads


def _feed_forward(text: Config, ranks: int) -> None:
    size = 64 * lcm(2, ranks)
    for name, value in text.items():
        wide = "intermediate_size" in name or name in ("ffn_hidden_size", "n_inner", "ffn_dim")
        if wide and isinstance(value, int) and value > size:
            text[name] = size
        elif wide and isinstance(value, list):
            text[name] = [size for _ in value]


def _experts(real: Model, text: Config) -> None:
    """As few experts as the router can choose from: two a group, twice those that a token takes."""
    if not real.experts:
        return
    groups = int(real.get(("n_group", "num_expert_group"), 1) or 1)
    chosen = int(real.get(EXPERTS_PER_TOKEN, 1) or 1)
    wanted = max(4, 2 * chosen)
    experts = min(real.experts, max(2 * groups, -(-wanted // groups) * groups))
    _set(text, EXPERTS, experts)


def _tower(part: Config, hidden: int, small_hidden: int) -> None:
    """A vision or audio tower: few layers, as wide as it was; what meets the text model has its new width."""
    depth_name = next((n for n in ("depth", "vt_num_hidden_layers", *LAYERS) if isinstance(part.get(n), int)), None)
    if depth_name is not None:
        depth = part[depth_name]
        lists = {
            name: value for name, value in part.items()
            if "indexes" in name and isinstance(value, list) and all(isinstance(item, int) for item in value)
        }
        part[depth_name] = min(depth, max([2, *(len(value) + 1 for value in lists.values())]))
        for name, value in lists.items():
            part[name] = list(range(1, len(value) + 1))
    own = () if "embed_dim" in part else HIDDEN
    _set_equal(part, [name for name in part if name not in own], hidden, small_hidden)


def _set_equal(part: Config, names: Sequence[str], value: int, small: int) -> None:
    """Where a width is that of the text model, it stays so."""
    for name in names:
        other = any(word in name for word in ("position", "image", "vocab", "token"))
        if type(part.get(name)) is int and part[name] == value and not other:
            part[name] = small


def _limits(text: Config) -> None:
    if isinstance(text.get("max_position_embeddings"), int):
        text["max_position_embeddings"] = min(text["max_position_embeddings"], POSITIONS)


def _parts(config: Config) -> list[Config]:
    """The config and every dict in it that is a config of something."""
    parts = [config]
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and name not in (*WEIGHT_FORMATS, "linear_attn_config"):
            parts += _parts(value)
    return parts


def _wrappers(config: Config, path: Sequence[str]) -> list[Config]:
    """The configs around the text model's."""
    parts = []
    for name in path:
        parts.append(config)
        config = config[name]
    return parts


def _set(text: Config, names: Sequence[str], value: int) -> None:
    for name in names:
        if text.get(name) is not None:
            text[name] = value
