"""Everything that eagle3compat raises; each message ends with what to do."""

from __future__ import annotations

from collections.abc import Sequence


class Eagle3CompatError(Exception):
    """The base of every error of this library."""


class IncompatibleError(Eagle3CompatError, RuntimeError):
    """Something that an adapter relies on is not there: the installed pair cannot be bridged.

    `adapter` is the adapter's id, `clause` what was asked of vLLM or speculators, `expected` and `found` the
    two sides of it.
    """

    def __init__(self, adapter: str, clause: str, expected: str, found: str, remedy: str) -> None:
        self.adapter, self.clause, self.expected, self.found, self.remedy = adapter, clause, expected, found, remedy
        super().__init__(
            f"eagle3compat: adapter '{adapter}' cannot bridge this pair: {clause}: expected {expected}; "
            f"found {found}. {remedy}"
        )


class WorkerNotAdaptedError(Eagle3CompatError, RuntimeError):
    """A worker process runs without the capture of this library, so its states would not be right."""

    def __init__(self, found: str, remedy: str) -> None:
        self.found, self.remedy = found, remedy
        super().__init__(f"eagle3compat: a vLLM worker is not adapted: {found}. {remedy}")


class WorkerError(Eagle3CompatError, RuntimeError):
    """A worker process raised or died. Carries the rank, the exception's type name and the worker's traceback.

    `ended` says that `process` tells how it ended, and not only which it was.
    """

    def __init__(
        self, doing: str, type_name: str, message: str, traceback: str, process: str, remedy: str, ended: bool = False
    ) -> None:
        self.doing, self.type_name, self.worker_message = doing, type_name, message
        self.worker_traceback, self.process = traceback, process
        said = message.strip() or "(the exception carries no message)"
        text = f"eagle3compat: {process}{'' if ended else ' failed'} while {doing}: {type_name}: {said}\n{remedy}"
        if traceback.strip():
            text += f"\n\nTraceback of {process}:\n{traceback.rstrip()}"
        super().__init__(text)


class GeneratorDeadError(Eagle3CompatError, RuntimeError):
    """The generator's engine is gone; no later call on it can work."""

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"eagle3compat: this generator can no longer be used: {why} "
            "Delete it and make a new VllmHiddenStatesGenerator; results returned earlier are intact."
        )


class ResultError(Eagle3CompatError, RuntimeError):
    """What was extracted failed a check, and was not returned. `sample` is the index in the call, or None."""

    def __init__(self, sample: int | None, fault: str, remedy: str) -> None:
        self.sample, self.fault, self.remedy = sample, fault, remedy
        where = "the batch" if sample is None else f"sample {sample}"
        super().__init__(f"eagle3compat: {where} was not returned because {fault}. {remedy}")


class IncompleteFileError(Eagle3CompatError, RuntimeError):
    """A server could not write the file of an answer, so the answer was not sent; `path` is the file's."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"eagle3compat: {path} was not written to its end, and what there was of it is removed. Look for the "
            "writer's error in the server's log and for space on that disk, then send the request again."
        )


class UnprovenCaptureError(Eagle3CompatError, RuntimeError):
    """What the decoder layers return could not be shown to be the model's residual stream."""

    def __init__(self, model: str, fault: str, remedy: str) -> None:
        self.model, self.fault, self.remedy = model, fault, remedy
        super().__init__(f"eagle3compat: hidden states of {model} cannot be captured: {fault}. {remedy}")


class InputError(Eagle3CompatError, ValueError):
    """What was asked cannot be extracted; nothing was sent to the model. `index` is the offending input, or None."""

    def __init__(self, message: str, index: int | None = None) -> None:
        self.index = index
        super().__init__(f"eagle3compat: {message}")


class ModelNotFoundError(InputError, FileNotFoundError):
    """The model path names a folder that is not there."""


class ModelClassError(Eagle3CompatError, ValueError):
    """vLLM cannot import its class of the model here; `cause` is what the import raised. Nothing was loaded."""

    def __init__(self, architecture: str, cause: str, remedy: str) -> None:
        self.architecture, self.cause, self.remedy = architecture, cause, remedy
        super().__init__(f"eagle3compat: vLLM cannot import its class for {architecture}: {cause}. {remedy}")


def joined(words: Sequence[str]) -> str:
    """`a, b and c`, for messages."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else "nothing"
