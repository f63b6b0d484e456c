"""Devices and shared memory, found without torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eagle3compat import hardware
from eagle3compat.hardware import Accelerator


@pytest.fixture
def no_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put an `nvidia-smi` of this content first on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(hardware, "SMI_SECONDS", 300)  # a machine that stands still is no driver that hangs


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, "echo 'NVIDIA H200, 143771, 1000'; echo 'NVIDIA H200, [N/A], 2000'")
    found = hardware.accelerators(tmp_path)
    assert found == [
        Accelerator("cuda", "NVIDIA H200", 143771 * 2**20, 1000 * 2**20),
        Accelerator("cuda", "NVIDIA H200", None, 2000 * 2**20),
    ]


def test_what_nvidia_smi_says_need_be_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, monkeypatch, r"printf 'Quadro \256, \302\262\302\263, 5\n'")
    assert hardware.accelerators(tmp_path) == [Accelerator("cuda", "Quadro \ufffd", None, 5 * 2**20)]


@pytest.mark.parametrize("script", ["exit 9", "echo no devices were found"])
def test_a_driver_that_does_not_answer_shows_no_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    smi(tmp_path, monkeypatch, script)
    assert hardware.accelerators(tmp_path) == []


@pytest.mark.usefixtures("no_smi")
class TestFiles:
    def test_the_driver_s_own_list_is_read_where_there_is_no_nvidia_smi(self, tmp_path: Path) -> None:
        for bus in ("0000:01:00.0", "0000:02:00.0"):
            place = tmp_path / "proc/driver/nvidia/gpus" / bus
            place.mkdir(parents=True)
            (place / "information").write_text("Model: \t\t NVIDIA L4\nIRQ: 1\n")
        assert hardware.accelerators(tmp_path) == [Accelerator("cuda", "NVIDIA L4")] * 2

    def test_amd_s_nodes_with_compute_units_are_counted(self, tmp_path: Path) -> None:
        for node, units in (("0", 0), ("1", 304)):
            place = tmp_path / "sys/class/kfd/kfd/topology/nodes" / node
            place.mkdir(parents=True)
            (place / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\n")
        assert [found.kind for found in hardware.accelerators(tmp_path)] == ["rocm"]

    def test_ascend_s_devices_are_counted(self, tmp_path: Path) -> None:
        (tmp_path / "dev").mkdir()
        for name in ("davinci0", "davinci1", "davinci_manager"):
            (tmp_path / "dev" / name).touch()
        assert [found.kind for found in hardware.accelerators(tmp_path)] == ["npu", "npu"]

    def test_a_machine_without_devices_has_none(self, tmp_path: Path) -> None:
        assert hardware.accelerators(tmp_path) == []
        assert hardware.visible([]) == 0


@pytest.mark.parametrize(
    ("value", "count"), [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("1,3", 2), ("0,-1,2", 1), ("GPU-1a,GPU-2b", 2)]
)
def test_cuda_visible_devices_decides_what_is_seen(
    monkeypatch: pytest.MonkeyPatch, value: str | None, count: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert hardware.visible([Accelerator("cuda", "H200")] * 4) == count
