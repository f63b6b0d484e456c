"""What tells, before a model is loaded, that its hidden states cannot be captured, or only as vLLM hands them out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import UnprovenCaptureError

SETTER = "set_aux_hidden_state_layers"
"""What a vLLM model has that can hand out hidden states to an EAGLE-3 draft."""
MARK = re.compile(r"(^|_)m?hc(_|$)|hyper_?connection|attn_res(_|$)")
"""Names that models with several residual streams give to the parts and settings of their streams."""
SWITCH = re.compile(r"^(enable|use)_(i?hc|hyper_?connections?|attn_res)$")
"""Names of settings without which such a model has one stream, whatever else its configuration says (HY-V4)."""

SERVER = "Nothing was loaded. Use speculators' server path (0.5 or later)"


def marked(names: Mapping[str, Any]) -> bool:
    """Whether one of these names tells of several residual streams, and is set."""
    return any(MARK.search(name) and _is_set(value) for name, value in names.items())


def _is_set(value: Any) -> bool:
    return bool(value) if isinstance(value, (bool, int, float)) else value is not None


def refuse_before_load(model_config: Any) -> None:
    """Raise UnprovenCaptureError for a model of which configuration and class alone tell that it cannot be captured.

    `model_config` is vLLM's ModelConfig.
    """
    name = ", ".join(getattr(model_config, "architectures", None) or ["this model"])
    if getattr(model_config, "is_encoder_decoder", False):
        raise UnprovenCaptureError(
            name, "it is an encoder-decoder model, and EAGLE-3 drafts are for decoders", f"{SERVER}, if that takes it."
        )
    runner = getattr(model_config, "runner_type", "generate")
    if runner not in ("generate", "draft"):
        raise UnprovenCaptureError(
            name, f"vLLM runs it as a {runner} model, which generates no text", "Nothing was loaded. Check the model."
        )
    names = getattr(getattr(model_config, "hf_text_config", None), "__dict__", {})
    off = any(SWITCH.search(name) and value is False for name, value in names.items())
    if marked(names) and not off:
        model_class = class_of(model_config)
        if model_class is not None and not hasattr(model_class, SETTER):
            raise UnprovenCaptureError(
                name,
                f"it carries several residual streams, and its class {model_class.__name__} does not say which of them "
                "a draft model gets",
                f"{SERVER}, or a vLLM whose model of this name feeds EAGLE-3 drafts.",
            )


def class_of(model_config: Any) -> type | None:
    """The class by which vLLM would load this model; None where it does not tell."""
    resolve = getattr(getattr(model_config, "registry", None), "resolve_model_cls", None)
    if resolve is None:
        return None
    found: type = resolve(model_config.architectures, model_config)[0]
    return found
