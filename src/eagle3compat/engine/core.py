"""vLLM's engine core, in the driver process, over vLLM's multiprocess executor.

The engine core is the highest seam below vLLM's public API at which a request is token ids: it plans the KV cache with
its layout and block sizes, builds the scheduler, runs a step in one phase or in two, and tells the scheduler what was
computed, so that chunks, preemption and any number of sequences are vLLM's own business, in every release.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import multiprocessing.process
import os
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ..capture import EXTENSION
from ..capture.marks import refuse_before_load
from ..errors import GeneratorDeadError, WorkerError, WorkerNotAdaptedError
from ..faults import FaultLog
from ..report import source_digest
from . import preflight
from .capacity import check_capacity
from .queues import close_sockets, message_queues, remove_files, socket_files

log = logging.getLogger("eagle3compat")

PROGRESS_SECONDS = 10.0
SHUTDOWN_SECONDS = 10.0
ENDING_SECONDS = 10.0
IDLE_STEPS = 1000
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _disown_all() -> None:
    for engine in _engines:
        engine.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_all)


class Engine:
    """One engine core with its workers.

    `vllm_config` is a finished VllmConfig; `kv_share` the share of free accelerator memory that the KV cache takes.
    Raises WorkerNotAdaptedError and UnprovenCaptureError before anything is started when the workers would not or could
    not capture, InputError when what they need is not there, and WorkerError when a worker fails to start.
    """

    def __init__(self, vllm_config: Any, kv_share: float) -> None:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        extension = vllm_config.parallel_config.worker_extension_cls
        if extension != EXTENSION:
            raise WorkerNotAdaptedError(
                f"the configuration names {extension or 'no extension'} as the worker's extension, not {EXTENSION}",
                "Something replaced ParallelConfig after eagle3compat.apply(), or the adapter 'capture' is skipped. "
                "Call apply() last, or do not skip it.",
            )

        refuse_before_load(vllm_config.model_config)
        preflight.check(vllm_config, kv_share)
        started: list[Any] = []

        class ExtractionExecutor(MultiprocExecutor):  # type: ignore[misc]
            """Plans KV memory as stock does, through vLLM's own setting for it."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                started.append(self)

            def determine_available_memory(self) -> list[int]:
                figures: list[int] = self.collective_rpc("eagle3compat_available_memory", args=(kv_share,))
                return figures

        self.vllm_config = vllm_config
        self._pid = os.getpid()
        self._dead = ""
        self._faults = FaultLog()
        self._core: Any = None
        self._processes: list[tuple[int, Any]] = []
        self._queues: list[Any] = []
        self._files: set[str] = set()
        self._at_exit: Any = None
        spawn_where_fork_fails()
        with self._faults.announced():
            try:
                self._core = EngineCore(vllm_config, ExtractionExecutor, log_stats=False)
            except BaseException as error:  # Ctrl-C as well
                report = self._faults.error("starting the engine", error)
                for executor in started:  # the engine core failed over workers that run: it would leave them behind
                    self._processes, self._queues = processes_of(executor), message_queues(executor)
                    executor.shutdown()
                self.shutdown()
                if not isinstance(error, Exception):
                    raise
                raise report from error
        _engines.add(self)
        executor = self._core.model_executor
        self._processes, self._queues = processes_of(executor), message_queues(executor)
        self._at_exit = getattr(executor, "_finalizer", None)
        self._attest()

    def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a worker method on every rank; the replies by rank. Raises WorkerError, GeneratorDeadError."""
        self._require_alive()
        try:
            executor = self._core.model_executor
            replies: list[Any] = executor.collective_rpc(method, timeout=timeout, args=args, kwargs=kwargs)
        except Exception as error:
            raise self._failed(f"calling {method}", error) from error
        except BaseException as error:
            self._interrupted(error)
            raise
        return replies

    def run(self, requests: Mapping[str, Any]) -> None:
        """Compute these requests (id to vLLM Request) to the end.

        Raises InputError for a prompt that does not fit into the KV cache before anything is computed.
        After an exception none of them is left in the engine, and the engine is usable or says that it is dead.
        """
        self._require_alive()
        check_capacity(self._core, self.vllm_config, [request.prompt_token_ids for request in requests.values()])
        unfinished = set(requests)
        started = shown = time.monotonic()
        idle = 0
        step = getattr(self._core, "step_fn", self._core.step)
        try:
            for request in requests.values():
                self._core.add_request(request)
            while unfinished:
                outputs, executed = step()
                for output in (item for group in (outputs or {}).values() for item in group.outputs):
                    if output.finish_reason is not None:
                        unfinished.discard(output.request_id)
                idle = 0 if executed else idle + 1
                if idle > IDLE_STEPS:
                    raise RuntimeError(f"vLLM's scheduler no longer schedules {len(unfinished)} unfinished requests")
                now = time.monotonic()
                if now - shown > PROGRESS_SECONDS:
                    shown = now
                    done = len(requests) - len(unfinished)
                    log.info("extracted %d of %d sequences in %.0f s", done, len(requests), now - started)
        except BaseException as error:
            self._abort(sorted(unfinished))
            if not isinstance(error, Exception):
                self._interrupted(error)
                raise
            raise self._failed("extracting", error) from error
        log.debug("extracted %d sequences in %.1f s", len(requests), time.monotonic() - started)

    def shutdown(self) -> None:
        """Stop the workers and release what they hold. No worker outlives it: one that does not end is killed."""
        core, self._core = self._core, None
        self._dead = self._dead or "it was shut down."
        if core is not None:
            core.model_executor.shutdown()
        close_sockets(self._queues)
        if core is not None:
            core.shutdown()
        for _rank, process in self._processes:
            process.join(SHUTDOWN_SECONDS)
            if process.is_alive():
                process.kill()
                process.join(SHUTDOWN_SECONDS)
        remove_files(self._files | socket_files(self._queues))
        self._faults.close()

    def _attest(self) -> None:
        for rank, attestation in enumerate(self.call("eagle3compat_attest")):
            self._files.update(attestation["sockets"])
            if attestation["source"] != source_digest():
                self.shutdown()
                raise WorkerNotAdaptedError(
                    f"rank {rank} runs another copy of eagle3compat than the driver",
                    "Make PYTHONPATH and the environment the same for driver and workers.",
                )

    def _abort(self, requests: Sequence[str]) -> None:
        try:
            self._core.abort_requests(list(requests))
        except Exception as error:  # noqa: BLE001  the first error is the one to report; this one makes the engine unusable
            self._dead = self._dead or f"its requests could not be taken back ({type(error).__name__}: {error})."

    def _failed(self, doing: str, error: Exception) -> WorkerError | GeneratorDeadError:
        """The error to raise for `error`; finds out whether the engine can still be used."""
        gone = self._gone()
        report = self._faults.error(doing, error, "; ".join(gone))
        if gone or getattr(self._core.model_executor, "is_failed", False):
            self._dead = "; ".join(gone) + "." if gone else "its workers have failed."
        elif not self._dead and not self._in_step():
            self._dead = "replies of its workers no longer match the calls."
        if self._dead:
            self.shutdown()
        return report

    def _gone(self) -> list[str]:
        """The worker processes that have ended, each with its exit code."""
        return [
            f"worker process {process.name} (rank {rank}, pid {process.pid}) ended with exit code {process.exitcode}"
            for rank, process in self._processes
            if has_ended(process)
        ]

    def _in_step(self) -> bool:
        """Whether the next reply of every rank belongs to the next call."""
        word = uuid.uuid4().hex
        try:
            replies = self._core.model_executor.collective_rpc("eagle3compat_echo", timeout=60, args=(word,))
        except Exception:  # noqa: BLE001  any failure here means that the answer is no
            return False
        return bool(replies) and all(reply == word for reply in replies)

    def _interrupted(self, error: BaseException) -> None:
        """Ctrl-C, while a worker was at work: nobody has read its reply."""
        self._dead = self._dead or f"a call was interrupted by {type(error).__name__}."
        self.shutdown()

    @property
    def dead(self) -> str:
        """Why it can no longer be used, or nothing; a worker that ended while nothing was asked of it is noticed."""
        return self._dead or "; ".join(self._gone())

    @property
    def is_ours(self) -> bool:
        """Whether this process started the workers, and is not a fork of the one that did."""
        return os.getpid() == self._pid

    def disown(self) -> None:
        """In a fork of the process that started the workers: leave them to it.

        At exit vLLM would stop them, and multiprocessing would end what it takes for this process's children.
        """
        for _rank, process in self._processes:
            getattr(multiprocessing.process, "_children", set()).discard(process)
        if self._at_exit is not None:
            self._at_exit.detach()

    def _require_alive(self) -> None:
        if not self.is_ours:
            raise GeneratorDeadError(f"it belongs to process {self._pid}, of which this one is a fork.")
        if not self._dead and self._gone():  # between two calls
            self._dead = "; ".join(self._gone()) + "."
            self.shutdown()
        if self._dead:
            raise GeneratorDeadError(self._dead)


def processes_of(executor: Any) -> list[tuple[int, Any]]:
    """The worker processes of a MultiprocExecutor, each with its rank."""
    return [(handle.rank, handle.proc) for handle in getattr(executor, "workers", None) or []]


def has_ended(process: Any) -> bool:
    """Whether it has ended, so that its exit code is known.

    One that ends closes its files first, by which vLLM notices, and may have to wait for a processor before it is gone:
    that is waited for.
    """
    deadline = time.monotonic() + ENDING_SECONDS
    while process.is_alive():
        if not multiprocessing.connection.wait([process.sentinel], 0) or time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def spawn_where_fork_fails() -> None:
    """Have vLLM spawn its workers when a forked one could not use CUDA.

    CUDA does not survive a fork once this process has touched it, which `torch.cuda.is_initialized()`, all that vLLM
    asks, need not know: counting devices is enough. So a forked child is asked.
    """
    import torch

    if os.environ.get(START_METHOD, "fork") != "fork" or not hasattr(os, "fork"):
        return
    is_bad = getattr(torch.cuda, "_is_in_bad_fork", bool)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = int(is_bad())
        finally:  # whatever happens, the child must not go on as a second driver
            os._exit(code)
    _pid, status = os.waitpid(child, 0)
    if status != 0:
        log.warning("eagle3compat: CUDA is in use in this process, so workers are spawned (%s=spawn).", START_METHOD)
        os.environ[START_METHOD] = "spawn"
