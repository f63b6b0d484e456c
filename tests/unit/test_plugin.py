"""The entry point that vLLM calls in every one of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import eagle3compat

SRC = Path(eagle3compat.__file__).parents[1]
CALL = "from eagle3compat.plugin import register; before = list(sys.meta_path); assert register() is None\n"
STATE = "import eagle3compat; print(eagle3compat.status().headline)"


def python(code: str, *folders: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, with no EAGLE3COMPAT but what is given."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EAGLE3COMPAT")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, [SRC, *folders])), **variables}
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("asked", [None, "", "off", "yes"])
def test_does_nothing_unless_asked(asked: str | None) -> None:
    variables = {} if asked is None else {"EAGLE3COMPAT": asked}
    result = python(f"{CALL}assert sys.meta_path == before\n{STATE}", **variables)
    assert result.stdout == "eagle3compat is not applied in this process\n", result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("asked", ["strict", "warn", " Strict "])
def test_applies_when_asked_and_prints_nothing(asked: str) -> None:
    result = python(f"{CALL}print(end='', flush=True)\n{STATE}", EAGLE3COMPAT=asked)
    assert result.stdout == "nothing to adapt: speculators is not installed\n", result.stderr
    assert result.stderr == ""


def test_a_call_that_was_not_asked_for_loads_no_more_than_the_package() -> None:
    package = python("import eagle3compat\nprint(*sys.modules)")
    plugin = python(f"{CALL}print(*sys.modules)")
    assert set(plugin.stdout.split()) - set(package.stdout.split()) == {"eagle3compat.plugin"}


def test_logs_what_it_cannot_do_and_does_not_raise() -> None:
    result = python(CALL, EAGLE3COMPAT="strict", EAGLE3COMPAT_SKIP="nonsense")
    assert result.returncode == 0, result.stderr
    assert "not applied by the plugin" in result.stderr
    assert "there is no adapter 'nonsense'" in result.stderr
    assert result.stdout == ""


def test_leaves_an_earlier_apply_of_the_user_as_it_is(tmp_path: Path) -> None:
    generation = tmp_path / "speculators" / "data_generation"
    generation.mkdir(parents=True)
    (tmp_path / "vllm").mkdir()
    for folder in (tmp_path / "vllm", generation.parent, generation):
        (folder / "__init__.py").touch()
    (generation / "vllm_hidden_states_generator.py").touch()
    code = f"import eagle3compat; eagle3compat.apply(skip=['results'])\n{CALL}"
    result = python(f"{code}print(eagle3compat.status()['results'].status.value)", tmp_path, EAGLE3COMPAT="strict")
    assert result.stdout == "disabled\n", result.stderr


def test_is_declared_as_an_entry_point_that_can_be_loaded() -> None:
    declared = (SRC.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."vllm.general_plugins"]\neagle3compat = "eagle3compat.plugin:register"' in declared
    assert python("from eagle3compat.plugin import register; assert callable(register)").returncode == 0
