"""What stock's capture loop does by itself in each family, read from the source of vLLM 0.16.0, 0.24.0 and 0.33.0.

Stock replaces the forward of the model by a loop over its layers. This is about that loop alone: whether the generator
gets as far depends on the release, and on most it does not (docs/adapters.md).
"""

from __future__ import annotations

RELEASES = ((0, 16), (0, 24), (0, 33))
SAME = ("right",) * 3
RAISES = ("raises",) * 3
DIFFERS = ("silently wrong",) * 3
NO_PLAN = ("raises (KV cache plan)",) * 3

READ: dict[str, tuple[str, str, str]] = {
    "llama": SAME,
    "qwen2": SAME,
    "qwen3": SAME,
    "mistral": SAME,
    "phi3": SAME,
    "ernie4_5": SAME,
    "ernie4_5_moe": SAME,
    "qwen3_moe": SAME,
    "glm4_moe": SAME,
    "gpt_oss": SAME,
    "llama4": SAME,
    "minimax": SAME,
    "gemma3": SAME,
    "gemma2": ("silently wrong", "right", "right"),
    "gemma4": ("no such model", "raises", "raises"),
    "olmo2": RAISES,
    "granite": RAISES,
    "transformers": RAISES,
    "minimax_m3": ("no such model", *("right on one GPU, silently wrong on more",) * 2),
    "step3p5": RAISES,
    "cohere": DIFFERS,
    "exaone4": DIFFERS,
    "granitemoehybrid": DIFFERS,
    "deepseek_v2": SAME,
    "deepseek_v3": SAME,
    "kimi_k25": SAME,
    "mistral_large_3": DIFFERS,
    "deepseek_v32": NO_PLAN,
    "qwen3_next": NO_PLAN,
    "qwen3_5": NO_PLAN,
    "kimi_linear": ("raises (KV cache plan)", "raises (KV cache plan)", "raises"),
    "nemotron_h": RAISES,
    "nemotron_h_dense": RAISES,
    "qwen2_5_vl": SAME,
    "qwen3_vl": ("right for text",) * 3,
    "deepseek_v4": ("no such model", "raises", "raises"),
}


def outcome(family: str, vllm: str) -> str:
    """What was read for the release nearest to `vllm`."""
    here = tuple(int(part) for part in vllm.split(".")[:2])
    nearest = min(range(len(RELEASES)), key=lambda index: abs(RELEASES[index][1] - here[1]) + 1000 * here[0])
    return READ[family][nearest]
