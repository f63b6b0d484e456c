"""Tiny models that take images, which every transformers here reads: `python image_models.py DIR FAMILY [FAMILY ...]`.

They are those of tests/families, with a chat template that takes parts, and with the older names beside the newer ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from image_families import PICTURED

from families.build import build

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['reasoning_content'] %}{{ '(' + message['reasoning_content'] + ')' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "{{ 'IMAGE' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))


def make(name: str, folder: Path) -> None:
    pictured = PICTURED[name]
    build(pictured.family, folder)
    tokens(folder, pictured.tokens)
    template = TEMPLATE.replace("IMAGE", pictured.placeholder)
    names = {"extra_special_tokens": pictured.names} if pictured.names else {}
    change(folder / "tokenizer_config.json", chat_template=template, tokenizer_class="Qwen2Tokenizer", **names)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    rope = text.get("rope_parameters", {})
    if "rope_theta" in rope:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        text.update(rope_theta=rope["rope_theta"], rope_scaling={**scaling, "type": rope["rope_type"]})
    change(folder / "config.json", text_config=text, torch_dtype="bfloat16", **pictured.config)


def tokens(folder: Path, more: tuple[str, ...]) -> None:
    """Add these special tokens to the tokenizer."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(list(more))
    tokenizer.save(str(path))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make(name, Path(sys.argv[1]) / name)
