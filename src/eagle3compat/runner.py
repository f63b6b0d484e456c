"""Runs a program as `python` would, adapted: in this process and in every process that multiprocessing spawns from it.

A spawned process imports the parent's main module again before it does anything else. So `__main__` is made the
program's own, and the adapters are applied in the child before that import: a script that imports speculators at its
top would otherwise fail there, in each of vLLM's spawned workers.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import zipfile
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from multiprocessing import spawn
from types import CodeType, ModuleType, TracebackType
from typing import Any

from .errors import Eagle3CompatError
from .report import Report

MODE = "EAGLE3COMPAT"
_prepared = spawn.get_preparation_data


class ProgramNotFoundError(Eagle3CompatError):
    """There is no such script or module."""


class Adapted:
    """Part of what a spawned process is prepared with; it applies the adapters there when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return adapt, ()


def preparation_data(name: str) -> dict[str, Any]:
    """What multiprocessing gives a process to prepare itself with, and the adapters."""
    return {**_prepared(name), "eagle3compat": Adapted()}


def adapt() -> Report:
    """Apply the adapters in this process, and in those that it spawns."""
    from eagle3compat import apply

    report = apply()
    spawn.get_preparation_data = preparation_data
    return report


def run(arguments: Sequence[str]) -> int:
    """Run `SCRIPT [ARG ...]` or `-m MODULE [ARG ...]` to its end; the exit code. SystemExit passes through.

    Raises ProgramNotFoundError before anything has run, and what `eagle3compat.apply()` raises.
    """
    as_module = arguments[0] == "-m"
    name, *rest = arguments[1:] if as_module else arguments
    if not as_module and not os.path.isfile(name):
        raise ProgramNotFoundError(f"there is no script {name}. Check the path; for a module: run -m MODULE.")
    if not as_module and zipfile.is_zipfile(name):
        raise ProgramNotFoundError(
            f"{name} is an archive, not a script. Put it on PYTHONPATH and name the module in it: run -m MODULE."
        )
    if as_module and name.startswith("."):
        raise ProgramNotFoundError(f"{name} is relative, and there is no package that it is in. Give its full name.")
    report = adapt()
    if not os.environ.get(MODE):
        os.environ[MODE] = "strict"
    print(f"eagle3compat: {report.headline}", file=sys.stderr)
    _lead_path(os.getcwd() if as_module else os.path.dirname(os.path.realpath(name)))
    try:
        if as_module:
            code, main = _module(name)
        else:
            code, main = _script(os.path.abspath(name))
        sys.argv = [str(main.__file__) if as_module else name, *rest]
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # spawned processes pickle under the second name
        exec(code, vars(main))
    except ProgramNotFoundError:
        raise
    except Exception as error:  # noqa: BLE001  whatever the program raises is shown as python shows it
        trace = _from_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    except SystemExit:
        raise
    except BaseException as error:  # Ctrl-C and its like: the interpreter ends as it does for a plain script
        _show_from_program(error.__traceback__)
        raise
    return 0


def _show_from_program(trace: TracebackType | None) -> None:
    """Have the exception that ends the interpreter shown without the frames that led to the program."""
    hook, trimmed = sys.excepthook, _from_program(trace)

    def show(kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        hook(kind, error.with_traceback(trimmed), trimmed)

    sys.excepthook = show


def _from_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that led to the program; none is left of a syntax error in the program."""
    leading = (run.__code__.co_filename, find_spec.__code__.co_filename)
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in leading and not file.startswith("<frozen importlib"):
            break
        trace = trace.tb_next
    return trace


def _lead_path(directory: str) -> None:
    """Put `directory` where this command's own is on the import path, if Python was told to have one there."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = directory


def _script(path: str) -> tuple[CodeType, ModuleType]:
    loader = SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        code = loader.source_to_code(file.read(), path)
    return code, _main(__file__=path, __loader__=loader, __package__=None, __spec__=None, __cached__=None)


def _module(name: str) -> tuple[CodeType, ModuleType]:
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
    loader = spec.loader if spec else None
    code = loader.get_code(spec.name) if spec and isinstance(loader, InspectLoader) else None
    if spec is None or code is None:
        raise ProgramNotFoundError(f"there is no module {name} that can be run. Check its name and sys.path.")
    return code, _main(
        __file__=spec.origin, __loader__=loader, __package__=spec.parent, __spec__=spec, __cached__=spec.cached
    )


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):  # it, or a package that it is said to be in
            return None
        raise


def _main(**attributes: Any) -> ModuleType:
    module = ModuleType("__main__")
    vars(module).update(attributes, __builtins__=builtins)
    return module
