"""Clauses, and the two surfaces that answer them: both are held to the same tables."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3compat.contract import (
    Accepts,
    AnyOf,
    Binds,
    Call,
    Clause,
    Exists,
    Finding,
    Imported,
    Imports,
    Not,
    Signature,
    SourceNotFoundError,
    Surface,
)
from eagle3compat.signature import inspected
from eagle3compat.source import SourceSurface
from eagle3compat.surfaces import LiveSurface

Package = Callable[[dict[str, str]], Surface]


@pytest.fixture(params=["live", "source"])
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Writes files of a package `lib` (and of others, by path), and gives a surface on them."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(files: dict[str, str]) -> Surface:
        for name, text in {"lib/__init__.py": "", **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text))
        importlib.invalidate_caches()
        tops = {name.split("/")[0] for name in files} | {"lib"}
        return LiveSurface() if request.param == "live" else SourceSurface({top: tmp_path / top for top in tops})

    yield write
    for name in list(sys.modules):
        if name.split(".")[0] in {path.name for path in tmp_path.iterdir()}:
            del sys.modules[name]


TREE = {
    "lib/__init__.py": """
        import typing
        from .things import Thing as Renamed
        NAMES = {"Lazy": ".things:Thing", "LazyModule": "lib.things", "NotAPath": 3}
        if typing.TYPE_CHECKING:
            from .things import Thing as ForTypes
        else:
            def __getattr__(name):
                import importlib
                if name in NAMES:
                    value = NAMES[name]
                    if isinstance(value, str):
                        module, _, attribute = value.partition(":")
                        found = importlib.import_module(module, __package__)
                        return getattr(found, attribute) if attribute else found
                    return value
                if name == "compared":
                    return 1
                raise AttributeError(name)
    """,
    "lib/things.py": """
        from __future__ import annotations
        from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload
        from abc import ABC, abstractmethod
        import functools
        if TYPE_CHECKING:
            from nowhere import OnlyForTypes
        T = TypeVar("T")
        annotated_only: int
        value: int = 3
        first, second = 1, 2
        deleted = 1
        del deleted

        class Thing:
            plain = 1
            declared: int
            made: int = 4
            def __init__(self, a, b=1, *args, c, d=2, **kwargs):
                self.hidden = a
            def method(self, x, /, y, *, z=1): ...
            @staticmethod
            def static(x): ...
            @classmethod
            def of_class(cls, x): ...
            @property
            def prop(self): return 1
            @prop.setter
            def prop(self, value): ...
            @functools.cached_property
            def cached(self): return 1
            @functools.lru_cache
            def remembered(self, key): ...
            alias = method
            class Inner:
                def __init__(self, deep): ...

        class Child(Thing):
            def own(self): ...
        class Bare: ...
        class Abstract(ABC, Generic[T]):
            @abstractmethod
            def todo(self, x): ...
        class Made(Abstract[int]):
            def __new__(cls, made): ...
        class Left(Bare):
            def side(self, left): ...
        class Right(Bare):
            def side(self, right): ...
            def __init__(self, right): ...
        class Both(Left, Right): ...
        class Point(NamedTuple):
            x: int
            y: int = 0
        class Farther(Point): ...
        class Meta(type):
            def __call__(cls, *args): ...
        class Odd(metaclass=Meta):
            def __init__(self, a): ...

        def wrapping(f):
            @functools.wraps(f)
            def inner(*args, **kwargs): return f(*args, **kwargs)
            return inner
        @wrapping
        def wrapped(a, b=1): ...
        @overload
        def loaded(a: int) -> int: ...
        @overload
        def loaded(a: str) -> str: ...
        def loaded(a, b=None): ...
        async def coroutine(a): ...
        def helper(self, a): ...
        class Borrowing:
            borrowed = helper
        same = helper
        through = Thing.of_class
        Alias = Thing
        Chained = Alias
    """,
    "lib/branches.py": """
        import sys
        try:
            from nowhere import missing_function
        except ImportError:
            missing_function = None
        try:
            from .things import helper
        except ImportError:
            def helper(): ...
        try:
            import nowhere.deep as nowhere_deep
        except ImportError:
            has_nowhere = False
        else:
            has_nowhere = True
        if sys.maxsize > 1:
            def chosen(a, b): ...
        else:
            def chosen(a, b): ...
        with open(__file__) as handle:
            inside_with = 1
        def replaced(a): ...
        def replaced(b): ...
    """,
    "lib/stars.py": """
        from .public import *
        from .listed import *
        from .chain import *
    """,
    "lib/public.py": "from .things import Thing\nvisible = 1\n_hidden = 1\ndef both(public): ...\n",
    "lib/listed.py": "__all__ = ['_chosen']\n__all__ += ['both']\n_chosen = 1\nnot_chosen = 1\ndef both(listed): ...\n",
    "lib/chain.py": "from .deep.inner import *\n",
    "lib/deep/__init__.py": "from . import inner\nfrom .inner import function as inner_function\n",
    "lib/deep/inner.py": "def function(a): ...\n",
    "lib/deep/other.py": "def function(b): ...\n",
    "lib/replaced.py": """
        import sys, types
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from .things import Thing
        else:
            from . import things
            lazy = types.ModuleType(__name__)
            lazy.__getattr__ = lambda name: getattr(things, name)
            sys.modules[__name__] = lazy
    """,
    "lib/broken.py": "import a_dependency_that_is_not_there\nclass There: ...\n",
    "lib/imports_gone.py": "from .gone import name\n",
}

EXISTS = [
    ("lib", True),
    ("lib.things", True),
    ("lib.deep", True),
    ("lib.deep.other", True),
    ("lib.gone", False),
    ("lib.gone.deeper", False),
    ("not_installed_at_all", False),
    ("lib:things", True),
    ("lib.deep:other", True),
    ("lib.deep:other.function", True),
    ("lib.deep:inner.function", True),
    ("lib.deep:inner_function", True),
    ("lib:Renamed", True),
    ("lib:Renamed.method", True),
    ("lib:Thing", False),
    ("lib:ForTypes", False),
    ("lib:Lazy", True),
    ("lib:Lazy.method", True),
    ("lib:Lazy.gone", False),
    ("lib:LazyModule", True),
    ("lib:NotAPath", True),
    ("lib:compared", True),
    ("lib.things:value", True),
    ("lib.things:first", True),
    ("lib.things:annotated_only", False),
    ("lib.things:deleted", False),
    ("lib.things:OnlyForTypes", False),
    ("lib.things:functools", True),
    ("lib.things:Thing.plain", True),
    ("lib.things:Thing.declared", True),
    ("lib.things:Thing.made", True),
    ("lib.things:Thing.hidden", False),
    ("lib.things:Thing.prop", True),
    ("lib.things:Thing.Inner", True),
    ("lib.things:Thing.__init__", True),
    ("lib.things:Thing.gone", False),
    ("lib.things:Child.method", True),
    ("lib.things:Child.declared", True),
    ("lib.things:Child.own", True),
    ("lib.things:Bare.__init__", True),
    ("lib.things:Alias.method", True),
    ("lib.branches:missing_function", True),
    ("lib.branches:helper", True),
    ("lib.branches:nowhere_deep", False),
    ("lib.branches:has_nowhere", True),
    ("lib.branches:inside_with", True),
    ("lib.stars:Thing", True),
    ("lib.stars:visible", True),
    ("lib.stars:_hidden", False),
    ("lib.stars:_chosen", True),
    ("lib.stars:not_chosen", False),
    ("lib.stars:function", True),
    ("lib.replaced:Thing", True),
    ("lib.replaced:gone", False),
]
BY_SOURCE_ALONE = {"lib.branches:nowhere_deep"}
"""What a surface on source answers otherwise: it cannot know which packages of others are installed."""


@pytest.mark.parametrize(("path", "expected"), EXISTS)
def test_exists(package: Package, path: str, expected: bool) -> None:
    surface = package(TREE)
    if isinstance(surface, SourceSurface) and path in BY_SOURCE_ALONE:
        expected = not expected
    assert surface.exists(path) is expected


SIGNATURES = [
    ("lib.things:Thing", "(a, b=..., *args, c, d=..., **kwargs)"),
    ("lib.things:Thing.__init__", "(a, b=..., *args, c, d=..., **kwargs)"),
    ("lib.things:Thing.method", "(x, /, y, *, z=...)"),
    ("lib.things:Thing.alias", "(x, /, y, *, z=...)"),
    ("lib.things:Thing.static", "(x)"),
    ("lib.things:Thing.of_class", "(x)"),
    ("lib.things:Thing.remembered", "(key)"),
    ("lib.things:Thing.prop", None),
    ("lib.things:Thing.cached", None),
    ("lib.things:Thing.plain", None),
    ("lib.things:Thing.declared", None),
    ("lib.things:Thing.Inner", "(deep)"),
    ("lib.things:Child", "(a, b=..., *args, c, d=..., **kwargs)"),
    ("lib.things:Child.method", "(x, /, y, *, z=...)"),
    ("lib.things:Bare", "()"),
    ("lib.things:Abstract", "()"),
    ("lib.things:Abstract.todo", "(x)"),
    ("lib.things:Made", "(made)"),
    ("lib.things:Both", "(right)"),
    ("lib.things:Both.side", "(left)"),
    ("lib.things:Point", "(x, y=...)"),
    ("lib.things:Farther", "(x, y=...)"),
    ("lib.things:wrapped", "(a, b=...)"),
    ("lib.things:loaded", "(a, b=...)"),
    ("lib.things:coroutine", "(a)"),
    ("lib.things:same", "(self, a)"),
    ("lib.things:through", "(x)"),
    ("lib.things:Borrowing.borrowed", "(a)"),
    ("lib.things:Chained.method", "(x, /, y, *, z=...)"),
    ("lib.things:value", None),
    ("lib.things", None),
    ("lib.things:gone", None),
    ("lib:Renamed.static", "(x)"),
    ("lib:Lazy", "(a, b=..., *args, c, d=..., **kwargs)"),
    ("lib:NotAPath", None),
    ("lib.branches:helper", "(self, a)"),
    ("lib.branches:chosen", "(a, b)"),
    ("lib.branches:replaced", "(b)"),
    ("lib.branches:missing_function", None),
    ("lib.stars:both", "(listed)"),
    ("lib.stars:function", "(a)"),
    ("lib.replaced:Thing.static", "(x)"),
]


@pytest.mark.parametrize(("path", "expected"), SIGNATURES)
def test_signature(package: Package, path: str, expected: str | None) -> None:
    signature = package(TREE).signature(path)
    assert (None if signature is None else str(signature)) == expected


def test_a_metaclass_that_changes_calls_leaves_no_signature_of_init(package: Package) -> None:
    assert str(package(TREE).signature("lib.things:Odd")) in ("None", "(*args)")


GENERATED = """
    from __future__ import annotations
    import dataclasses
    import typing
    from dataclasses import KW_ONLY, InitVar, dataclass, field
    from typing import ClassVar
    def config(cls):
        return cls
    @typing.no_type_check
    def plain(cls): return cls
