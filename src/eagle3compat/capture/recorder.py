"""Records the residual streams of chosen layers while the model's own forward runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UnprovenCaptureError
from .decoder import Decoder, find_decoder
from .rows import RowReader, Step
from .store import Piece, Store
from .streams import REMEDY, Reading, decide, distance, entering, flat, kept, shape_of, tolerance


class Recorder:
    """Hooks on the decoder layers of one worker's model.

    Only tensor-parallel rank 0 captures: what a layer returns is whole on every rank. The first batch proves the
    reading of the layers' return values against the final norm, and raises UnprovenCaptureError otherwise.
    """

    def __init__(self, runner: Any, num_layers: int, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self.decoder: Decoder = find_decoder(runner.model, num_layers)
        self.model = type(runner.model).__name__
        self.rows = RowReader(runner)
        self.store = Store(layer_ids)
        self.reading: tuple[str, Reading] | None = None
        self.checked_tokens = True
        self._shape = ""
        self._step: Step | None = None
        self._pieces: list[Piece] = []
        self._seen: set[int] = set()
        self._last: Any = None
        self._norm: tuple[torch.Tensor, Any] | None = None
        self._forward = self.decoder.base.forward
        self._parameters = inspect.signature(self._forward)
        self.decoder.base.forward = self._around_forward
        for index in sorted(set(layer_ids)):
            self.decoder.layers[index].register_forward_hook(self._layer_hook(index))
        self._proof = self._install_proof()

    def _layer_hook(self, index: int) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if self._step is None:
                return
            if index in self._seen:
                raise UnprovenCaptureError(self.model, f"its forward calls layer {index} more than once", REMEDY)
            self._seen.add(index)
            if self.reading is None:  # the first batch: kept whole until the last layer has told how to read it
                self._unread[index] = kept(output)
            else:
                self._put(index, self._step, output)

        return hook

    def _put(self, index: int, step: Step, output: Any) -> None:
        """File what the layer returned, read as was proved."""
        assert self.reading is not None
        if shape_of(output) != self._shape:
            raise self._unproven(index, output)
        self.store.put(index, step, self._pieces, flat(self.reading[1](output)))

    def _unproven(self, index: int, output: Any) -> UnprovenCaptureError:
        return UnprovenCaptureError(
            self.model,
            f"layer {index} ({type(self.decoder.layers[index]).__name__}) returns {shape_of(output)}, "
            f"the last layer {self._shape}: what holds for one is not proved for the other",
            REMEDY,
        )

    def _install_proof(self) -> list[Any]:
        self._unread: dict[int, Any] = {}
        handles = [self.decoder.layers[-1].register_forward_hook(self._on_last_layer)]
        for module in self.decoder.after.values():
            handles.append(module.register_forward_pre_hook(self._before_child))
            handles.append(module.register_forward_hook(self._after_child))
        return handles

    def _on_last_layer(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._step is not None:
            self._last = kept(output)

    def _before_child(self, _module: torch.nn.Module, args: Any) -> None:
        if self._step is not None and self._last is not None and self._norm is None:
            stream = entering(args)
            if stream is not None:
                self._norm = (stream, None)

    def _after_child(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._step is not None and self._norm is not None and self._norm[1] is None:
            self._norm = (self._norm[0], output[0] if isinstance(output, (tuple, list)) else output)

    def _prove(self, returned: Any, total: int) -> None:
        """Decide how layers are to be read, once, on the first real batch; rows past `total` are padding."""
        layer = type(self.decoder.layers[-1]).__name__
        if self._norm is None or not isinstance(self._norm[1], torch.Tensor):
            raise UnprovenCaptureError(self.model, f"no final norm was seen after the last {layer}", REMEDY)
        entered, normed = self._norm
        first = returned[0] if isinstance(returned, (tuple, list)) else returned
        if not isinstance(first, torch.Tensor) or not (
            distance(flat(normed)[:total], flat(first)[:total]) <= tolerance(entered.dtype)
        ):
            raise UnprovenCaptureError(self.model, "its forward returns something else than its final norm", REMEDY)
        self.reading = decide(self.model, layer, self._last, entered, total)
        self._shape = shape_of(self._last)
        for handle in self._proof:
            handle.remove()

    def _around_forward(self, *args: Any, **kwargs: Any) -> Any:
        step = self.rows.step()
        if step is None or not self.store.expects(step):
            return self._forward(*args, **kwargs)
        self._forget_step()
        self._pieces = self._pieces_of(step, self._parameters.bind(*args, **kwargs).arguments)
        self._step = step
        try:
            returned = self._forward(*args, **kwargs)
        finally:
            self._step = None
        if self.reading is None:
            self._prove(returned, step.total)
            for index, output in self._unread.items():
                self._put(index, step, output)
        missing = [index for index in self.store.layer_ids if index not in self._seen]
        if missing:
            raise UnprovenCaptureError(self.model, f"its forward did not call layers {missing}", REMEDY)
        self.store.end_step()
        self._forget_step()
        return returned

    def _forget_step(self) -> None:
        self._pieces, self._last, self._norm = [], None, None
        self._seen.clear()
        self._unread.clear()

    def _pieces_of(self, step: Step, arguments: Mapping[str, Any]) -> list[Piece]:
        """Where the step's rows belong, from what the forward is given: known before the first layer runs."""
        positions = arguments.get("positions")
        if not isinstance(positions, torch.Tensor):
            raise UnprovenCaptureError(self.model, "its forward gets no `positions`, so rows cannot be placed", REMEDY)
        if positions.dim() > 1:  # multimodal rotary positions [3, rows]: for text all three are the same
            positions = positions[0]
        tokens = arguments.get("input_ids")
        if not isinstance(tokens, torch.Tensor):
            tokens, self.checked_tokens = None, False
        return self.store.pieces(
            step,
            positions[: step.total].to("cpu", torch.long),
            None if tokens is None else tokens[: step.total].to("cpu", torch.long),
        )
