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
        (f"{NOISE}{TRACEBACK}\n", "AttributeError: no shape"),
        (f"ValueError: first\n{TRACEBACK}\n{NOISE}", "AttributeError: no shape"),
        (f"vllm.v1.DeadError\n{NOISE}", "vllm.v1.DeadError"),
        (f"(EngineCore pid=7) ERROR 11-30 05:28:54 [core.py:9] KeyError: 'x'\n{NOISE}", "KeyError: 'x'"),
        (NOISE, "shutting down"),
        ("", ""),
    ],
)
def test_the_line_of_the_last_exception_is_kept_alone(log: str, kept: str) -> None:
    assert last_words(log) == kept


def test_a_long_line_is_cut_at_the_end_of_a_word() -> None:
    kept = last_words(f"ValueError: {'word ' * 500}")
    assert len(kept) <= SAID
    assert kept.endswith("word ...")
    assert len(last_words("x" * 5000)) == SAID


def test_of_a_message_the_cause_is_kept_on_one_line() -> None:
    message = f"worker process VllmWorker-0 (pid 9664) failed: KeyError: 'x'\nThe cause is below.\n\n{TRACEBACK}"
    assert brief(message) == "worker process VllmWorker-0 failed: KeyError: 'x'"
    assert brief("\n1 error in ModelConfig\n  no such model") == "1 error in ModelConfig no such model"
