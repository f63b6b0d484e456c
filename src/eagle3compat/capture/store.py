"""Captured rows on the host, filed by request and position, until the driver has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from ..errors import ResultError
from .courier import Courier, courier_for
from .rows import Step
from .segment import Address, Layout, Sheet

REMEDY = "Nothing of this call was returned. Run `eagle3compat doctor` and report its output."
REMEDY_IMAGES = "Nothing of this call was returned. Leave images out on this vLLM, or set VLLM_USE_V2_MODEL_RUNNER=0."


@dataclass(frozen=True)
class Piece:
    """Rows of one request in a step: `rows` of the step are `here` in the prompt."""

    request: str
    rows: slice
    here: slice


class Spans:
    """Which rows of a prompt are filed, as stretches in order that neither touch nor overlap."""

    def __init__(self) -> None:
        self._stretches: list[tuple[int, int]] = []

    def add(self, start: int, stop: int) -> bool:
        """Take these rows down; whether one of them was there already."""
        if not self._stretches or self._stretches[-1][1] < start:
            self._stretches.append((start, stop))
            return False
        again = any(low < stop and start < high for low, high in self._stretches)
        touching = [span for span in self._stretches if span[0] <= stop and start <= span[1]]
        apart = [span for span in self._stretches if span not in touching]
        lows, highs = zip((start, stop), *touching, strict=True)
        self._stretches = sorted([*apart, (min(lows), max(highs))])
        return again

    @property
    def count(self) -> int:
        return sum(high - low for low, high in self._stretches)


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
        self._leads: dict[str, int] = {}
        self._states: dict[tuple[str, int], torch.Tensor] = {}
        self._in_segment: dict[int, bool] = {}
        self._filled: dict[tuple[str, int], Spans] = {}
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
        self._leads.clear()
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

    def begin(
        self,
        prompts: Mapping[str, Sequence[int]],
        layout: Layout | None = None,
        leads: Mapping[str, int] | None = None,
    ) -> None:
        """Expect the rows of these requests (id to token ids), in the attached segment where `layout` says so.

        `leads` says of those with an image how many tokens come before the first.
        """
        self._leads.update(leads or {})
        for request, tokens in prompts.items():
            self._prompts[request] = torch.tensor(tokens, dtype=torch.long)
            self._filled.update({(request, layer): Spans() for layer in self.layer_ids})
        self._in_segment.clear()
        self._sheet = None
        if layout is not None and self._data is not None:
            self._sheet = Sheet(layout, self._data)
            self._sheet.landed.zero_()
            self._sheet.revisions.zero_()

    def expects(self, step: Step) -> bool:
        return any(request in self._prompts for request in step.request_ids)

    def has_images(self, step: Step) -> bool:
        """Whether one of the step's requests has an image, which need not be in this step."""
        return any(request in self._leads for request in step.request_ids)

    def pieces(self, step: Step, positions: torch.Tensor, tokens: torch.Tensor | None) -> list[Piece]:
        """Where a step's rows belong. Raises ResultError when they are not the prompts' own.

        `positions` `[rows]`, or `[3, rows]` of a multimodal rotary embedding, and `tokens` `[rows]` (None: unknown) are
        int64 on the host. Rows past the step's total are padding; rows past a prompt are sampled tokens.

        A position is a row's place in the prompt, but in a multimodal rotary embedding from the first image on. Where
        there is one, places follow from what the runner has computed of each, and positions must agree up to there.
        """
        rotary = positions.dim() > 1  # for text all three are the same
        positions = positions[0] if rotary else positions
        require(len(positions), step, "positions")
        starts = [stop - count for stop, count in zip(accumulate(step.counts), step.counts, strict=True)]
        mine = [
            (request, slice(start, start + count))
            for request, start, count in zip(step.request_ids, starts, step.counts, strict=True)
            if request in self._prompts and count
        ]
        placed = rotary and self.has_images(step)
        if placed and step.starts is None:
            raise ResultError(None, "the model runner does not say how much of a prompt it has computed", REMEDY_IMAGES)
        if placed and step.starts is not None:
            computed = dict(zip(step.request_ids, step.starts, strict=True))
            firsts = [computed[request] for request, _rows in mine]
        else:
            firsts = positions[[rows.start for _request, rows in mine]].tolist()
        found = []
        for (request, rows), first in zip(mine, firsts, strict=True):
            wanted = min(rows.stop - rows.start, len(self._prompts[request]) - first)
            if wanted > 0:
                found.append(Piece(request, slice(rows.start, rows.start + wanted), slice(first, first + wanted)))
        if placed:
            mine = [(name, self._text_of(name, rows, at)) for (name, rows), at in zip(mine, firsts, strict=True)]
        self._refuse_others(mine, firsts, found, positions, tokens)
        return found

    def _text_of(self, request: str, rows: slice, first: int) -> slice:
        """Those of a request's rows, from place `first` in the prompt on, whose rotary positions are places."""
        lead = self._leads.get(request)
        return rows if lead is None else slice(rows.start, min(rows.stop, rows.start + max(lead - first, 0)))

    def _refuse_others(
        self,
        mine: Sequence[tuple[str, slice]],
        firsts: Sequence[int],
        pieces: Sequence[Piece],
        positions: torch.Tensor,
        tokens: torch.Tensor | None,
    ) -> None:
        """Raise ResultError where positions of `mine` do not follow one another, or tokens are not the prompt's."""
        follow = [
            torch.arange(first, first + rows.stop - rows.start) for (_, rows), first in zip(mine, firsts, strict=True)
        ]
        if not alike([positions[rows] for _, rows in mine], follow) or any(first < 0 for first in firsts):
            for (request, rows), first, wanted in zip(mine, firsts, follow, strict=True):
                if first < 0 or not torch.equal(positions[rows], wanted):
                    raise ResultError(None, f"the rows of {request} do not have consecutive positions", REMEDY)
        if tokens is None:
            return
        prompts = [self._prompts[piece.request][piece.here] for piece in pieces]
        if not alike([tokens[piece.rows] for piece in pieces], prompts):
            for piece, wanted in zip(pieces, prompts, strict=True):
                if not torch.equal(tokens[piece.rows], wanted):
                    found = f"rows taken for {piece.request} were computed from other tokens than its prompt"
                    raise ResultError(None, found, REMEDY)

    def put(self, layer: int, step: Step, pieces: Sequence[Piece], stream: torch.Tensor) -> None:
        """Send what a step's `stream` `[rows, hidden_size]` of `layer` holds of `pieces` on its way to the host."""
        require(len(stream), step, "states")
        if self._courier is None:
            self._courier = courier_for(stream.device)
            self._courier.adopt(self._data)
        shared = self._lies_in_segment(layer, stream)
        again = [piece for piece in pieces if self._filled[piece.request, layer].add(piece.here.start, piece.here.stop)]
        self._sends += 1
        if not shared:
            copies = [(stream[piece.rows], self._place(layer, piece.request, stream)[piece.here]) for piece in pieces]
            self._courier.send(copies, nothing)
            return
        sheet, row = self._require_sheet(), self.layer_ids.index(layer)
        changing = [sheet.index[piece.request] for piece in again]
        for number in changing:  # the driver may have read what is about to change
            sheet.revisions[row, number] += 1
        runs = joined((piece.rows, sheet.starts[piece.request] + piece.here.start) for piece in pieces)
        copies = [(stream[rows], sheet.rows[row, place : place + rows.stop - rows.start]) for rows, place in runs]
        numbers = [sheet.index[piece.request] for piece in pieces]
        counts = [self._filled[piece.request, layer].count for piece in pieces]
        self._courier.send(copies, partial(self._landed, row, numbers, counts, changing))

    def _landed(self, row: int, numbers: Sequence[int], counts: Sequence[int], changed: Sequence[int]) -> None:
        """Tell the driver, once rows are in the segment, how many there are. Sends arrive in the order of sending."""
        sheet = self._require_sheet()
        sheet.landed[row, torch.tensor(numbers, dtype=torch.long)] = torch.tensor(counts, dtype=torch.long)
        for number in changed:  # it may have read some of it before and some after
            sheet.revisions[row, number] += 1

    def _lies_in_segment(self, layer: int, stream: torch.Tensor) -> bool:
        """Whether rows of this layer go to the segment, in this call: if that was laid out for such rows."""
        if layer not in self._in_segment:
            layout = None if self._sheet is None else self._sheet.layout
            self._in_segment[layer] = layout is not None and (layout.hidden_size, layout.dtype) == (
                stream.shape[-1], stream.dtype,
            )  # fmt: skip
        return self._in_segment[layer]

    def end_step(self) -> None:
        """Wait until earlier steps' rows have left the device, so that those of two steps at most are on it."""
        if self._courier is not None:
            self._courier.settle(keep=self._sends)
        self._sends = 0

    def _place(self, layer: int, request: str, stream: torch.Tensor) -> torch.Tensor:
        """`[len(prompt), hidden_size]`, for rows that do not lie in the segment."""
        key = request, layer
        if key not in self._states:
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
        length = len(self._prompts.pop(request))
        entries: list[torch.Tensor | int] = []
        for row, layer in enumerate(self.layer_ids):
            count = self._filled.pop((request, layer)).count
            if count != length:
                raise ResultError(None, f"only {count} of {length} rows of {request} were computed", REMEDY)
            if self._in_segment[layer]:
                sheet = self._require_sheet()
                entries.append(int(sheet.revisions[row, sheet.index[request]]))
            else:
                entries.append(self._states.pop((request, layer)))
        return entries


def nothing() -> None:
    """What there is to do once rows are there that the driver does not look for."""


def joined(pieces: Iterable[tuple[slice, int]]) -> list[tuple[slice, int]]:
    """The same rows for the same places, those that follow one another in both as one."""
    runs: list[tuple[slice, int]] = []
    for rows, place in pieces:
        if runs:
            before, start = runs[-1]
            if before.stop == rows.start and start + before.stop - before.start == place:
                runs[-1] = slice(before.start, rows.stop), start
                continue
        runs.append((rows, place))
    return runs


def alike(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return not found or torch.equal(torch.cat([*found]), torch.cat([*wanted]))


def require(found: int, step: Step, what: str) -> None:
    if found < step.total:
        raise ResultError(None, f"a step of {step.total} rows came with {found} {what}", REMEDY)
