"""Holds a server's answer until the file that it names is whole.

vLLM's connector writes the file in another thread, at the earliest while the answer is under way, and holds an
exclusive lock on a file beside it meanwhile (example_hidden_states_connector.py, since vLLM 0.22). A client of
speculators 0.5 does not know of that lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ..errors import IncompleteFileError
from ..header import HeaderError, read_header

POLL_SECONDS = 0.005
_MARK = "_eagle3compat"


def hold(locked: bool) -> bool:
    """Have the engine of this process hold its answers; False if it does so already. `locked` is `settled`'s."""
    from vllm.v1.engine.async_llm import AsyncLLM

    if hasattr(AsyncLLM.generate, _MARK):
        return False
    AsyncLLM.generate = holding(AsyncLLM.generate, locked)
    return True


def holding(original: Callable[..., Any], locked: bool = True) -> Callable[..., Any]:
    """`original`, an async generator of outputs, with the last output of a request held."""

    @functools.wraps(original)
    async def generate(self: Any, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async with aclosing(original(self, *arguments, **options)) as outputs:
            async for output in outputs:
                path = (getattr(output, "kv_transfer_params", None) or {}).get("hidden_states_path")
                if path is not None and output.finished:
                    await settled(path, locked)
                yield output

    setattr(generate, _MARK, original)
    return generate


async def settled(path: str, locked: bool = True) -> None:
    """Return when the file is whole, without its lock.

    `locked` says that this vLLM's connector locks a file until it is written: one without a lock is not waited for, as
    the user may switch locks off. Others have written it before the answer.
    Raises IncompleteFileError if the lock is let go and the file is not whole: its writer failed, or its process
    ended. What there is of the file is then removed.
    """
    if not locked:
        _refuse_incomplete(path)
        return
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        while not _free(lock):
            await asyncio.sleep(POLL_SECONDS)
        os.remove(f"{path}.lock")
    finally:
        os.close(lock)
    _refuse_incomplete(path)


def _refuse_incomplete(path: str) -> None:
    if not is_whole(path):
        if os.path.exists(path):
            os.remove(path)
        raise IncompleteFileError(path)


def _free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_whole(path: str) -> bool:
    """Whether a safetensors file is there, and as long as its header says."""
    try:
        read_header(Path(path))
    except (OSError, HeaderError):  # absent, or cut short
        return False
    return True
