"""A worker that ended is known to have, with its exit code, as soon as vLLM may know of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from eagle3compat.engine import core


class Process:
    """Ends, as far as its parent can tell, after having been asked for so many times."""

    def __init__(self, sentinel: int, asked: int) -> None:
        self.sentinel, self.asked = sentinel, asked

    def is_alive(self) -> bool:
        self.asked -= 1
        return self.asked >= 0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """What a process holds open as long as it lives: the parent's end and the process's."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_one_that_has_closed_its_files_and_is_not_gone_yet_is_waited_for(pipe: tuple[int, int]) -> None:
    os.close(pipe[1])
    assert core.has_ended(Process(pipe[0], asked=5))


def test_one_that_lives_is_not_waited_for(pipe: tuple[int, int]) -> None:
    process = Process(pipe[0], asked=5)
    assert not core.has_ended(process)
    assert process.asked == 4
    os.close(pipe[1])


def test_one_that_only_closed_its_files_is_waited_for_no_longer_than_that(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "ENDING_SECONDS", 0.05)
    os.close(pipe[1])
    assert not core.has_ended(Process(pipe[0], asked=10**9))
