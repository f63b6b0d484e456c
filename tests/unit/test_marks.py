"""A model that cannot be captured is refused before it is loaded, where its configuration or class tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eagle3compat.capture.marks import refuse_before_load
from eagle3compat.errors import UnprovenCaptureError


class Plain:
    """A model class that hands out nothing."""


class Handing(Plain):
    def set_aux_hidden_state_layers(self, layers: Any) -> None:
        """Hands out what a draft gets."""


def config(model_class: type = Plain, text: dict[str, Any] | None = None, **more: Any) -> Any:
    registry = SimpleNamespace(resolve_model_cls=lambda names, config: (model_class, names[0]))
    fields: dict[str, Any] = {
        "architectures": ["SomeForCausalLM"],
        "registry": registry,
        "hf_text_config": SimpleNamespace(**text or {}),
        "is_encoder_decoder": False,
        "runner_type": "generate",
    }
    return SimpleNamespace(**{**fields, **more})


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (config(is_encoder_decoder=True), "encoder-decoder"),
        (config(runner_type="pooling"), "pooling model"),
        (config(text={"hc_mult": 4}), "its class Plain does not say which of them a draft model gets"),
        (config(text={"attn_res_block_size": 2}), "several residual streams"),
        (config(text={"hc_mult": 4, "enable_ihc": True}), "several residual streams"),
        (config(text={"hc_mult": 4, "use_fused_mhc": False}), "several residual streams"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name_with_a_way_out(model: Any, says: str) -> None:
    with pytest.raises(UnprovenCaptureError, match=says) as caught:
        refuse_before_load(model)
    assert "SomeForCausalLM" in str(caught.value)
    assert "Nothing was loaded" in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        config(),
        config(text={"hc_mult": None, "attn_res_block_size": 0, "hidden_size": 8}),
        config(Handing, {"hc_mult": 4}),
        config(text={"hc_mult": 4}, registry=None),
        config(text={"hc_mult": 4, "enable_ihc": False}),
        SimpleNamespace(),
    ],
)
def test_what_may_be_captured_is_let_through(model: Any) -> None:
    refuse_before_load(model)
