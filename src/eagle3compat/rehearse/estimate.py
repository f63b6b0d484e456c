"""What the real model needs, worked out from its config: weights, KV cache, captured states, disk.

Sizes are bytes. Weights are counted from the shapes that the config gives, without a vision or audio tower; where the
folder has an index of its weights, their size is taken from it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .config import INTERMEDIATE, Config, Kind, Model

GIB = 2**30
ROW_BYTES = 2
"""Of one captured value, and of one value in the KV cache: bf16, as stock runs models."""
INDEXER_SCALE = 4
STOCK_SEQUENCES = 32
MOST_BYTES = 2**60
LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


@dataclass(frozen=True)
class Estimate:
    """What extraction from the real model takes. Bytes, unless said otherwise."""

    architecture: str
    layers: int
    kinds: dict[str, int]
    layer_ids: tuple[int, ...]
    missing_layer_ids: tuple[int, ...]
    parameters: int
    weights: int
    weights_from: str
    weights_per_rank: int
    kv_per_token: int
    kv_per_rank_token: int
    state_per_sequence: int
    kv_one_sequence_per_rank: int
    kv_batch_per_rank: int
    host_batch: int
    disk_per_1000: int
    sequence: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return asdict(self)


def default_layer_ids(layers: int) -> list[int]:
    """The layers that stock takes when none are named: one low, one in the middle, one high, the last."""
    return [2, layers // 2, layers - 3, layers - 1]


def estimate(
    config: Config,
    layer_ids: Sequence[int] | None = None,
    tensor_parallel_size: int = 1,
    sequence: int = 2048,
    batch: int = STOCK_SEQUENCES,
    index: Config | None = None,
) -> Estimate:
    """Work it out. `sequence` is tokens a sample, `batch` samples a call, `index` the weights' index file if any.

    Raises InputError where the config has no text model.
    """
    model = Model(config)
    ids = tuple(default_layer_ids(model.layers) if layer_ids is None else layer_ids)
    parameters = _parameters(model)
    said = (index or {}).get("metadata")
    size = said.get("total_size") if isinstance(said, dict) else None
    total = int(size) if isinstance(size, (int, float)) and 0 < size < MOST_BYTES else 0
    weights = total or int(_weight_bytes(model, parameters))
    ranks = tensor_parallel_size
    kinds = model.kinds()
    growing, fixed, windowed = _kv(model, kinds, 1)
    rank_growing, rank_fixed, rank_windowed = _kv(model, kinds, ranks)
    window = min(_window(model), sequence)
    one = rank_growing * sequence + rank_windowed * window + rank_fixed
    rows = len(set(ids)) * model.hidden * ROW_BYTES
    return Estimate(
        architecture=model.architecture,
        layers=model.layers,
        kinds=dict(Counter(str(kind) for kind in kinds)),
        layer_ids=ids,
        missing_layer_ids=tuple(layer for layer in ids if not 0 <= layer < model.layers),
        parameters=sum(parameters.values()),
        weights=weights,
        weights_from="the index of its weights" if total else "the shapes in its config",
        weights_per_rank=weights // ranks,
        kv_per_token=growing + windowed,
        kv_per_rank_token=rank_growing + rank_windowed,
        state_per_sequence=fixed,
        kv_one_sequence_per_rank=one,
        kv_batch_per_rank=one * min(batch, STOCK_SEQUENCES),
        host_batch=2 * batch * sequence * rows,  # once in the worker, once in the driver
        disk_per_1000=1000 * sequence * (len(ids) * model.hidden * ROW_BYTES + 2 * 8),  # and token ids and loss mask
        sequence=sequence,
        problems=tuple(_problems(model, kinds, ids, ranks, sequence, layer_ids is None)),
        notes=tuple(_notes(model, ids, kinds, index)),
    )


def _problems(
    model: Model, kinds: Sequence[Kind], ids: Sequence[int], ranks: int, sequence: int, default: bool
) -> list[str]:
    """What the real run would be refused for."""
    problems = []
    missing = [layer for layer in ids if not 0 <= layer < model.layers]
    if missing and default:
        problems.append(
            f"stock's default layer ids fit no model of {model.layers} decoder layers. Name some of 0 to "
            f"{model.layers - 1}: layer_ids, or --layer-ids here."
        )
    elif missing:
        problems.append(
            f"layer ids {missing} do not exist: the model has {model.layers} decoder layers, 0 to {model.layers - 1}. "
            "Ids that vLLM serves with (eagle_aux_hidden_state_layer_ids) are one higher than these."
        )
    if model.heads and model.heads % ranks:
        fits = [size for size in range(1, ranks + 9) if model.heads % size == 0]
        problems.append(
            f"{model.heads} attention heads cannot be shared by {ranks} tensor-parallel ranks. Sizes that fit: "
            f"{', '.join(map(str, fits))}."
        )
    problems += _parallel_problems(model, kinds, ranks)
    positions = model.get("max_position_embeddings")
    scaled = any("factor" in str(model.get(name)) for name in ("rope_scaling", "rope_parameters"))  # by what, differs
    if isinstance(positions, int) and sequence > positions and not scaled and os.environ.get(LONGER) != "1":
        problems.append(
            f"max_model_len {sequence} is more than the model's {positions} positions, which vLLM refuses. Lower it, "
            f"or set {LONGER}=1 if you know that the model takes more."
        )
    return problems


def _parallel_problems(model: Model, kinds: Sequence[Kind], ranks: int) -> Iterator[str]:
    """What cannot be divided as vLLM divides it over tensor-parallel ranks."""
    attends = not model.mla and any(kind.attention in ("full", "sliding", "chunked") for kind in kinds)
    if attends and model.kv_heads > 0:
        if model.heads % model.kv_heads:
            yield f"{model.heads} attention heads cannot share {model.kv_heads} key-value heads: look at the config."
        elif max(model.kv_heads, ranks) % min(model.kv_heads, ranks):
            fits = [size for size in range(1, ranks + 9) if not max(model.kv_heads, size) % min(model.kv_heads, size)]
            yield (
                f"{model.kv_heads} key-value heads cannot be shared by {ranks} tensor-parallel ranks. Sizes that fit: "
                f"{', '.join(str(size) for size in fits if not model.heads % size)}."
            )
    widths = {
        "dense": ("intermediate_size_mlp", *INTERMEDIATE),
        "moe": ("moe_intermediate_size", *INTERMEDIATE),
    }
    for part in sorted({kind.feed_forward for kind in kinds} & widths.keys()):
        width = model.get(widths[part])
        if isinstance(width, int) and width % ranks:
            yield (
                f"feed-forward layers {width} wide cannot be shared by {ranks} tensor-parallel ranks. Choose a size "
                "that divides it."
            )


def _notes(model: Model, ids: Sequence[int], kinds: Sequence[Kind], index: Config | None) -> list[str]:
    notes = []
    if ids and ids[-1] != model.layers - 1:
        notes.append(
            f"the last layer id is {ids[-1]}, and the model's last layer is {model.layers - 1}: stock's training takes "
            "the last one for the target's last hidden state"
        )
    if model.path and index is None:
        notes.append("the wrapper around the text model (vision or audio) is not counted in the weights")
    if any(kind.attention in ("linear", "mamba", "conv", "recurrent") for kind in kinds):
        notes.append("vLLM pads the KV pages of hybrid models, so that the cache takes more than the figure")
    if model.mla:
        notes.append("MLA keeps the whole latent on every tensor-parallel rank")
    return notes


def _kv(model: Model, kinds: Sequence[Kind], ranks: int) -> tuple[int, int, int]:
    """Bytes on one rank: a token in layers that keep all, a sequence whatever its length, a token within a window."""
    growing = fixed = windowed = 0
    for kind in kinds:
        if kind.attention == "full":
            growing += _attention_token(model, ranks)
        elif kind.attention in ("sliding", "chunked"):
            windowed += _attention_token(model, ranks)
        elif kind.attention != "none":
            fixed += _state(model, kind.attention) // ranks
    return growing, fixed, windowed


def _attention_token(model: Model, ranks: int) -> int:
    """Bytes that one attention layer keeps of a token on one rank."""
    if model.mla:
        indexer = int(model.get("index_head_dim", 0))
        latent = (int(model.get("kv_lora_rank")) + int(model.get("qk_rope_head_dim"))) * ROW_BYTES
        return latent + (indexer + INDEXER_SCALE if indexer else 0)
    return 2 * max(model.kv_heads // ranks, 1) * model.head_dim * ROW_BYTES


def _state(model: Model, attention: str) -> int:
    """Bytes that one linear-attention or Mamba layer keeps of a sequence: the recurrent state in float32, the
    convolution's in bf16 (vllm/model_executor/layers/mamba/mamba_utils.py)."""
    kernel = int(model.get(("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"), 4)) - 1
    if model.get("linear_num_value_heads"):
        keys, values = model.get("linear_num_key_heads"), model.get("linear_num_value_heads")
        key_dim, value_dim = model.get("linear_key_head_dim"), model.get("linear_value_head_dim")
        return int(values * key_dim * value_dim * 4 + (2 * keys * key_dim + values * value_dim) * kernel * ROW_BYTES)
    heads = model.get(("mamba_num_heads", "mamba_n_heads"))
    if heads:
        size = model.get(("mamba_head_dim", "mamba_d_head"))
        state = model.get(("ssm_state_size", "mamba_d_state"), 128)
        groups = model.get(("n_groups", "mamba_n_groups"), 1)
        return int(heads * size * state * 4 + (heads * size + 2 * groups * state) * kernel * ROW_BYTES)
    linear = model.get("linear_attn_config")
    if isinstance(linear, dict) and linear.get("num_heads"):
        heads, size = int(linear["num_heads"]), int(linear["head_dim"])
        return heads * size * size * 4 + 3 * heads * size * (int(linear.get("short_conv_kernel_size", 4)) - 1) * 2
    return model.heads * model.head_dim * model.head_dim * 4  # lightning attention


