"""Faults that a real pair does not have: absent packages, and stock modules that are not as they should be."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.adapter import GENERATOR, Status
from eagle3compat.adapters import ADAPTERS
from eagle3compat.errors import IncompatibleError, InputError
from eagle3compat.patcher import Patcher, Settings, complaint, plan
from eagle3compat.report import Report

PACKAGES = ("speculators", "speculators__data_generation", "vllm", "vllm__engine", "transformers")
FAKED = ("speculators", "vllm", "transformers")
STOCK = """
class VllmHiddenStatesGenerator:
    def __init__(self, model_path, layer_ids=None):
        self.made = True

    def generate(self, token_ids):
        return token_ids
"""
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules of fake packages; none of them is imported before or after."""

    def write(**sources: str) -> None:
        for name, source in sources.items():
            path = tmp_path.joinpath(*name.split("__"))
            if name in PACKAGES:
                path.mkdir(exist_ok=True)
                path /= "__init__"
            path.with_suffix(".py").write_text(source)
        importlib.invalidate_caches()

    for variable in ("EAGLE3COMPAT", "EAGLE3COMPAT_SKIP"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] in FAKED]:
        del sys.modules[name]


@pytest.fixture
def patcher() -> Iterator[Patcher]:
    patcher, finders = Patcher(), list(sys.meta_path)
    yield patcher
    patcher.revert()
    assert sys.meta_path == finders


def stock(write: Write, generator: str = STOCK) -> None:
    """Fake packages with a generator of this source."""
    write(
        speculators="", speculators__data_generation="", speculators__data_generation__custom_worker="",
        speculators__data_generation__vllm_hidden_states_generator=generator, vllm="", transformers="",
        transformers__configuration_utils="torch = 1\n",
    )


def settings(strict: bool = True, skip: Any = None, only: Any = None) -> Settings:
    return Settings.read(strict, only, skip)


def statuses(report: Report) -> set[Status]:
    return {outcome.status for outcome in report}


def test_without_speculators_there_is_nothing_to_adapt(write: Write, patcher: Patcher) -> None:
    report = patcher.apply(settings())
    assert report.headline == "nothing to adapt: speculators is not installed"
    assert report.healthy
    assert statuses(report) == {Status.NOT_NEEDED}


def test_without_in_process_extraction_there_is_nothing_to_adapt(write: Write, patcher: Patcher) -> None:
    write(speculators="__version__ = '0.5.0'", vllm="")
    report = patcher.apply(settings())
    assert "has no in-process extraction" in report.headline
    assert report.healthy


def test_without_vllm_it_says_what_to_install(write: Write, patcher: Patcher) -> None:
    stock(write)
    path = Path(importlib.import_module("vllm").__file__ or "")
    del sys.modules["vllm"]
    path.unlink()
    path.parent.rename(path.parent.with_name("elsewhere"))
    importlib.invalidate_caches()
    with pytest.raises(IncompatibleError, match="Install vLLM"):
        patcher.apply(settings())
    assert not patcher.apply(settings(strict=False)).healthy


def test_a_vllm_without_anything_is_refused_before_the_load(write: Write, patcher: Patcher) -> None:
    stock(write)
    patcher.apply(settings())
    module: Any = importlib.import_module(GENERATOR)
    report = patcher.status()
    assert {Status.DRIFTED, Status.FAILED} <= statuses(report)
    with pytest.raises(IncompatibleError, match="cannot bridge this pair"):
        module.VllmHiddenStatesGenerator("owner/name")


def test_a_vllm_that_does_not_import_is_told_from_one_that_changed(write: Write, patcher: Patcher) -> None:
    stock(write)
    write(vllm="raise OSError('libcuda.so.1: cannot open shared object file')", vllm__engine="")
    patcher.apply(settings())
    importlib.import_module(GENERATOR)
    outcome = patcher.status()["capture"]
    assert outcome.status is Status.DRIFTED
    assert "importing it fails" in outcome.found
    assert "libcuda.so.1" in outcome.found


def test_a_generator_module_without_its_class_still_imports(write: Write, patcher: Patcher) -> None:
    stock(write, "value = 1\n")
    patcher.apply(settings())
    assert importlib.import_module(GENERATOR).value == 1
    assert not patcher.status().healthy


def test_an_exception_of_the_generator_module_itself_passes(write: Write, patcher: Patcher) -> None:
    stock(write, "raise LookupError('stock has a fault')\n")
    patcher.apply(settings())
    with pytest.raises(LookupError, match="stock has a fault"):
        importlib.import_module(GENERATOR)
    assert patcher.status()["results"].status is Status.DEFERRED
    assert patcher.status().healthy


