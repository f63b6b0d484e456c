"""Stock gives vLLM's Request arguments that it no longer takes (`eos_token_id`, from vLLM 0.17 on)."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from ..adapter import GENERATOR, Adapter
from ..contract import Accepts, Binds
from ..ledger import Ledger

REQUEST = "vllm.v1.request:Request"


class RequestArguments(Adapter):
    """Builds vLLM's Request from those of stock's arguments that it takes."""

    id = "request"
    seam = "request"
    breaks = "`Request.__init__() got an unexpected keyword argument 'eos_token_id'` (from vLLM 0.17)"
    stock_needs = (Binds(GENERATOR, "Request", REQUEST),)
    relies_on = (
        Accepts(
            f"{REQUEST}.__init__",
            ("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "arrival_time"),
        ),
    )
    replaces = ("Request",)
    hands_back = ("Request",)
    upstream = "https://github.com/vllm-project/speculators/pull/348"
    remove_when = "stock no longer passes eos_token_id"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        ledger.rebind(self.id, module, "Request", request)


def request(**arguments: Any) -> Any:
    """A vLLM Request; what stock passes beyond its signature is about decoding, which extraction does not do."""
    from vllm.v1.request import Request

    accepted = parameters(Request)
    return Request(**{name: value for name, value in arguments.items() if name in accepted})


@functools.cache
def parameters(kind: type) -> frozenset[str]:
    """The names that a class takes. Asked once: reading a signature takes as long as the rest of a short prompt."""
    return frozenset(inspect.signature(kind).parameters)
