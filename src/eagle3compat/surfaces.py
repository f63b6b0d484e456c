"""The surfaces that clauses are asked of: imported objects here, source files in `source`."""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .contract import Call, Imported, SourceNotFoundError
from .resolve import Missing, locate
from .signature import Signature, inspected
from .source import SourceSurface, directory, split
from .syntax import Module

__all__ = ["LiveSurface", "SourceSurface"]


@dataclass(frozen=True)
class _Found:
    """An object, and the class that it was taken from, if it was; not yet bound by a descriptor."""

    value: object
    owner: type | None = None


class LiveSurface:
    """Imports what a path names, and looks at the object.

    Only `calls` and `imports` read source, and import nothing: they work on a module that cannot be imported.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Module] = {}

    def exists(self, path: str) -> bool:
        return not isinstance(self._find(path), Missing)

    def signature(self, path: str) -> Signature | None:
        # The parameters of `Class.__init__` are those of the class, whatever writes the method.
        stem = path.removesuffix(".__init__")
        found = self._find(stem)
        if stem != path and not (isinstance(found, _Found) and isinstance(found.value, type)):
            found = self._find(path)
        if isinstance(found, Missing):
            return None
        value = found.value
        if found.owner is None or isinstance(value, type):
            return inspected(value)
        if isinstance(value, staticmethod):
            return inspected(value.__func__)
        if isinstance(value, classmethod):
            return inspected(value.__func__, drop_first=True)
        return inspected(value, drop_first=hasattr(value, "__get__"))

    def explain(self, path: str) -> str:
        found = self._find(path)
        return found.reason if isinstance(found, Missing) else f"{path} is there; it has no signature"

    def calls(self, module: str, name: str) -> tuple[Call, ...]:
        return tuple(self._source(module).calls.get(name, ()))

    def imports(self, module: str, of: str) -> tuple[Imported, ...]:
        return self._source(module).imports(of)

    def _source(self, name: str) -> Module:
        if name not in self._sources:
            self._sources[name] = _source(name)
        return self._sources[name]

    def _find(self, path: str) -> _Found | Missing:
        name, parts = split(path)
        imported = _import(name)
        if isinstance(imported, Missing):
            return imported
        found: _Found | Missing = _Found(imported)
        for part in parts:
            if isinstance(found, Missing):
                break
            found = _attribute(found.value, part)
        return found


def _import(name: str) -> ModuleType | Missing:
    """The module, or why not: that there is none of that name, or that importing it fails."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return Missing(f"no module named {error.name!r}")
        return _does_not_import(name, error)
    except Exception as error:  # noqa: BLE001  a module can raise anything while it is imported
        return _does_not_import(name, error)


def _does_not_import(name: str, error: Exception) -> Missing:
    said = " ".join(str(error).split()) or "no message"
    return Missing(f"module {name!r} is there, but importing it fails: {type(error).__name__}: {said}")


def _attribute(holder: object, name: str) -> _Found | Missing:
    if isinstance(holder, type):
        for base in holder.__mro__:
            if name in vars(base):
                return _Found(vars(base)[name], holder)
        if any(name in _annotated(base) for base in holder.__mro__) or hasattr(holder, name):
            return _Found(None, holder)
        return Missing(f"class '{holder.__module__}:{holder.__qualname__}' has no attribute {name!r}")
    try:
        return _Found(getattr(holder, name))
    except AttributeError:
        if not isinstance(holder, ModuleType):
            return Missing(f"{type(holder).__name__!r} object has no attribute {name!r}")
    except Exception as error:  # noqa: BLE001  a lazy module imports, and that can raise anything
        return _does_not_import(f"{getattr(holder, '__name__', holder)}.{name}", error)
    full = f"{holder.__name__}.{name}"
    submodule = _import(full) if hasattr(holder, "__path__") else None
    if isinstance(submodule, ModuleType):
        return _Found(submodule)
    absent = Missing(f"module {holder.__name__!r} has no attribute {name!r}")
    return absent if submodule is None or submodule == Missing(f"no module named {full!r}") else submodule


def _annotated(owner: type) -> frozenset[str]:
    """The names that a class body annotates: its fields, also those without a default."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return frozenset(annotationlib.get_annotations(owner, format=annotationlib.Format.FORWARDREF))
    return frozenset(inspect.get_annotations(owner))


def _source(name: str) -> Module:
    """The source of a module, found from the directory of its top-level package: no parent is imported."""
    imported = sys.modules.get(name)
    file = getattr(imported, "__file__", None)
    if file:
        return Module(name, Path(file))
    top = name.split(".")[0]
    place = directory(top)
    path = locate(name, {top: place}) if place else None
    if path is None:
        raise SourceNotFoundError(f"no module named {name!r}")
    return Module(name, path)