def test_a_generator_that_cannot_be_parsed_raises_its_own_error(write: Write, patcher: Patcher) -> None:
    stock(write, "class VllmHiddenStatesGenerator(:\n")
    patcher.apply(settings())
    with pytest.raises(SyntaxError):
        importlib.import_module(GENERATOR)


def test_without_transformers_the_package_still_imports(
    write: Write, patcher: Patcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock(write)
    monkeypatch.setitem(sys.modules, "transformers", None)
    patcher.apply(settings())
    importlib.import_module("speculators")
    assert patcher.status()["speculators_import"].status is Status.FAILED


def test_apply_called_by_the_stock_module_itself_ends_and_is_made_good(write: Write, patcher: Patcher) -> None:
    stock(write, f"{STOCK}\nimport sys; sys.eagle3compat_test()\n")
    vars(sys)["eagle3compat_test"] = lambda: patcher.apply(settings(strict=False))
    try:
        importlib.import_module(GENERATOR)
    finally:
        del vars(sys)["eagle3compat_test"]
    deferred = {outcome.adapter for outcome in patcher.status() if outcome.status is Status.DEFERRED}
    assert deferred == {"worker_names"}


def test_what_was_refused_once_is_logged_where_not_strict(
    write: Write, patcher: Patcher, caplog: pytest.LogCaptureFixture
) -> None:
    stock(write)
    patcher.apply(settings(strict=False))
    module: Any = importlib.import_module(GENERATOR)
    with caplog.at_level(logging.WARNING, "eagle3compat"):
        assert module.VllmHiddenStatesGenerator("owner/name").made
    assert "cannot bridge this pair" in caplog.text


def test_the_plan_imports_nothing(write: Write) -> None:
    stock(write)
    write(vllm="raise AssertionError('imported')")
    report = plan(settings())
    assert not report.healthy
    assert not {name for name in sys.modules if name.split(".")[0] in FAKED}


def test_the_plan_names_missing_requirements_as_the_live_outcome_does(write: Write, patcher: Patcher) -> None:
    stock(write)
    planned = plan(settings(skip=["capture"]))
    patcher.apply(settings(skip=["capture"], strict=False))
    importlib.import_module("speculators.data_generation.custom_worker")
    importlib.import_module(GENERATOR)
    assert patcher.status().outcomes == planned.outcomes


def test_the_complaint_is_about_the_first_that_is_not_healthy(write: Write) -> None:
    stock(write)
    report = plan(settings())
    error = complaint(report)
    assert error is not None
    assert error.adapter == next(outcome.adapter for outcome in report if not outcome.status.healthy)
    assert complaint(Report("", ())) is None


@pytest.mark.parametrize(
    ("variables", "strict", "expected"),
    [
        ({}, True, Settings(True, frozenset())),
        ({}, False, Settings(False, frozenset())),
        ({"EAGLE3COMPAT": "warn"}, True, Settings(False, frozenset())),
        ({"EAGLE3COMPAT": " Strict "}, False, Settings(True, frozenset())),
        ({"EAGLE3COMPAT": ""}, False, Settings(False, frozenset())),
        ({"EAGLE3COMPAT": "off"}, True, Settings(False, frozenset(), off=True)),
        ({"EAGLE3COMPAT_SKIP": " memory , request,,"}, True, Settings(True, frozenset({"memory", "request"}))),
    ],
)
def test_settings(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], strict: bool, expected: Settings
) -> None:
    for name in ("EAGLE3COMPAT", "EAGLE3COMPAT_SKIP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert settings(strict) == expected


def test_one_name_may_be_given_as_text(write: Write) -> None:
    assert settings(skip="memory").skip == {"memory"}
    assert settings(only="memory").skip == {adapter.id for adapter in ADAPTERS} - {"memory"}
    assert settings(only=iter(["memory"])) == settings(only="memory")
    assert settings(skip=iter(["memory"])).skip == {"memory"}


def test_only_nothing_skips_everything(write: Write) -> None:
    assert settings(only=[]).skip == {adapter.id for adapter in ADAPTERS}


@pytest.mark.parametrize(("only", "skip"), [(["memory", "nonsense"], None), (None, ["nonsense"]), ("nonsense", None)])
def test_unknown_names_are_refused(write: Write, only: Any, skip: Any) -> None:
    with pytest.raises(InputError, match="there is no adapter 'nonsense'"):
        settings(only=only, skip=skip)