"""
FIELDS = [
    ("@dataclass\nclass C:\n    a: int\n    b: int = 1", "(a, b=...)"),
    ("@dataclasses.dataclass(frozen=True)\nclass C:\n    a: int", "(a)"),
    ("@config\n@dataclass\nclass C:\n    a: int", "(a)"),
    ("@config\nclass C:\n    a: int = 1", "()"),
    ("@dataclass\nclass C:\n    a: int = field(default=1)\n    b: list = field(default_factory=list)",
     "(a=..., b=...)"),
    ("@dataclass\nclass C:\n    a: int = field(init=False, default=1)\n    b: int = field()", "(b)"),
    ("@dataclass\nclass C:\n    a: int = field(kw_only=True)\n    b: int", "(b, *, a)"),
    ("@dataclass(kw_only=True)\nclass C:\n    a: int = 1\n    b: int = field(kw_only=False)", "(b, *, a=...)"),
    ("@dataclass\nclass C:\n    a: int\n    _: KW_ONLY\n    b: int", "(a, *, b)"),
    ("@dataclass\nclass C:\n    a: ClassVar[int] = 1\n    b: typing.ClassVar = 2\n    c: int", "(c)"),
    ("@dataclass\nclass C:\n    a: InitVar[int]\n    b: InitVar[int] = 1", "(a, b=...)"),
    ("@dataclass\nclass C:\n    a: int = ...", "(a=...)"),
    ("@dataclass\nclass C:\n    a: int\n    def __init__(self, own): ...", "(own)"),
    ("@dataclass(init=False)\nclass C:\n    a: int", "()"),
    ("@dataclass\nclass P:\n    a: int\n    b: int = 1\n@dataclass\nclass C(P):\n    b: int = 2\n    c: int = 3",
     "(a, b=..., c=...)"),
    ("@dataclass\nclass P:\n    a: int\nclass C(P):\n    b: int = 2", "(a)"),
    ("class P:\n    a: int\n@dataclass\nclass C(P):\n    b: int", "(b)"),
    ("@dataclass\nclass P:\n    a: int = 1\n@dataclass(kw_only=True)\nclass C(P):\n    b: int", "(a=..., *, b)"),
    ("@dataclass\nclass P:\n    a: int = 1\n@dataclass\nclass C(P):\n    a: int = field(init=False, default=2)", "()"),
    ("@dataclass\nclass C(Exception):\n    a: int", "(a)"),
    ("@plain\n@dataclass\nclass C:\n    a: int", "(a)"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "expected"), FIELDS)
def test_signature_that_a_dataclass_writes(package: Package, source: str, expected: str) -> None:
    surface = package({"lib/made.py": textwrap.dedent(GENERATED) + source})
    assert str(surface.signature("lib.made:C")) == expected
    assert str(surface.signature("lib.made:C.__init__")) == expected
    assert surface.exists("lib.made:C.a")


STAND_INS = {
    "pydantic/__init__.py": "from .fields import Field\n",
    "pydantic/fields.py": "def Field(default=..., *, default_factory=None, init=True): ...\n",
    "pydantic/dataclasses.py": "def dataclass(cls=None, **settings): ...\n",
    "msgspec/__init__.py": "class Struct: ...\ndef field(**options): ...\n",
    "typing_extensions/__init__.py": "",
    "lib/utils.py": """
        from pydantic.dataclasses import dataclass
        from typing_extensions import dataclass_transform
        @dataclass_transform()
        def config(cls=None, **settings):
            return dataclass(cls, **settings)
    """,
}
OF_OTHER_PACKAGES = [
    ("from pydantic.dataclasses import dataclass\n@dataclass(config=1)\nclass C:\n    a: int\n    b: int = 1",
     "(a, b=...)"),
    ("from lib.utils import config\n@config\nclass C:\n    a: int\n    b: int = 1", "(a, b=...)"),
    ("from lib.utils import config\n@config(config=1, kw_only=True)\nclass C:\n    a: int", "(*, a)"),
    ("from lib.utils import config\nfrom pydantic import Field\n@config\nclass C:\n    a: int = Field(...)\n"
     "    b: int = Field(gt=0)\n    c: int = Field(3)\n    d: int = Field(default_factory=int)\n"
     "    e: int = Field(init=False)", "(a, b, c=..., d=...)"),
    ("import msgspec\nclass P: ...\nclass B(msgspec.Struct):\n    a: int\n"
     "class C(P, B, omit_defaults=True, kw_only=True):\n    b: int\n    c: int = msgspec.field(default=1)",
     "(a, *, b, c=...)"),
    ("import torch\nclass C(torch.nn.Module):\n    def __init__(self, a): ...", "(a)"),
    ("import torch\nclass C(torch.nn.Module):\n    a = 1", "None"),
    ("import enum\nclass C(enum.IntEnum):\n    a = 1", "None"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "expected"), OF_OTHER_PACKAGES)
def test_signature_from_source_where_another_package_writes_it(tmp_path: Path, source: str, expected: str) -> None:
    """Held against the real pydantic and msgspec by tests/real/check_surfaces.py."""
    for name, text in {"lib/__init__.py": "", **STAND_INS, "lib/made.py": source}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    surface = SourceSurface({"lib": tmp_path / "lib"})
    assert str(surface.signature("lib.made:C")) == expected
    assert surface.exists("lib.made:C.a") is ("a: int" in source or "a = 1" in source)


def test_a_base_that_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("import torch\nclass C(torch.nn.Module): ...\n")
    found = Exists("lib:C.forward").evaluate(SourceSurface({"lib": tmp_path})).found
    assert found == (
        "class 'lib:C' has no attribute 'forward' (its base torch.nn.Module is not among the packages that are read)"
    )


def test_defs_that_differ_by_branch_leave_the_signature_unknown(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("import os\nif os.name:\n    def f(a): ...\nelse:\n    def f(b): ...\n")
    surface = SourceSurface({"lib": tmp_path})
    assert surface.exists("lib:f")
    assert surface.signature("lib:f") is None


REASONS = [
    ("lib.gone", "no module named 'lib.gone'"),
    ("lib.gone.deeper:x", "no module named 'lib.gone'"),
    ("not_installed_at_all.x:y", "no module named 'not_installed_at_all'"),
    ("lib.things:gone", "module 'lib.things' has no attribute 'gone'"),
    ("lib.things:gone.deeper", "module 'lib.things' has no attribute 'gone'"),
    ("lib.things:Child.gone", "class 'lib.things:Child' has no attribute 'gone'"),
]


@pytest.mark.parametrize(("path", "reason"), REASONS)
def test_what_is_missing_is_told_apart(package: Package, path: str, reason: str) -> None:
    finding = Exists(path).evaluate(package(TREE))
    assert (finding.held, finding.found) == (False, reason)
    assert finding.expected == f"{path} to be there"


def test_a_dependency_that_does_not_import_is_no_missing_module(package: Package) -> None:
    surface = package(TREE)
    finding = Exists("lib.broken:There").evaluate(surface)
    if isinstance(surface, SourceSurface):
        assert finding.held
    else:
        assert finding.found == (
            "module 'lib.broken' is there, but importing it fails: "
            "ModuleNotFoundError: No module named 'a_dependency_that_is_not_there'"
        )


def test_an_error_without_a_message_is_still_named(package: Package) -> None:
    surface = package({"lib/raises.py": "raise RuntimeError\n"})
    if isinstance(surface, LiveSurface):
        assert Exists("lib.raises").evaluate(surface).found.endswith("fails: RuntimeError: no message")


def test_a_name_imported_from_a_module_that_is_gone(package: Package) -> None:
    finding = Exists("lib.imports_gone:name").evaluate(package(TREE))
    assert not finding.held
    assert "lib.gone" in finding.found


def test_a_compiled_module_exists_with_whatever_it_has(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("from lib._C import kernel\n")
    (tmp_path / "_C.abi3.so").write_bytes(b"")
    surface = SourceSurface({"lib": tmp_path})
    assert surface.exists("lib._C")
    assert surface.exists("lib:kernel")
    assert surface.signature("lib:kernel") is None


def test_a_file_that_does_not_parse_is_named(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "newer.py").write_text("def f(: ...\n")
    surface = SourceSurface({"lib": tmp_path})
    assert surface.exists("lib.newer")
    assert "does not parse on this Python" in Exists("lib.newer:f").evaluate(surface).found
    with pytest.raises(SourceNotFoundError, match="does not parse"):
        surface.calls("lib.newer", "f")


@pytest.mark.parametrize("path", ["", "lib:", ":x", "lib..x", "lib:a:b", "lib x"])
def test_what_is_no_path(path: str) -> None:
    for surface in (LiveSurface(), SourceSurface({})):
        with pytest.raises(ValueError, match="is not a path"):
            surface.exists(path)


def test_reading_source_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "untouched").mkdir()
    (tmp_path / "untouched" / "__init__.py").write_text("raise SystemExit\n")
    (tmp_path / "untouched" / "module.py").write_text("def f(a): ...\nf(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    surface = SourceSurface.installed("untouched", "not_installed_at_all")
    assert str(surface.signature("untouched.module:f")) == "(a)"
    for either in (surface, LiveSurface()):
        assert either.calls("untouched.module", "f") == (Call(1, (), False, 2),)
        assert either.imports("untouched.module", "os") == ()
    assert "untouched" not in sys.modules


def test_a_file_is_parsed_at_most_once_and_only_when_a_question_leads_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").write_text("from .a import A\nfrom .b import B\n")
    (tmp_path / "a.py").write_text("class A: ...\n")
    (tmp_path / "b.py").write_text("class B: ...\n")
    parsed: list[bytes] = []
    real = ast.parse

    def parse(data: bytes) -> ast.Module:
        parsed.append(data)
        return real(data)

    monkeypatch.setattr("eagle3compat.syntax.ast.parse", parse)
    surface = SourceSurface({"lib": tmp_path})
    assert [surface.exists("lib:A"), surface.exists("lib:A"), surface.exists("lib:C")] == [True, True, False]
    assert parsed == [(tmp_path / name).read_bytes() for name in ("__init__.py", "a.py")]


CALLER = {
    "lib/api.py": "def target(a, b=1, *, c): ...\nclass Made:\n    def __init__(self, a): ...\n",
    "user/__init__.py": "",
    "user/caller.py": """
        from __future__ import annotations
        import os, lib.api
        import lib as library
        from lib.api import target, Made as Renamed
        from lib import api
        from lib.gone import lost
        from lib.api import never
        from . import sibling
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from lib.api import for_types
        try:
            from lib.api import optional
        except ImportError:
            optional = None
        try:
            from lib.api import unguarded
        except ValueError:
            pass
        if os.name:
            from lib.api import conditional
        def function():
            from lib.api import inside
            target(1, c=2)
            target(1, 2, 3, c=4)
            return Renamed(a=target(b=1, c=1))
        target(*os.name, c=1, d=2)
        target(**{})
        lib.api.target()
    """,
    "user/sibling.py": "",
}


def test_calls(package: Package) -> None:
    surface = package(CALLER)
    assert surface.calls("user.caller", "target") == (
        Call(1, ("c",), False, 25),
        Call(3, ("c",), False, 26),
        Call(0, ("b", "c"), False, 27),
        Call(0, ("c", "d"), True, 28),
        Call(0, (), True, 29),
    )
    assert surface.calls("user.caller", "nothing") == ()
    with pytest.raises(SourceNotFoundError, match=r"no module named 'user.gone'"):
        surface.calls("user.gone", "target")


def test_imports(package: Package) -> None:
    assert package(CALLER).imports("user.caller", "lib") == (
        Imported("lib.api", None, "lib", 3),
        Imported("lib", None, "library", 4),
        Imported("lib.api", "target", "target", 5),
        Imported("lib.api", "Made", "Renamed", 5),
        Imported("lib", "api", "api", 6),
        Imported("lib.gone", "lost", "lost", 7),
        Imported("lib.api", "never", "never", 8),
        Imported("lib.api", "unguarded", "unguarded", 18),
        Imported("lib.api", "conditional", "conditional", 22),
    )
    assert package(CALLER).imports("user.caller", "user") == (Imported("user", "sibling", "sibling", 9),)


CLAUSES = [
    (Exists("lib.api:target"), True, "lib.api:target is there"),
    (Accepts("lib.api:target", ("a", "c")), True, "lib.api:target takes 'a' and 'c'"),
    (Accepts("lib.api:target", ("a", "x", "y")), False, "no parameter 'x' and 'y' in (a, b=..., *, c)"),
    (Accepts("lib.api:gone", ("a",)), False, "module 'lib.api' has no attribute 'gone'"),
    (Binds("user.caller", "Renamed", "lib.api:Made"), True, "the call binds"),
    (Binds("user.caller", "nothing", "lib.api:gone"), True, "user.caller does not call nothing"),
    (Binds("user.caller", "Renamed", "lib.api:gone"), False, "module 'lib.api' has no attribute 'gone'"),
    (Binds("user.gone", "target", "lib.api:target"), False, "no module named 'user.gone'"),
    (
        Binds("user.caller", "target", "lib.api:target"),
        False,
        "target() in line 26 takes from 1 to 2 positional arguments but 3 were given; "
        "target() in line 27 missing 1 required argument: 'a'; "
        "target() in line 28 got an unexpected keyword argument 'd'; its parameters are (a, b=..., *, c)",
    ),
    (Imports("user.sibling", "lib"), True, "user.sibling imports nothing from lib"),
    (Imports("user.caller", "user"), True, "all 1 of them are there"),
    (
        Imports("user.caller", "lib"),
        False,
        "line 7: no module named 'lib.gone'; line 8: module 'lib.api' has no attribute 'never'; "
        "line 18: module 'lib.api' has no attribute 'unguarded'; "
        "line 22: module 'lib.api' has no attribute 'conditional'",
    ),
    (Not(Exists("lib.gone")), True, "no module named 'lib.gone'"),
    (Not(Exists("lib.api")), False, "lib.api is there"),
    (AnyOf((Exists("lib.gone"), Exists("lib.api"))), True, "lib.api is there"),
    (AnyOf((Exists("lib.a"), Exists("lib.b"))), False, "no module named 'lib.a'; no module named 'lib.b'"),
    (AnyOf(()), False, "no clause at all"),
]


@pytest.mark.parametrize(("clause", "held", "found"), CLAUSES, ids=str)
def test_clause(package: Package, clause: Clause, held: bool, found: str) -> None:
    finding = clause.evaluate(package(CALLER))
    assert finding == Finding(clause, held, finding.expected, found)
    assert finding.expected
    assert str(clause)


def test_clauses_are_values() -> None:
    assert Accepts("a:b", ("c",)) == Accepts("a:b", ("c",))
    assert len({Exists("a"), Exists("a"), Not(Exists("a"))}) == 2


def test_a_surface_that_cannot_explain_still_gives_a_reason() -> None:
    class Bare:
        def exists(self, path: str) -> bool:
            return path == "there"

        def signature(self, path: str) -> Signature | None:
            return None

        def calls(self, module: str, name: str) -> tuple[Call, ...]:
            return ()

        def imports(self, module: str, of: str) -> tuple[Imported, ...]:
            return ()

    assert Exists("gone").evaluate(Bare()).found == "gone does not exist"
    assert Accepts("there", ("a",)).evaluate(Bare()).found == "there has no known signature"


def of(parameters: str) -> Signature:
    signature = inspected(define(parameters))
    assert signature is not None
    return signature


def define(parameters: str) -> FunctionType:
    names: dict[str, FunctionType] = {}
    exec(f"def f({parameters}): return None", names)
    return names["f"]


REFUSALS = [
    ("a, b", 0, (), "missing 2 required arguments: 'a' and 'b'"),
    ("a, *, block_size", 1, (), "missing 1 required argument: 'block_size'"),
    ("a, b, c", 0, (), "missing 3 required arguments: 'a', 'b' and 'c'"),
    ("a", 1, ("eos_token_id",), "got an unexpected keyword argument 'eos_token_id'"),
    ("a, b", 1, ("a",), "got multiple values for argument 'a'"),
    ("a", 2, (), "takes 1 positional argument but 2 were given"),
    ("", 1, (), "takes 0 positional arguments but 1 was given"),
    ("a, b=1", 3, (), "takes from 1 to 2 positional arguments but 3 were given"),
    ("a, /", 0, ("a",), "got some positional-only arguments passed as keyword arguments: 'a'"),
    ("a, b=1, *args, c, d=2, **kwargs", 4, ("c", "x"), None),
]


@pytest.mark.parametrize(("parameters", "positional", "keywords", "expected"), REFUSALS)
def test_bind_says_why_not(
    parameters: str, positional: int, keywords: tuple[str, ...], expected: str | None
) -> None:
    assert of(parameters).bind(positional, keywords) == expected


def test_a_partial_call_may_lack_arguments_but_not_have_others() -> None:
    assert of("a, b").bind(0, (), partial=True) is None
    assert of("a, b").bind(0, ("c",), partial=True) == "got an unexpected keyword argument 'c'"


def test_accepts_by_keyword_only_what_can_be_passed_so() -> None:
    assert [of("a, /, b, *args, c").accepts(name) for name in ("a", "b", "args", "c", "d")] == [
        False, True, False, True, False,
    ]  # fmt: skip
    assert of("a, /, **kwargs").accepts("a")


def test_a_long_signature_is_shown_in_part() -> None:
    assert of("a, b, c").shown(2) == "(a, b, and 1 more)"
    assert of("a, b").shown(2) == "(a, b)"


STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
"""The same examples each time, which may take their time."""


@st.composite
def parameter_lists(draw: st.DrawFn) -> str:
    required, optional = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    positional = [f"p{i}" for i in range(required)] + [f"q{i}=0" for i in range(optional)]
    slash = draw(st.integers(0, len(positional)))
    words = [*positional[:slash], *(["/"] if slash else []), *positional[slash:]]
    keyword_only = draw(st.lists(st.sampled_from(["k0", "k1=0", "k2"]), unique=True))
    star = draw(st.sampled_from(["*args", "*", ""]))
    if star == "*args" or keyword_only:
        words += [star or "*", *keyword_only]
    return ", ".join(words + (["**kwargs"] if draw(st.booleans()) else []))


@given(
    parameters=parameter_lists(),
    positional=st.integers(0, 5),
    keywords=st.sets(st.sampled_from(["p0", "p1", "q0", "q1", "k0", "k1", "k2", "other"])),
)
@settings(STEADY, max_examples=400)
def test_bind_agrees_with_python(parameters: str, positional: int, keywords: set[str]) -> None:
    reason = of(parameters).bind(positional, sorted(keywords))
    if reason is None:
        define(parameters)(*range(positional), **dict.fromkeys(keywords))
    else:
        with pytest.raises(TypeError, match=reason.split(" ")[0]):
            define(parameters)(*range(positional), **dict.fromkeys(keywords))


@given(parameters=parameter_lists())
@settings(STEADY, max_examples=100)
def test_a_def_reads_as_it_is_inspected(tmp_path_factory: pytest.TempPathFactory, parameters: str) -> None:
    root = tmp_path_factory.mktemp("lib")
    (root / "__init__.py").write_text(f"def f({parameters}): ...\n")
    assert SourceSurface({"lib": root}).signature("lib:f") == of(parameters)
