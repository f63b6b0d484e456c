"""The stock modules of this process: imported anew, compared with their source, and put back after each test.

The suite runs inside an environment with a real vLLM and a stock speculators, in one process, as importing vLLM takes
half a minute. Where vLLM is not installed, nothing is collected.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import eagle3compat
from eagle3compat.adapter import GENERATOR, PACKAGE, WORKER
from eagle3compat.adapters.absent import Gone

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

POISONED = "speculators.data_generation.logging_utils"
"""A module that the stock generator imports: without it, the import fails for a reason of its own."""
CLASS = "VllmHiddenStatesGenerator"

REBINDS: dict[str, tuple[str, ...]] = {
    "speculators_import": (),
    "vllm_names": (),
    "worker_names": (),
    "tokenizer": ("AutoTokenizer",),
    "capture": ("ParallelConfig",),
    "configs": ("CacheConfig", "ModelConfig", "SchedulerConfig", "DeviceConfig", "LoadConfig", "VllmConfig"),
    "execution": ("MultiprocExecutor",),
    "memory": ("torch", "mem_get_info", "empty_cache"),
    "kv_planning": (
        "unify_hybrid_kv_cache_specs", "_get_kv_cache_groups_uniform_spec", "get_kv_cache_config_from_groups",
        "get_hash_fn_by_name", "init_none_hash", "get_request_block_hasher",
    ),
    "scheduler": ("Scheduler", "StructuredOutputManager"),
    "request": ("Request",),
    "results": ("sorted", f"{CLASS}.__init__", f"{CLASS}.generate"),
}
"""Adapter to the names that it may rebind in the stock generator's module; nothing else may ever change."""


class Stock:
    """Imports the stock modules, and tells their own objects from rebound ones by reading their source."""

    rebinds = REBINDS
    poisoned = POISONED
    unaided = True
    """Whether the generator can be imported on this vLLM without the library."""
    untouched: Snapshot
    """The process with everything imported but the stock modules, and the library not applied."""

    @property
    def generator(self) -> Any:
        """The module of the generator, which must have been imported."""
        return sys.modules[GENERATOR]

    @property
    def class_(self) -> Any:
        """The generator's class."""
        return self.generator.VllmHiddenStatesGenerator

    def drop(self) -> None:
        """As before the stock modules were imported; the package above them stays."""
        for name in (GENERATOR, WORKER):
            sys.modules.pop(name, None)
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)

    def drop_package(self) -> None:
        """As before anything of speculators was imported."""
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]

    def load(self) -> Any:
        """Import generator and worker anew; the generator's module."""
        self.drop()
        importlib.import_module(WORKER)
        return importlib.import_module(GENERATOR)

    def load_once(self) -> Any:
        """Import generator and worker anew, with the library's help where they cannot do without."""
        if not self.unaided:
            with eagle3compat.applied():
                return self.load()
        return self.load()

    def fail(self) -> None:
        """Import the generator while something that it imports is missing."""
        self.drop()
        kept = sys.modules.pop(POISONED, None)
        sys.modules[POISONED] = None  # type: ignore[assignment]
        try:
            with pytest.raises(ImportError):
                importlib.import_module(GENERATOR)
        finally:
            del sys.modules[POISONED]
            if kept is not None:
                sys.modules[POISONED] = kept
        assert GENERATOR not in sys.modules

    def rebound(self) -> set[str]:
        """The names of the imported stock modules that are not bound to what their source binds them to."""
        names: set[str] = set()
        for module in (sys.modules[name] for name in (GENERATOR, WORKER) if name in sys.modules):
            names |= {name for name, own in bindings(module) if not is_own(vars(module).get(name), own)}
            names |= {name for name in vars(module) if hasattr(builtins, name) and not name.startswith("__")}
            for class_name, class_ in inspect.getmembers(module, inspect.isclass):
                if class_.__module__ == module.__name__:
                    methods = inspect.getmembers(class_, inspect.isfunction)
                    names |= {f"{class_name}.{n}" for n, f in methods if f.__code__.co_filename != module.__file__}
        return names

    def expected(self, report: eagle3compat.Report) -> set[str]:
        """The names that are rebound when the adapters are as `report` says, the check before the load included."""
        applied = {outcome.adapter for outcome in report if outcome.status.value == "applied"}
        there = {*vars(self.generator), "sorted", f"{CLASS}.generate", f"{CLASS}.__init__"}
        return {name for id_ in applied for name in REBINDS[id_] if name in there} | {f"{CLASS}.__init__"}


