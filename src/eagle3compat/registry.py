"""The adapters by name, in the order in which an extraction meets their seams.

`apply()` needs no more than this until a stock module is imported; the adapters themselves are loaded then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .outcome import Outcome, Status

if TYPE_CHECKING:
    from .adapter import Adapter

PACKAGE = "speculators"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
WORKER = "speculators.data_generation.custom_worker"


class Registered(NamedTuple):
    """An adapter's id and seam, and the stock module whose import it waits for."""

    id: str
    seam: str
    target: str

    def load(self) -> Adapter:
        """The adapter itself."""
        from .adapters import ADAPTERS

        return next(adapter for adapter in ADAPTERS if adapter.id == self.id)

    def outcome(self, status: Status, reason: str) -> Outcome:
        return Outcome(self.id, self.seam, status, reason)

    def deferral(self) -> Outcome:
        return self.outcome(Status.DEFERRED, f"goes in when {self.target} is imported")

    def failure(self, error: Exception) -> Outcome:
        return self.outcome(Status.FAILED, f"{type(error).__name__}: {error}")


REGISTRY: tuple[Registered, ...] = (
    Registered("speculators_import", "imports", PACKAGE),
    Registered("vllm_names", "imports", GENERATOR),
    Registered("worker_names", "imports", WORKER),
    Registered("tokenizer", "configs", GENERATOR),
    Registered("capture", "capture and attribution", GENERATOR),
    Registered("configs", "configs", GENERATOR),
    Registered("execution", "execution", GENERATOR),
    Registered("memory", "kv planning", GENERATOR),
    Registered("kv_planning", "kv planning", GENERATOR),
    Registered("scheduler", "scheduler", GENERATOR),
    Registered("request", "request", GENERATOR),
    Registered("results", "results", GENERATOR),
)
"""Every adapter, in order; `adapters.ADAPTERS` holds them in the same."""

SERVER = (
    "server_chunks", "server_prefix_caching", "server_writes", "server_aborts", "server_answers", "server_render",
    "server_takeover",
)  # fmt: skip
"""What `serverpath` changes in a vLLM server; EAGLE3COMPAT_SKIP knows these names too."""