def _window(model: Model) -> int:
    return int(model.get(("sliding_window", "attention_chunk_size"), 2**31))


def _parameters(model: Model) -> dict[str, int]:
    """Parameters of the text model: `experts` (routed) and `other`."""
    vocabulary = int(model.get("vocab_size", 0)) * model.hidden
    tied = model.get("tie_word_embeddings", model.config.get("tie_word_embeddings", False))
    found = {"experts": 0, "other": vocabulary * (1 if tied else 2)}
    kinds = model.kinds()
    for kind in kinds:
        found["other"] += _mixer(model, kind.attention) + 2 * model.hidden
        if kind.feed_forward == "dense":
            found["other"] += _gated(model) * model.hidden * _dense_width(model)
        elif kind.feed_forward == "moe":
            experts, shared = _mixture(model)
            found["experts"] += experts
            found["other"] += shared
    return found


def _mixer(model: Model, attention: str) -> int:
    """Parameters of what mixes the tokens of one layer."""
    hidden, heads, size = model.hidden, model.heads, model.head_dim
    if attention == "none":
        return 0
    if attention in ("mamba",) and model.get(("mamba_num_heads", "mamba_n_heads")):
        inner = model.get(("mamba_num_heads", "mamba_n_heads")) * model.get(("mamba_head_dim", "mamba_d_head"))
        state = 2 * model.get(("n_groups", "mamba_n_groups"), 1) * model.get(("ssm_state_size", "mamba_d_state"), 128)
        return int(hidden * (2 * inner + state) + inner * hidden)
    if attention == "linear" and model.get("linear_num_value_heads"):
        keys = model.get("linear_num_key_heads") * model.get("linear_key_head_dim")
        values = model.get("linear_num_value_heads") * model.get("linear_value_head_dim")
        return int(hidden * (2 * keys + 2 * values) + values * hidden)
    if model.mla:
        return _mla(model)
    gate = heads * size if model.get("full_attention_interval") and not model.mla else 0  # Qwen3-Next gates its output
    return hidden * (heads * size + gate + 2 * model.kv_heads * size) + heads * size * hidden


