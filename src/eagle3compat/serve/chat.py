"""Text and conversations as token ids, by the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..adapters.tokenizer import TrustingTokenizer
from ..errors import InputError

RENDERING = ("add_generation_prompt", "continue_final_message", "documents")
"""Fields of a request that the chat template takes as they are."""


class Tokens:
    """The tokenizer of `model_config`, loaded when it is first needed: prompts of token ids need none."""

    def __init__(self, model_config: Any) -> None:
        self._config = model_config
        self._loaded: Any = None

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer

            config = self._config
            try:
                self._loaded = TrustingTokenizer(AutoTokenizer).from_pretrained(
                    config.tokenizer, revision=config.tokenizer_revision, trust_remote_code=config.trust_remote_code
                )
            except (OSError, ValueError, ImportError) as error:
                raise InputError(
                    f"the tokenizer of {config.tokenizer} could not be loaded, so only prompts of token ids are served:"
                    f" {error}"
                ) from error
        return self._loaded

    def of_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._tokenizer()
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is no Unicode: {error.reason} at {error.start}.") from error
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def of_chat(self, body: Mapping[str, Any]) -> list[int]:
        """What `messages` of a request are rendered to, cut as `truncate_prompt_tokens` says. Raises InputError."""
        tokenizer = self._tokenizer()
        options = {name: body[name] for name in RENDERING if body.get(name) is not None}
        options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
        more = body.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise InputError(f"chat_template_kwargs is {more!r}, not an object.")
        options.update(more)
        if body.get("chat_template") is not None or "chat_template" in more:
            raise InputError("chat_template is in the request. A template is a program: only the model's own is used.")
        given = body.get("messages") or []
        if not isinstance(given, list):
            raise InputError(f"messages is {given!r}, not a list.")
        messages = [plain(message, number) for number, message in enumerate(given)]
        if not messages:
            raise InputError("messages is empty: there is nothing to render.")
        try:
            text = tokenizer.apply_chat_template(messages, tools=body.get("tools") or None, tokenize=False, **options)
        except Exception as error:  # a template is the model's code: it raises whatever it likes
            said = f"{type(error).__name__}: {error}"
            raise InputError(f"the chat template cannot render these messages: {said}") from error
        return self.of_text(str(text), bool(body.get("add_special_tokens", False)))


def cut(tokens: list[int], body: Mapping[str, Any], limit: int) -> list[int]:
    """At most `truncate_prompt_tokens` of these, from the side that `truncation_side` leaves. Raises InputError."""
    wanted, side = body.get("truncate_prompt_tokens"), body.get("truncation_side") or "left"
    if wanted is None:
        return tokens
    if type(wanted) is not int or not -1 <= wanted <= limit:
        raise InputError(f"truncate_prompt_tokens is {wanted!r}, not a number of tokens from -1 to {limit}.")
    if side not in ("left", "right"):
        raise InputError(f"truncation_side is {side!r}. Use left (the end stays) or right (the start stays).")
    count = limit if wanted == -1 else wanted
    return tokens[:count] if side == "right" else tokens[max(0, len(tokens) - count) :]


def plain(message: Any, number: int) -> dict[str, Any]:
    """A message whose content is text: parts of text are joined, as vLLM does for templates that take text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"message {number} is no object with a role.", number)
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content]
    for kind in kinds:
        if kind != "text":
            raise InputError(f"message {number} holds a part of type {kind!r}; this server takes text only.", number)
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"message {number} holds a part of type 'text' whose text is no string.", number)
    return {**message, "content": "\n".join(texts)}
