"""The adapters, one a file, in the order in which an extraction meets their seams."""

from __future__ import annotations

from ..adapter import Adapter
from .capture import Capture
from .configs import Configs
from .execution import Execution
from .kv_planning import KVPlanning
from .memory import Memory
from .request import RequestArguments
from .results import Results
from .scheduler import SchedulerStandIn
from .speculators_import import SpeculatorsImport
from .tokenizer import Tokenizer
from .vllm_names import VllmNames, WorkerNames

ADAPTERS: tuple[Adapter, ...] = (
    SpeculatorsImport(),
    VllmNames(),
    WorkerNames(),
    Tokenizer(),
    Capture(),
    Configs(),
    Execution(),
    Memory(),
    KVPlanning(),
    SchedulerStandIn(),
    RequestArguments(),
    Results(),
)
"""Every adapter, in order."""
