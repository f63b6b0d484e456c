"""vLLM's connector for hidden states, for releases in which a request that is given up in the queue ends the engine.

vLLM loads it by this module's name, in the scheduler and in each worker (`kv_connector_module_path`). Such a request
was never scheduled, so the scheduler's side has no file name for it and raises KeyError, and the workers' side would
report as sent what the scheduler no longer knows (example_hidden_states_connector.py, vLLM 0.24 to 0.30).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class ExampleHiddenStatesConnector(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]
    """Takes a request that was never scheduled for what it is: nothing to save, nothing to wait for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._scheduled: set[str] = set()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id not in self._request_filenames:
            return False, None
        return super().request_finished(request, block_ids)  # type: ignore[no-any-return]

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id not in self._request_filenames:
            return False, None
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[no-any-return]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.has_connector_metadata():
            self._scheduled |= self._get_connector_metadata().new_req_filenames.keys()
        sent, received = super().get_finished(finished_req_ids)
        known = (sent or set()) & self._scheduled
        self._scheduled -= known
        return known or None, received
