"""Closes the message queues of an executor that has shut down.

vLLM leaves their ZeroMQ sockets to the garbage collector. Once a worker has raised, the exception, its traceback and
vLLM's future form a cycle that holds them, and collecting a cycle destroys a ZeroMQ context before its sockets, which
waits for ever (seen on vLLM 0.25.1, whose EngineCore.shutdown collects).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


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


def _sockets(queue: Any) -> Iterator[Any]:
    import zmq

    for value in vars(queue).values():
        if isinstance(value, zmq.Socket):
            yield value
        elif type(value).__module__ == type(queue).__module__:  # such as vLLM's SpinCondition
            yield from (inner for inner in vars(value).values() if isinstance(inner, zmq.Socket))
