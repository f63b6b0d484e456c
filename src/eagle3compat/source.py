"""Answers clauses from the source files of packages, installed or only unpacked, that it never imports."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .contract import Call, Imported, SourceNotFoundError
from .places import Place
from .resolve import Class, Function, Missing, Resolver, Target, Value
from .signature import Kind, Parameter, Signature, written
from .syntax import Module, decorated

_DATACLASS = ("dataclasses.dataclass", "pydantic.dataclasses.dataclass")
_FIELD = ("dataclasses.field", "pydantic.Field", "pydantic.fields.Field", "msgspec.field")
_WITHOUT_INIT = ("builtins.object", "abc.ABC", "typing.Generic")
_NAMED_TUPLE, _STRUCT = "typing.NamedTuple", "msgspec.Struct"


def directory(package: str) -> Path | None:
    """Where the top-level `package` is; it is not imported for that. None if it is not installed."""
    imported = sys.modules.get(package)
    if imported is not None:
        places = list(getattr(imported, "__path__", ()))
    else:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def split(path: str) -> tuple[str, list[str]]:
    """The module's name and the names to take from it, one after the other."""
    module, colon, names = path.partition(":")
    parts = names.split(".") if colon else []
    if not all(part.isidentifier() for part in (*module.split("."), *parts)):
        raise ValueError(f"{path!r} is not a path: write 'module.sub' or 'module.sub:Name.attr'")
    return module, parts


