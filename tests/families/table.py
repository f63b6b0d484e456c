"""The model families, as data: what of each family's own configuration makes a tiny model that has all its parts.

A layer of every kind that a family has is among the six: dense and mixture, sliding and full, linear and full
attention. Sizes are the smallest for which the kernels of a CPU and of a Hopper GPU are built: heads of 64, and the
real ranks of multi-head latent attention (512 + 64).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]

LAYERS, HIDDEN, INNER, VOCAB, EXPERTS = 6, 256, 384, 704, 8
IDS: Config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHARED: Config = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    **IDS,
}
SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LINEAR = ["linear_attention", "linear_attention", "full_attention"] * (LAYERS // 3)


@dataclass(frozen=True)
class Family:
    """One family: the transformers class and `model_type` of its configuration, and what differs from SHARED.

    `architecture` is what config.json names. `text` is the configuration of the language model where that is a part of
    it, `drop` what it must not have, `unsaved` what the hub's does not have. `renamed` are beginnings of weight names
    that transformers saves otherwise than the hub has them, `files` what else vLLM reads of it. `expert_gain` is the
    scale of what a routed expert writes, `embedding` that of token embeddings. `without` says why a family does not run
    on a device (`cpu`, `cuda`), `no_float32` why it does not in float32. `tap` names the norm that each layer's stream
    enters, for the reference from vLLM's own forward, and `tap_adds` says whether a residual that it is given is added.
    `engine` are vLLM's own settings on a GPU, by dotted name. With `many_streams` the model carries several
    residual streams, and a draft gets their mean. `limit` is what passes, where that is more than for others.
    """

    name: str
    title: str
    model_type: str
    architecture: str
    config: Config = field(default_factory=dict)
    text: Config | None = None
    drop: tuple[str, ...] = ()
    transformers_class: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()
    files: dict[str, Config] = field(default_factory=dict)
    model_impl: str = "auto"
    expert_gain: float = 1.2
    embedding: float = 1.0
    without: dict[str, str] = field(default_factory=dict)
    tap: str = "input_layernorm"
    tap_adds: bool = True
    engine: Config = field(default_factory=dict)
    many_streams: bool = False
    limit: float = 0.0
    no_float32: dict[str, str] = field(default_factory=dict)

    @property
    def image(self) -> list[list[int]]:
        """A prompt with the token that stands for an image, where the family takes images."""
        token = self.config.get("image_token_id")
        return [] if token is None else [[5, 6, token, 7]]

    @property
    def full_config(self) -> Config:
        shared = {key: value for key, value in SHARED.items() if key not in self.drop}
        if self.text is None:
            return {**shared, **self.config}
        return {**self.config, "text_config": {**shared, **self.text}}


MOE: Config = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}
DEEPSEEK: Config = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 128,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
V3: Config = {**DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
YARN: Config = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
GATED_DELTA: Config = {
    "layer_types": LINEAR,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
NO_DELTA_32 = dict.fromkeys(("cpu", "cuda"), "vLLM's own kernels for gated delta nets are for bf16")
NO_LATENT_32 = {"cuda": "vLLM has no attention backend for latent attention in float32"}
STATE_32: Config = {"mamba_ssm_dtype": "float32"}
"""As the hub's Qwen3.5 has it. Without, vLLM keeps the state in bf16, and by itself fails on a CPU: its kernel there
says "Input tensor dtype mismatch" (0.26.0; `--mamba-ssm-cache-dtype float32` helps as well)."""
OWN_DELTA: Config = {"additional_config.gdn_prefill_backend": "triton"}
"""vLLM's own kernel for gated delta nets. On Hopper its default is FlashInfer's, which is compiled at first use."""
MAMBA: Config = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}
QWEN_VISION: Config = {"depth": 2, "hidden_size": 128, "num_heads": 2, "intermediate_size": 128}
VISION_IDS: Config = {
    "image_token_id": 640,
    "video_token_id": 641,
    "vision_start_token_id": 642,
    "vision_end_token_id": 643,
}
NEMOTRON: Config = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 1,
    "ssm_state_size": 64,
    "chunk_size": 64,
    "expand": 2,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "n_shared_experts": 1,
    "layer_norm_epsilon": 1e-5,
}
NEMOTRON_NAMES = {"backbone.embedding.": "backbone.embeddings."}
"""As transformers 5.12 saves it, and as it and all others read it."""
KIMI_IMAGES: Config = {
    "in_patch_limit": 1024,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 64,
    "in_patch_limit_each_frame": 256,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
QWEN_IMAGES: Config = {
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 3136,
    "max_pixels": 50176,
    "size": {"shortest_edge": 3136, "longest_edge": 50176},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def qwen_files(processor: str, patch: int, video: str = "Qwen2VLVideoProcessor") -> dict[str, Config]:
    """The image and video processors of a Qwen vision-language model, for small images."""
    shared = {**QWEN_IMAGES, "patch_size": patch, "processor_class": processor}
    return {
        "preprocessor_config.json": {**shared, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {**shared, "video_processor_type": video},
    }


NO_SIGMOID = {"cpu": "vLLM's CPU build has no router of this kind: softmax alone, where experts are not grouped"}
NO_VISION = {"cpu": "the environments of CPU builds have no torchvision, without which vLLM does not load its class"}
MROPE: Config = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}

DENSE = [
    Family("llama", "Llama", "llama", "LlamaForCausalLM"),
    Family("qwen2", "Qwen2", "qwen2", "Qwen2ForCausalLM"),
    Family("qwen3", "Qwen3", "qwen3", "Qwen3ForCausalLM"),
    Family("mistral", "Mistral", "mistral", "MistralForCausalLM", {"sliding_window": None}),
    Family("phi3", "Phi-3", "phi3", "Phi3ForCausalLM", {"original_max_position_embeddings": 2048}),
    Family("olmo2", "Olmo 2", "olmo2", "Olmo2ForCausalLM"),
    Family("cohere", "Cohere", "cohere", "CohereForCausalLM", {"tie_word_embeddings": True, "layer_norm_eps": 1e-5},
           tap_adds=False),
    Family(
        "granite", "Granite", "granite", "GraniteForCausalLM",
        {"embedding_multiplier": 1.5, "residual_multiplier": 0.8, "attention_multiplier": 0.125},
    ),
    Family(
        "gemma2", "Gemma 2", "gemma2", "Gemma2ForCausalLM",
        {"tie_word_embeddings": True, "layer_types": SLIDING, "sliding_window": 64, "query_pre_attn_scalar": 64},
        embedding=1 / 16,
    ),
    Family(
        "gemma3", "Gemma 3", "gemma3_text", "Gemma3ForCausalLM",
        {"tie_word_embeddings": True, "layer_types": SLIDING, "sliding_window": 64, "query_pre_attn_scalar": 64},
        embedding=1 / 16,
    ),
    Family(
        "gemma4", "Gemma 4", "gemma4_text", "Gemma4ForCausalLM",
        {
            "tie_word_embeddings": True, "layer_types": SLIDING, "sliding_window": 64, "global_head_dim": 128,
            "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": VOCAB,
        },
        embedding=1 / 16, engine={"attention_config.flash_attn_version": 3},  # its default, 4, needs nvidia-cutlass-dsl
    ),
    Family(
        "exaone4", "Exaone 4", "exaone4", "Exaone4ForCausalLM",
        {"layer_types": SLIDING, "sliding_window": 64, "sliding_window_pattern": 2},
    ),
    Family("ernie4_5", "Ernie 4.5", "ernie4_5", "Ernie4_5ForCausalLM"),
    Family("transformers", "Llama through the Transformers backend", "llama", "LlamaForCausalLM",
           model_impl="transformers"),
]  # fmt: skip

MIXTURES = [
    Family("qwen3_moe", "Qwen3-MoE", "qwen3_moe", "Qwen3MoeForCausalLM", {**MOE, "mlp_only_layers": [0]}),
    Family(
        "ernie4_5_moe", "Ernie 4.5 MoE", "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        {
            "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 128, "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1, "moe_layer_end_index": LAYERS - 1,
        },
    ),
    Family(
        "glm4_moe", "GLM-4.5", "glm4_moe", "Glm4MoeForCausalLM",
        {
            "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "use_qk_norm": True,
            "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 0,
        },
    ),
    Family(
        "gpt_oss", "gpt-oss", "gpt_oss", "GptOssForCausalLM",
        {
            "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "layer_types": SLIDING, "sliding_window": 64,
            "intermediate_size": 128,
        },
    ),
    Family(
        "llama4", "Llama 4", "llama4_text", "Llama4ForCausalLM",
        {
            "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "intermediate_size": 128,
            "intermediate_size_mlp": INNER, "interleave_moe_layer_step": 2, "attention_chunk_size": 128,
            "no_rope_layer_interval": 3, "floor_scale": 64,
        },
    ),
    Family(
        "minimax", "MiniMax M2", "minimax_m2", "MiniMaxM2ForCausalLM",
        {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": 128, "rotary_dim": 32,
         "use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True},
        without=NO_SIGMOID,
    ),
    Family(
        "minimax_m3", "MiniMax M3, dense attention", "minimax_m3_vl", "MiniMaxM3SparseForCausalLM",
        {**IDS, "tie_word_embeddings": False},
        text={
            "model_type": "minimax_m3_text", "head_dim": 128, "rotary_dim": 64, "partial_rotary_factor": 0.5,
            "dense_intermediate_size": INNER, "intermediate_size": 128, "shared_intermediate_size": 128,
            "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "n_shared_experts": 1, "use_routing_bias": True,
            "routed_scaling_factor": 1.0, "moe_layer_freq": [0, 0, 1, 1, 0, 1], "rope_theta": 10000.0,
            "hidden_act": "swigluoai", "num_mtp_modules": 0,
            "sparse_attention_config": {
                "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 2,
                "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_attention_freq": [0] * LAYERS,
            },
        },
        without={"cpu": "vLLM's CPU build has no MiniMax M3"},
        no_float32={"cuda": "vLLM's norm of this model is FlashInfer's, which has bf16 and float16"},
    ),
    Family(
        "step3p5", "Step 3.5", "step3p5", "Step3p5ForCausalLM",
        {
            "num_attention_groups": 2, "moe_num_experts": EXPERTS, "moe_top_k": 2, "moe_intermediate_size": 128,
            "share_expert_dim": 128, "use_moe": True, "moe_layers_enum": "2,3,4,5", "need_fp32_gate": True,
            "moe_router_activation": "sigmoid", "rope_theta": [10000.0] * LAYERS, "layer_types": SLIDING,
            "sliding_window": 64, "use_rope_layers": [], "yarn_only_types": [],
            "partial_rotary_factors": [1.0] * LAYERS,
            "attention_other_setting": {
                "attention_type": "sliding_attention", "num_attention_heads": 4, "num_attention_groups": 2,
                "head_dim": 64, "true_head_dim": 64,
            },
        },
        without=NO_SIGMOID,
    ),
]  # fmt: skip

LATENT = [
    Family(
        "deepseek_v2", "DeepSeek-V2", "deepseek_v2", "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "scoring_func": "softmax", "rope_scaling": YARN,
         "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        no_float32=NO_LATENT_32,
    ),
    Family("deepseek_v3", "DeepSeek-V3", "deepseek_v3", "DeepseekV3ForCausalLM", {**V3, "rope_scaling": YARN},
           expert_gain=0.4, no_float32=NO_LATENT_32),
    Family(
        "mistral_large_3", "Mistral Large 3", "deepseek_v3", "DeepseekV3ForCausalLM",
        {**V3, "rope_scaling": YARN, "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.5}},
        expert_gain=0.4, no_float32=NO_LATENT_32,
    ),
    Family(
        "deepseek_v32", "DeepSeek-V3.2", "deepseek_v32", "DeepseekV32ForCausalLM",
        {**V3, "rope_scaling": YARN, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64,
         "num_attention_heads": 64, "num_key_value_heads": 64},
        expert_gain=0.4, without={"cpu": "vLLM's CPU build has no sparse latent attention"},
        no_float32=NO_LATENT_32,
    ),
    Family(
        "kimi_k25", "Kimi-K2.5", "kimi_k25", "KimiK25ForConditionalGeneration",
        {
            "vision_config": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2,
                              "intermediate_size": 128},
            **IDS, "image_token_id": 644, "media_placeholder_token_id": 644, "projection_hidden_size": 128,
            "tie_word_embeddings": False,
        },
        text={**V3, "rope_scaling": YARN, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]},
        transformers_class="Kimi_K25ForConditionalGeneration", expert_gain=0.4, no_float32=NO_LATENT_32,
        renamed={
            "language_model.model.blocks.": "language_model.model.layers.", "model.mm_projector.": "mm_projector.",
            "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        },
        files={"preprocessor_config.json": {
            "media_proc_cfg": KIMI_IMAGES, "image_processor_type": "Kimi_K25ImageProcessor"}},
    ),
]  # fmt: skip

HYBRIDS = [
    Family(
        "qwen3_next", "Qwen3-Next", "qwen3_next", "Qwen3NextForCausalLM",
        {**MOE, **GATED_DELTA, "shared_expert_intermediate_size": 128, "head_dim": 128,
         # with as many keys as values vLLM hands its kernels views (0.25.1), which they take for whole
         "partial_rotary_factor": 0.25, "linear_num_key_heads": 2},
        engine=OWN_DELTA, no_float32=NO_DELTA_32,
    ),
    Family(
        "qwen3_5", "Qwen3.5", "qwen3_5", "Qwen3_5ForConditionalGeneration",
        {**VISION_IDS, "vision_config": {**QWEN_VISION, "out_hidden_size": HIDDEN, "num_position_embeddings": 64},
         "tie_word_embeddings": False},
        text={**GATED_DELTA, **STATE_32, "head_dim": 128, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [6, 5, 5],
            "mrope_interleaved": True}}, files=qwen_files("Qwen3VLProcessor", 16, "Qwen3VLVideoProcessor"),
        without=NO_VISION, engine=OWN_DELTA, no_float32=NO_DELTA_32,
    ),
    Family(
        "kimi_linear", "Kimi-Linear", "kimi_linear", "KimiLinearForCausalLM",
        {
            **{k: v for k, v in DEEPSEEK.items() if k not in ("q_lora_rank", "n_group", "topk_group")},
            "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
            "num_experts_per_token": 2, "num_shared_experts": 1, "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "mla_use_nope": True,
            "model_max_length": 2048,
            "layer_types": LINEAR, "linear_head_dim": 128, "linear_num_heads": 4, "linear_conv_kernel_dim": 4,
            "linear_attn_config": {
                "kda_layers": [1, 2, 4, 5], "full_attn_layers": [3, 6], "head_dim": 128, "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
        drop=("head_dim",), expert_gain=0.4, without={"cpu": "vLLM's CPU build has no delta attention kernels"},
        renamed={"model.layers.0.block_sparse_moe.": "model.layers.0.mlp."},  # the dense layer, as on the hub
        no_float32=NO_LATENT_32,
    ),
    Family(
        "granitemoehybrid", "Granite 4 hybrid", "granitemoehybrid", "GraniteMoeHybridForCausalLM",
        {
            **MAMBA, "layer_types": ["mamba", "mamba", "attention"] * (LAYERS // 3), "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2, "intermediate_size": 128, "shared_intermediate_size": 128,
            "embedding_multiplier": 1.5, "residual_multiplier": 0.8, "attention_multiplier": 0.125,
            "position_embedding_type": "nope",
        },
    ),
    Family(
        "nemotron_h", "Nemotron-H", "nemotron_h", "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp", "moe"]},
        drop=("num_hidden_layers",), tap="norm", renamed=NEMOTRON_NAMES,
        without={"cpu": "vLLM's CPU build has no mixtures without a gate"},
    ),
    Family(
        "nemotron_h_dense", "Nemotron-H without mixtures", "nemotron_h", "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba", "attention", "mlp"]},
        drop=("num_hidden_layers",), tap="norm", renamed=NEMOTRON_NAMES,
    ),
]  # fmt: skip

MULTIMODAL = [
    Family(
        "qwen2_5_vl", "Qwen2.5-VL", "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration",
        {**VISION_IDS, "vision_config": {**QWEN_VISION, "out_hidden_size": HIDDEN, "fullatt_block_indexes": [1]},
         "tie_word_embeddings": False},
        text={"rope_parameters": {**MROPE, "type": "default"}}, files=qwen_files("Qwen2_5_VLProcessor", 14),
        without=NO_VISION,
    ),
    Family(
        "qwen3_vl", "Qwen3-VL", "qwen3_vl", "Qwen3VLForConditionalGeneration",
        {**VISION_IDS, "vision_config": {**QWEN_VISION, "out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0, 1],
                                         "num_position_embeddings": 64}, "tie_word_embeddings": False},
        text={"rope_parameters": {**MROPE, "mrope_interleaved": True}},
        files=qwen_files("Qwen3VLProcessor", 16, "Qwen3VLVideoProcessor"), without=NO_VISION,
    ),
]  # fmt: skip

MANY_STREAMS = [
    Family(
        "deepseek_v4", "DeepSeek-V4", "deepseek_v4", "DeepseekV4ForCausalLM",
        {
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
            "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 64, "sliding_window": 128,
            "compress_ratios": [0] * LAYERS, "compress_rope_theta": 10000.0, "rope_theta": 10000.0,
            "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
            "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "num_hash_layers": LAYERS,
            "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 64,
            "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0,
            "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
        },
        drop=("intermediate_size",), many_streams=True, limit=0.2,  # its cache is in FP8
        without={"cpu": "vLLM's class for CPUs raises KeyError: 'c1a', and needs triton-cpu",
                 "cuda": "vLLM's class for GPUs needs tilelang"},
        unsaved=("layer_types", "mlp_layer_types"),
        renamed={
            "model.hc_head.hc_": "model.hc_head_",
            **{f"model.layers.{k}.attn.norm.": f"model.layers.{k}.attn.kv_norm." for k in range(LAYERS)},
        },
    ),
]  # fmt: skip

FAMILIES = {family.name: family for family in (*DENSE, *MIXTURES, *LATENT, *HYBRIDS, *MULTIMODAL, *MANY_STREAMS)}
