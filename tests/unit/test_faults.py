"""An exception of a worker reaches the driver with its type, its traceback and the process it came from."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import eagle3compat
from eagle3compat.errors import WorkerError
from eagle3compat.faults import FOLDER, FaultLog, watch_worker

SRC = Path(eagle3compat.__file__).parents[1]


@pytest.fixture
def faults() -> Iterator[FaultLog]:
    log = FaultLog()
    yield log
    log.close()


@pytest.fixture
def worker(faults: FaultLog) -> Iterator[logging.Logger]:
    """This process, watched as a worker that the driver started; its vLLM logger."""
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    with faults.announced():
        watch_worker()
        watch_worker()
    yield logger.getChild("v1.executor")
    assert len(logger.handlers) == len(before) + 1, "watched twice, it records twice"
    logger.handlers[:] = before


def fail(logger: logging.Logger, error: BaseException) -> None:
    """Log an exception as vLLM's worker loop does."""
    try:
        raise error
    except BaseException:
        logger.exception("WorkerProc hit an exception.")


def test_an_exception_that_a_worker_logged_is_the_one_that_is_raised(faults: FaultLog, worker: logging.Logger) -> None:
    fail(worker, AssertionError())
    error = faults.error("extracting", RuntimeError("Worker failed with error ''"))
    assert isinstance(error, WorkerError)
    assert error.type_name == "AssertionError"
    assert error.doing == "extracting"
    assert f"(pid {os.getpid()})" in error.process
    assert "in fail\n    raise error" in error.worker_traceback
    message = str(error)
    assert "failed while extracting: AssertionError: (the exception carries no message)" in message
    assert "Traceback of worker process" in message


def test_without_a_record_the_exception_of_the_call_is_told(faults: FaultLog) -> None:
    error = faults.error("starting the engine", TimeoutError("no reply"))
    assert "the engine failed while starting the engine: TimeoutError: no reply" in str(error)
    dead = faults.error("extracting", EOFError(), "worker process VllmWorker-1 ended with exit code -9")
    assert "VllmWorker-1 ended with exit code -9 while extracting: EOFError: (the exception" in str(dead)
    assert "can no longer be used: make a new one" in str(dead)
    assert "-4 is an instruction that the processor refuses" in str(dead)
    assert "traceback below" not in str(error) + str(dead), "there is none"


def test_a_record_is_told_once(faults: FaultLog, worker: logging.Logger) -> None:
    fail(worker, ValueError("first"))
    assert [entry["message"] for entry in faults.take()] == ["first"]
    assert faults.take() == []
    fail(worker, ValueError("second"))
    assert [entry["message"] for entry in faults.take()] == ["second"]


def test_records_without_an_exception_are_not_kept(faults: FaultLog, worker: logging.Logger) -> None:
    worker.warning("only said")
    worker.error("no exception", exc_info=(None, None, None))
    worker.info("too quiet", exc_info=ValueError("quiet"))
    assert faults.take() == []


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this exception cannot be shown")


def test_an_exception_that_cannot_be_shown_does_not_hide_itself(faults: FaultLog, worker: logging.Logger) -> None:
    fail(worker, SilentError())
    assert [entry["type"] for entry in faults.take()] == ["SilentError"]


def test_text_that_is_not_unicode_arrives(
    faults: FaultLog, worker: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # what pytest captures of a log, xdist sends as UTF-8
        patch.setattr(logging.getLogger(), "handlers", [])
        fail(worker, ValueError("file \udcff, naïve\nsecond line"))
    assert faults.take()[0]["message"] == "file \udcff, naïve\nsecond line"


def test_a_line_that_was_cut_short_is_passed_over(faults: FaultLog, worker: logging.Logger) -> None:
    fail(worker, ValueError("whole"))
    (Path(faults.folder) / "999999.jsonl").write_text('{"process": "VllmWorker-1", "type": "Val')
    assert [entry["message"] for entry in faults.take()] == ["whole"]


def test_the_first_of_several_processes_is_the_one_that_failed_first(faults: FaultLog) -> None:
    code = (
        "import logging, sys; from eagle3compat.faults import watch_worker; watch_worker()\n"
        "try: raise ValueError(sys.argv[1])\n"
        "except ValueError: logging.getLogger('vllm').exception('')\n"
    )
    for name in ("cause", "consequence"):
        environment = {**os.environ, "PYTHONPATH": str(SRC), FOLDER: faults.folder}
        command = [sys.executable, "-c", code, name]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
        time.sleep(0.05)
    first, second = sorted(Path(faults.folder).glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    # Whatever numbers the processes had: the later one sorts first here.
    first.rename(first.with_name("20000.jsonl"))
    second.rename(second.with_name("10000.jsonl"))
    assert [entry["message"] for entry in faults.take()] == ["cause", "consequence"]


def test_other_processes_that_failed_are_named(faults: FaultLog) -> None:
    for rank in (0, 1):
        entry = {"process": f"VllmWorker-{rank}", "pid": rank, "type": "ValueError", "message": "m", "traceback": "t"}
        (Path(faults.folder) / f"{rank}.jsonl").write_text(json.dumps({**entry, "time": rank}) + "\n")
    message = str(faults.error("extracting", RuntimeError()))
    assert "worker process VllmWorker-0 (pid 0), and likewise VllmWorker-1," in message


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (MemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "Lower gpu_memory_utilization"),
        (type("OutOfMemoryError", (RuntimeError,), {})(), "Lower gpu_memory_utilization"),
        (ModuleNotFoundError("No module named 'eagle3compat'"), "Install eagle3compat in the environment"),
        (ValueError("larger than the available KV cache memory"), "Lower max_model_len"),
        (ValueError("something else"), "eagle3compat doctor"),
    ],
)
def test_the_message_says_what_to_do(faults: FaultLog, error: Exception, advice: str) -> None:
    assert advice in str(faults.error("extracting", error))


def test_workers_are_told_the_folder_only_while_they_are_started(faults: FaultLog) -> None:
    with faults.announced():
        assert os.environ[FOLDER] == faults.folder
    assert FOLDER not in os.environ
    with pytest.raises(ZeroDivisionError), faults.announced():
        _ = 1 // 0
    assert FOLDER not in os.environ


def test_a_process_that_no_driver_started_is_left_alone() -> None:
    before = list(logging.getLogger("vllm").handlers)
    assert FOLDER not in os.environ
    watch_worker()
    assert logging.getLogger("vllm").handlers == before


def test_a_worker_that_outlives_its_driver_goes_on(faults: FaultLog, worker: logging.Logger) -> None:
    faults.close()
    fail(worker, ValueError("nobody reads this"))
    assert not Path(faults.folder).exists()


def test_the_folder_goes_with_the_driver() -> None:
    folder = Path(FaultLog().folder)
    assert not folder.exists()
