"""The files of vLLM's sockets: those of an executor's own queues are removed, and no others."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3compat.engine.queues import remove_files, socket_files


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path: a socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def bound(file: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(file))
    return file


def queue(**addresses: Any) -> Any:
    return SimpleNamespace(handle=SimpleNamespace(local_reader_ranks=[0], buffer_handle=(1, 2, 3, "psm"), **addresses))


def test_files_are_those_that_handles_name() -> None:
    queues = [
        queue(local_subscribe_addr="ipc:///tmp/a", local_notify_addr="ipc:///tmp/b", remote_subscribe_addr=None),
        queue(local_subscribe_addr="ipc:///tmp/a", remote_subscribe_addr="tcp://10.0.0.1:5555"),
        queue(local_subscribe_addr=None), None, SimpleNamespace(), SimpleNamespace(handle=None),
    ]  # fmt: skip
    assert socket_files(queues) == {"/tmp/a", "/tmp/b"}


def test_only_these_sockets_are_removed(place: Path) -> None:
    ours, another, text = bound(place / "ours"), bound(place / "another"), place / "text"
    text.write_text("no socket")
    remove_files(map(str, (ours, text, place / "gone")))
    assert sorted(place.iterdir()) == [another, text]
