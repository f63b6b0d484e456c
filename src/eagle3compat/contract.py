"""What stock code and adapters count on, as clauses about another library's symbols and signatures.

A clause is asked of a surface. `surfaces.LiveSurface` answers from imported objects, `source.SourceSurface`
from source files that it never imports; both give the same answers, so what can be planned for an installed
vLLM can be planned for one that is not.

A path is `module.sub` or `module.sub:Name.attr`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .signature import Kind, Parameter, Signature, listed

__all__ = [
    "Accepts", "AnyOf", "Binds", "Call", "Clause", "Exists", "Explains", "Finding", "Imported",
    "Imports", "Kind", "Not", "Parameter", "Signature", "SourceNotFoundError", "Surface",
]


@dataclass(frozen=True)
class Call:
    """A call in source; `starred` says that it also passes `*args` or `**kwargs`."""

    positional: int
    keywords: tuple[str, ...]
    starred: bool
    line: int


@dataclass(frozen=True)
class Imported:
    """A name that a module's source imports; `name` is None for `import module`, "*" for a star import."""

    module: str
    name: str | None
    bound: str
    line: int

    @property
    def path(self) -> str:
        return self.module if self.name in (None, "*") else f"{self.module}:{self.name}"


class SourceNotFoundError(LookupError):
    """A module has no source file that can be read, so its calls and imports are unknown."""


class Surface(Protocol):
    """What a clause can ask of a library."""

    def exists(self, path: str) -> bool:
        """Whether the module can be imported and has the name."""

    def signature(self, path: str) -> Signature | None:
        """None if there is no such thing, if it cannot be called, or if its signature is unknown."""

    def calls(self, module: str, name: str) -> tuple[Call, ...]:
        """The calls of the plain name, `name(...)`, in the source of `module`.

        Raises `SourceNotFoundError` if that source cannot be read.
        """

    def imports(self, module: str, of: str) -> tuple[Imported, ...]:
        """What the source of `module` needs from the package `of` to be imported itself.

        Left out: imports inside functions, under TYPE_CHECKING, and those whose failure the source handles.
        Raises `SourceNotFoundError` if that source cannot be read.
        """


@runtime_checkable
class Explains(Protocol):
    """A surface that can also say why something does not exist or has no signature."""

    def explain(self, path: str) -> str:
        """One line, never empty."""


def _explain(surface: Surface, path: str) -> str:
    if isinstance(surface, Explains):
        return surface.explain(path)
    return f"{path} has no known signature" if surface.exists(path) else f"{path} does not exist"


@dataclass(frozen=True)
class Finding:
    """What became of one clause; `expected` and `found` are never empty."""

    clause: Clause
    held: bool
    expected: str
    found: str


class Clause(ABC):
    """Something that must be so. Its text names the thing, such that "relies on <text>" reads well."""

    def evaluate(self, surface: Surface) -> Finding:
        try:
            held, found = self._ask(surface)
        except SourceNotFoundError as error:
            held, found = False, str(error)
        return Finding(self, held, self.expected, found)

    @property
    @abstractmethod
    def expected(self) -> str: ...

    @abstractmethod
    def _ask(self, surface: Surface) -> tuple[bool, str]:
        """Whether it holds, and what was found."""


@dataclass(frozen=True)
class Exists(Clause):
    """`path` can be imported."""

    path: str

    @property
    def expected(self) -> str:
        return f"{self.path} to be there"

    def _ask(self, surface: Surface) -> tuple[bool, str]:
        if surface.exists(self.path):
            return True, f"{self.path} is there"
        return False, _explain(surface, self.path)

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class Accepts(Clause):
    """The callable at `path` takes each of `names` by keyword."""

    path: str
    names: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"{self.path} to take {listed(self.names)} by keyword"

    def _ask(self, surface: Surface) -> tuple[bool, str]:
        signature = surface.signature(self.path)
        if signature is None:
            return False, _explain(surface, self.path)
        refused = [name for name in self.names if not signature.accepts(name)]
        if refused:
            return False, f"no parameter {listed(refused)} in {signature.shown()}"
        return True, f"{self.path} takes {listed(self.names)}"

    def __str__(self) -> str:
        return f"{self.path}({', '.join(f'{name}=' for name in self.names)})"


@dataclass(frozen=True)
class Binds(Clause):
    """Every call `name(...)` in the source of the module `caller` binds the signature of `path`.

    Holds where there is no such call.
    """

    caller: str
    name: str
    path: str

    @property
    def expected(self) -> str:
        return f"each of them to bind {self.path}"

    def _ask(self, surface: Surface) -> tuple[bool, str]:
        calls = surface.calls(self.caller, self.name)
        if not calls:
            return True, f"{self.caller} does not call {self.name}"
        signature = surface.signature(self.path)
        if signature is None:
            return False, _explain(surface, self.path)
        faults = []
        for call in calls:
            reason = signature.bind(call.positional, call.keywords, partial=call.starred)
            if reason is not None:
                faults.append(f"{self.name}() in line {call.line} {reason}")
        if faults:
            return False, f"{'; '.join(faults)}; its parameters are {signature.shown()}"
        return True, "the call binds" if len(calls) == 1 else f"all {len(calls)} calls bind"

    def __str__(self) -> str:
        return f"the calls of {self.name} in {self.caller}"


@dataclass(frozen=True)
class Imports(Clause):
    """Every name that the source of `caller` imports from the package `of` exists."""

    caller: str
    of: str

    @property
    def expected(self) -> str:
        return "every one of them to be there"

    def _ask(self, surface: Surface) -> tuple[bool, str]:
        imports = surface.imports(self.caller, self.of)
        gone = [imported for imported in imports if not surface.exists(imported.path)]
        if gone:
            return False, "; ".join(f"line {name.line}: {_explain(surface, name.path)}" for name in gone)
        if not imports:
            return True, f"{self.caller} imports nothing from {self.of}"
        return True, f"all {len(imports)} of them are there"

    def __str__(self) -> str:
        return f"what {self.caller} imports from {self.of}"


@dataclass(frozen=True)
class Not(Clause):
    """`clause` does not hold."""

    clause: Clause

    @property
    def expected(self) -> str:
        return f"the opposite of: {self.clause.expected}"

    def _ask(self, surface: Surface) -> tuple[bool, str]:
        finding = self.clause.evaluate(surface)
        return not finding.held, finding.found

    def __str__(self) -> str:
        return f"not {self.clause}"


@dataclass(frozen=True)
class AnyOf(Clause):
    """At least one of `clauses` holds."""

    clauses: tuple[Clause, ...]

    @property
    def expected(self) -> str:
        return " or ".join(clause.expected for clause in self.clauses) or "a clause that holds"

    def _ask(self, surface: Surface) -> tuple[bool, str]:
        found = []
        for clause in self.clauses:
            finding = clause.evaluate(surface)
            if finding.held:
                return True, finding.found
            found.append(finding.found)
        return False, "; ".join(found) or "no clause at all"

    def __str__(self) -> str:
        return " or ".join(str(clause) for clause in self.clauses) or "one of no clauses"
