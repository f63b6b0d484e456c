"""Stock builds vLLM's Scheduler, whose arguments changed, and aborts requests before they are accounted for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..adapter import GENERATOR, Adapter
from ..contract import Binds
from ..ledger import Ledger


class SchedulerStandIn(Adapter):
    """Hands stock a scheduler that passes its requests to the engine core's own."""

    id = "scheduler"
    seam = "scheduler"
    breaks = (
        "`Scheduler.__init__() missing 1 required positional argument: 'block_size'` (0.3 from vLLM 0.11.1), a bare "
        "AssertionError where the KV block size does not divide 16 (from 0.23)"
    )
    stock_needs = (Binds(GENERATOR, "Scheduler", "vllm.v1.core.sched.scheduler:Scheduler"),)
    always = "stock aborts requests or keeps finished ones running: samples are cut, swapped or lost"
    replaces = ("Scheduler", "StructuredOutputManager")
    requires = ("execution",)
    upstream = "https://github.com/vllm-project/speculators/pull/365"
    remove_when = "never while in-process extraction is used: the engine core schedules"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        from ..engine.stand_in import Scheduler

        ledger.rebind(self.id, module, "Scheduler", Scheduler)
        ledger.rebind(self.id, module, "StructuredOutputManager", nothing)


def nothing(**_options: Any) -> None:
    """The engine core has its own."""
