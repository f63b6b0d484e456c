"""Plans for every vLLM release and every stock release, from the surface record, with nothing installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tools import release_docs, surface_record

from eagle3compat.adapter import Status
from eagle3compat.adapters import ADAPTERS
from eagle3compat.patcher import decide
from eagle3compat.probe.facts import RecordedSurface, fold, parse, unfold

EXPECTED = """
adapter              0.3.0                    0.4.0                              0.4.0.1
speculators_import   0.24.0 on                0.24.0 on                          0.24.0 on
vllm_names           0.33.0 on                0.11.0, 0.33.0 on                  0.11.0, 0.33.0 on
worker_names         none                     none                               none
tokenizer*           none                     none                               none
capture*             none                     none                               none
configs*             0.12.0 on                0.11.0                             0.11.0
execution*           0.11.0                   0.11.0                             0.11.0
memory*              none                     none                               none
kv_planning*         0.11.0, 0.12.0 on        0.11.0 to 0.11.2, 0.33.0 on        0.11.0 to 0.11.2, 0.33.0 on
scheduler*           0.11.1 on                0.11.0                             0.11.0
request              0.17.0 on                0.17.0 on                          0.17.0 on
results*             none                     none                               none
"""
"""Where something that stock counts on does not hold. Of an adapter with a star, stock is wrong on every release."""
FIRST = """
0.3.0     0.11.0    nothing
0.3.0     0.11.1    Scheduler() missing 1 required argument: 'block_size'
0.3.0     0.12.0    SchedulerConfig() missing 1 required argument: 'is_encoder_decoder'
0.3.0     0.33.0    module 'vllm.v1.core.kv_cache_utils' has no attribute '_get_kv_cache_groups_uniform_spec'
0.4.0.1   0.11.0    no module named 'vllm.utils.hashing'
0.4.0.1   0.11.2    get_kv_cache_config_from_groups() missing 1 required argument: 'kv_cache_specs'
0.4.0.1   0.12.0    nothing
0.4.0.1   0.16.0    nothing
0.4.0.1   0.17.0    Request() got an unexpected keyword argument 'eos_token_id'
0.4.0.1   0.33.0    module 'vllm.v1.core.kv_cache_utils' has no attribute '_get_kv_cache_groups_uniform_spec'
"""
"""What stock by itself was seen to die of first on real releases, and what the source shows first in vLLM."""
RECORD = release_docs.load()
PAIRS = [(release, speculators) for release in RECORD.releases for speculators in surface_record.STOCK]


def rows(text: str, gap: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(gap) if cell.strip()] for line in text.strip().splitlines()]


def test_each_adapter_is_needed_where_it_is_known_to_be() -> None:
    (_, *stock), *expected = rows(EXPECTED, "  ")
    found = [
        [adapter.id + "*" * bool(adapter.always), *(release_docs.unmet(adapter.id, release) for release in stock)]
        for adapter in ADAPTERS
    ]
    assert found == expected


@pytest.mark.parametrize(("speculators", "vllm", "fault"), rows(FIRST, "   "))
def test_source_shows_what_stock_was_seen_to_die_of(speculators: str, vllm: str, fault: str) -> None:
    faults = [f for f in RECORD.faults[vllm][speculators] if f["use"] != "import speculators"]
    assert next((f["found"] for f in faults), "nothing") == fault


@pytest.mark.parametrize(("vllm", "speculators"), PAIRS)
def test_every_pair_can_be_bridged(vllm: str, speculators: str) -> None:
    statuses = {outcome.adapter: outcome.status for outcome in release_docs.outcomes(vllm, speculators)}
    assert list(statuses) == [adapter.id for adapter in ADAPTERS]
    assert set(statuses.values()) <= {Status.APPLIED, Status.NOT_NEEDED}
    for adapter in ADAPTERS:
        assert statuses[adapter.id] is Status.APPLIED or not adapter.always
    assert [fault for fault in RECORD.faults[vllm][speculators] if not fault["adapter"]] == []


@pytest.mark.parametrize("vllm", RECORD.releases)
def test_every_release_has_what_the_library_itself_uses(vllm: str) -> None:
    assert RECORD.library[vllm]["faults"] == []


def test_a_fact_that_is_changed_shows() -> None:
    surface = RECORD.surface("0.33.0", "0.4.0.1")
    path = "vllm.v1.engine.core:EngineCore.step"
    assert surface.exists(path)
    changed = RecordedSurface({**surface._facts, path: ("it is gone", None)}, surface._stock)
    outcomes = {outcome.adapter: outcome for outcome in decide(changed)}
    assert (outcomes["execution"].status, outcomes["execution"].found) == (Status.DRIFTED, "it is gone")


def test_what_is_not_recorded_is_never_made_up() -> None:
    surface = RECORD.surface("0.33.0", "0.4.0.1")
    with pytest.raises(LookupError, match="make the record anew"):
        surface.exists("vllm.no.such:Thing")
    with pytest.raises(LookupError, match="make the record anew"):
        surface.calls(release_docs.__name__, "print")


def test_the_record_is_small_and_holds_every_release_once() -> None:
    files = list(release_docs.FOLDER.glob("*.json"))
    assert sum(file.stat().st_size for file in files) < 1_500_000
    assert len(set(RECORD.releases)) == len(RECORD.releases) >= 35
    assert set(RECORD.stock) == set(surface_record.STOCK)


def test_releases_with_the_same_code_are_told_together() -> None:
    assert release_docs.alike(list(RECORD.stock)) == [("0.3.0",), ("0.4.0", "0.4.0.1")]


def test_the_page_in_the_repository_is_what_the_record_says(tmp_path: Path) -> None:
    assert release_docs.FILE.read_text(encoding="utf-8") == release_docs.document()
    stale = tmp_path / "releases.md"
    stale.write_text("older\n")
    command = [sys.executable, release_docs.__file__ or "", "--check", str(stale)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "run python tools/release_docs.py" in done.stderr


@pytest.mark.parametrize("text", ["()", "(a, /, b, *, c=..., **more)", "(*many, only)", "(a, b=..., *rest)"])
def test_a_signature_is_read_as_it_was_written(text: str) -> None:
    assert str(parse(text)) == text


KEYS = st.sampled_from("abc")
HISTORIES = st.lists(st.dictionaries(KEYS, st.integers(0, 2)), min_size=1, max_size=6)


@given(HISTORIES)
@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_folding_loses_nothing(histories: list[dict[str, int]]) -> None:
    releases = {str(at): values for at, values in enumerate(histories)}
    assert unfold(fold(releases), list(releases)) == releases


@pytest.mark.parametrize(
    ("chosen", "said"),
    [("", "none"), ("a", "a"), ("ab", "a to b"), ("d", "d on"), ("abcd", "a on"), ("bd", "b, d on")],
)
def test_ranges(chosen: str, said: str) -> None:
    assert release_docs.ranges("abcd", set(chosen)) == said
