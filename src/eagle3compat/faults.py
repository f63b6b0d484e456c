"""Brings an exception of a worker process to the user, with its type, its traceback and the process it came from.

vLLM reports a worker's exception to the driver as `str(exception)`, which is empty for an assertion, and a failed start
as "see stack trace". Both are logged in the worker with the exception attached. So each worker writes what its vLLM
logger records with an exception to a folder that the driver made, and the driver reads it when a call fails.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import WorkerError

FOLDER = "_EAGLE3COMPAT_FAULTS"
REMEDIES = (
    ("OutOfMemoryError", "Lower gpu_memory_utilization, max_num_batched_tokens or the batch size, or use more GPUs."),
    ("out of memory", "Lower gpu_memory_utilization, max_num_batched_tokens or the batch size, or use more GPUs."),
    ("No module named 'torchvision'", "Install torchvision, the build that belongs to your torch."),
    ("No module named 'eagle3compat'", "Install eagle3compat in the environment that the workers run in."),
    ("MLA is not supported on CPU", "Set VLLM_MLA_DISABLE=1: the CPU build runs DeepSeek models without MLA."),
    ("KV cache", "Lower max_model_len or raise gpu_memory_utilization (VLLM_CPU_KVCACHE_SPACE on CPU)."),
    ("UnprovenCaptureError", "The reason and the remedy are above."),
)
GENERAL = "The cause is in the traceback below; `eagle3compat doctor` shows what is installed."
UNEXPLAINED = "`eagle3compat doctor` shows what is installed; what the worker printed may say more."
GONE = (
    "The generator can no longer be used: make a new one; results returned earlier are intact. Exit code -9 is most "
    "often the kernel's, when host memory runs out; -4 is an instruction that the processor refuses: vLLM alone dies "
    "of it too (in bf16 on a CPU with AMX, of a step of few tokens), so try another dtype; 0 comes after Ctrl-C, which "
    "a terminal sends to workers as well."
)


class _Recorder(logging.Handler):
    """Writes each record that carries an exception as one JSON line."""

    def __init__(self, folder: str) -> None:
        super().__init__(logging.WARNING)
        self._path = Path(folder) / f"{os.getpid()}.jsonl"

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info or record.exc_info[1] is None:
            return
        error = record.exc_info[1]
        entry = {
            "time": record.created,
            "process": multiprocessing.current_process().name,
            "pid": os.getpid(),
            "type": type(error).__name__,
            "message": _message(error),
            "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
        }
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError:  # the driver removed the folder: it is gone, nobody reads this any more
            return


def tell_driver(error: BaseException) -> None:
    """In a process that a driver of this library started: have the driver show this error. Elsewhere: nothing."""
    folder = os.environ.get(FOLDER)
    if folder:
        trace = (type(error), error, error.__traceback__)
        _Recorder(folder).emit(logging.LogRecord("eagle3compat", logging.ERROR, "", 0, "", None, trace))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as fault:  # noqa: BLE001  raised here, it would hide the exception that is to be shown
        return f"(its message cannot be shown: {type(fault).__name__})"


def watch_worker() -> None:
    """In a worker that a driver of this library started: record exceptions that vLLM logs. Elsewhere: nothing."""
    folder = os.environ.get(FOLDER)
    logger = logging.getLogger("vllm")
    if folder and not any(isinstance(handler, _Recorder) for handler in logger.handlers):
        logger.addHandler(_Recorder(folder))


class FaultLog:
    """The driver's side: the folder, and what workers wrote there."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="eagle3compat-")
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @contextmanager
    def announced(self) -> Iterator[None]:
        """While workers are started: tell them the folder through the environment that they inherit."""
        os.environ[FOLDER] = self.folder
        try:
            yield
        finally:
            os.environ.pop(FOLDER, None)

    def take(self) -> list[dict[str, Any]]:
        """What was written since the last call, oldest first."""
        entries = []
        for path in sorted(Path(self.folder).glob("*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    entries.append(json.loads(line))
                except json.JSONDecodeError:  # the worker ended while it wrote this line
                    continue
            path.unlink()
        return sorted(entries, key=lambda entry: float(entry["time"]))

    def error(self, doing: str, raised: BaseException, dead: str = "") -> WorkerError:
        """The error to raise for `raised`, which a call into the workers ended with.

        `dead` describes worker processes that are no longer alive.
        """
        entries = self.take()
        if entries:
            first = entries[0]
            others = sorted({entry["process"] for entry in entries} - {first["process"]})
            process = f"worker process {first['process']} (pid {first['pid']})"
            if others:
                process += f", and likewise {', '.join(others)},"
            kind, message, trace = first["type"], first["message"], first["traceback"]
        else:
            process = dead or "the engine"
            kind, message, trace = type(raised).__name__, str(raised), ""
        text = f"{kind} {message} {raised}"
        usual = GENERAL if trace else GONE if dead else UNEXPLAINED
        remedy = next((advice for word, advice in REMEDIES if word in text), usual)
        return WorkerError(doing, kind, message, trace, process, remedy, ended=bool(dead) and not entries)

    def close(self) -> None:
        self._finalizer()
