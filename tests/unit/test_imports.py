"""Acting before and after the import of a module, whoever finds it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eagle3compat.imports import StockFinder

PACKAGE = "eagle3compat_sample"
WATCHED = f"{PACKAGE}.watched"
SECONDS = 120
"""For what comes at once, on a machine that may stand still in between."""


class Watch:
    """A finder over the sample package, and what it was told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.finder = StockFinder({WATCHED, PACKAGE}, self.around, self.after)

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        self.events.append(f"before {name}")
        try:
            yield
        finally:
            self.events.append(f"left {name}")

    def after(self, module: ModuleType) -> None:
        assert sys.modules[module.__name__] is module
        self.events.append(f"after {module.__name__}")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / PACKAGE
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "watched.py").write_text("value = 1\n")
    (folder / "other.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.fixture
def watch(package: Path) -> Iterator[Watch]:
    watch = Watch()
    watch.finder.install()
    yield watch
    watch.finder.remove()


def test_before_is_before_the_module_runs_and_after_is_after_it(package: Path, watch: Watch) -> None:
    (package / "watched.py").write_text(f"import {PACKAGE}.other; import sys; sys.seen = list(sys.events)\n")
    vars(sys)["events"] = watch.events
    importlib.import_module(WATCHED)
    assert vars(sys).pop("seen") == [f"before {PACKAGE}", f"left {PACKAGE}", f"after {PACKAGE}", f"before {WATCHED}"]
    assert watch.events[-3:] == [f"before {WATCHED}", f"left {WATCHED}", f"after {WATCHED}"]
    del vars(sys)["events"]


def test_other_modules_are_not_touched(watch: Watch) -> None:
    importlib.import_module(f"{PACKAGE}.other")
    assert not any("other" in event for event in watch.events)


def test_the_second_import_is_no_event(watch: Watch) -> None:
    importlib.import_module(WATCHED)
    events = list(watch.events)
    importlib.import_module(WATCHED)
    assert watch.events == events


@pytest.mark.parametrize("name", [PACKAGE, WATCHED])
def test_the_ordinary_loader_is_back_on_the_module(watch: Watch, name: str) -> None:
    module = importlib.import_module(name)
    assert module.__spec__ is not None
    assert type(module.__spec__.loader) is SourceFileLoader
    assert module.__loader__ is module.__spec__.loader
    assert module.__spec__.loader.get_source(name) is not None


def test_the_ordinary_loader_is_there_while_the_module_runs(package: Path, watch: Watch) -> None:
    (package / "watched.py").write_text("loader, kind = __loader__, type(__spec__.loader).__name__\n")
    module = importlib.import_module(WATCHED)
    assert (type(module.loader), module.kind) == (SourceFileLoader, "SourceFileLoader")


def test_a_spec_that_is_looked_up_and_not_run_is_no_event(watch: Watch) -> None:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_source(PACKAGE) == ""  # type: ignore[attr-defined]
    assert watch.events == []


def test_a_reload_is_an_event_and_leaves_the_ordinary_loader(watch: Watch) -> None:
    module = importlib.import_module(WATCHED)
    watch.events.clear()
    assert importlib.reload(module) is module
    assert watch.events == [f"before {WATCHED}", f"left {WATCHED}", f"after {WATCHED}"]
    assert type(module.__loader__) is SourceFileLoader


def test_an_exception_in_the_module_passes_and_after_is_not_told(package: Path, watch: Watch) -> None:
    (package / "watched.py").write_text("raise LookupError('in the module')\n")
    with pytest.raises(LookupError, match="in the module"):
        importlib.import_module(WATCHED)
    assert watch.events[-2:] == [f"before {WATCHED}", f"left {WATCHED}"]
    assert WATCHED not in sys.modules


def test_the_import_after_a_failed_one_is_watched_again(package: Path, watch: Watch) -> None:
    (package / "watched.py").write_text("raise LookupError('in the module, this once')\n")
    with pytest.raises(LookupError):
        importlib.import_module(WATCHED)
    (package / "watched.py").write_text("value = 3\n")
    importlib.invalidate_caches()
    assert importlib.import_module(WATCHED).value == 3
    assert watch.events[-1] == f"after {WATCHED}"


def test_a_module_that_is_not_there_raises_as_ever(package: Path, watch: Watch) -> None:
    (package / "watched.py").unlink()
    with pytest.raises(ModuleNotFoundError, match=WATCHED):
        importlib.import_module(WATCHED)


def test_removed_it_no_longer_watches(watch: Watch) -> None:
    watch.finder.remove()
    watch.finder.remove()
    importlib.import_module(WATCHED)
    assert watch.events == []
    assert watch.finder not in sys.meta_path


def test_installed_twice_it_is_there_once(watch: Watch) -> None:
    watch.finder.install()
    assert sys.meta_path.count(watch.finder) == 1
    importlib.import_module(WATCHED)
    assert watch.events.count(f"after {WATCHED}") == 1


def test_two_finders_are_both_told_once(watch: Watch) -> None:
    second = Watch()
    second.finder.install()
    module = importlib.import_module(WATCHED)
    second.finder.remove()
    assert watch.events.count(f"after {WATCHED}") == second.events.count(f"after {WATCHED}") == 1
    assert type(module.__loader__) is SourceFileLoader


class Handmade(MetaPathFinder, Loader):
    """Finds the watched module itself, from no file."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, origin="nowhere") if fullname == WATCHED else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["value"] = "handmade"


@pytest.mark.parametrize("position", [0, 1])
def test_a_module_that_another_finder_finds(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    theirs = Handmade()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:position], theirs, *sys.meta_path[position:]])
    module = importlib.import_module(WATCHED)
    assert module.value == "handmade"
    assert module.__loader__ is theirs
    assert (f"after {WATCHED}" in watch.events) == (position == 1), "a finder in front of ours that finds it wins"


class Asking(MetaPathFinder):
    """A finder that asks the others, as import hooks do, and imports something else on the way."""

    def __init__(self) -> None:
        self.busy = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if self.busy or fullname != WATCHED:
            return None
        self.busy = True
        try:
            importlib.util.find_spec(PACKAGE)
            sys.modules.pop(PACKAGE)
            importlib.import_module(PACKAGE)
            return importlib.util.find_spec(fullname)
        finally:
            self.busy = False


@pytest.mark.parametrize("position", [0, 1])
def test_beside_a_finder_that_asks_the_others(watch: Watch, monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    importlib.import_module(PACKAGE)
    watch.events.clear()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:position], Asking(), *sys.meta_path[position:]])
    module = importlib.import_module(WATCHED)
    assert watch.events.count(f"after {WATCHED}") == 1
    assert type(module.__loader__) is SourceFileLoader


def test_finders_of_the_old_kind_are_passed_over(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[0], object(), *sys.meta_path[1:]])
    if sys.version_info < (3, 12):  # Python itself asks every finder, and from 3.12 on passes over these too
        with pytest.raises(AttributeError):
            importlib.import_module(f"{PACKAGE}.other")
    else:
        assert importlib.import_module(f"{PACKAGE}.other").__name__ == f"{PACKAGE}.other"
    spec = watch.finder.find_spec(PACKAGE, None)
    assert spec is not None


def test_threads_that_import_at_once_run_it_once(package: Path, watch: Watch) -> None:
    (package / "watched.py").write_text("import time; time.sleep(0.1)\n")
    barrier, found = threading.Barrier(8), []

    def run() -> None:
        barrier.wait(SECONDS)
        found.append(importlib.import_module(WATCHED))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(set(map(id, found))) == 1
    assert len(found) == 8
    assert watch.events.count(f"after {WATCHED}") == 1


def test_another_thread_s_search_is_not_ours(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread looks a module up while another one does: each gets a spec that is watched."""
    inside, go = threading.Event(), threading.Event()

    class Slow(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if fullname == PACKAGE and not inside.is_set():
                inside.set()
                assert go.wait(SECONDS)
            return PathFinder.find_spec(fullname, path) if fullname == PACKAGE else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:1], Slow(), *sys.meta_path[1:]])
    specs: list[Any] = []
    thread = threading.Thread(target=lambda: specs.append(watch.finder.find_spec(PACKAGE, None)))
    thread.start()
    assert inside.wait(SECONDS)
    specs.append(watch.finder.find_spec(PACKAGE, None))
    go.set()
    thread.join(SECONDS)
    assert [type(spec.loader).__name__ for spec in specs] == ["_Loader", "_Loader"]
