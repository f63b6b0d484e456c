"""The nightly watch, command by command, against wheels served from here; `gh` is a script that notes its words."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit import probe_kit as kit
from tools import nightly

from eagle3compat.probe import index

TONIGHT = "9.2.0rc1.dev14+gaa384b3c0.cpu"
STEP = "vllm.v1.engine.core:EngineCore.step"
GH = """#!{python}
import os, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path({folder!r})
given = sys.stdin.read() if "-" in words else ""
with open(folder / "said", "a") as log:
    log.write(" ".join(words[:2]) + "|" + given.replace(chr(10), " ") + chr(10))
state = folder / "open"
if words[:2] == ["issue", "list"]:
    print('[{{"number": 7}}]' if state.exists() else "[]")
elif words[:2] == ["issue", "create"]:
    state.touch()
elif words[:2] == ["issue", "close"]:
    state.unlink()
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `gh` was told, one line a call: two words, and what it read."""
    (tmp_path / "bin").mkdir()
    gh = tmp_path / "bin" / "gh"
    gh.write_text(GH.format(python=sys.executable, folder=str(tmp_path)))
    gh.chmod(gh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{gh.parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "said"


@pytest.fixture(params=["ranges", "ignored"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[kit.Server]:
    """An index with speculators and transformers, and a nightly index beside it, with and without parts of files."""
    for name in [name for name in os.environ if name.startswith("PIP_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    names = {"speculators": ("0.3.0", "0.4.0.1"), "transformers": ("4.57.6",)}
    files, pages = {}, {}
    for name, versions in names.items():
        wheels = {f"{name}-{version}-py3-none-any.whl": version for version in versions}
        content = kit.speculators() if name == "speculators" else kit.transformers()
        files.update({f"/files/{wheel}": kit.wheel(content, name, version) for wheel, version in wheels.items()})
        pages[f"/simple/{name}/"] = kit.page(*wheels)
    with kit.serving({**files, **pages}, request.param) as server:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", kit.SECONDS)
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server
    index._files.cache_clear()


def release(server: kit.Server, version: str = TONIGHT, **changes: Any) -> str:
    """Put a vLLM on the nightly index; the index's address."""
    name = f"vllm-{version}-cp38-abi3-linux_x86_64.whl".replace("+", "%2B")
    server.files["/nightly/vllm/"] = f'<a href="../{name}">{name}</a>'.encode()
    server.files[f"/nightly/{name}"] = kit.wheel(kit.vllm(**changes), version=version)
    index._files.cache_clear()
    return f"{server.url}/nightly"


class Night:
    """The commands, with their files in one folder."""

    def __init__(self, folder: Path) -> None:
        self.result, self.good = folder / "result.json", folder / "good.json"

    def check(self, *targets: str, install: str = "changed") -> int:
        words = ["--out", str(self.result), "--good", str(self.good), "--install", install]
        return nightly.main(["check", *targets, *words])

    def then(self, command: str) -> int:
        return nightly.main([command, str(self.result), "--good", str(self.good)])

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.result.read_text())
        return found

    def extracted(self, well: bool, said: str = "") -> None:
        """As if an extraction had been run."""
        self.result.write_text(json.dumps({**self.read(), "extraction": {"well": well, "said": said}}))


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


def test_a_good_night_moves_the_last_good_one_once_it_was_extracted_from(
    server: kit.Server, night: Night, said: Path
) -> None:
    assert night.check(release(server)) == 0
    assert night.read()["vllm"] == TONIGHT
    assert night.read()["extract"] == "there was none yet"
    assert night.then("accept") == 0
    assert not night.good.exists(), "an extraction is due"
    night.extracted(well=True)
    assert (night.then("tell"), night.then("accept")) == (0, 0)
    assert json.loads(night.good.read_text())["vllm"] == TONIGHT
    assert said.read_text() == "issue list|\n"
    assert night.check(release(server)) == 0
    assert (night.read()["extract"], night.read()["flips"]) == ("", [])


def test_drift_opens_one_issue_and_updates_it_until_it_is_gone(server: kit.Server, night: Night, said: Path) -> None:
    night.check(release(server), install="never")
    assert night.then("accept") == 0
    for _ in range(2):
        assert night.check(release(server, "9.2.0.dev15+gb.cpu", without=[STEP])) == 1
        assert night.then("tell") == 0
        assert night.then("accept") == 1
    assert json.loads(night.good.read_text())["vllm"] == TONIGHT
    assert night.check(release(server, "9.2.0.dev16+gc.cpu"), install="never") == 0
    assert night.then("tell") == 0
    calls = [line.partition("|") for line in said.read_text().splitlines()]
    assert [words for words, _, _ in calls] == [
        "issue list", "label create", "issue create", "issue list", "issue edit", "issue list", "issue close",
    ]  # fmt: skip
    for _, _, told in (calls[2], calls[4]):
        assert f"Last good one: {TONIGHT}" in told
        assert f"### execution: {STEP} no longer holds" in told
        assert f"- old: `{STEP}(*positional, **more)`" in told
        assert "- new: `class 'vllm.v1.engine.core:EngineCore' has no attribute 'step'`" in told
        assert "vllm/v1/engine/core.py" in told


def test_what_no_clause_foresaw_is_red_as_well(server: kit.Server, night: Night) -> None:
    assert night.check(release(server, vllm__sampling_params="")) == 1
    assert {trouble["adapter"] for trouble in night.read()["troubles"]} == {"not foreseen by any adapter"}


