"""Stock modules import vLLM names that have moved or gone; the import of speculators' data generation then fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ..adapter import GENERATOR, WORKER, Adapter
from ..contract import Imports
from ..ledger import Ledger
from .absent import supplied


class VllmNames(Adapter):
    """Lets the import statements of the stock generator succeed: absent names are there while it is imported.

    Everything that the generator does with them is rebound by the adapters that follow, so what is supplied only has to
    be importable, and vLLM's own modules are left as they were afterwards.
    """

    id = "vllm_names"
    seam = "imports"
    target = GENERATOR
    breaks = (
        "`from speculators.data_generation import ...` raises ImportError or ModuleNotFoundError: "
        "`vllm.utils.hashing` (0.4 on vLLM 0.11.0), `_get_kv_cache_groups_uniform_spec` (vLLM 0.33)"
    )
    stock_needs = (Imports(GENERATOR, "vllm"),)
    where = "driver"
    upstream = "https://github.com/vllm-project/speculators/pull/225"
    remove_when = "no supported vLLM lacks a name that stock imports"

    @contextmanager
    def during_import(self) -> Iterator[None]:
        with supplied(self.id, (self.target,), "vllm"):
            yield

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        """Nothing to keep: the adapters that follow rebind these names in the generator."""


class WorkerNames(VllmNames):
    """The same for the module of the stock worker extension, which a worker or a user's subclass may import."""

    id = "worker_names"
    target = WORKER
    breaks = "importing the stock worker extension raises ImportError when vLLM has moved a name that it imports"
    stock_needs = (Imports(WORKER, "vllm"),)
    where = "driver and worker"
