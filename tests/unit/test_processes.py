"""What the evidence of a family keeps of a log."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from processes import SAID, brief, last_words  # type: ignore[import-not-found]

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nAttributeError: no shape'
NOISE = "(EngineCore pid=7) shutting down\n" * 40


@pytest.mark.parametrize(
    ("log", "kept"),
    [
        (f"{NOISE}{TRACEBACK}\n", f"{NOISE}{TRACEBACK}"[-SAID:]),
        (f"ValueError: first\n{TRACEBACK}\n{NOISE}", f"AttributeError: no shape ... {NOISE.rstrip()[-SAID:]}"),
        (f"vllm.v1.DeadError\n{NOISE}", f"vllm.v1.DeadError ... {NOISE.rstrip()[-SAID:]}"),
        (NOISE, NOISE.rstrip()[-SAID:]),
        (f"ValueError: {'x' * 5000}", f"ValueError: {'x' * 288} ... {'x' * SAID}"),
        ("", ""),
    ],
)
def test_the_last_exception_and_the_last_characters_are_kept(log: str, kept: str) -> None:
    assert last_words(log).endswith(kept)
    assert len(last_words(log)) <= 2 * SAID + 5
    assert ("AttributeError: no shape" in last_words(log)) == ("AttributeError" in log)


def test_a_message_is_kept_from_its_beginning_and_a_traceback_from_its_end() -> None:
    assert brief("head " * 100) == ("head " * 100)[:SAID]
    assert brief(f"the engine failed\n{TRACEBACK}").endswith("AttributeError: no shape")
