"""Why vLLM cannot import its class of a model: it says so in its log, and raises an error that points there.

While it builds a configuration, vLLM imports the class in a process of its own, logs what that ended with (the logger
of `vllm/model_executor/models/registry.py`, 0.11 to 0.33), and raises that the architecture "failed to be inspected".
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .. import detect
from ..errors import ModelClassError

LOGGER = "vllm.model_executor.models.registry"
TRACEBACK = "Traceback (most recent call last):"
ARCHITECTURES = re.compile(r"architectures \[([^]]*)\] failed to be inspected")
CAUSES: dict[str, str] = {}
"""By architectures: vLLM keeps that a class could not be imported, and logs it once."""
INSTALLED_BY = {"PIL": "pillow", "cv2": "opencv-python-headless"}
"""Names to install by, where they are not those to import by."""


class _Errors(logging.Filter):
    """Keeps the words of the exceptions that this thread logs as errors, and lets all pass.

    A filter, because later releases configure vLLM's logging anew while they build a configuration, and that takes
    every handler away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.said = threading.get_ident(), list[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        raised = record.exc_info[1] if record.exc_info else None
        if record.thread == self.thread and record.levelno >= logging.ERROR and raised is not None:
            self.said.append(str(raised))
        return True


@contextmanager
def named_faults() -> Iterator[None]:
    """Within, a class that vLLM cannot import is a ModelClassError that says why, where vLLM logs why.

    What it raises otherwise goes on as it is.
    """
    logger, errors = logging.getLogger(LOGGER), _Errors()
    logger.addFilter(errors)
    try:
        yield
    except ValueError as error:
        found = ARCHITECTURES.search(str(error))
        name = found.group(1).replace("'", "") if found else ""
        cause = last_error("\n".join(errors.said)) or CAUSES.get(name, "")
        if not name or not cause:
            raise
        CAUSES[name] = cause
        raise ModelClassError(name, cause, remedy(cause)) from error
    finally:
        logger.removeFilter(errors)


def last_error(text: str) -> str:
    """What the last traceback of a text ends with; empty where there is none.

    Without those of exceptions that Python ignored, as when it ends.
    """
    lines = text.splitlines()
    said = ""
    for number, line in enumerate(lines):
        if line.startswith(TRACEBACK) and not (number and lines[number - 1].startswith("Exception ignored")):
            said = next((end for end in lines[number + 1 :] if end.strip() and not end.startswith((" ", "\t"))), said)
    return said.strip()


def remedy(cause: str) -> str:
    """What to do about an exception that an import ended with."""
    missing = re.search(r"No module named '([\w-]+)", cause)
    if missing and detect.package(missing.group(1)) is None:
        name = missing.group(1)
        build = ", the build that belongs to your torch" if name in detect.BESIDE_TORCH else ""
        return f"Install {INSTALLED_BY.get(name, name)}{build}."
    foreign = re.search(rf"\b({'|'.join(detect.BESIDE_TORCH)})::", cause)
    if foreign:
        return f"The installed {foreign.group(1)} is not for this torch: install the build that belongs to it."
    gone = missing or re.search(r"cannot import name '[^']+' from '(\w+)", cause)
    installed = detect.package(gone.group(1)) if gone else None
    vllm = detect.package("vllm")
    if installed is not None and vllm is not None and installed.name != vllm.name:
        return (
            f"That is not in the installed {installed.name} {installed.version}: install a release of it that vLLM "
            f"{vllm.version} has this model for, or another vLLM."
        )
    return "What it was about to import is in vLLM's log; `eagle3compat doctor` shows what is installed."
