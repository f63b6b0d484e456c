"""Closes the message queues of an executor that has shut down, and removes the files of their sockets.

vLLM leaves their ZeroMQ sockets to the garbage collector. Once a worker has raised, the exception, its traceback and
vLLM's future form a cycle that holds them, and collecting a cycle destroys a ZeroMQ context before its sockets, which
waits for ever (seen on vLLM 0.25.1, whose EngineCore.shutdown collects).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

IPC = "ipc://"


def message_queues(executor: Any) -> list[Any]:
    """Every message queue of a MultiprocExecutor and of its handles on workers."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    holders = [executor, *(getattr(executor, "workers", None) or [])]
    values = [value for holder in holders for value in vars(holder).values()]
    spread = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [item for item in spread if isinstance(item, MessageQueue)]


def close_sockets(queues: list[Any]) -> None:
    """Close their sockets at once; what was not delivered has nobody left to read it."""
    for queue in queues:
        for socket in _sockets(queue):
            socket.close(linger=0)


def socket_files(queues: Iterable[Any]) -> set[str]:
    """The files to which the sockets of these queues are bound, by whichever process: vLLM names each by a random id.

    One queue has one or two (a second to wake its readers, in later releases), for readers on this machine.
    """
    handles = [vars(queue.handle) for queue in queues if getattr(queue, "handle", None) is not None]
    return {
        value.removeprefix(IPC) for handle in handles for value in handle.values()
        if isinstance(value, str) and value.startswith(IPC)
    }


def remove_files(files: Iterable[str]) -> None:
    """Remove these files if they are sockets: ZeroMQ leaves them where they were."""
    for file in files:
        with suppress(FileNotFoundError):  # somebody has tidied up
            if stat.S_ISSOCK(os.lstat(file).st_mode):
                os.remove(file)


def _sockets(queue: Any) -> Iterator[Any]:
    import zmq

    for value in vars(queue).values():
        if isinstance(value, zmq.Socket):
            yield value
        elif type(value).__module__ == type(queue).__module__:  # such as vLLM's SpinCondition
            yield from (inner for inner in vars(value).values() if isinstance(inner, zmq.Socket))