def _mla(model: Model) -> int:
    hidden, heads = model.hidden, model.heads
    nope, rope = int(model.get("qk_nope_head_dim", 0)), int(model.get("qk_rope_head_dim"))
    value, latent = int(model.get("v_head_dim", nope)), int(model.get("kv_lora_rank"))
    rank = model.get("q_lora_rank")
    query = hidden * rank + rank * heads * (nope + rope) if rank else hidden * heads * (nope + rope)
    key_value = hidden * (latent + rope) + latent * heads * (nope + value)
    indexer = 0
    if model.get("index_n_heads") and rank:
        indexer = rank * model.get("index_n_heads") * model.get("index_head_dim") + hidden * model.get("index_head_dim")
    return int(query + key_value + heads * value * hidden + indexer)


def _mixture(model: Model) -> tuple[int, int]:
    """Parameters of one mixture of experts: the routed experts', and the shared ones' and the router's."""
    width = int(model.get("moe_intermediate_size", model.get(INTERMEDIATE, 0)))
    one = _gated(model) * model.hidden * width
    shared = int(model.get(("n_shared_experts", "num_shared_experts"), 0) or 0)
    if "interleave_moe_layer_step" in model.text:  # Llama 4 has one shared expert and does not say so
        shared = 1
    shared_width = model.get(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"))
    if shared_width:
        shared, one_shared = 1, _gated(model) * model.hidden * int(shared_width)
    else:
        one_shared = one
    return model.experts * one, shared * one_shared + model.hidden * model.experts


def _dense_width(model: Model) -> int:
    return int(model.get("intermediate_size_mlp", model.get(INTERMEDIATE, 4 * model.hidden)))


def _gated(model: Model) -> int:
    """Matrices of a feed-forward: three where it is gated, two where its activation is relu squared."""
    return 2 if str(model.get(("mlp_hidden_act", "hidden_act"), "silu")) == "relu2" else 3


def _weight_bytes(model: Model, parameters: dict[str, int]) -> float:
    experts, other = _bytes_per_parameter(model)
    return parameters["experts"] * experts + parameters["other"] * other


def _bytes_per_parameter(model: Model) -> tuple[float, float]:
    """Of routed experts, and of the rest."""
    plain = 4.0 if "32" in str(model.config.get("torch_dtype") or model.get(("torch_dtype", "dtype"), "")) else 2.0
    quantized = model.config.get("quantization_config") or model.get("quantization_config")
    if not quantized:
        return plain, plain
    method = str(quantized.get("quant_method", "")).lower()
    bits = _bits(quantized)
    if method == "mxfp4":
        return 4.25 / 8, plain
    if bits == 8:
        return 1.0, 1.0
    if method in ("gptq", "awq"):
        return bits / 8 + 0.06, bits / 8 + 0.06
    return bits / 8 + 0.06, plain if model.experts else bits / 8 + 0.06


def _bits(quantized: Config) -> int:
    if str(quantized.get("quant_method", "")).lower() == "fp8":
        return 8
    if quantized.get("load_in_4bit") or "FP4" in str(quantized.get("quant_algo", "")).upper():
        return 4
    groups = quantized.get("config_groups") or {}
    for group in groups.values():
        if isinstance(group, dict) and isinstance(group.get("weights"), dict):
            return int(group["weights"].get("num_bits") or 8)
    return int(quantized.get("bits") or quantized.get("w_bit") or 8)

