"""What code uses of another package, derived from its source; each case beside one in which nothing is wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.contract.conftest import REBINDS

from eagle3compat.adapters import ADAPTERS
from eagle3compat.contract import SourceNotFoundError
from eagle3compat.probe.types import TypedSurface
from eagle3compat.probe.uses import Use, uses

LIBRARY = {
    "lib/__init__.py": "from .parts import Plan as Plan\n__version__ = '1'\n",
    "lib/parts.py": """
        from __future__ import annotations
        from typing import Optional
        class Plan:
            size: int
            step: Step
            maybe: Optional[Step] = None
            def __init__(self, size, *, name=None):
                self.made_here = size
            def run(self, count) -> "Step": ...
            @property
            def first(self) -> Step | None: ...
        class Step:
            FLAG = 1
            def go(self): ...
        class Unread(object_of_another_package): ...
        def make(size) -> Plan: ...
    """,
}


def derive(tmp_path: Path, code: str, **library: str) -> list[Use]:
    files = {**LIBRARY, **{f"lib/{name}.py": text for name, text in library.items()}, "app/__init__.py": "",
             "app/main.py": code}  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return uses(TypedSurface({"lib": tmp_path / "lib", "app": tmp_path / "app"}), ["app.main"], "lib")


def found(derived: list[Use]) -> list[str]:
    return [use.fault for use in derived if use.fault and not use.guarded]


CLASS = """
    from lib import Plan
    class App:
        def generate(self):
            {body}
        def __init__(self):
            self.plan = self._make()
        def _make(self) -> Plan:
            return Plan(3)
"""
FINE = [
    "from lib import Plan\nPlan(1, name='x')",
    "from lib import Plan\nPlan(1).run(2).go()",
    "from lib.parts import Plan, Step\nStep.FLAG\nPlan(1).first.go()",
    "import lib\nlib.__version__\nlib.parts.make(1).step.go()",
    "import lib.parts as parts\nparts.make(1).made_here",
    "from lib.parts import make\nmake.__name__\nmake(1).run.__doc__\nfrom lib import __version__\n__version__.upper()",
    "from lib.parts import Unread\nUnread(1, 2).anything",
    "import other\nother.thing(1)",
    "from lib import Plan\ndef f(Plan):\n    Plan(1, 2, 3)",
    "from lib import Plan\nPlan = other\nPlan(1, 2, 3)",
    "from lib import Plan\nPlan(*many, **more)",
    "try:\n    from lib import Gone\nexcept ImportError:\n    Gone = None",
    "from lib import Plan\nx = Plan(1)\nif hasattr(x, 'gone'):\n    x.gone()",
    "from lib import Plan\ntry:\n    Plan(1).gone()\nexcept Exception:\n    log()",
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lib import Gone",
]
WRONG = [
    ("from lib import Gone", "module 'lib' has no attribute 'Gone'"),
    ("import lib.gone", "no module named 'lib.gone'"),
    ("from lib import Plan\nPlan(1, 2)", "Plan() takes 1 positional argument but 2 were given"),
    ("from lib import Plan\nPlan()", "Plan() missing 1 required argument: 'size'"),
    ("from lib import Plan\nPlan(1, length=2)", "Plan() got an unexpected keyword argument 'length'"),
    ("from lib import Plan\nPlan(1).run()", "Plan.run() missing 1 required argument: 'count'"),
    ("from lib import Plan\nx = Plan(1)\nx.gone", "class 'lib.parts:Plan' has no attribute 'gone'"),
    ("from lib import Plan\nif (y := Plan(1).run(1)).gone: ...", "class 'lib.parts:Step' has no attribute 'gone'"),
    ("from lib.parts import make\nmake(1).maybe.gone()", "class 'lib.parts:Step' has no attribute 'gone'"),
    ("from lib.parts import make\nmake(1).first.gone", "class 'lib.parts:Step' has no attribute 'gone'"),
    ("from lib.parts import Step\nf(Step.GONE)", "class 'lib.parts:Step' has no attribute 'GONE'"),
    ("from lib import Plan\nx = Plan(1)\nx.step.gone = 3", "class 'lib.parts:Step' has no attribute 'gone'"),
    ("import lib\nlib.gone", "module 'lib' has no attribute 'gone'"),
    ("def f():\n    from lib import Gone", "module 'lib' has no attribute 'Gone'"),
    ("from lib import Plan\ndef f(plan: Plan):\n    plan.gone", "class 'lib.parts:Plan' has no attribute 'gone'"),
    ("from lib import Plan\ntry:\n    Plan()\nexcept Exception as error:\n    raise Mine from error",
     "Plan() missing 1 required argument: 'size'"),
    ("from lib import Plan\n[Plan(1, 2) for _ in ()]", "Plan() takes 1 positional argument but 2 were given"),
    ("from lib import Plan\nlambda: Plan(1, 2)", "Plan() takes 1 positional argument but 2 were given"),
    (CLASS.format(body="self.plan.gone()"), "class 'lib.parts:Plan' has no attribute 'gone'"),
]


@pytest.mark.parametrize("code", [*FINE, CLASS.format(body="self.plan.run(1).go()")])
def test_what_is_there_is_no_fault(code: str, tmp_path: Path) -> None:
    assert found(derive(tmp_path, code)) == []


@pytest.mark.parametrize(("code", "fault"), WRONG)
def test_what_does_not_fit_is_found(code: str, fault: str, tmp_path: Path) -> None:
    assert found(derive(tmp_path, code)) == [fault]


def test_an_absent_name_is_a_fault_at_its_import_and_where_it_is_used(tmp_path: Path) -> None:
    derived = derive(tmp_path, "from lib import Gone\n\nGone(1)\nGone.flag\n")
    assert [(use.kind, use.line) for use in derived if use.fault] == [("import", 1), ("call", 3), ("attribute", 4)]


def test_uses_are_in_the_order_in_which_they_run(tmp_path: Path) -> None:
    code = """
        from lib.parts import Plan, make
        class App:
            def generate(self):
                self.plan.run(1)
            def __init__(self):
                self.plan = self._make(make(2))
            def _make(self, other) -> Plan:
                return Plan(3)
    """
    calls = [use.text for use in derive(tmp_path, code) if use.kind == "call"]
    assert calls == ["make(...)", "Plan(...)", "self.plan.run(...)"]


def test_each_use_names_what_leads_to_it(tmp_path: Path) -> None:
    derived = derive(tmp_path, "from lib.parts import make as build\nbuild(1).step.go()\n")
    assert {(use.text, use.root, use.inherited) for use in derived} == {
        ("from lib.parts import make", "build", False),
        ("build(...)", "build", False),
        ("build(1).step", "build", True),
        ("build(1).step.go", "build", True),
        ("build(1).step.go()", "build", True),
    }


def test_what_adapters_say_they_replace_is_what_they_may_rebind() -> None:
    for adapter in ADAPTERS:
        assert set(adapter.replaces) == {name for name in REBINDS[adapter.id] if "." not in name}
        assert set(adapter.hands_back) <= set(adapter.replaces)


def test_a_module_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="does not parse"):
        derive(tmp_path, "def f(:\n")