class SourceSurface:
    """Reads `packages`, which maps the name of each top-level package to its own directory.

    Every file is parsed at most once, and only when a question leads there. Where source alone cannot tell (a
    base class of another package, a metaclass that may change calls), a signature is unknown and a name does
    not exist.
    """

    def __init__(self, packages: Mapping[str, Place | str]) -> None:
        self._resolver = Resolver({n: Path(p) if isinstance(p, str) else p for n, p in packages.items()})

    @classmethod
    def installed(cls, *packages: str) -> SourceSurface:
        """Reads those of the top-level `packages` that are installed."""
        found = {package: directory(package) for package in packages}
        return cls({package: place for package, place in found.items() if place is not None})

    def exists(self, path: str) -> bool:
        return not isinstance(self._find(path), Missing)

    def signature(self, path: str) -> Signature | None:
        # The parameters of `Class.__init__` are those of the class, whatever writes the method.
        target = self._find(path.removesuffix(".__init__"))
        if isinstance(target, Class):
            return self._constructor(target)
        target = self._find(path)
        if not isinstance(target, Function) or decorated(target.node, "property"):
            return None
        return written(target.node, target.in_class and not decorated(target.node, "staticmethod"))

    def explain(self, path: str) -> str:
        target = self._find(path)
        if isinstance(target, Missing):
            return target.reason
        return f"{path} is there; its signature cannot be told from its source"

    def calls(self, module: str, name: str) -> tuple[Call, ...]:
        return tuple(self._source(module).calls.get(name, ()))

    def imports(self, module: str, of: str) -> tuple[Imported, ...]:
        return self._source(module).imports(of)

    def _source(self, name: str) -> Module:
        module = self._resolver.module(name)
        if isinstance(module, Missing):
            raise SourceNotFoundError(module.reason)
        return module

    def _find(self, path: str) -> Target:
        name, parts = split(path)
        target: Target = self._resolver.module(name)
        for part in parts:
            target = self._resolver.member(target, part)
        return target

    def _constructor(self, owner: Class) -> Signature | None:
        """What a call of the class takes, looked up in the order of `inspect.signature`."""
        lineage = self._resolver.lineage(owner)
        if any(isinstance(base, str) and base.startswith("enum.") for base in lineage):
            return None
        if not all(self._plain_calls(base) for base in lineage if isinstance(base, Class)):
            return None
        if _STRUCT in lineage:
            return self._from_fields([b for b in lineage if isinstance(b, Class) and self._is_struct(b)])
        for at, base in enumerate(lineage):
            if base == _NAMED_TUPLE:
                return self._from_fields([b for b in lineage[at - 1 : at] if isinstance(b, Class)])
            if isinstance(base, str):
                if base in _WITHOUT_INIT:
                    continue
                return None
            for name in ("__new__", "__init__"):
                method = self._resolver.in_body(base, name)
                if method is not None:
                    return written(method.node, True) if isinstance(method, Function) else None
            settings = self._dataclass(base)
            if settings is not None and not _is(settings.get("init"), False):
                parents = [b for b in self._resolver.lineage(base) if isinstance(b, Class)]
                return self._from_fields([b for b in parents if self._dataclass(b) is not None])
        return Signature(())

    def _plain_calls(self, owner: Class) -> bool:
        """Whether calling the class makes an instance: no metaclass has a `__call__` of its own."""
        for keyword in owner.node.keywords:
            if keyword.arg != "metaclass":
                continue
            meta = self._resolver.evaluate(keyword.value, owner.module)
            line = self._resolver.lineage(meta) if isinstance(meta, Class) else (getattr(meta, "origin", ""),)
            for base in line:
                known = base in ("abc.ABCMeta", "builtins.type") if isinstance(base, str) else True
                if not known or (isinstance(base, Class) and self._resolver.in_body(base, "__call__")):
                    return False
        return True

    def _is_struct(self, owner: Class) -> bool:
        return _STRUCT in self._resolver.lineage(owner)

    def _dataclass(self, owner: Class) -> dict[str | None, ast.expr] | None:
        """The arguments of its dataclass decorators, or None if it has none.

        They are the standard library's, pydantic's, and those marked with `dataclass_transform`, as vLLM's
        `config` is in releases where it makes the dataclass itself (vllm/config/utils.py).
        """
        settings: dict[str | None, ast.expr] | None = None
        for node in owner.node.decorator_list:
            maker = self._resolver.evaluate(node.func if isinstance(node, ast.Call) else node, owner.module)
            if (isinstance(maker, Value) and maker.origin in _DATACLASS) or (
                isinstance(maker, Function) and decorated(maker.node, "dataclass_transform")
            ):
                arguments = {k.arg: k.value for k in node.keywords} if isinstance(node, ast.Call) else {}
                settings = {**(settings or {}), **arguments}
        return settings

    def _from_fields(self, owners: list[Class]) -> Signature | None:
        """The parameters for the fields of `owners`, the most derived class first."""
        unread = {base.split(".")[0] for base in self._resolver.lineage(owners[0]) if isinstance(base, str)}
        if unread - sys.stdlib_module_names - {"msgspec"}:
            return None
        fields: dict[str, Parameter | None] = {}
        for owner in reversed(owners):
            fields.update(self._own_fields(owner))
        parameters = [parameter for parameter in fields.values() if parameter is not None]
        return Signature(tuple(sorted(parameters, key=lambda p: p.kind is Kind.KEYWORD_ONLY)))

    def _own_fields(self, owner: Class) -> Iterator[tuple[str, Parameter | None]]:
        """The fields that a class body declares; None for one that is no parameter (`init=False`)."""
        settings = self._dataclass(owner) or {k.arg: k.value for k in owner.node.keywords}
        keyword_only = _is(settings.get("kw_only"), True)
        for node in owner.node.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            kind = _head(node.annotation)
            if kind == "KW_ONLY":
                keyword_only = True
            elif kind != "ClassVar":
                name, options = node.target.id, self._options(node.value, owner)
                if _is(options.get("init"), False):
                    yield name, None
                    continue
                by_keyword = _is(options["kw_only"], True) if "kw_only" in options else keyword_only
                passed = Kind.KEYWORD_ONLY if by_keyword else Kind.POSITIONAL_OR_KEYWORD
                yield name, Parameter(name, passed, not options.keys() & {"default", "default_factory"})

    def _options(self, value: ast.expr | None, owner: Class) -> dict[str | None, ast.expr]:
        """The arguments of `field(...)` or pydantic's `Field(...)`; any other value is a default."""
        if value is None:
            return {}
        if isinstance(value, ast.Call):
            maker = self._resolver.evaluate(value.func, owner.module)
            if isinstance(maker, Value) and maker.origin in _FIELD:
                options = {keyword.arg: keyword.value for keyword in value.keywords}
                default = value.args[0] if value.args else options.pop("default", None)
                return options if default is None or _is(default, ...) else {**options, "default": default}
        return {"default": value}


def _is(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _head(annotation: ast.expr) -> str:
    """The last name of what an annotation subscripts: `ClassVar` of `typing.ClassVar[int]`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return annotation.value.split("[")[0].split(".")[-1].strip()
    while isinstance(annotation, ast.Subscript):
        annotation = annotation.value
    return annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", "")
