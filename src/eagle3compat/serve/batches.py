"""Requests that wait are computed together, in one run of the engine, and each gets a file."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import Eagle3CompatError
from .files import Folder


class StoppingError(Eagle3CompatError, RuntimeError):
    """The server ends before a request was computed."""

    def __init__(self) -> None:
        super().__init__("eagle3compat: the server is stopping, and this request was not computed. Send it later.")


class Extracts(Protocol):
    """What is needed of an Extractor."""

    step_tokens: int

    @property
    def dead(self) -> str: ...

    def extract(self, prompts: dict[str, list[int]], features: dict[str, Sequence[Any]]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Job:
    """One request: `name` is its id and its file's, `path` the file once that is whole, `features` are its images."""

    name: str
    tokens: list[int]
    features: Sequence[Any] = ()
    path: Future[Path] = field(default_factory=Future)


class Batches:
    """One thread that drives the engine, and a few that write.

    A batch is what waits, up to the tokens of one step of the engine: more would only wait longer for an answer. While
    a batch is computed the one before it is written, so the states of two are in memory. `on_death` is called when the
    engine can no longer be used.
    """

    def __init__(self, extractor: Extracts, folder: Folder, writers: int, on_death: Callable[[], None]) -> None:
        self._extractor, self._folder, self._on_death = extractor, folder, on_death
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._held: Job | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="eagle3compat-writer")
        self._thread = threading.Thread(target=self._work, name="eagle3compat-engine", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Have it computed. Its future may be cancelled while it waits. Raises StoppingError."""
        with self._lock:
            if self._closed:
                raise StoppingError
            self._waiting.put(job)

    def close(self, seconds: float) -> bool:
        """Take nothing new, and wait for the batch that is being computed; whether it ended."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._writers.shutdown()
        return True

    def _work(self) -> None:
        writing: list[Future[None]] = []
        while not self._closed:
            batch = [job for job in self._next() if job.path.set_running_or_notify_cancel()]
            if not batch:
                continue
            results = self._extracted(batch)
            wait(writing)
            writing = [self._writers.submit(self._finish, job, result) for job, result in results]
            if self._extractor.dead:
                wait(writing)
                self._closed = True
                self._on_death()
        with self._lock:  # who has put something by now is answered, and nobody puts anything later
            left = [self._held]
            while not self._waiting.empty():
                left.append(self._waiting.get())
        for job in left:
            if job is not None and job.path.set_running_or_notify_cancel():
                job.path.set_exception(StoppingError())

    def _next(self) -> list[Job]:
        """What waits, in order, up to a step's tokens; waits for the first."""
        first = self._held or self._waiting.get()
        self._held = None
        if first is None:
            return []
        batch, tokens = [first], len(first.tokens)
        while True:
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                return batch
            if job is None or tokens + len(job.tokens) > self._extractor.step_tokens:
                self._held = job
                return batch
            batch.append(job)
            tokens += len(job.tokens)

    def _extracted(self, batch: Sequence[Job]) -> list[tuple[Job, Any]]:
        """Each job with its tensors or its error. A batch that fails is run again, one by one: one may be at fault."""
        try:
            features = {job.name: job.features for job in batch if job.features}
            results = self._extractor.extract({job.name: job.tokens for job in batch}, features)
        except Exception as error:  # noqa: BLE001  the requests are answered with it, and the next ones are served
            if len(batch) == 1 or self._extractor.dead:
                return [(job, error) for job in batch]
            return [pair for job in batch for pair in self._extracted([job])]
        return [(job, results[job.name]) for job in batch]

    def _finish(self, job: Job, result: Any) -> None:
        if isinstance(result, Exception):
            job.path.set_exception(result)
            return
        try:
            job.path.set_result(self._folder.write(job.name, result))
        except Exception as error:  # noqa: BLE001  the request is answered with it
            job.path.set_exception(error)
