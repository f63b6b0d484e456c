"""Stock modules import vLLM names that have moved or gone; the import of speculators' data generation then fails."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

from ..adapter import GENERATOR, WORKER, Adapter
from ..contract import Imports
from ..errors import IncompatibleError
from ..ledger import Ledger


class Gone:
    """In the place of a vLLM name that is no longer there. Using it raises; the adapters rebind what stock uses."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise IncompatibleError(
            "vllm_names", self._name, "a name that vLLM has", "nothing of that name",
            "No adapter replaces this use of it. Run `eagle3compat doctor` and report its output.",
        )

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return self()


class VllmNames(Adapter):
    """Lets the import statements of the stock generator succeed: absent names are there while it is imported.

    Everything that the generator does with them is rebound by the adapters that follow, so what is supplied only has to
    be importable, and vLLM's own modules are left as they were afterwards.
    """

    id = "vllm_names"
    seam = "imports"
    target = GENERATOR
    breaks = (
        "`from speculators.data_generation import ...` raises ImportError or ModuleNotFoundError: "
        "`vllm.utils.hashing` (0.4 on vLLM 0.11.0), `_get_kv_cache_groups_uniform_spec` (vLLM 0.33)"
    )
    stock_needs = (Imports(GENERATOR, "vllm"),)
    where = "driver"
    upstream = "https://github.com/vllm-project/speculators/pull/225"
    remove_when = "no supported vLLM lacks a name that stock imports"

    @contextmanager
    def during_import(self) -> Iterator[None]:
        with supplied(self.id, self.target):
            yield

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        """Nothing to keep: the adapters that follow rebind these names in the generator."""


class WorkerNames(VllmNames):
    """The same for the module of the stock worker extension, which a worker or a user's subclass may import."""

    id = "worker_names"
    target = WORKER
    breaks = "importing the stock worker extension raises ImportError when vLLM has moved a name that it imports"
    stock_needs = (Imports(WORKER, "vllm"),)
    where = "driver and worker"


@contextmanager
def supplied(adapter: str, stock_module: str) -> Iterator[None]:
    """Within: every vLLM name that the source of `stock_module` imports is there."""
    from ..surfaces import LiveSurface

    ledger = Ledger()
    modules: dict[str, bool] = {}
    try:
        for imported in LiveSurface().imports(stock_module, "vllm"):
            module = _module(imported.module, modules)
            if imported.name is not None and not _has(module, imported.name):
                ledger.rebind(adapter, module, imported.name, Gone(f"{imported.module}:{imported.name}"))
        yield
    finally:
        ledger.restore()
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update({name: None for name, blocked in modules.items() if blocked})  # type: ignore[misc]


def _module(name: str, made: dict[str, bool]) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # a dependency of vLLM is missing: another fault, with its own message
        module = ModuleType(name)
        made[name] = name in sys.modules  # None there says that somebody blocks it
        sys.modules[name] = module
        return module


def _has(module: ModuleType, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:  # neither an attribute nor a submodule: it is absent
        return False
    return True