def bindings(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """What the import statements at the top of a module's source bind, each with the object; None where it is gone."""
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], importlib.import_module(alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            try:
                source = importlib.import_module("." * node.level + (node.module or ""), module.__package__)
            except ModuleNotFoundError:
                source = None
            for alias in node.names:
                yield alias.asname or alias.name, getattr(source, alias.name, None)


def is_own(bound: object, own: object) -> bool:
    return isinstance(bound, Gone) if own is None else bound is own


class Snapshot:
    """What every name is bound to: in vLLM's and the stock modules, in the classes that these define, in builtins."""

    def __init__(self) -> None:
        self.meta_path = list(sys.meta_path)
        self.held: dict[str, tuple[object, dict[str, object]]] = {}
        for name, module in list(sys.modules.items()):
            watched = name.split(".")[0] == "vllm" or name in (GENERATOR, WORKER, PACKAGE, "builtins")
            if not watched and name != "transformers.configuration_utils":
                continue
            self.held[name] = (module, dict(vars(module)))
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    self.held[f"{name}:{value.__qualname__}"] = (value, dict(vars(value)))

    def changes(self) -> list[str]:
        """Every name that is bound to another object now, was added, or went; and whether finders changed."""
        found = [] if list(sys.meta_path) == self.meta_path else ["sys.meta_path"]
        for place, (holder, before) in self.held.items():
            if isinstance(holder, ModuleType) and sys.modules.get(place) is not holder:
                found.append(f"sys.modules[{place!r}]")
            now = vars(holder)
            found += [f"{place}.{name} (other)" for name in before if name in now and now[name] is not before[name]]
            found += [f"{place}.{name} (gone)" for name in before if name not in now]
            found += [f"{place}.{name} (new)" for name in now if name not in before and not is_lazy(name, now[name])]
        return [*found, *(f"{name} (made up)" for name in made_up())]


def is_lazy(name: str, value: object) -> bool:
    """Submodules appear when they are imported, and a class without annotations gets empty ones when asked."""
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__) is value
    return name == "__annotations__" and value == {}


def made_up() -> list[str]:
    """Modules of vLLM that no file stands behind."""
    return [n for n, m in sys.modules.items() if n.split(".")[0] == "vllm" and getattr(m, "__spec__", None) is None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every name that an adapter may rebind, for tests that ask for one as `adapter` and `rebound`."""
    if "rebound" in metafunc.fixturenames:
        pairs = [pytest.param(id_, name, id=f"{id_} {name}") for id_, names in REBINDS.items() for name in names]
        metafunc.parametrize(("adapter", "rebound"), pairs)


@pytest.fixture(scope="session")
def _warm() -> Stock:
    """Import everything once, so that later changes are no longer those of a first import."""
    stock = Stock()
    with eagle3compat.applied():
        stock.load()
    stock.drop()
    try:
        stock.load()
    except ImportError:
        stock.unaided = False
    stock.drop()
    stock.untouched = Snapshot()
    return stock


@pytest.fixture
def stock(_warm: Stock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    """The stock modules, not imported, in a process where the library is not applied; afterwards no trace is left."""
    for name in [name for name in os.environ if name.startswith("EAGLE3COMPAT")]:
        monkeypatch.delenv(name)
    eagle3compat.revert()
    _warm.drop()
    yield _warm
    eagle3compat.revert()
    _warm.drop()
    monkeypatch.undo()
    changes, _warm.untouched = _warm.untouched.changes(), Snapshot()  # one test's trace is not held against the next
    assert changes == []
