"""Files of hidden states, laid out as vLLM's ExampleHiddenStatesConnector does (vLLM 0.32).

`NAME.safetensors` holds `token_ids` `[T]` and `hidden_states` `[T, layers, hidden_size]`; beside it lies an empty
`NAME.safetensors.lock`, held (flock) by the writer until the file is whole. Files are written in a hidden folder of the
server's own and moved when they are whole, so nothing ever has a final name and is not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import Eagle3CompatError, InputError

SUFFIX, LOCK, SCRATCH = ".safetensors", ".lock", ".eagle3compat-"
READABLE = 0o644
"""Mode of a file, as of the connector's locks: safetensors 0.8 makes files for its own user alone."""


class WriteError(Eagle3CompatError, OSError):
    """A file could not be written; nothing is left of it."""

    def __init__(self, path: Path, error: Exception) -> None:
        self.path = path
        super().__init__(
            f"eagle3compat: {path} could not be written: {type(error).__name__}: {error}. Nothing is left of it. "
            "Free space in that folder, or look at its permissions, and send the request again."
        )


class Folder:
    """Where files go, until `close`. With `lock` a lock file stays beside each, which the client takes away.

    What killed servers left half written there is removed, and counted in `swept`.
    Raises InputError where files cannot be written.
    """

    def __init__(self, path: Path, lock: bool) -> None:
        self.path, self._keep_lock = path, lock
        self._open = ExitStack()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.swept = sweep(path)
            self._scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=path))
            self._open.enter_context(held(lock_of(self._scratch / "server")))
        except OSError as error:
            raise InputError(f"files cannot be written to {path}: {error}. Pass another folder.") from error

    def write(self, name: str, tensors: Mapping[str, Any]) -> Path:
        """Write one file; it is whole when its path is returned. Raises WriteError."""
        from safetensors.torch import save_file

        path, part = self.path / f"{name}{SUFFIX}", self._scratch / name
        try:
            save_file(dict(tensors), part)
            part.chmod(READABLE)
            with held(lock_of(path)):
                part.rename(path)
            if not self._keep_lock:
                lock_of(path).unlink()
        except Exception as error:  # safetensors has an exception of its own for a full disk
            with suppress(OSError):  # where the folder itself is gone, nothing is left of the file either
                part.unlink(missing_ok=True)
                lock_of(path).unlink(missing_ok=True)
            raise WriteError(path, error) from error
        return path

    def close(self) -> None:
        """Nothing is being written any more."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._open.close()


def sweep(path: Path) -> int:
    """Remove what nobody holds: folders of killed servers, and locks whose file is gone; how many there were."""
    scratch = {folder: lock_of(folder / "server") for folder in path.glob(f"{SCRATCH}*")}
    locks = [lock for lock in path.glob(f"*{SUFFIX}{LOCK}") if not lock.with_suffix("").exists()]
    removed = 0
    for leftover, lock in [*scratch.items(), *((lock, lock) for lock in locks)]:
        try:
            with held(lock):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        except (BlockingIOError, FileNotFoundError):  # another server is at work there, or has just removed it
            continue
        removed += 1
    return removed


def discard(path: Path) -> None:
    """Remove a file that nobody will read."""
    path.unlink(missing_ok=True)
    lock_of(path).unlink(missing_ok=True)


def lock_of(path: Path) -> Path:
    return Path(f"{path}{LOCK}")


@contextmanager
def held(lock: Path) -> Iterator[None]:
    """With this lock file held, made if need be. Raises BlockingIOError where another process holds it."""
    descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, READABLE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
