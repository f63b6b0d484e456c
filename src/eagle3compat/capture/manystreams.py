"""Models that carry several residual streams at once (hyper-connections, attention residuals).

What of these a draft model gets is the model's own business: vLLM's models say it through the states that they hand to
an EAGLE-3 draft, counted from 1 where layer ids count from 0, because number k is what *enters* layer k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UnprovenCaptureError
from .decoder import Decoder
from .marks import SETTER, marked
from .proof import Agree
from .streams import Reduce, distance, flat, tolerance

REMEDY = "Use speculators' server path (0.5 or later), or a vLLM whose model of this name feeds EAGLE-3 drafts."


def has_many_streams(decoder: Decoder) -> bool:
    """Whether the layers of a model, or the model around them, mix several streams."""
    return any(_marked(module) for module in (decoder.base, decoder.layers[0], decoder.layers[-1]))


def _marked(module: torch.nn.Module) -> bool:
    parts = {**module._modules, **module._parameters, **module._buffers}
    return marked({name: part is not None for name, part in parts.items()}) or marked(module.__dict__)


class AuxiliaryStates:
    """Asks `model` for its own auxiliary hidden states after these layers, and takes them out of what it returns.

    With `reduce` and `agree`, as in Recorder, the first batch shows that all tensor-parallel ranks have the same ones:
    some of vLLM's models hand out a rank's share, where a layer leaves the sum over the ranks to the layer after it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        name: str,
        layer_ids: Sequence[int],
        reduce: Reduce | None = None,
        agree: Agree | None = None,
    ) -> None:
        self._name = name
        self._reduce, self._agree = reduce, agree
        self._layers = sorted(set(layer_ids))
        language = getattr(model, "get_language_model", None)
        owners = [model, language()] if callable(language) else [model]
        setters = [getattr(owner, SETTER) for owner in owners if callable(getattr(owner, SETTER, None))]
        if not setters:
            raise UnprovenCaptureError(
                name, "it carries several residual streams and does not say which of them a draft model gets", REMEDY
            )
        setters[0](tuple(layer + 1 for layer in self._layers))

    def split(self, returned: Any, total: int) -> tuple[Any, dict[int, torch.Tensor]]:
        """What the model returns without the request, and the state of each layer, `[rows, hidden_size]`.

        Rows past `total` are padding.
        """
        states = returned[1] if isinstance(returned, tuple) and len(returned) == 2 else []
        hidden = self.without(returned)
        found = len(states) if isinstance(states, (list, tuple)) else 0
        rows = [flat(state).clone() for state in states] if found else []
        if found != len(self._layers) or any(state.shape != flat(hidden).shape for state in rows):
            raise UnprovenCaptureError(
                self._name,
                f"it carries several residual streams, and for layers {self._layers} it hands out {found} states",
                REMEDY,
            )
        if self._reduce is not None and self._agree is not None:
            self._require_alike([state[:total] for state in rows], self._reduce, self._agree)
            self._reduce = None
        return hidden, dict(zip(self._layers, rows, strict=True))

    def _require_alike(self, states: Sequence[torch.Tensor], reduce: Reduce, agree: Agree) -> None:
        ranks = float(reduce(torch.ones_like(states[0][:1, :1])))
        apart = agree([distance(state, reduce(state.clone()) / ranks) for state in states])
        shares = [layer for layer, by in zip(self._layers, apart, strict=True) if not by <= tolerance(states[0].dtype)]
        if shares:
            raise UnprovenCaptureError(
                self._name,
                f"the states that it hands out for layers {shares} differ from one tensor-parallel rank to the next",
                "Nothing was returned. Use a tensor_parallel_size of 1, or speculators' server path (0.5 or later).",
            )

    @staticmethod
    def without(returned: Any) -> Any:
        return returned[0] if isinstance(returned, tuple) and isinstance(returned[1], (list, tuple)) else returned