def test_a_failed_extraction_is_red(server: kit.Server, night: Night, said: Path) -> None:
    night.check(release(server))
    night.extracted(well=False, said="a tensor is off by 0.9")
    assert night.then("tell") == 0
    assert "a tensor is off by 0.9" in said.read_text()
    assert night.then("accept") == 1
    assert not night.good.exists()


def test_a_clause_that_flips_and_is_bridged_wants_an_extraction(server: kit.Server, night: Night) -> None:
    night.check(release(server), install="never")
    night.then("accept")
    moved = "class Scheduler:\n    def __init__(self, settings): ...\n"
    assert night.check(release(server, "9.2.0.dev15+gb.cpu", vllm__v1__core__sched__scheduler=moved)) == 0
    assert night.read()["extract"] == "2 clauses have flipped"
    flip = night.read()["flips"][0]
    assert (flip["adapter"], flip["holds"]) == ("scheduler", False)
    assert flip["old"].endswith(":Scheduler(vllm_config)")
    assert flip["new"].endswith(":Scheduler(settings)")


def test_an_extraction_is_due_once_a_week(server: kit.Server, night: Night) -> None:
    night.check(release(server))
    night.extracted(well=True)
    night.then("accept")
    good = json.loads(night.good.read_text())
    night.good.write_text(json.dumps({**good, "extracted": "2020-01-01"}))
    night.check(release(server))
    assert night.read()["extract"].startswith("the last one was ")


def test_a_network_fault_says_nothing_about_vllm(server: kit.Server, night: Night, said: Path) -> None:
    assert night.check("http://127.0.0.1:9/nightly") == 2
    assert night.check("http://127.0.0.1:9/nightly/cpu", release(server)) == 2, "a fault is not a missing build"
    assert not night.result.exists()
    assert night.then("tell") == 2
    assert not said.exists()


def test_the_next_target_is_taken_where_there_is_no_build_of_a_kind(server: kit.Server, night: Night) -> None:
    assert night.check(f"{server.url}/nightly/cpu", release(server, "9.2.0.dev3+gaa")) == 0
    assert night.read()["vllm"] == "9.2.0.dev3+gaa"
    assert night.then("extract") == 0
    assert night.read()["extraction"] is None, "it is no CPU build"


def test_the_workflow_runs_commands_that_there_are() -> None:
    text = (nightly.ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    lines = [line.partition("||")[0].split() for line in re.findall(r"python tools/nightly\.py (.*)", text)]
    assert {nightly._parser().parse_args(words).command for words in lines} == {"check", "extract", "tell", "accept"}


def test_the_last_good_one_in_the_repository_can_be_compared_with() -> None:
    good = json.loads(nightly.GOOD.read_text())
    assert set(good) == {"vllm", "date", "extracted", "clauses", "facts"}
    assert set(good["clauses"]) == {f"speculators {release}" for release in nightly.STOCK}


class Demo:
    """In place of the demo: extraction that ends as it is told."""

    class DemoError(Exception):
        pass

    MODELS = ("a model",)

    def __init__(self, folder: Path, faults: list[str]) -> None:
        self.OUT, self.faults = folder, faults

    def make_models(self, python: Path) -> None:
        pass

    def extract_and_compare(self, python: Path, model: str) -> dict[str, Any]:
        if "raise" in self.faults:
            raise self.DemoError("extraction from a model failed")
        return {}

    def faults_of(self, model: str, found: dict[str, Any]) -> list[str]:
        return self.faults


@pytest.mark.parametrize(
    ("faults", "said"),
    [([], "every tensor equals"), (["off by 0.9"], "off by 0.9"), (["raise"], "extraction from a model failed")],
)
def test_what_the_extraction_says_is_kept(
    faults: list[str], said: str, night: Night, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def ensure(*words: str) -> Path:
        asked.append(words)
        return Path("python")

    environments = SimpleNamespace(ensure=ensure, CommandFailedError=LookupError)
    monkeypatch.setitem(sys.modules, "demo", Demo(tmp_path / "out", faults))
    monkeypatch.setitem(sys.modules, "environments", environments)
    monkeypatch.setattr(nightly, "assert_installed", lambda python, result: None)
    url = f"http://127.0.0.1/vllm-{TONIGHT.replace('+', '%2B')}-cp38-abi3-linux_x86_64.whl"
    night.result.write_text(json.dumps({"vllm": TONIGHT, "url": url, "extract": "it is due", "healthy": True}))
    assert night.then("extract") == (1 if faults else 0)
    assert asked == [(TONIGHT, "0.4.0.1", url)]
    assert night.read()["extraction"]["well"] is not bool(faults)
    assert said in night.read()["extraction"]["said"]


def test_an_environment_with_another_vllm_is_refused() -> None:
    wanted = {"vllm": TONIGHT, "url": "http://127.0.0.1/rich-1-py3-none-any.whl"}
    with pytest.raises(nightly.NotTheNightlyError, match=r"installed is rich .* not 9\.2\.0rc1\.dev14"):
        nightly.assert_installed(Path(sys.executable), wanted)
    with pytest.raises(nightly.NotTheNightlyError, match="No package metadata"):
        nightly.assert_installed(Path(sys.executable), {**wanted, "url": "http://127.0.0.1/no_such-1-py3-none-any.whl"})
