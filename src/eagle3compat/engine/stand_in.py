"""What the stock generator sees: an executor, a scheduler and requests that lead to the engine core.

Stock drives a scheduler and an executor step by step. Here the scheduler announces one step that holds every request
whole, and executing that step runs the engine core until all are done; so stock's own bookkeeping sees each prompt
computed once, in one piece, in the order in which it was added.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import GeneratorDeadError
from ..patcher import PATCHER
from .core import Engine
from .landed import Joined, Landed
from .transport import Transport, chosen


@dataclass(frozen=True)
class Expectation:
    """What a stock release expects of its executor.

    `assemble` turns the states by request into its answer to `_get_captured_states`; `listed` says whether a reply of
    one rank comes in a list.
    """

    assemble: Callable[[list[str], dict[str, list[Any]]], Any]
    listed: bool


_executors: weakref.WeakSet[Executor] = weakref.WeakSet()


@dataclass
class WholeBatch:
    """Stands in for a SchedulerOutput: every pending request with all its tokens."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class Executor:
    """Stands in for MultiprocExecutor in the stock generator."""

    def __init__(self, vllm_config: Any, kv_share: float, expectation: Expectation) -> None:
        self.layer_ids: list[int] = []
        self.pending: dict[str, Any] = {}
        self.finished: dict[str, Sequence[int]] = {}
        self.landed: dict[int, Landed] = {}
        self.lock = threading.RLock()
        self._expectation = expectation
        choice = chosen()
        self.engine = Engine(vllm_config, kv_share)
        self.transport = Transport(self.engine, choice)
        self._finalizer = weakref.finalize(self, close, self.engine, self.transport)
        atexit.register(self._finalizer)  # before multiprocessing ends the workers, and before modules are taken apart
        _executors.add(self)

    @property
    def vllm_config(self) -> Any:
        return self.engine.vllm_config

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a worker method on every rank; the replies by rank, or one rank's as this stock release expects it."""
        if method == "_reset_capture":  # each batch begins afresh: `execute_model`
            return None
        if method == "_set_request_metadata":  # the worker knows whose rows it computes
            return None
        if method == "_get_captured_states":
            return self._captured()
        if method == "_setup_hidden_states_capture":
            self.layer_ids = list(args[0])
        replies = self.engine.call(method, *args, timeout=timeout, **(kwargs or {}))
        if unique_reply_rank is None:
            return replies
        return [replies[unique_reply_rank]] if self._expectation.listed else replies[unique_reply_rank]

    def execute_model(self, batch: WholeBatch, **_options: Any) -> None:
        """Run every request of `batch` to its end."""
        requests = {request: self.pending.pop(request) for request in batch.num_scheduled_tokens}
        prompts = {name: request.prompt_token_ids for name, request in requests.items()}
        self.transport.begin(prompts, len(set(self.layer_ids)))
        try:
            self.engine.run(requests)
        except BaseException:
            self.transport.abandon()
            raise
        self.finished.update(prompts)

    def sample_tokens(self, _grammar: Any = None, **_options: Any) -> None:
        """Nothing left to do: executing has sampled."""

    def initialize_from_config(self, _kv_cache_configs: Any) -> None:
        """Nothing left to do: the engine core has planned and allocated the KV cache."""

    def shutdown(self) -> None:
        """Stop the workers; a second time, nothing: stock asks for it once more while the interpreter ends."""
        if self._finalizer.alive:
            self._finalizer()
            atexit.unregister(self._finalizer)

    def forget(self) -> None:
        """Drop what an earlier call left behind when it failed."""
        self.pending.clear()
        self.finished.clear()
        self.transport.abandon()
        self.landed = {}

    def _captured(self) -> Any:
        prompts, self.finished = self.finished, {}
        distinct = list(dict.fromkeys(self.layer_ids))
        states = self.transport.collect(prompts)
        self.landed = {id(s.tensor): s for row in states.values() for s in row if isinstance(s, Landed)}
        order = [distinct.index(layer) for layer in self.layer_ids]
        asked = {request: [states[request][index] for index in order] for request in prompts}
        answer = self._expectation.assemble(list(prompts), asked)
        return [answer] if self._expectation.listed else answer


class Scheduler:
    """Stands in for vLLM's Scheduler in the stock generator."""

    def __init__(self, vllm_config: Any, **_options: Any) -> None:
        self._executor = executor_of(vllm_config)

    def add_request(self, request: Any) -> None:
        self._executor.pending[request.request_id] = request

    def schedule(self) -> WholeBatch:
        """All requests added since the last execution. Raises GeneratorDeadError after `revert()`."""
        if not PATCHER.active:
            raise GeneratorDeadError("eagle3compat.revert() was called after it was made.")
        pending = self._executor.pending
        return WholeBatch({name: len(request.prompt_token_ids) for name, request in pending.items()})

    def finish_requests(self, _request_ids: Iterable[str], _status: Any) -> None:
        """Nothing left to do: executed requests have finished."""


@dataclass(frozen=True)
class PlannedCache:
    """Stands in for the KVCacheConfig that stock plans: the engine core's own number of blocks."""

    num_blocks: int


def executor_of(vllm_config: Any) -> Executor:
    """The executor that was started for this configuration."""
    for executor in _executors:
        if executor.vllm_config is vllm_config:
            return executor
    raise LookupError("no executor was started for this VllmConfig: stock's constructor has changed its order")


def by_request(_order: list[str], states: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """A dict of request id to a list of `[len(prompt), hidden_size]`, one a layer."""
    return states


def by_layer(order: list[str], states: dict[str, list[Any]]) -> list[Any]:
    """A list of `[all tokens, hidden_size]`, one a layer, requests in input order."""
    layers = len(next(iter(states.values()), []))
    return [joined([states[request][layer] for request in order]) for layer in range(layers)]


def joined(pieces: list[Any]) -> Any:
    if all(isinstance(piece, Landed) for piece in pieces):
        return Joined(pieces)
    import torch

    return torch.cat([piece.cpu() for piece in pieces])


def close(engine: Engine, transport: Transport) -> None:
    if engine.is_ours:
        engine.shutdown()
        transport.close()


V0_3 = Expectation(by_layer, listed=True)
V0_4 = Expectation(by_request, listed=False)
