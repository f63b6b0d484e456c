"""Captured rows on the host, filed by request and position, until the driver has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import ResultError
from .courier import Courier, courier_for
from .rows import Step
from .segment import Address, Layout, Sheet

REMEDY = "Nothing of this call was returned. Run `eagle3compat doctor` and report its output."


@dataclass(frozen=True)
class Piece:
    """Rows of one request in a step: `rows` of the step are `here` in the prompt."""

    request: str
    rows: slice
    here: slice


class Store:
    """One tensor `[len(prompt), hidden_size]` a layer and request, filled as rows arrive, in any order.

    Where the driver has given a segment, these tensors lie in it; else they are the store's own. Every row is proved
    before it is filed: its position lies within the prompt, positions of a request's rows follow one another, and the
    token that the forward sees there is the prompt's. A row computed again (after preemption) overwrites itself. Which
    rows have arrived is kept here, and is not read off their values.
    """

    def __init__(self, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(dict.fromkeys(layer_ids))
        self._prompts: dict[str, torch.Tensor] = {}
        self._states: dict[tuple[str, int], torch.Tensor] = {}
        self._in_segment: set[tuple[str, int]] = set()
        self._filled: dict[str, torch.Tensor] = {}
        self._courier: Courier | None = None
        self._address: Address | None = None
        self._data: torch.Tensor | None = None
        self._sheet: Sheet | None = None
        self._sends = 0

    def clear(self) -> None:
        """Forget everything, once nothing is on its way any more."""
        if self._courier is not None:
            self._courier.abandon()
        self._sheet = None
        self._sends = 0
        self._prompts.clear()
        self._states.clear()
        self._in_segment.clear()
        self._filled.clear()

    def attach(self, address: Address | None) -> None:
        """Use this segment from now on; None: none. Forgets everything. Raises OSError or RuntimeError."""
        self.clear()
        if address == self._address:
            return
        if self._courier is not None:
            self._courier.adopt(None)
        self._address = self._data = None
        if address is not None:
            self._data, self._address = address.open(), address
        if self._courier is not None:
            self._courier.adopt(self._data)

    def begin(self, prompts: Mapping[str, Sequence[int]], layout: Layout | None = None) -> None:
        """Expect the rows of these requests (id to token ids), in the attached segment where `layout` says so."""
        for request, tokens in prompts.items():
            self._prompts[request] = torch.tensor(tokens, dtype=torch.long)
            self._filled[request] = torch.zeros((len(self.layer_ids), len(tokens)), dtype=torch.bool)
        self._sheet = None
        if layout is not None and self._data is not None:
            self._sheet = Sheet(layout, self._data)
            self._sheet.landed.zero_()
            self._sheet.revisions.zero_()

    def expects(self, step: Step) -> bool:
        return any(request in self._prompts for request in step.request_ids)

    def pieces(self, step: Step, positions: torch.Tensor, tokens: torch.Tensor | None) -> list[Piece]:
        """Where a step's rows belong. Raises ResultError when they are not the prompts' own.

        `positions` `[rows]` and `tokens` `[rows]` (None where the forward gets embeddings) are int64 on the host. Rows
        past the step's total are padding; rows past a prompt are sampled tokens.
        """
        require(len(positions), step, "positions")
        found, start = [], 0
        for request, count in zip(step.request_ids, step.counts, strict=True):
            rows = slice(start, start + count)
            start += count
            if request in self._prompts:
                here = self._here(request, positions[rows], None if tokens is None else tokens[rows])
                wanted = here.stop - here.start
                if wanted > 0:
                    found.append(Piece(request, slice(rows.start, rows.start + wanted), here))
        return found

    def _here(self, request: str, positions: torch.Tensor, tokens: torch.Tensor | None) -> slice:
        prompt = self._prompts[request]
        first, count = int(positions[0]), len(positions)
        if first < 0 or not torch.equal(positions, torch.arange(first, first + count)):
            raise ResultError(None, f"the rows of {request} do not have consecutive positions", REMEDY)
        here = slice(first, min(first + count, len(prompt)))
        if tokens is not None and not torch.equal(tokens[: max(0, here.stop - first)], prompt[here]):
            raise ResultError(None, f"rows taken for {request} were computed from other tokens than its prompt", REMEDY)
        return here

    def put(self, layer: int, step: Step, pieces: Sequence[Piece], stream: torch.Tensor) -> None:
        """Send what a step's `stream` `[rows, hidden_size]` of `layer` holds of `pieces` on its way to the host."""
        require(len(stream), step, "states")
        if self._courier is None:
            self._courier = courier_for(stream.device)
            self._courier.adopt(self._data)
        copies, counts = [], []
        for piece in pieces:
            copies.append((stream[piece.rows], self._place(layer, piece.request, stream)[piece.here]))
            counts.append((piece.request, self._count(layer, piece)))
        self._sends += 1
        self._courier.send(copies, partial(self._landed, layer, counts))

    def _count(self, layer: int, piece: Piece) -> int:
        """Take down that these rows come; how many of the request there are with them."""
        row = self.layer_ids.index(layer)
        filled = self._filled[piece.request][row]
        if (piece.request, layer) in self._in_segment and bool(filled[piece.here].any()):
            sheet = self._require_sheet()
            sheet.revisions[row, sheet.index[piece.request]] += 1  # the driver may have read what is about to change
        filled[piece.here] = True
        return int(filled.sum())

    def _landed(self, layer: int, counts: Sequence[tuple[str, int]]) -> None:
        """Tell the driver, once rows are in the segment, how many there are. Sends arrive in the order of sending."""
        for request, count in counts:
            if (request, layer) in self._in_segment:
                sheet = self._require_sheet()
                sheet.landed[self.layer_ids.index(layer), sheet.index[request]] = count

    def end_step(self) -> None:
        """Wait until earlier steps' rows have left the device, so that those of two steps at most are on it."""
        if self._courier is not None:
            self._courier.settle(keep=self._sends)
        self._sends = 0

    def _place(self, layer: int, request: str, stream: torch.Tensor) -> torch.Tensor:
        """`[len(prompt), hidden_size]`: in the segment if that was laid out for such rows."""
        key = request, layer
        if key not in self._states:
            sheet = self._sheet
            if sheet is not None and (sheet.layout.hidden_size, sheet.layout.dtype) == (stream.shape[-1], stream.dtype):
                self._states[key] = sheet.places[request][self.layer_ids.index(layer)]
                self._in_segment.add(key)
            else:
                shape = len(self._prompts[request]), stream.shape[-1]
                self._states[key] = torch.empty(shape, dtype=stream.dtype)
        return self._states[key]

    def _require_sheet(self) -> Sheet:
        assert self._sheet is not None, "rows lie in a segment that is no longer laid out"
        return self._sheet

    def collect(self, requests: Sequence[str]) -> dict[str, list[torch.Tensor | int]]:
        """Hand over and forget these requests, each with one entry a layer of `layer_ids`.

        An entry is the `[len(prompt), hidden_size]`, or, where that lies in the segment, the number of times that rows
        of it were written again.
        """
        if self._courier is not None:
            self._courier.settle()
        return {request: self._hand_over(request) for request in requests}

    def _hand_over(self, request: str) -> list[torch.Tensor | int]:
        filled = self._filled.pop(request)
        del self._prompts[request]
        entries: list[torch.Tensor | int] = []
        for row, layer in enumerate(self.layer_ids):
            if not bool(filled[row].all()):
                found = f"only {int(filled[row].sum())} of {filled.shape[1]} rows of {request} were computed"
                raise ResultError(None, found, REMEDY)
            state = self._states.pop((request, layer))
            if (request, layer) in self._in_segment:
                sheet = self._require_sheet()
                entries.append(int(sheet.revisions[row, sheet.index[request]]))
            else:
                entries.append(state)
        return entries


def require(found: int, step: Step, what: str) -> None:
    if found < step.total:
        raise ResultError(None, f"a step of {step.total} rows came with {found} {what}", REMEDY)
