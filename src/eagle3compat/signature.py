"""What a call may pass, wherever it was read from: an imported object or source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

Def: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


class Kind(Enum):
    """How an argument may be passed; the names are those of `inspect.Parameter`."""

    POSITIONAL_ONLY = auto()
    POSITIONAL_OR_KEYWORD = auto()
    VAR_POSITIONAL = auto()
    KEYWORD_ONLY = auto()
    VAR_KEYWORD = auto()


_POSITIONAL = (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)
_NAMED = (Kind.POSITIONAL_OR_KEYWORD, Kind.KEYWORD_ONLY)
_STARS = {Kind.VAR_POSITIONAL: "*", Kind.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: Kind
    required: bool

    def __str__(self) -> str:
        optional = not self.required and self.kind not in _STARS
        return f"{_STARS.get(self.kind, '')}{self.name}{'=...' if optional else ''}"


@dataclass(frozen=True)
class Signature:
    """What a call may pass; `self` and `cls` are left out for classes and methods."""

    parameters: tuple[Parameter, ...]

    def accepts(self, name: str) -> bool:
        """Whether `name` can be passed by keyword, to a parameter of that name or to `**kwargs`."""
        return self._has(Kind.VAR_KEYWORD) or any(p.name == name for p in self.parameters if p.kind in _NAMED)

    def bind(self, positional: int, keywords: Collection[str], *, partial: bool = False) -> str | None:
        """None if a call with `positional` arguments and these keywords binds, else why not.

        The reason is in Python's words. `partial` allows required arguments to be missing: the call also has
        `*args` or `**kwargs`.
        """
        by_position = [p for p in self.parameters if p.kind in _POSITIONAL]
        filled = {p.name for p in by_position[:positional]}
        named = {p.name for p in self.parameters if p.kind in _NAMED}
        for name in keywords:
            if name not in named and not self._has(Kind.VAR_KEYWORD):
                if any(p.name == name for p in by_position):
                    return f"got some positional-only arguments passed as keyword arguments: {name!r}"
                return f"got an unexpected keyword argument {name!r}"
            if name in named and name in filled:
                return f"got multiple values for argument {name!r}"
        most = len(by_position)
        if positional > most and not self._has(Kind.VAR_POSITIONAL):
            least = sum(p.required for p in by_position)
            allowed = f"{most}" if least == most else f"from {least} to {most}"
            arguments = "argument" if most == 1 else "arguments"
            were = "was" if positional == 1 else "were"
            return f"takes {allowed} positional {arguments} but {positional} {were} given"
        filled |= named.intersection(keywords)
        missing = [p.name for p in self.parameters if p.required and p.name not in filled]
        if missing and not partial:
            return f"missing {len(missing)} required argument{'s' * (len(missing) > 1)}: {listed(missing)}"
        return None

    def _has(self, kind: Kind) -> bool:
        return any(p.kind is kind for p in self.parameters)

    def shown(self, most: int = 16) -> str:
        """As `str`, but of a long signature (`EngineArgs` has over 200 parameters) only the beginning."""
        more = len(self.parameters) - most
        begun = str(Signature(self.parameters[:most]))
        return f"{begun[:-1]}, and {more} more)" if more > 0 else begun

    def __str__(self) -> str:
        words: list[str] = []
        for index, parameter in enumerate(self.parameters):
            before = self.parameters[index - 1].kind if index else None
            if before is Kind.POSITIONAL_ONLY and parameter.kind is not before:
                words.append("/")
            if parameter.kind is Kind.KEYWORD_ONLY and before not in (Kind.KEYWORD_ONLY, Kind.VAR_POSITIONAL):
                words.append("*")
            words.append(str(parameter))
        if self.parameters and self.parameters[-1].kind is Kind.POSITIONAL_ONLY:
            words.append("/")
        return f"({', '.join(words)})"


def written(node: Def, drop_first: bool) -> Signature:
    """The signature of a `def`, whatever decorates it; `drop_first` leaves out `self` or `cls`."""
    args = node.args
    plain = [*((a, Kind.POSITIONAL_ONLY) for a in args.posonlyargs)]
    plain += ((a, Kind.POSITIONAL_OR_KEYWORD) for a in args.args)
    optional = len(plain) - len(args.defaults)
    found = [Parameter(a.arg, kind, at < optional) for at, (a, kind) in enumerate(plain)]
    found = found[1:] if drop_first else found
    if args.vararg:
        found.append(Parameter(args.vararg.arg, Kind.VAR_POSITIONAL, False))
    for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Parameter(a.arg, Kind.KEYWORD_ONLY, default is None))
    if args.kwarg:
        found.append(Parameter(args.kwarg.arg, Kind.VAR_KEYWORD, False))
    return Signature(tuple(found))


def inspected(target: object, drop_first: bool = False) -> Signature | None:
    """The signature of an imported object, through `functools.wraps`; None if it has none."""
    if not callable(target) or (isinstance(target, type) and issubclass(target, Enum)):
        return None
    try:
        parameters = list(_inspect(target).parameters.values())
    except Exception:  # noqa: BLE001  a stand-in for a missing package raises whatever it likes when looked at
        return None
    if drop_first and parameters and Kind[parameters[0].kind.name] in _POSITIONAL:
        del parameters[0]
    found = []
    for p in parameters:
        kind = Kind[p.kind.name]
        found.append(Parameter(p.name, kind, p.default is p.empty and kind not in _STARS))
    return Signature(tuple(found))


def _inspect(target: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        # Annotations are evaluated there, and may name what is only imported for type checkers.
        import annotationlib

        return inspect.signature(target, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(target)


def listed(names: Sequence[str]) -> str:
    """`'a', 'b' and 'c'`, as Python lists arguments."""
    quoted = [repr(name) for name in names]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted) or "nothing"
