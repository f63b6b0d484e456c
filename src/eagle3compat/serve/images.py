"""Conversations with images as token ids and what vLLM's encoder takes, by vLLM's own input processing.

What is fetched from where, the chat template, how many tokens stand for an image, and what the image's processor makes
of it are vLLM's: its renderer and its input processor do what they do in its own server (seen in vLLM 0.16 to 0.32,
`vllm/renderers/base.py` and `vllm/v1/engine/input_processor.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..adapters.request import parameters
from ..errors import InputError
from .chat import Prompt, TokensOf

REMEDY = "Leave images out, or serve with a vLLM that has it, as releases from 0.16 on do."


class Images:
    """Renders conversations with images, for several threads; vLLM's processor is made when the first one comes."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._made: Any = None
        self._making, self._processing = threading.Lock(), threading.Lock()

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        request: str,
        tokens_of: TokensOf,
        pictured: bool = True,
    ) -> Prompt | None:
        """The prompt of these messages, `options` being what the chat template takes and `request` its id.

        Its tokens stand for the images too. Those of text alone (`pictured` is False) are rendered alike, because the
        processor of a model may have another template than its tokenizer; None where this vLLM has no renderer.
        Raises InputError for what this vLLM, the model or its processor refuses.
        """
        try:
            try:
                with self._making:
                    processor, chat_params = self._parts()
            except InputError:
                if pictured:
                    raise
                return None
            text = is_of_transformers(processor.renderer.get_tokenizer())
            params = chat_params(chat_template_kwargs={**options, "tokenize": not text})
            _conversation, rendered = processor.renderer.render_messages(list(messages), params)  # fetches the images
            if "prompt_token_ids" not in rendered:
                rendered = {**rendered, "prompt_token_ids": tokens_of(rendered["prompt"])}
            if not pictured:
                return Prompt(list(rendered["prompt_token_ids"]))
            rendered.pop("prompt", None)  # what it was tokenized to is computed, and not the text once more
            return self._processed(processor, rendered, request)
        except InputError:
            raise
        except Exception as error:  # fetching, decoding, a model's template and processor raise whatever they like
            said = f"{type(error).__name__}: {error}"
            what = "these messages with images cannot be taken" if pictured else "these messages cannot be rendered"
            raise InputError(f"{what}: {said}") from error

    def _processed(self, processor: Any, rendered: dict[str, Any], request: str) -> Prompt:
        from vllm import SamplingParams

        one = SamplingParams(max_tokens=1, temperature=0.0)
        with self._processing:  # the model's image processor is made for one caller at a time
            if hasattr(processor.renderer, "process_for_engine"):  # else the processor does what that would
                rendered = processor.renderer.process_for_engine(rendered, time.time())
            made = processor.process_inputs(request, rendered, one, supported_tasks=("generate",))
        return Prompt(list(made.prompt_token_ids), tuple(made.mm_features or ()))

    def _parts(self) -> tuple[Any, Any]:
        """vLLM's input processor, which is made once, and the class of what its renderer takes."""
        try:
            from vllm.renderers.params import ChatParams
            from vllm.v1.engine.input_processor import InputProcessor
            from vllm.v1.request import Request
        except ImportError as error:
            raise InputError(f"this vLLM does not have what images need ({error}). {REMEDY}") from error
        if "mm_features" not in parameters(Request):
            raise InputError(f"vllm.v1.request:Request of this vLLM takes no mm_features, which images need. {REMEDY}")
        if self._made is None:
            self._made = InputProcessor(self._config)
        if not hasattr(getattr(self._made, "renderer", None), "render_messages"):
            raise InputError(f"the input processor of this vLLM has no renderer, which images need. {REMEDY}")
        return self._made, ChatParams


def is_of_transformers(tokenizer: Any) -> bool:
    """Whether a rendered conversation is text that this tokenizer makes tokens of.

    One of vLLM's own (Mistral's) makes tokens as it renders, so that what a user writes never becomes a control token.
    """
    from transformers import PreTrainedTokenizerBase

    return isinstance(tokenizer, PreTrainedTokenizerBase)
