"""The checkpoints of families whose model transformers does not have: names and shapes, as on the hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def attention(hidden: int, head: int, queries: int, keys: int) -> Shapes:
    """The norms and the attention of a layer whose queries and keys have norms."""
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
    }


def step3p5(config: dict[str, Any]) -> Shapes:
    """Step 3.5: zero-centred norms, dense layers first, then mixtures with a shared expert."""
    hidden, head, experts = config["hidden_size"], config["head_dim"], config["moe_num_experts"]
    queries, keys = config["num_attention_heads"] * head, config["num_attention_groups"] * head
    inner, routed, shared = config["intermediate_size"], config["moe_intermediate_size"], config["share_expert_dim"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    mixtures = [int(layer) for layer in config["moe_layers_enum"].split(",")]
    for layer in range(config["num_hidden_layers"]):
        parts = attention(hidden, head, queries, keys)
        if layer in mixtures:
            parts |= {
                "moe.gate": (experts, hidden),
                "moe.gate_proj": (experts, routed, hidden),
                "moe.up_proj": (experts, routed, hidden),
                "moe.down_proj": (experts, hidden, routed),
                "share_expert.gate_proj": (shared, hidden),
                "share_expert.up_proj": (shared, hidden),
                "share_expert.down_proj": (hidden, shared),
            }
        else:
            parts |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
            parts |= {"mlp.down_proj": (hidden, inner)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
        if layer in mixtures:
            shapes[f"model.layers.{layer}.moe.router_bias"] = (experts,)
    return shapes


def minimax_m3(config: dict[str, Any]) -> Shapes:
    """MiniMax M3: zero-centred norms, dense layers and mixtures with a shared expert, attention without an index."""
    text = config["text_config"]
    hidden, head, inner = text["hidden_size"], text["head_dim"], text["intermediate_size"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    shapes: Shapes = {"model.embed_tokens.weight": (text["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (text["vocab_size"], hidden)
    for layer, mixture in enumerate(text["moe_layer_freq"]):
        parts = attention(hidden, head, queries, keys)
        if mixture:
            experts = text["num_local_experts"]
            parts |= {"block_sparse_moe.gate": (experts, hidden)}
            places = [f"block_sparse_moe.experts.{number}" for number in range(experts)]
            parts |= {f"{place}.{name}": (inner, hidden) for place in places for name in ("w1", "w3")}
            parts |= {f"{place}.w2": (hidden, inner) for place in places}
            dense, width = "block_sparse_moe.shared_experts", inner * text["n_shared_experts"]
            shapes[f"model.layers.{layer}.block_sparse_moe.e_score_correction_bias"] = (experts,)
        else:
            dense, width = "mlp", text["dense_intermediate_size"]
        parts |= {f"{dense}.{name}": (width, hidden) for name in ("gate_proj", "up_proj")}
        parts[f"{dense}.down_proj"] = (hidden, width)
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


CHECKPOINTS: dict[str, Callable[[dict[str, Any]], Shapes]] = {"step3p5": step3p5, "minimax_m3": minimax_m3}
