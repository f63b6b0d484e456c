"""Names that a library no longer has, put there while a stock module that imports them is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..contract import SourceNotFoundError
from ..errors import IncompatibleError
from ..ledger import Ledger


class Gone(type):
    """A class in the place of a name that is no longer there. It can be a base class or an annotation; using it raises.

    Adapters rebind what stock uses for extraction; what is left is of no use to it.
    """

    adapter: str
    """The id of the adapter that supplied it."""

    def __new__(mcs, name: str, bases: tuple[type, ...] = (), namespace: dict[str, Any] | None = None) -> Gone:
        return super().__new__(mcs, name, bases, namespace or {})

    def __init__(cls, name: str, bases: tuple[type, ...] = (), namespace: dict[str, Any] | None = None) -> None:
        super().__init__(name, bases, namespace or {})

    def __call__(cls, *_args: Any, **_kwargs: Any) -> Any:
        raise IncompatibleError(
            cls.adapter, cls.__name__, "a name that the installed library has", "nothing of that name",
            "No adapter replaces this use of it. Run `eagle3compat doctor` and report its output.",
        )

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return cls()


@contextmanager
def supplied(adapter: str, stock_modules: Sequence[str], of: str) -> Iterator[None]:
    """Within: every name of the package `of` that the source of a stock module imports is there.

    A stock module that this release does not have needs nothing. `of`'s own modules are left as they were.
    """
    from ..source import SourceSurface

    surface = SourceSurface.installed(stock_modules[0].partition(".")[0])
    ledger = Ledger()
    modules: dict[str, bool] = {}
    try:
        for stock_module in stock_modules:
            try:
                imports = surface.imports(stock_module, of)
            except SourceNotFoundError:  # another release of stock has it
                continue
            for imported in imports:
                module = _module(imported.module, modules)
                if imported.name not in (None, "*") and not _has(module, imported.name):
                    ledger.rebind(adapter, module, imported.name, Gone(imported.path, (), {"adapter": adapter}))
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
