"""A class that vLLM cannot import: the cause, which vLLM logs, is in the error."""

from __future__ import annotations

import logging
import logging.config
import threading
from collections.abc import Callable, Iterator

import pytest

from eagle3compat import ModelClassError, detect
from eagle3compat.engine.model_class import CAUSES, LOGGER, last_error, named_faults, remedy

POINTS_TO_THE_LOG = (
    "1 validation error for ModelConfig\n  Value error, Model architectures ['Mistral3ForConditionalGeneration'] "
    "failed to be inspected. Please check the logs for more details."
)
STDERR = """Error raised in subprocess:
Traceback (most recent call last):
  File "registry.py", line 1, in <module>
    mod = importlib.import_module(self.module_name)
ImportError: cannot import name 'Rotary' from 'transformers.models.pixtral' (/x.py). Did you mean: 'Other'?
"""


def inspect_anew() -> None:
    logging.config.dictConfig({"version": 1, "loggers": {"vllm": {"level": "INFO"}}, "disable_existing_loggers": False})
    inspect(STDERR, POINTS_TO_THE_LOG)


@pytest.fixture(autouse=True)
def none_known() -> Iterator[None]:
    CAUSES.clear()
    yield
    CAUSES.clear()


def inspect(said: str, raised: str, level: int = logging.ERROR) -> None:
    """As vLLM does."""
    try:
        raise RuntimeError(said)
    except RuntimeError:
        logging.getLogger(LOGGER).log(level, "while inspecting", exc_info=True)
    raise ValueError(raised)


def test_the_cause_is_in_the_error() -> None:
    with pytest.raises(ModelClassError) as caught, named_faults():
        inspect(STDERR, POINTS_TO_THE_LOG)
    assert caught.value.architecture == "Mistral3ForConditionalGeneration"
    assert caught.value.cause.startswith("ImportError: cannot import name 'Rotary'")
    assert str(caught.value.__cause__) == POINTS_TO_THE_LOG


def raise_alone() -> None:
    """As vLLM does at the second attempt: what it logged at the first it does not log again."""
    with named_faults():
        raise ValueError(POINTS_TO_THE_LOG)


def test_the_cause_is_known_when_vllm_has_logged_it_before() -> None:
    with pytest.raises(ModelClassError, match="cannot import name 'Rotary'"), named_faults():
        inspect(STDERR, POINTS_TO_THE_LOG)
    with pytest.raises(ModelClassError, match="cannot import name 'Rotary'"):
        raise_alone()


def raise_beside_another_thread() -> None:
    def log() -> None:
        logging.getLogger(LOGGER).error("elsewhere", exc_info=KeyError("ImportError: not this"))

    with named_faults():
        other = threading.Thread(target=log)
        other.start()
        other.join()
        raise ValueError(POINTS_TO_THE_LOG)


@pytest.mark.parametrize("attempt", [raise_alone, raise_beside_another_thread])
def test_without_a_cause_vllms_own_error_goes_on(attempt: Callable[[], None]) -> None:
    with pytest.raises(ValueError, match="failed to be inspected") as caught:
        attempt()
    assert not isinstance(caught.value, ModelClassError)


@pytest.mark.parametrize(
    ("said", "raised", "level"),
    [(STDERR, "max_model_len is too large", logging.ERROR), ("no traceback", POINTS_TO_THE_LOG, logging.ERROR),
     (STDERR, POINTS_TO_THE_LOG, logging.WARNING)],
    ids=["another error", "nothing that names a cause", "no error in the log"],
)  # fmt: skip
def test_what_cannot_be_explained_goes_on_as_it_is(said: str, raised: str, level: int) -> None:
    with pytest.raises(ValueError, match=raised[:20]) as caught, named_faults():
        inspect(said, raised, level)
    assert not isinstance(caught.value, ModelClassError)


def test_nothing_listens_afterwards() -> None:
    with named_faults():
        assert len(logging.getLogger(LOGGER).filters) == 1
    assert not logging.getLogger(LOGGER).filters


def test_logging_may_be_configured_anew_meanwhile() -> None:
    """As vLLM 0.32 does."""
    with pytest.raises(ModelClassError), named_faults():
        inspect_anew()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Traceback (most recent call last):\n  File\nKeyError: 'a'\n\nDuring handling of it, another:\n\n"
         "Traceback (most recent call last):\n  File\nmodule.Undefined: second\n", "module.Undefined: second"),
        ("Traceback (most recent call last):\n  File\nAssertionError\n", "AssertionError"),
        ("Traceback (most recent call last):\n  File\nImportError: first\nmore\nException ignored in: <f>\n"
         "Traceback (most recent call last):\n  File\nTypeError: at the end\n", "ImportError: first"),
        ("all is well", ""),
    ],
)  # fmt: skip
def test_what_the_last_traceback_ends_with_was_raised(text: str, said: str) -> None:
    assert last_error(text) == said


@pytest.mark.parametrize(
    ("cause", "what"),
    [
        ("ModuleNotFoundError: No module named 'torchvision'", "Install torchvision, the build that belongs to"),
        ("ModuleNotFoundError: No module named 'flash_attn.ops'", "Install flash_attn."),
        ("ModuleNotFoundError: No module named 'PIL'", "Install pillow."),
        ("ModuleNotFoundError: No module named 'pytest.not_yet'", f"installed pytest {pytest.__version__}: install"),
        ("RuntimeError: operator torchvision::nms does not exist", "The installed torchvision is not for this torch"),
        ("ImportError: cannot import name 'X' from 'pytest' (/a)", f"installed pytest {pytest.__version__}: install"),
        ("ImportError: cannot import name 'X' from 'nowhere.at.all'", "is in vLLM's log"),
        ("ZeroDivisionError: division by zero", "is in vLLM's log"),
    ],
)
def test_each_cause_has_its_remedy(cause: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = detect.package
    monkeypatch.setattr(detect, "package", lambda name: package("rich" if name == "vllm" else name))
    assert what in remedy(cause)
