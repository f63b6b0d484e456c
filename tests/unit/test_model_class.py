"""A class that vLLM cannot import: the cause, which vLLM logs, is in the error."""

from __future__ import annotations

import logging

import pytest

from eagle3compat import ModelClassError, detect
from eagle3compat.engine.model_class import last_error, named_faults, remedy

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


def inspect(said: str, raised: str, level: int = logging.ERROR) -> None:
    """As vLLM does."""
    with named_faults():
        try:
            raise RuntimeError(said)
        except RuntimeError:
            logging.getLogger("vllm.model_executor.models.registry").log(level, "while inspecting", exc_info=True)
        raise ValueError(raised)


def test_the_cause_is_in_the_error() -> None:
    with pytest.raises(ModelClassError) as caught:
        inspect(STDERR, POINTS_TO_THE_LOG)
    assert caught.value.architecture == "Mistral3ForConditionalGeneration"
    assert caught.value.cause.startswith("ImportError: cannot import name 'Rotary'")
    assert str(caught.value.__cause__) == POINTS_TO_THE_LOG


@pytest.mark.parametrize(
    ("said", "raised", "level"),
    [(STDERR, "max_model_len is too large", logging.ERROR), ("no traceback", POINTS_TO_THE_LOG, logging.ERROR),
     (STDERR, POINTS_TO_THE_LOG, logging.WARNING)],
    ids=["another error", "nothing that names a cause", "no error in the log"],
)  # fmt: skip
def test_what_cannot_be_explained_goes_on_as_it_is(said: str, raised: str, level: int) -> None:
    with pytest.raises(ValueError, match=raised[:20]) as caught:
        inspect(said, raised, level)
    assert not isinstance(caught.value, ModelClassError)


def test_nothing_listens_afterwards() -> None:
    before = list(logging.getLogger("vllm").handlers)
    with named_faults():
        assert len(logging.getLogger("vllm").handlers) == len(before) + 1
    assert logging.getLogger("vllm").handlers == before


def test_the_last_error_of_a_text_is_what_was_raised() -> None:
    assert last_error("KeyError: 'a'\n\nDuring handling:\npkg.sub.MyError: the second\n  not: this") == (
        "pkg.sub.MyError: the second"
    )
    assert last_error("all is well") == ""


@pytest.mark.parametrize(
    ("cause", "what"),
    [
        ("ModuleNotFoundError: No module named 'torchvision'", "Install torchvision, the build that belongs to"),
        ("ModuleNotFoundError: No module named 'flash_attn.ops'", "Install flash_attn."),
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
