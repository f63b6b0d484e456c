"""Stock asks CUDA for free memory in the driver; machines without CUDA raise, or plan a KV cache of nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..adapter import GENERATOR, Adapter
from ..contract import Exists
from ..ledger import Ledger


class Memory(Adapter):
    """Answers stock's question about device memory without touching a device from the driver process.

    The workers plan KV memory from what is free on their own devices, so the driver's figure is not used; asking for it
    would start CUDA in the driver, after which later workers can no longer be forked.
    """

    id = "memory"
    seam = "kv planning"
    breaks = (
        "`RuntimeError: Found no NVIDIA driver on your system` or `Torch not compiled with CUDA enabled` on machines "
        "without CUDA; a KV cache of 0 bytes on a CPU build of torch"
    )
    always = "stock measures memory on the driver's current device, which need not be a worker's"
    relies_on = (Exists(f"{GENERATOR}:VllmHiddenStatesGenerator"),)
    replaces = ("torch", "mem_get_info", "empty_cache")
    requires = ("execution",)
    upstream = "https://github.com/vllm-project/speculators/issues/233"
    remove_when = "stock leaves memory planning to vLLM"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        for name, replacement in (("mem_get_info", no_figure), ("empty_cache", nothing)):
            if hasattr(module, name):
                ledger.rebind(self.id, module, name, replacement)
        ledger.rebind(self.id, module, "torch", TorchWithoutDevice(module.torch))


def no_figure() -> tuple[int, int]:
    """(free, total) device memory in bytes: unknown to the driver, and not needed."""
    return (0, 0)


def nothing() -> None:
    """The driver holds no device memory to give back."""


class _NoDevice:
    """`torch.cuda` as the stock generator sees it."""

    mem_get_info = staticmethod(no_figure)
    empty_cache = staticmethod(nothing)


class TorchWithoutDevice:
    """torch, as the stock generator sees it: everything but the driver's device."""

    cuda = _NoDevice()

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)
