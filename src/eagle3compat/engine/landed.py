"""What stock gets in place of tensors that are the caller's own already, so that it does not copy them once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Landed:
    """A captured state. `fault` says why it cannot be one, or nothing: see fault_of.

    Stock copies what it gets by `.clone().cpu()`. The first clone is the tensor itself; another, of a layer that was
    asked for twice, is a copy.
    """

    tensor: Any
    fault: str
    _taken: bool = False

    def clone(self) -> Landed:
        if not self._taken:
            self._taken = True
            return self
        return Landed(self.tensor.clone(), self.fault)

    def cpu(self) -> Any:
        return self.tensor


class Joined:
    """One layer of a batch, `[all tokens, hidden_size]`, of which stock 0.3 takes slices, a request each."""

    def __init__(self, pieces: Sequence[Landed]) -> None:
        self._pieces = pieces
        self._at: dict[tuple[int, int], Landed] = {}
        start = 0
        for piece in pieces:
            stop = start + len(piece.tensor)
            self._at[start, stop] = piece
            start = stop

    def __getitem__(self, rows: slice) -> Any:
        piece = self._at.get((rows.start, rows.stop))
        if piece is None:
            import torch

            return torch.cat([piece.tensor for piece in self._pieces])[rows]
        return piece
