"""Acts before and after the import of a stock module.

Stock modules have to be given names that vLLM no longer has while their import statements run, and be rebound right
after. An import hook that only reports finished imports cannot do the first, so this is a finder of its own; it can
be taken out again, and leaves no trace on the modules that it loaded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class StockFinder:
    """A meta path finder that wraps the loaders of the watched modules, whoever finds them."""

    def __init__(
        self,
        names: Collection[str],
        around: Callable[[str], AbstractContextManager[None]],
        after: Callable[[ModuleType], None],
    ) -> None:
        self.names, self.around, self.after = frozenset(names), around, after
        self._busy = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        outer = getattr(self._busy, "name", None)
        if fullname not in self.names or outer == fullname:
            return None
        self._busy.name = fullname
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                    return spec
        finally:
            self._busy.name = outer
        return None

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader:
    """Stands in for a module's loader during its one execution."""

    def __init__(self, original: Any, finder: StockFinder) -> None:
        self._original, self._finder = original, finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        with self._finder.around(module.__name__):
            self._original.exec_module(module)
        self._finder.after(module)
