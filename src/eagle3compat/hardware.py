"""Accelerators and shared memory of this machine, found without torch: asking torch may start CUDA in this process."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SMALL_SHM = 2**30
"""Below this, /dev/shm is a container's default more likely than anybody's choice."""
MIB = 2**20
SMI_SECONDS = 20
QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Accelerator:
    """One device; memory in bytes, None where the source does not say."""

    kind: str
    name: str
    memory: int | None = None
    free: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def accelerators(root: Path = Path("/")) -> list[Accelerator]:
    """The devices that the driver shows: NVIDIA's, else AMD's, else Ascend's. `root` stands for / in tests."""
    return _nvidia_smi() or _nvidia_proc(root) or _amd(root) or _ascend(root)


def visible(found: list[Accelerator]) -> int:
    """How many of them vLLM would see, by CUDA_VISIBLE_DEVICES and its like."""
    names = {
        "cuda": ("CUDA_VISIBLE_DEVICES",),
        "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    }
    for name in names[found[0].kind] if found else ():
        value = os.environ.get(name)
        if value is not None:
            return min(len(found), _named(value))
    return len(found)


def _named(value: str) -> int:
    """How many devices a list of them names: it ends at the first that is not one, as CUDA reads it."""
    count = 0
    for word in value.split(","):
        if not word.strip() or word.strip().startswith("-"):
            break
        count += 1
    return count


def _nvidia_smi() -> list[Accelerator]:
    if shutil.which(QUERY[0]) is None:
        return []
    try:
        said = subprocess.run(QUERY, capture_output=True, timeout=SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no driver behind it: then /proc shows none either
        return []
    found = []
    for line in said.decode(errors="replace").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            found.append(Accelerator("cuda", parts[0], _mib(parts[1]), _mib(parts[2])))
    return found


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.isdecimal() else None


def _nvidia_proc(root: Path) -> list[Accelerator]:
    found = []
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        model = [line.split(":", 1)[1].strip() for line in _lines(file) if line.startswith("Model:")]
        found.append(Accelerator("cuda", model[0] if model else "NVIDIA GPU"))
    return found


def _amd(root: Path) -> list[Accelerator]:
    nodes = sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"))
    return [Accelerator("rocm", "AMD GPU") for node in nodes if _property(node, "simd_count") > 0]


def _property(file: Path, name: str) -> int:
    for line in _lines(file):
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _ascend(root: Path) -> list[Accelerator]:
    return [Accelerator("npu", "Ascend NPU") for device in root.glob("dev/davinci*") if device.name[7:].isdigit()]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not ours to read: what it says is unknown
        return []


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def shared_memory() -> dict[str, int] | None:
    """Bytes of /dev/shm, where vLLM's processes exchange messages; None where there is no such thing."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}
