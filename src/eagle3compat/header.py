"""The header of a safetensors file: 8 bytes that say its length, then JSON. Nothing else of the file is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LONGEST = 100_000_000
"""Bytes of a header that safetensors takes (its `MAX_HEADER_SIZE`)."""


class HeaderError(ValueError):
    """The file is none, or is cut short; the message says why."""


def read_header(path: Path) -> dict[str, Any]:
    """The header's entries by tensor name, and `__metadata__`. Raises OSError, and HeaderError also for a file that
    is shorter or longer than its header says."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise HeaderError("it is no regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST):
            raise HeaderError("it is cut short, or no safetensors file")
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise HeaderError("its header is no header of safetensors") from None
    if size != whole:
        raise HeaderError(f"it has {size:,} bytes of the {whole:,} that its header says")
    return header
