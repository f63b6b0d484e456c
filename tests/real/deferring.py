"""vLLM's own Llama, with the last sum of each layer left to the norm after it, as MiniMax-M3 and DeepSeek-V3.2 have it.

vLLM's classes that defer a sum over tensor-parallel ranks (vllm/models/minimax_m3, deepseek_v32 and dots3_note, 0.32.0)
need kernels that its CPU build does not have. This one is put together as they are, from vLLM's own layers and by its
own function for the sum and the norm; its weights and its values are Llama's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import ModelRegistry
from vllm.model_executor.layers.fused_allreduce_gemma_rms_norm import fused_allreduce_gemma_rms_norm
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

ARCHITECTURE = "DeferringForCausalLM"


class DeferringLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """Returns one rank's share of `hidden`, and the residual."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mlp.down_proj.reduce_results = False

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = fused_allreduce_gemma_rms_norm(hidden, residual, self.input_layernorm)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class DeferringModel(LlamaModel):  # type: ignore[misc]
    def forward(
        self, input_ids: Any, positions: torch.Tensor, intermediate_tensors: Any = None, inputs_embeds: Any = None
    ) -> torch.Tensor:
        hidden, residual = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds, None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        normed: torch.Tensor = fused_allreduce_gemma_rms_norm(hidden, residual, self.norm)[0]
        return normed


class DeferringForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=DeferringLayer)

    def _init_model(self, vllm_config: Any, prefix: str = "", layer_type: Any = DeferringLayer) -> Any:
        return DeferringModel(vllm_config=vllm_config, prefix=prefix, layer_type=layer_type)


def register() -> None:
    """Give vLLM the class, in this process and in those that are forked from it."""
    ModelRegistry.register_model(ARCHITECTURE, DeferringForCausalLM)
