"""vLLM's connector for hidden states, without what ends its engine.

vLLM loads it by this module's name, in the scheduler and in each worker (`kv_connector_module_path`). The class that is
asked for is `FIRST:MODULE:CLASS`: one of the classes here, and the connector that it is put before.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from safetensors import SafetensorError

LOG = logging.getLogger("vllm.eagle3compat")


class Survives:
    """Goes on where a file cannot be written; its request is then answered with an error, as it has no file.

    For releases that write within the step (example_hidden_states_connector.py, vLLM 0.17 to 0.21).
    """

    def save_kv_layer(self, *arguments: Any, **options: Any) -> None:
        try:
            super().save_kv_layer(*arguments, **options)  # type: ignore[misc]
        except (OSError, SafetensorError) as error:
            LOG.error("eagle3compat: the files of this step could not all be written: %s", error)


class Outlives:
    """Takes a request that was never scheduled for what it is: nothing to save, nothing to wait for.

    For releases in which such a request ends the engine: the scheduler's side has no file name for it and raises
    KeyError, and the workers' side would report as sent what the scheduler no longer knows
    (example_hidden_states_connector.py, vLLM 0.24 to 0.30).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._scheduled: set[str] = set()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id not in self._request_filenames:  # type: ignore[attr-defined]
            return False, None
        return super().request_finished(request, block_ids)  # type: ignore[misc, no-any-return]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id not in self._request_filenames:  # type: ignore[attr-defined]
            return False, None
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc, no-any-return]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.has_connector_metadata():  # type: ignore[attr-defined]
            self._scheduled |= self._get_connector_metadata().new_req_filenames.keys()  # type: ignore[attr-defined]
        sent, received = super().get_finished(finished_req_ids)  # type: ignore[misc]
        known = (sent or set()) & self._scheduled
        self._scheduled -= known
        return known or None, received


def __getattr__(name: str) -> Any:
    """The class of `FIRST:MODULE:CLASS`. Raises AttributeError for any other name."""
    first, _, rest = name.partition(":")
    module, colon, wanted = rest.partition(":")
    before = {"Outlives": Outlives, "Survives": Survives}.get(first)
    if before is None or not colon:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = getattr(importlib.import_module(module), wanted)
    return type(wanted, (before, base), {"__module__": __name__})
