"""What is refused before a worker is started."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle3compat.engine import preflight
from eagle3compat.errors import InputError
from eagle3compat.hardware import Accelerator

CONFIGS = Path(__file__).parents[1] / "configs"
H200 = Accelerator("cuda", "NVIDIA H200", 141 * 2**30)
ROOMY = {"total": 2**36, "free": 2**36}


class HFConfig:
    """A config as transformers holds it; `to_dict` may hold what is no JSON."""

    def __init__(self, name: str) -> None:
        self.content = json.loads((CONFIGS / f"{name}.json").read_text())

    def to_dict(self) -> dict[str, Any]:
        return {**self.content, "dtype": object()}


def config(model: Path, name: str = "kimi-k2.5", ranks: int = 8, device: str = "cuda", longest: int = 2048) -> Any:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(hf_config=HFConfig(name), model=str(model), max_model_len=longest),
    )


def weights(folder: Path, gib: float) -> Path:
    """A model folder whose weights are as large as that, on paper."""
    with (folder / "model-00001-of-00001.safetensors").open("wb") as file:
        file.truncate(int(gib * 2**30))
    return folder


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Accelerator]:
    """Eight H200 and shared memory enough; what a test puts into the list is there as well."""
    found = [H200] * 8
    monkeypatch.setattr(preflight, "accelerators", lambda: found)
    monkeypatch.setattr(preflight, "shared_memory", lambda: ROOMY)
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_KVCACHE_SPACE", "VLLM_MLA_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_what_fits_passes(tmp_path: Path) -> None:
    preflight.check(config(weights(tmp_path, 554)), 0.16)


class TestSharedMemory:
    def test_a_container_s_default_is_refused_with_the_remedy(self) -> None:
        with pytest.raises(InputError, match=r"64 MiB free of 64 MiB.*--shm-size=8g"):
            preflight.check_shared_memory({"total": 64 * 2**20, "free": 64 * 2**20})

    def test_little_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "eagle3compat"):
            preflight.check_shared_memory({"total": 2**36, "free": 512 * 2**20})
        assert "512 MiB free" in caplog.text

    @pytest.mark.parametrize("memory", [None, ROOMY])
    def test_enough_passes_and_so_does_a_system_without(
        self, memory: dict[str, int] | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        preflight.check_shared_memory(memory)
        assert caplog.text == ""


class TestDevices:
    @pytest.mark.parametrize(("devices", "seen"), [("0,1", "2 of 8"), ("", "0 of 8")])
    def test_more_ranks_than_visible_devices_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str, seen: str
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        with pytest.raises(InputError, match=f"tensor_parallel_size is 8, and {seen} devices"):
            preflight.check(config(tmp_path), 0.16)

    def test_a_machine_that_shows_none_is_left_to_vllm(self, tmp_path: Path, machine: list[Accelerator]) -> None:
        machine.clear()
        preflight.check(config(tmp_path), 0.16)

    def test_a_cpu_has_as_many_ranks_as_asked(self, tmp_path: Path, machine: list[Accelerator]) -> None:
        preflight.check(config(tmp_path, "qwen3-235b-a22b", 64, "cpu"), 0.16)


class TestMemory:
    def test_weights_that_do_not_fit_are_refused_with_the_ranks_that_do(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"277\.0 GiB on each rank.*tensor_parallel_size of 5"):
            preflight.check(config(weights(tmp_path, 554), ranks=2), 0.16)

    def test_a_size_that_is_only_worked_out_refuses_nothing(self, tmp_path: Path) -> None:
        preflight.check(config(tmp_path, ranks=2), 0.16)

    def test_a_sequence_that_the_kv_cache_cannot_hold_is_refused(self, tmp_path: Path) -> None:
        folder = weights(tmp_path, 8 * 139)
        with pytest.raises(InputError, match=r"one sequence of 131072 tokens takes 8\.58 GiB.*0\.32 GiB"):
            preflight.check(config(folder, longest=131072), 0.16)

    def test_one_that_it_may_hold_in_fewer_bytes_is_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = weights(tmp_path, 8 * 139)
        with caplog.at_level(logging.WARNING, "eagle3compat"):
            preflight.check(config(folder, longest=6000), 0.16)
        assert "one sequence of 6000 tokens" in caplog.text

    def test_a_cpu_s_space_is_what_its_variable_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with pytest.raises(InputError, match="Raise VLLM_CPU_KVCACHE_SPACE"):
            preflight.check(config(tmp_path, "qwen3-235b-a22b", 1, "cpu", 40960), 0.16)
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "8")
        preflight.check(config(tmp_path, "qwen3-235b-a22b", 1, "cpu", 40960), 0.16)


@pytest.mark.parametrize("content", [{}, {"num_hidden_layers": "many"}, {"num_hidden_layers": 2, "hidden_size": None}])
def test_a_config_that_cannot_be_read_refuses_nothing(tmp_path: Path, content: dict[str, Any]) -> None:
    given = config(tmp_path)
    given.model_config.hf_config.content = content
    preflight.check(given, 0.16)
