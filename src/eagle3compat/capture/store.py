"""Captured rows on the host, filed by request and position, until the driver collects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import ResultError
from .rows import Step

REMEDY = "Nothing of this call was returned. Run `eagle3compat doctor` and report its output."


class Store:
    """One tensor `[len(prompt), hidden_size]` a layer and request, filled as rows arrive, in any order.

    Every row is proved before it is filed: its position lies within the prompt, positions of a request's rows follow
    one another, and the token that the forward saw there is the prompt's. A row computed again (after preemption)
    overwrites itself.
    """

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(dict.fromkeys(layer_ids))
        self._prompts: dict[str, torch.Tensor] = {}
        self._states: dict[str, dict[int, torch.Tensor]] = {}
        self._filled: dict[str, torch.Tensor] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._prompts.clear()
        self._states.clear()
        self._filled.clear()

    def begin(self, prompts: Mapping[str, Sequence[int]]) -> None:
        """Expect the rows of these requests: request id to token ids."""
        for request, tokens in prompts.items():
            self._prompts[request] = torch.tensor(tokens, dtype=torch.long)
            self._filled[request] = torch.zeros(len(tokens), dtype=torch.bool)

    def expects(self, step: Step) -> bool:
        return any(request in self._prompts for request in step.request_ids)

    def file(
        self,
        step: Step,
        positions: torch.Tensor,
        tokens: torch.Tensor | None,
        streams: Mapping[int, torch.Tensor],
    ) -> None:
        """File one step's rows.

        `positions` `[rows]` and `tokens` `[rows]` (None where the forward got embeddings) are int64 on the host;
        `streams` maps a layer id to `[rows, hidden_size]` on the host. Rows past the step's total are padding.
        """
        short = min(len(positions), *(len(stream) for stream in streams.values()))
        if short < step.total:
            raise ResultError(None, f"a step of {step.total} rows came with {short} positions or states", REMEDY)
        start = 0
        for request, count in zip(step.request_ids, step.counts, strict=True):
            rows = slice(start, start + count)
            start += count
            if request in self._prompts:
                self._file_request(request, positions[rows], None if tokens is None else tokens[rows], rows, streams)

    def _file_request(
        self,
        request: str,
        positions: torch.Tensor,
        tokens: torch.Tensor | None,
        rows: slice,
        streams: Mapping[int, torch.Tensor],
    ) -> None:
        prompt = self._prompts[request]
        first, count = int(positions[0]), len(positions)
        if first < 0 or not torch.equal(positions, torch.arange(first, first + count)):
            raise ResultError(None, f"the rows of {request} do not have consecutive positions", REMEDY)
        wanted = min(count, len(prompt) - first)  # rows past the prompt are sampled tokens
        if wanted <= 0:
            return
        here = slice(first, first + wanted)
        if tokens is not None and not torch.equal(tokens[:wanted], prompt[here]):
            raise ResultError(None, f"rows taken for {request} were computed from other tokens than its prompt", REMEDY)
        states = self._states.setdefault(request, {})
        for layer in self.layer_ids:
            stream = streams[layer]
            if layer not in states:
                states[layer] = torch.empty((len(prompt), stream.shape[-1]), dtype=stream.dtype)
            states[layer][here] = stream[rows][:wanted]
        self._filled[request][here] = True

    def collect(self, requests: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Hand over and forget these requests: for each, one `[len(prompt), hidden_size]` a layer of `layer_ids`."""
        collected = {}
        for request in requests:
            filled = self._filled.pop(request)
            del self._prompts[request]
            states = self._states.pop(request, {})
            if not bool(filled.all()):
                raise ResultError(
                    None, f"only {int(filled.sum())} of {len(filled)} rows of {request} were computed", REMEDY
                )
            collected[request] = [states[layer] for layer in self.layer_ids]
        return collected
