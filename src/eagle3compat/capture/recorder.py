"""Records the residual streams of chosen layers while the model's own forward runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import UnprovenCaptureError
from .decoder import Decoder, find_decoder
from .finite import FiniteWatch, refuse_unless_finite
from .manystreams import AuxiliaryStates, has_many_streams
from .passing import Links, links_of, passed_on, same
from .proof import Agree, FirstCall, Head, Normed, decide, is_norm, norm_of_head
from .rows import RowReader, Step
from .scaled import refuse_scaled
from .store import Piece, Store
from .streams import REMEDY, Reading, Reduce, distance, first_of, flat, kept, shape_of, tolerance

NO_IMAGES = "Nothing was returned. Leave images out: text is captured."


class Recorder:
    """Hooks on the decoder layers of one worker's model, and on what comes after each, where its stream enters.

    The first batch proves, layer by layer, how what it returns is to be read, and raises UnprovenCaptureError
    otherwise. Tensor-parallel rank 0 files what it captures; the others follow (`files=False`), because some models
    leave a layer's sum over the ranks to the layer after it, and that sum takes all ranks: `reduce` makes it, and
    `agree` makes all ranks decide alike.
    """

    def __init__(
        self,
        runner: Any,
        num_layers: int,
        layer_ids: Sequence[int],
        files: bool = True,
        reduce: Reduce | None = None,
        agree: Agree | None = None,
    ) -> None:
        self.layer_ids = tuple(layer_ids)
        self.decoder: Decoder = find_decoder(runner.model, num_layers)
        self.model = type(runner.model).__name__
        self._head: Head | None = getattr(runner.model, "compute_logits", None)
        refuse_scaled(self.model, self.decoder, runner)
        self.rows = RowReader(runner)
        self.store = Store(layer_ids)
        self.readings: dict[int, Reading] = {}
        self.checked_tokens = True
        self.files, self._reduce, self._agree = files, reduce, agree
        self._proved = False
        self._step: Step | None = None
        self._pieces: list[Piece] = []
        self._seen: set[int] = set()
        self._shapes: dict[int, str] = {}
        self._outputs: dict[int, Any] = {}
        self._left: dict[int, Any] = {}
        self._entered: dict[int, Any] = {}
        self._links: dict[int, Links] = {}
        self._hooks: dict[int, list[Any]] = {}
        self._arguments: Mapping[str, Any] = {}
        self._parameters = inspect.signature(runner.model.forward)
        self._base_forward, self.decoder.base.forward = self.decoder.base.forward, self._around_base
        self._forward, runner.model.forward = runner.model.forward, self._around_forward
        self._auxiliary: AuxiliaryStates | None = None
        if has_many_streams(self.decoder):
            self._auxiliary = AuxiliaryStates(runner.model, self.model, layer_ids, reduce, agree)
            self._proved = True
        else:
            self._install()

    @property
    def how(self) -> str | None:
        """How layers are read, for people; None before the first batch."""
        if self._auxiliary is not None:
            return "vLLM's auxiliary hidden states"
        return " or ".join(dict.fromkeys(reading.name for reading in self.readings.values())) or None

    def found(self) -> dict[str, Any]:
        """The classes of the model, of the base model that runs its layers, and of these layers."""
        layers = dict.fromkeys(type(layer).__name__ for layer in self.decoder.layers)
        return {"model": self.model, "base": type(self.decoder.base).__name__, "kinds": list(layers)}

    def _install(self) -> None:
        layers, last = self.decoder.layers, len(self.decoder.layers) - 1
        for index in sorted({*self.layer_ids, last}):
            after = self.decoder.after.values() if index == last else [layers[index + 1]]
            entries = [module.register_forward_pre_hook(self._entry_hook(index), with_kwargs=True) for module in after]
            self._hooks[index] = [layers[index].register_forward_hook(self._layer_hook(index)), *entries]
        self._final = FirstCall(self.decoder.after.values(), after=layers[last])
        self._next = {index: FirstCall(layers[index + 1].children()) for index in set(self.layer_ids) - {last}}
        self._finite = FiniteWatch(self.decoder)

    def _watch(self, step: Step | None) -> None:
        """Record this step from now on; None: nothing."""
        self._step = step
        if not self._proved:
            for watch in (self._final, *self._next.values()):
                watch.close() if step is None else watch.reset()
            self._finite.watch(None if step is None else step.total)

    def _layer_hook(self, index: int) -> Any:
        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            if self._step is None:
                return
            if index in self._seen or index in self._outputs or index in self._left:
                raise UnprovenCaptureError(self.model, f"its forward calls layer {index} more than once", REMEDY)
            if not self._proved:  # the first batch: kept whole until the norm after it has told how to read it
                self._outputs[index] = kept(output)
                self._left[index] = output
                return
            if shape_of(output) != self._shapes[index]:
                found = f"returns {shape_of(output)}, and returned {self._shapes[index]} when proved"
                raise UnprovenCaptureError(self.model, f"{self._layer(index)} {found}", REMEDY)
            if index in self._links:
                self._left[index] = output  # read where it enters the next layer
            else:
                self._put(index, self._step, self.readings[index](output))

        return hook

    def _entry_hook(self, index: int) -> Any:
        """Of what comes after a layer: the next one, or what the final norm may be.

        The last layer's stream is what it returns: what a model makes of that for its norm is no stream of a layer's.
        """
        last = index == len(self.decoder.layers) - 1

        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if index not in self._left or self._step is None:
                return
            output = self._left.pop(index)
            if not self._proved:
                self._links[index] = links_of(output, args, kwargs, replaced=not last)
                entered = passed_on(output, self._links[index], args, kwargs)
                if not last and not same(entered, self._outputs[index]):
                    self._entered[index] = kept(entered)
                return
            entered = passed_on(output, self._links[index], args, kwargs, replaced=not last)
            if entered is None:
                found = f"what comes after {self._layer(index)} no longer gets what it got when proved"
                raise UnprovenCaptureError(self.model, found, REMEDY)
            self._put(index, self._step, self.readings[index](entered))

        return hook

    def _put(self, index: int, step: Step, stream: torch.Tensor) -> None:
        """Send what a layer's stream holds of the prompts on its way."""
        self._seen.add(index)
        if self.files:
            self.store.put(index, step, self._pieces, flat(stream))

    def _layer(self, index: int) -> str:
        return f"layer {index} ({type(self.decoder.layers[index]).__name__})"

    def _prove(self, returned: Any, total: int) -> dict[int, torch.Tensor]:
        """Decide how each layer is to be read, once, on the first real batch; its streams by layer id.

        Rows past `total` are padding.
        """
        last = len(self.decoder.layers) - 1
        missing = sorted({*self.layer_ids, last} - set(self._outputs))
        if missing:
            raise UnprovenCaptureError(self.model, f"its forward did not call layers {missing}", REMEDY)
        refuse_unless_finite(self.model, self.decoder.base, returned, total, self._finite)
        final = self._final_norm(first_of(returned), type(self.decoder.layers[last]).__name__, total)
        sums: dict[str, Any] = {"total": total, "reduce": self._reduce, "agree": self._agree}
        proved = {last: self._decide(last, final, **sums)}
        for index in [index for index in self._outputs if index != last]:
            seen = self._next[index].normed
            if seen is not None and is_norm(seen.norm) and seen.normed.shape == final[0].normed.shape:
                where = f"the next layer's {type(seen.norm).__name__}"
                proved[index] = self._decide(index, [seen], where=where, **sums)
            elif self._kind(index) != self._kind(last):
                raise UnprovenCaptureError(
                    self.model,
                    f"{self._layer(index)} returns {self._kind(index)[1]}, the last layer {self._kind(last)[1]}: "
                    "what holds for one is not proved for the other",
                    REMEDY,
                )
            else:
                proved[index] = proved[last]
                if index in self._entered:  # no norm has shown that it came in the place of what the layer returned
                    del self._links[index]
        return self._adopt(proved)

    def _decide(self, index: int, normed: Sequence[Normed], **how: Any) -> Reading:
        """The reading of a layer, of what entered in place of what it returned if that can be read at all."""
        if index in self._entered:
            try:
                reading = decide(self.model, self._layer(index), self._entered[index], normed, **how)
            except UnprovenCaptureError:  # it was something else that entered: what was returned is read, or refused
                del self._links[index]
            else:
                self._outputs[index] = self._entered[index]
                return reading
        return decide(self.model, self._layer(index), self._outputs[index], normed, **how)

    def _adopt(self, proved: Mapping[int, Reading]) -> dict[int, torch.Tensor]:
        self.readings = {index: proved[index] for index in sorted(set(self.layer_ids))}
        self._shapes = {index: shape_of(output) for index, output in self._outputs.items()}
        self._links = {i: links for i, links in self._links.items() if links.keys() >= {*proved[i].items}}
        self._proved = True
        for watch in (self._final, *self._next.values()):
            watch.remove()
        self._finite.remove()
        for index, (leaving, *entering) in self._hooks.items():
            needed = index in self.readings and (self.files or self.readings[index].reduce)
            if not needed:
                leaving.remove()
            for hook in [] if needed and index in self._links else entering:
                hook.remove()
        streams = {index: reading(self._outputs[index]) for index, reading in self.readings.items()}
        self._outputs, self._entered = {}, {}
        return streams

    def _kind(self, index: int) -> tuple[type, str]:
        return type(self.decoder.layers[index]), shape_of(self._outputs[index])

    def _final_norm(self, returned: Any, layer: str, total: int) -> list[Normed]:
        """The final norm, with what the model's forward returned as its result.

        It is the module that was called first after the last layer. Where none was called, the model's head calls it
        (Step 3.5); or a kernel does its work together with a sum over the ranks, and it is one of the base's norms.
        """
        if not isinstance(returned, torch.Tensor):
            raise UnprovenCaptureError(self.model, f"its forward returns {type(returned).__name__}", REMEDY)
        seen = self._final.normed
        if seen is not None:
            if not distance(flat(seen.normed)[:total], flat(returned)[:total]) <= tolerance(returned.dtype):
                raise UnprovenCaptureError(self.model, "its forward returns something else than its final norm", REMEDY)
            return [seen]
        in_head = norm_of_head(self._head, self.decoder.after.values(), returned, total)
        if in_head is not None:
            return [in_head]
        norms = [Normed(module, returned) for module in self.decoder.after.values() if is_norm(module)]
        if not norms or self._reduce is None:
            found = f"no final norm was seen after the last {layer}, nor in its head"
            raise UnprovenCaptureError(self.model, found, REMEDY)
        return norms

    def _around_base(self, *args: Any, **kwargs: Any) -> Any:
        step = self.rows.step()
        if step is None or not self.store.expects(step):
            if self._auxiliary is None:
                return self._base_forward(*args, **kwargs)
            return self._auxiliary.without(self._base_forward(*args, **kwargs))
        self._outputs, self._entered, self._left, self._seen = {}, {}, {}, set()
        self._pieces = self._pieces_of(step) if self.files else []
        if self._proved:
            self._refuse_images(step)
        else:
            self._links = {}
        self._watch(step)
        try:
            returned = self._base_forward(*args, **kwargs)
        finally:
            self._watch(None)
        streams: Mapping[int, torch.Tensor] = {}
        if self._auxiliary is not None:
            returned, streams = self._auxiliary.split(returned, step.total)
        elif not self._proved:
            streams = self._prove(returned, step.total)
            self._refuse_images(step)
        for index, stream in streams.items():
            self._put(index, step, stream)
        self._end_step()
        return returned

    def _refuse_images(self, step: Step) -> None:
        """Raise UnprovenCaptureError for a step with images where something may be added that is not seen."""
        unseen = [index for index in self.readings if index not in self._links]
        if unseen and self._auxiliary is None and self.store.has_images(step):
            found = f"what layers {unseen} return is not what comes after them gets, so what an image adds is not seen"
            raise UnprovenCaptureError(self.model, found, NO_IMAGES)

    def _end_step(self) -> None:
        missing = [index for index in self.store.layer_ids if index not in self._seen]
        if self.files and missing:
            found = f"its forward did not call layers {missing}"
            if self._left:
                found = f"its forward called nothing after layers {sorted(self._left)}, where they were to be read"
            raise UnprovenCaptureError(self.model, found, REMEDY)
        self._pieces, self._left = [], {}
        self.store.end_step()

    def _around_forward(self, *args: Any, **kwargs: Any) -> Any:
        self._arguments = self._parameters.bind(*args, **kwargs).arguments
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._arguments = {}

    def _pieces_of(self, step: Step) -> list[Piece]:
        """Where the step's rows belong, from what the forward is given: known before the first layer runs."""
        positions = self._arguments.get("positions")
        if not isinstance(positions, torch.Tensor):
            raise UnprovenCaptureError(self.model, "its forward gets no `positions`, so rows cannot be placed", REMEDY)
        tokens = self._arguments.get("input_ids")
        if not isinstance(tokens, torch.Tensor):
            tokens = self.rows.tokens()
            self.checked_tokens = self.checked_tokens and tokens is not None
        return self.store.pieces(
            step,
            positions[..., : step.total].to("cpu", torch.long),
            None if tokens is None else tokens[: step.total].to("cpu", torch.long),
        )
