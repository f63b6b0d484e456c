"""Conversations with images: pictures of random pixels beside words, in steps so small that images are split."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from pathlib import Path
from typing import Any

CHUNKS = ["--max-num-batched-tokens", "128", "--long-prefill-token-threshold", "20", "--max-num-seqs", "4"]
"""At most 20 tokens of a prompt in a step of several: images have more."""
Picture = tuple[int, int, int]
"""Width and height in tokens, and the seed of its pixels."""


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ASKED: list[list[Any]] = [
    [text("In the morning the harbour is quiet.")],  # the first batch, which proves, has no image
    [text("How many were there?"), (4, 6, 1), text("And today?")],
    [text("How many were there?"), (4, 6, 2), text("And today?")],  # as the one before, with another image
    [(7, 5, 3)],
    [(3, 2, 4), text("The boats come in with the tide"), (5, 4, 5), text("and the nets are dry by noon.")],
    [text("To make bread you need flour, water, salt and time.")],
]
ALIKE = (1, 2)
"""Conversations of one length that differ in an image."""


def png(picture: Picture, side: int) -> bytes:
    """A picture of random pixels, `side` of them for a token: pictures of whole tokens are not resized."""
    width, height, seed = picture[0] * side, picture[1] * side, picture[2]
    source = random.Random(seed)
    lines = b"".join(b"\0" + source.randbytes(3 * width) for _ in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def image(picture: Picture, side: int) -> dict[str, Any]:
    data = base64.b64encode(png(picture, side)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def conversation(parts: list[Any], side: int) -> list[dict[str, Any]]:
    """As prepare-data of stock sends one: parts, and an answer."""
    content = [image(part, side) if isinstance(part, tuple) else part for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "Seventeen, and one."}]


def pictures(parts: list[Any], family: str, side: int, folder: Path) -> list[str]:
    """Paths of a conversation's pictures in their order, as image_reference.py reads them."""
    found = [part for part in parts if isinstance(part, tuple)]
    paths = [folder / f"{family}-{picture[2]}.png" for picture in found]
    for path, picture in zip(paths, found, strict=True):
        path.write_bytes(png(picture, side))
    return list(map(str, paths))
