"""Tiny models that take images, which every transformers here reads: `python image_models.py DIR FAMILY [FAMILY ...]`.

They are those of tests/families, with a chat template that takes parts, and with the older names beside the newer ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from families.build import build
from families.table import FAMILIES

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}, indent=2))


def make(family: str, folder: Path) -> None:
    build(FAMILIES[family], folder)
    change(folder / "tokenizer_config.json", chat_template=TEMPLATE, tokenizer_class="Qwen2Tokenizer")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    rope = text["rope_parameters"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    text.update(rope_theta=rope["rope_theta"], rope_scaling={**scaling, "type": rope["rope_type"]})
    change(folder / "config.json", text_config=text, torch_dtype="bfloat16")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        make(name, Path(sys.argv[1]) / name)
