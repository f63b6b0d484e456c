"""Text and conversations as token ids, by the model's own tokenizer and chat template."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..adapters.tokenizer import TrustingTokenizer
from ..errors import InputError

RENDERING = ("add_generation_prompt", "continue_final_message", "documents")
"""Fields of a request that the chat template takes as they are."""
TokensOf = Callable[[str], list[int]]
IMAGE = "image_url"
"""The type of a part that is an image, as OpenAI has it."""


@dataclass(frozen=True)
class Prompt:
    """Token ids and, for each image in order, what vLLM's encoder takes (MultiModalFeatureSpec)."""

    tokens: list[int]
    features: tuple[Any, ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the images are: the first place of each, and the one after its last."""
        places = [feature.mm_position for feature in self.features]
        return tuple((place.offset, place.offset + place.length) for place in places)


class Renders(Protocol):
    """What is needed of Images."""

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        request: str,
        tokens_of: TokensOf,
        pictured: bool = True,
    ) -> Prompt | None: ...


class Tokens:
    """The tokenizer of `model_config`, loaded when it is first needed: prompts of token ids need none.

    Conversations of a model that takes images are rendered by `images`, where that can.
    """

    def __init__(self, model_config: Any, images: Renders | None = None) -> None:
        self._config, self._images = model_config, images
        self._loaded: Any = None
        self._part_template: bool | None = None
        self._lock = threading.Lock()

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
        with self._lock:  # a tokenizer serves one caller at a time
            return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def of_chat(self, body: Mapping[str, Any], request: str = "") -> Prompt:
        """What `messages` of a request are rendered to; `request` is its id. Raises InputError."""
        options = {name: body[name] for name in RENDERING if body.get(name) is not None}
        options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
        more = body.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise InputError(f"chat_template_kwargs is {more!r}, not an object.")
        for name in ("add_generation_prompt", "continue_final_message"):
            for value in (body.get(name), more.get(name)):
                if value is not None and not isinstance(value, bool):
                    raise InputError(f"{name} is {value!r}, neither true nor false.")
            if None not in (body.get(name), more.get(name)) and body[name] != more[name]:
                raise InputError(f"{name} is {body[name]} in the request and {more[name]} in its chat_template_kwargs.")
        options.update(more)
        if body.get("chat_template") is not None or "chat_template" in more:
            raise InputError("chat_template is in the request. A template is a program: only the model's own is used.")
        given = body.get("messages") or []
        if not isinstance(given, list):
            raise InputError(f"messages is {given!r}, not a list.")
        if not given:
            raise InputError("messages is empty: there is nothing to render.")
        options["tools"] = body.get("tools") or more.get("tools")
        with_images = [number for number, message in enumerate(given) if has_image(message, number)]
        given = [with_reasoning(message) for message in given]
        if with_images:
            refuse_unless_multimodal(self._config, with_images[0])
        if self._images is not None and takes_images(self._config):
            images, tokens_of = self._images, lambda text: self._tokens_of(text, body)
            prompt = images.of_chat(given, options, request, tokens_of, bool(with_images))
            if prompt is not None:
                return prompt
        tokenizer = self._tokenizer()
        if self._part_template is None:
            self._part_template = takes_parts(tokenizer)
        messages = given if self._part_template else [plain(message) for message in given]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # a template is the model's code: it raises whatever it likes
            said = f"{type(error).__name__}: {error}"
            raise InputError(f"the chat template cannot render these messages: {said}") from error
        return Prompt(self._tokens_of(str(text), body))

    def _tokens_of(self, text: str, body: Mapping[str, Any]) -> list[int]:
        """Of a rendered conversation, whose template has put in the special tokens."""
        return self.of_text(text, bool(body.get("add_special_tokens", False)))


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


def has_image(message: Any, number: int) -> bool:
    """Whether a message holds an image. Raises InputError for what is no message of text and images."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"message {number} is no object with a role.", number)
    content = message.get("content")
    if content is None or isinstance(content, str):
        return False
    if not isinstance(content, list):
        raise InputError(f"the content of message {number} is {content!r:.60}, not text or a list of parts.", number)
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", IMAGE):
            says = f"message {number} holds a part of type {kind!r}; this server takes text and images ({IMAGE})."
            raise InputError(says, number)
        if kind == "text" and not isinstance(part.get("text"), str):
            raise InputError(f"message {number} holds a part of type 'text' whose text is no string.", number)
        where = part.get(IMAGE)
        if kind == IMAGE and not (isinstance(where, Mapping) and isinstance(where.get("url"), str) and where["url"]):
            raise InputError(f"message {number} holds a part of type {IMAGE!r} without {IMAGE}.url.", number)
    return any(part["type"] == IMAGE for part in content)


def with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under both of its names.

    Clients and templates have either, and vLLM's renderer takes the newer alone (its server renames the older before).
    """
    said = message.get("reasoning")
    if said is None:
        said = message.get("reasoning_content")
    return dict(message) if said is None else {**message, "reasoning": said, "reasoning_content": said}


def takes_images(model_config: Any) -> bool:
    return bool(getattr(model_config, "is_multimodal_model", False))


def refuse_unless_multimodal(model_config: Any, number: int) -> None:
    """Raise InputError for message `number`, which holds an image, if the model takes none."""
    if not takes_images(model_config):
        raise InputError(
            f"message {number} holds a part of type {IMAGE!r}, and vLLM runs {model_config.model} for text only. Leave "
            "images out.", number,
        )  # fmt: skip


def asks_for_images(body: Mapping[str, Any]) -> bool:
    """Whether one of a request's messages, whatever else they are, holds an image."""
    messages = body.get("messages")
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") == IMAGE for part in parts)


def takes_parts(tokenizer: Any) -> bool:
    """Whether the chat template goes through the parts of a message, and does not write them down as they are."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    except Exception:  # noqa: BLE001  a template is the model's code; that it cannot take parts is the answer
        return False
    return "one" in text and "two" in text and "'type'" not in text and '"type"' not in text


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of text: its parts are joined, as vLLM does for templates that take text."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    return {**message, "content": "\n".join(part["text"] for part in content)}
