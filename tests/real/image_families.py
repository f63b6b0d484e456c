"""Families whose conversations hold images, as data: what image_models.py makes, and how an image is asked for.

Those that no test takes were run by hand, as docs/families.md says.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from families.table import EXPERTS, FAMILIES, IDS, INNER, SLIDING, Config, Family

IMAGE, START, END = 640, 642, 643
VISION: Config = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
MEAN: Config = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

SIGLIP = {"vision_tower.": "vision_tower.vision_model."}
"""As the hub has it, and transformers 5.24 does not save it."""


@dataclass(frozen=True)
class Pictured:
    """A family with images. `placeholder` is what its chat template writes for one, `side` the pixels of a token's.

    `tokens` are more special tokens, from id 645 on, `names` those that the tokenizer is asked for by a name of its
    own, and `config` what the hub's config.json has and transformers does not write. The tokens of an image attend to
    each other where `together` says so: then no step may hold a part of one.
    """

    family: Family
    placeholder: str = "<|vision_start|><|image_pad|><|vision_end|>"
    side: int = 28
    tokens: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    config: Config = field(default_factory=dict)
    together: bool = False


def named(processor: str, **settings: object) -> dict[str, Config]:
    return {"processor_config.json": {"processor_class": processor, **settings}}


def square(size: int, kind: str, **more: object) -> dict[str, Config]:
    """The configuration of an image processor that makes each picture `size` pixels wide and high."""
    shape = {"height": size, "width": size}
    return {"preprocessor_config.json": {"image_processor_type": kind, "size": shape, **MEAN, **more}}


GEMMA3 = Family(
    "gemma3_vl", "Gemma 3 with images", "gemma3", "Gemma3ForConditionalGeneration",
    {
        **IDS, "image_token_id": IMAGE, "image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END,
        "mm_tokens_per_image": 36,
        "vision_config": {**VISION, "model_type": "siglip_vision_model", "image_size": 168, "patch_size": 14,
                          "vision_use_head": False},
    },
    text={
        "model_type": "gemma3_text", "tie_word_embeddings": True, "layer_types": SLIDING, "sliding_window": 64,
        "query_pre_attn_scalar": 64,
    },
    embedding=1 / 16, renamed=SIGLIP,
    files={**named("Gemma3Processor", image_seq_length=36), **square(168, "Gemma3ImageProcessor")},
)  # fmt: skip
MISTRAL3 = Family(
    "mistral3", "Mistral Small 3.1", "mistral3", "Mistral3ForConditionalGeneration",
    {
        **IDS, "image_token_id": IMAGE, "image_token_index": IMAGE, "spatial_merge_size": 2,
        "tie_word_embeddings": False,
        "vision_config": {**VISION, "model_type": "pixtral", "image_size": 448, "patch_size": 14, "head_dim": 64},
    },
    text={"model_type": "mistral", "sliding_window": None},
    files={
        **named(
            "PixtralProcessor", patch_size=14, spatial_merge_size=2, image_token="<|image_pad|>",
            image_break_token="<|video_pad|>", image_end_token="<|vision_end|>",
        ),
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 28, "width": 28},
            "size": {"longest_edge": 448}, **MEAN,
        },
    },
)  # fmt: skip
LLAMA4 = Family(
    "llama4_vl", "Llama 4 with images", "llama4", "Llama4ForConditionalGeneration",
    {
        **IDS, "image_token_id": 648, "image_token_index": 648, "boi_token_index": 646, "eoi_token_index": 647,
        "vision_config": {
            **VISION, "image_size": 56, "patch_size": 14, "pixel_shuffle_ratio": 0.5, "vision_output_dim": 128,
            "projector_input_dim": 128, "projector_output_dim": 128, "intermediate_size": 512,
        },
    },
    text={
        "model_type": "llama4_text", "num_local_experts": EXPERTS, "num_experts_per_tok": 1, "intermediate_size": 128,
        "intermediate_size_mlp": INNER, "interleave_moe_layer_step": 2, "attention_chunk_size": 128,
        "no_rope_layer_interval": 3,
    },
    files={
        **named("Llama4Processor", patch_size=14, pixel_shuffle_ratio=0.5),
        **square(56, "Llama4ImageProcessorFast", max_patches=6, resize_to_max_canvas=False),
    },
)  # fmt: skip
LLAVA = Family(
    "llava", "LLaVA", "llava", "LlavaForConditionalGeneration",
    {
        **IDS, "image_token_id": IMAGE, "image_token_index": IMAGE, "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default", "image_seq_length": 36, "tie_word_embeddings": False,
        "vision_config": {**VISION, "model_type": "clip_vision_model", "image_size": 84, "patch_size": 14,
                          "num_hidden_layers": 3},
    },
    text={"model_type": "llama"}, renamed=SIGLIP,
    files={
        **named(
            "LlavaProcessor", patch_size=14, vision_feature_select_strategy="default", image_token="<|image_pad|>",
            num_additional_image_tokens=1,
        ),
        **square(84, "CLIPImageProcessor", crop_size={"height": 84, "width": 84}),
    },
)  # fmt: skip
INTERNVL = Family(
    "internvl", "InternVL 3", "internvl", "InternVLForConditionalGeneration",
    {
        **IDS, "image_token_id": 645, "image_seq_length": 16, "downsample_ratio": 0.5,
        "vision_config": {**VISION, "model_type": "internvl_vision", "image_size": [112, 112], "patch_size": [14, 14],
                          "use_mean_pooling": True},
    },
    text={"model_type": "qwen2"},
    files={
        **named("InternVLProcessor", image_seq_length=16),
        **square(112, "GotOcr2ImageProcessorFast", crop_to_patches=True, min_patches=1, max_patches=4),
    },
)  # fmt: skip

NAMES = {"image_token": "<|image_pad|>", "boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>"}
LINES = tuple("\n" * count for count in (1, 2, 3, 4))
"""Gemma's tokenizer has these as tokens, and vLLM puts together those beside an image's."""
LLAMA4_TOKENS = ("<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>",
                 "<|tile_y_separator|>")  # fmt: skip
PICTURED = {
    "qwen2_5_vl": Pictured(FAMILIES["qwen2_5_vl"]),
    "qwen3_vl": Pictured(FAMILIES["qwen3_vl"], side=32),
    "qwen3_5": Pictured(FAMILIES["qwen3_5"], side=32),
    "kimi_k25": Pictured(
        FAMILIES["kimi_k25"], "<|vision_start|>image<|media_pad|><|vision_end|>",
        config={"use_unified_vision_chunk": True, "media_placeholder_token_id": 644},
    ),
    "gemma3": Pictured(GEMMA3, "<|vision_start|>", tokens=LINES, names=NAMES, together=True),
    "mistral3": Pictured(MISTRAL3, "<|image_pad|>"),
    "llama4": Pictured(LLAMA4, "<|image|>", tokens=LLAMA4_TOKENS),
    "llava": Pictured(LLAVA, "<|image_pad|>"),
    "internvl": Pictured(
        INTERNVL, "<IMG_CONTEXT>", tokens=("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        names={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
               "video_token": "<video>"},
    ),
}  # fmt: skip
