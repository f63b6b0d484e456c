"""Prompts with tokens that stand for an image, a video or a sound.

Stock hands vLLM token ids alone. vLLM then computes such a token as if it were a word: it has an embedding, so nothing
fails, and the states from there on are not those of the image. So these prompts are refused before anything is sent.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import InputError

PLACEHOLDER = re.compile(r"(^|_)(im|image|img|video|audio|sound|media|vision|speech)_(\w+_)?(token|patch)_(id|index)$")
"""Names that multimodal configs give to the tokens in whose place vLLM puts what an encoder made."""
log = logging.getLogger("eagle3compat")
_warned: set[str] = set()
EDGE = re.compile(r"(^|_)(start|end|begin|bos|eos|col|sep|newline|break)(_|$)")
"""Of these, the names of tokens around an image, which are computed as words with an image too."""


def media_tokens(config: Any) -> dict[int, str]:
    """Token ids that stand for something else than text, with their names in `config`, a nested dict."""
    return dict(_named(config))


def _named(config: Any) -> Iterator[tuple[int, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif type(value) is int and value >= 0 and PLACEHOLDER.search(name) and not EDGE.search(name):
            yield value, name


ELSEWHERE = (
    "Leave such samples out, or send them as conversations with parts of type image_url to a server: "
    "`eagle3compat serve`, or vLLM's own for speculators 0.7 or later."
)
IN_SERVER = "Send the image as a part of type image_url in messages to /v1/chat/completions, or leave the sample out."


def check_media(
    prompts: Sequence[Sequence[int]],
    model_config: Any,
    images: Sequence[tuple[int, int]] = (),
    remedy: str = ELSEWHERE,
) -> None:
    """Raise InputError for the first prompt that holds such a token; `model_config` is vLLM's ModelConfig.

    Between the places of `images` (the first, and the one after the last) there are images, and such tokens belong.
    Models of which vLLM runs a class for text alone have none: their own forward takes each token for a word.
    """
    if not getattr(model_config, "is_multimodal_model", False):
        return
    names = media_tokens(model_config.hf_config.to_dict())
    if not names and model_config.model not in _warned:
        _warned.add(model_config.model)
        log.warning(
            "eagle3compat: %s takes images or the like, and its config does not name the token that stands for one. A "
            "prompt with such a token is computed as a word, without an error: leave such samples out.",
            model_config.model,
        )
    for index, prompt in enumerate(prompts):
        if names.keys().isdisjoint(prompt):
            continue
        found = [place for place, token in enumerate(prompt) if token in names]
        found = [place for place in found if not any(start <= place < stop for start, stop in images)]
        if not found:
            continue
        place, token = found[0], prompt[found[0]]
        raise InputError(
            f"prompt {index} holds token id {token} at position {place}, which is {names[token]} in the config. "
            "It stands for an image or the like, which token ids do not carry, so its states would be those of a word. "
            f"Nothing was extracted. {remedy}", index,
        )
