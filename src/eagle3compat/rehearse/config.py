"""Reads a model's config.json: where the text model is in it, and of which kind each decoder layer is.

The names are those of published configs; where there are several for one thing, the likeliest is read first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError

Config = dict[str, Any]

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
DENSE_LEAD = ("first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_start_index")
"""How many layers at the start are dense in a mixture of experts."""
DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers", "num_mtp_layers")
"""Layers for multi-token prediction, which follow the decoder and are not loaded for extraction."""
LAYER_TYPES = ("layer_types", "layers_block_type", "mlp_layer_types")
PATTERN = "hybrid_override_pattern"
COUNTED = (*HIDDEN, *HEADS, "vocab_size")
"""What no model has none of."""
MOST_LAYERS = 10_000
TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")


@dataclass(frozen=True)
class Kind:
    """What one decoder layer is: how it mixes tokens, and what follows that. `none` where it has no such part."""

    attention: str
    feed_forward: str

    def __str__(self) -> str:
        by_token = ("full", "sliding", "chunked", "linear")
        attention = f"{self.attention} attention" if self.attention in by_token else self.attention
        parts = (attention, "MoE" if self.feed_forward == "moe" else self.feed_forward)
        return " + ".join(part for part in parts if part != "none")


class Model:
    """A config and its text model's part of it, which is the whole where there is no wrapper.

    Raises InputError where no text model with a number of layers is found.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.path, self.text = text_part(config)
        for name in (*COUNTED, *LAYERS):
            value, most = self.text.get(name), MOST_LAYERS if name in LAYERS else None
            if isinstance(value, str) or (type(value) is int and (value < 1 or (most and value > most))):
                raise InputError(f"{name} of its config is {value!r}, which no model has. Take the published config.")

    def get(self, names: Sequence[str] | str, default: Any = None) -> Any:
        """The first of `names` that the text model's config has and that is not null."""
        for name in (names,) if isinstance(names, str) else names:
            if self.text.get(name) is not None:
                return self.text[name]
        return default

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or self.text.get("architectures") or []
        return str(names[0]) if names else str(self.config.get("model_type", "unknown"))

    @property
    def layers(self) -> int:
        return int(self.get(LAYERS))

    @property
    def hidden(self) -> int:
        return int(self.get(HIDDEN, 0))

    @property
    def heads(self) -> int:
        return int(self.get(HEADS, 0))

    @property
    def kv_heads(self) -> int:
        return int(self.get(KV_HEADS, self.heads))

    @property
    def head_dim(self) -> int:
        return int(self.get(HEAD_DIM, self.hidden // self.heads if self.heads else 0))

    @property
    def mla(self) -> bool:
        """Whether its attention is multi-head latent attention."""
        return self.get("kv_lora_rank") is not None and self.get("qk_rope_head_dim") is not None

    @property
    def experts(self) -> int:
        return int(self.get(EXPERTS, 0))

    def kinds(self) -> list[Kind]:
        """The kind of every decoder layer, in order."""
        return [Kind(*self._kind(index)) for index in range(self.layers)]

    def _kind(self, index: int) -> tuple[str, str]:
        pattern = self.get(PATTERN)
        if isinstance(pattern, str) and index < len(pattern):
            return {"M": ("mamba", "none"), "*": ("full", "none"), "E": ("none", "moe")}.get(
                pattern[index], ("none", "dense")
            )
        block = _listed(self.get("layers_block_type"), index)
        if block in ("mlp", "moe"):
            return "none", "moe" if block == "moe" else "dense"
        if isinstance(block, str) and self.get("mamba_num_heads") is not None:  # Nemotron-H: one part a layer
            return _attention(block), "none"
        return self._attention(index), "moe" if self._sparse(index) else "dense"

    def _attention(self, index: int) -> str:
        for name in ("layer_types", "layers_block_type"):
            named = _listed(self.get(name), index)
            if isinstance(named, str):
                return _attention(named)
        linear = self.get("linear_attn_config")
        if isinstance(linear, dict) and linear.get("kda_layers"):  # counted from 1
            return "linear" if index + 1 in linear["kda_layers"] else "full"
        if isinstance(self.get("attn_type_list"), list):
            return "full" if _listed(self.get("attn_type_list"), index) else "linear"
        if self.get("attn_layer_indices"):
            return "full" if index in self.get("attn_layer_indices") else "mamba"
        if self.get("attn_layer_period"):
            return "full" if index % self.get("attn_layer_period") == self.get("attn_layer_offset", 0) else "mamba"
        if self.get("full_attention_interval"):
            return "full" if (index + 1) % self.get("full_attention_interval") == 0 else "linear"
        if self.get("attention_chunk_size") and isinstance(self.get("no_rope_layers"), list):  # Llama 4
            return "chunked" if _listed(self.get("no_rope_layers"), index) else "full"
        return self._window(index)

    def _window(self, index: int) -> str:
        if not self.get("sliding_window") or self.text.get("use_sliding_window") is False:
            return "full"
        pattern = self.get(("sliding_window_pattern", "_sliding_window_pattern"))
        if isinstance(pattern, int):
            return "full" if (index + 1) % pattern == 0 else "sliding"
        if self.text.get("use_sliding_window"):
            return "full" if index < self.get("max_window_layers", 0) else "sliding"
        return "sliding"

    def _sparse(self, index: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        if not self.experts or index in self.get("mlp_only_layers", ()) or index < self.get(DENSE_LEAD, 0):
            return False
        named = _listed(self.get("mlp_layer_types"), index)
        if isinstance(named, str):
            return named != "dense"
        if isinstance(self.get("moe_layers"), list):
            return index in self.get("moe_layers")
        frequency = self.get("moe_layer_freq", 1)
        if isinstance(frequency, list):
            return bool(_listed(frequency, index))
        if self.get("expert_layer_period"):
            return bool(index % self.get("expert_layer_period") == self.get("expert_layer_offset", 0))
        step = self.get(("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval"), 1)
        return bool(index % frequency == 0 and (index + 1) % step == 0)


def text_part(config: Config) -> tuple[tuple[str, ...], Config]:
    """The keys that lead to the text model's config, and that config."""
    path: tuple[str, ...] = ()
    part = config
    while True:
        name = next((name for name in TEXT_PARTS if isinstance(part.get(name), dict)), None)
        if name is None:
            break
        path, part = (*path, name), part[name]
    if not any(isinstance(part.get(name), int) for name in LAYERS):
        where = f"{'.'.join(path)} of its config" if path else "its config"
        raise InputError(
            f"{where} names no number of decoder layers (looked for: {', '.join(LAYERS)}). Is it a language model?"
        )
    return path, part


def _listed(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list) and index < len(value) else None


def _attention(named: str) -> str:
    """`sliding_attention`, `full_attention`, `linear_attention`, `mamba`, ... as one word."""
    for word in ("sliding", "chunked", "linear", "mamba", "conv", "recurrent"):
        if word in named:
            return word
    return "full"
