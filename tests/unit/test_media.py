"""Prompts with tokens that stand for images are refused by models that would take images."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eagle3compat.engine.media import check_media, media_tokens
from eagle3compat.errors import InputError

QWEN = {
    "image_token_id": 640,
    "video_token_id": 641,
    "vision_start_token_id": 642,
    "vision_end_token_id": 643,
    "bos_token_id": 1,
    "text_config": {"eos_token_id": 2, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (QWEN, {640: "image_token_id", 641: "video_token_id"}),
        ({"image_token_index": 7, "boi_token_index": 8, "mm_tokens_per_image": 9}, {7: "image_token_index"}),
        ({"thinker_config": {"audio_token_index": 5, "audio_start_token_id": 6}}, {5: "audio_token_index"}),
        ({"media_placeholder_token_id": 4}, {4: "media_placeholder_token_id"}),
        ({"image_patch_id": 3, "image_col_id": 2, "low_res_image_start_token_id": 1}, {3: "image_patch_id"}),
        ({"img_context_token_id": 3, "image_token_id": None, "video_token_id": -1}, {3: "img_context_token_id"}),
        ({"image_token": "<image>", "vision_config": {"patch_size": 14, "image_size": 224}}, {}),
    ],
)
def test_the_tokens_that_a_config_names(config: dict[str, Any], tokens: dict[int, str]) -> None:
    assert media_tokens(config) == tokens


def model(multimodal: bool, config: dict[str, Any] = QWEN, name: str = "model") -> Any:
    config_class = SimpleNamespace(to_dict=lambda: config)
    return SimpleNamespace(is_multimodal_model=multimodal, hf_config=config_class, model=name)


def test_a_prompt_with_an_image_token_is_refused_by_name_and_place() -> None:
    says = "prompt 1 holds token id 640 at position 2, which is image_token_id"
    with pytest.raises(InputError, match=says) as caught:
        check_media([[5, 6], [5, 642, 640, 643]], model(True))
    assert caught.value.index == 1


@pytest.mark.parametrize(("multimodal", "prompt"), [(True, [5, 642, 643]), (False, [640])])
def test_others_are_not(multimodal: bool, prompt: list[int]) -> None:
    check_media([prompt], model(multimodal))


def test_within_an_image_they_belong_and_beside_it_they_do_not() -> None:
    prompt = [5, 642, 640, 640, 643, 7]
    check_media([prompt], model(True), [(2, 4)])
    with pytest.raises(InputError, match="token id 640 at position 3"):
        check_media([prompt], model(True), [(2, 3)])


def test_a_model_that_does_not_name_its_token_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        check_media([[5, 6]], model(True, {"vision_config": {}}, "unnamed"))
    (record,) = caplog.records
    assert "unnamed takes images or the like, and its config does not name the token" in record.getMessage()
