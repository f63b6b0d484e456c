"""Toy decoders with the habits of vLLM's layers, a reference for their residual streams, and toy model runners.

Every layer adds `tanh(stream @ weight)` to the stream, row by row, so that the reference is a plain loop; what differs
is how the layers return the stream, and what they write into.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from eagle3compat.capture.recorder import Recorder

HIDDEN, VOCABULARY, LAYERS = 8, 50, 4


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN), requires_grad=False)

    def update(self, stream: torch.Tensor) -> torch.Tensor:
        return torch.tanh(stream @ self.weight)


class Pair(Layer):
    """`(hidden, residual)`, still to be added up; adds into the residual that the layer before returned."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden.clone() if residual is None else residual.add_(hidden)
        return self.update(residual), residual


class Single(Layer):
    """The stream itself, each time the same tensor, written over by the next layer."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: None) -> Any:
        return hidden.add_(self.update(hidden))


class WithNone(Layer):
    """`(stream, None)`."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: None) -> Any:
        return hidden + self.update(hidden), None


class Stale(Layer):
    """`(stream, residual)` where the residual is contained in the stream already, and the next layer ignores it."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: Any) -> Any:
        return hidden + self.update(hidden), hidden


class Keyed(Layer):
    """A dict."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: Any) -> Any:
        return {"hidden": hidden + self.update(hidden)}


class Norm(torch.nn.Module):
    """Adds the residual that it is given, and norms."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return torch.nn.functional.layer_norm(x, (HIDDEN,))
        total = x + residual
        return torch.nn.functional.layer_norm(total, (HIDDEN,)), total


class Deaf(Norm):
    """Is given a residual, and ignores it (Cohere)."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        normed = super().forward(x)
        return normed if residual is None else (normed, residual)


class Normed(Layer):
    """Norms the stream before it reads it, as nearly all models do."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()

    def update(self, stream: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.layer_norm(stream, (HIDDEN,)) @ self.weight)

    def added(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What this layer adds to the stream, and the stream."""
        if residual is None:
            return torch.tanh(self.input_layernorm(hidden) @ self.weight), hidden
        normed, stream = self.input_layernorm(hidden, residual)
        return torch.tanh(normed @ self.weight), stream


class NormedPair(Normed):
    """`(hidden, residual)`, still to be added up."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return self.added(hidden, residual)


class Settled(Normed):
    """`(stream, None)`, whatever it was given."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        update, stream = self.added(hidden, residual)
        return stream + update, None


class Bare(Settled):
    """The stream itself, whatever it was given."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        return super().forward(positions, hidden, residual)[0]


class Triple(Normed):
    """`(hidden, something else, residual)`, and the next layer takes the first and the last (Kimi-Linear)."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        update, stream = self.added(hidden, residual)
        return update, torch.ones_like(update), stream


class Share(Normed):
    """`(one rank's share of hidden, residual)`: the sum over the ranks is left to the layer after it."""

    def forward(self, positions: Any, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        update, stream = self.added(hidden if residual is None else summed(hidden), residual)
        return update / RANKS, stream


RANKS = 2


def summed(share: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of which each has the same share."""
    return share * RANKS


class Base(torch.nn.Module):
    """Embeds, runs its layers, and norms; `kinds` are the classes of its layers in order."""

    def __init__(self, *kinds: type[Layer]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
        self.layers = torch.nn.ModuleList(kind() for kind in kinds)
        self.norm = Norm()

    def forward(self, input_ids: Any, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> Any:
        flat = positions[0] if positions.dim() > 1 else positions
        embedded = inputs_embeds if inputs_embeds is not None else self.embed(input_ids)
        hidden, residual = embedded + 0.1 * flat[:, None], None
        for layer in self.layers:
            output = layer(positions, hidden, residual)
            hidden, *_, residual = output if isinstance(output, tuple) else (output, None)
            if isinstance(hidden, dict):
                hidden = hidden["hidden"]
        return self.finish(hidden, residual)

    def finish(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if residual is None or isinstance(self.layers[-1], Stale):
            return self.norm(hidden)
        return self.norm(summed(hidden) if isinstance(self.layers[-1], Share) else hidden, residual)[0]


class Model(torch.nn.Module):
    """A causal language model around a base."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.model = base

    def forward(self, input_ids: Any, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None) -> Any:
        return self.model(input_ids, positions, inputs_embeds)


def reference(
    base: Base, prompt: Sequence[int], positions: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """The stream after each layer for a whole prompt: `[len(prompt), HIDDEN]` each; positions are places by default."""
    places = torch.arange(len(prompt)) if positions is None else torch.tensor(positions)
    stream = base.embed.weight[torch.tensor(prompt)] + 0.1 * places[:, None]
    streams = []
    for layer in base.layers:
        stream = stream + layer.update(stream)
        streams.append(stream)
    return streams


Chunk = tuple[str, int, int]
"""A request, the position of the first row, and the number of rows."""


class Runner:
    """Runs steps as a model runner of vLLM's first generation does: in the order of its `input_batch`."""

    def __init__(self, model: torch.nn.Module, prompts: Mapping[str, Sequence[int]]) -> None:
        self.model, self.prompts = model, prompts
        self.padding = 0
        self.dirt = 0.0
        self.sampled = 3
        self.as_embeddings = False
        self.rotary = False
        self.images: dict[str, tuple[int, int]] = {}
        self.ahead: int | None = 0
        self.says_tokens = False
        self.wrong_token_at: int | None = None
        self.input_batch: Any = SimpleNamespace(req_ids=[])

    def execute_model(self, scheduler_output: Any) -> Any:
        self.input_batch.req_ids = [request for request, _, _ in scheduler_output.rows]
        self.input_batch.num_computed_tokens_cpu = self.computed(scheduler_output.rows)
        return self.forward(scheduler_output.rows)

    def computed(self, rows: Iterable[Chunk]) -> list[int] | None:
        """What it says to have computed of each request: `ahead` of the truth, or nothing."""
        return None if self.ahead is None else [first + self.ahead for _, first, _ in rows]

    def rotated(self, request: str, place: int) -> int:
        """The position in a multimodal rotary embedding: all of an image's are alike, and later ones follow it."""
        start, stop = self.images.get(request, (place, place))
        return min(place, start) if place < stop else start + 1 + place - stop if place > start else place

    def forward(self, rows: Iterable[Chunk]) -> Any:
        tokens, positions = [], []
        for request, first, count in rows:
            for position in range(first, first + count):
                prompt = self.prompts[request]
                tokens.append(prompt[position] if position < len(prompt) else self.sampled)
                positions.append(self.rotated(request, position))
        tokens += [0] * self.padding
        positions += [0] * self.padding
        if self.wrong_token_at is not None:
            tokens[self.wrong_token_at] += 1
        ids, places = torch.tensor(tokens), torch.tensor(positions)
        if self.rotary:
            places = places.expand(3, -1)
        if not self.as_embeddings:
            return self.model(ids, places)
        if self.says_tokens:
            self.say(ids)
        embedded = self.model.model.embed(ids)
        if self.padding:
            embedded[-self.padding :] += self.dirt
        return self.model(None, positions=places, inputs_embeds=embedded)


    def say(self, ids: torch.Tensor) -> None:
        """Keep the tokens where this generation has them: in a buffer with a part on the device."""
        self.input_ids: Any = SimpleNamespace(gpu=ids)


class SecondRunner(Runner):
    """The second generation has no `input_batch`; `prepare_inputs` returns the order."""

    def __init__(self, model: torch.nn.Module, prompts: Mapping[str, Sequence[int]]) -> None:
        super().__init__(model, prompts)
        del self.input_batch

    def prepare_inputs(self, scheduler_output: Any) -> Any:
        requests = [request for request, _, _ in scheduler_output.rows]
        self.batch = SimpleNamespace(req_ids=requests, num_computed_tokens_np=self.computed(scheduler_output.rows))
        return self.batch

    def say(self, ids: torch.Tensor) -> None:
        self.batch.input_ids = ids

    def execute_model(self, scheduler_output: Any) -> Any:
        self.prepare_inputs(scheduler_output)
        return self.forward(scheduler_output.rows)


def step(rows: Sequence[Chunk], scheduled: Sequence[str] | None = None) -> Any:
    """A SchedulerOutput: `rows` is the order of the runner, `scheduled` that of the scheduler's dict."""
    counts = {request: count for request, _, count in rows}
    return SimpleNamespace(num_scheduled_tokens={name: counts[name] for name in scheduled or sorted(counts)}, rows=rows)


def chunks(prompts: Mapping[str, Sequence[int]], size: int) -> list[list[Chunk]]:
    """Steps that take every prompt in pieces of `size`, all requests side by side."""
    pieces = [[(n, at, min(size, len(p) - at)) for at in range(0, len(p), size)] for n, p in prompts.items()]
    return [[piece for piece in row if piece is not None] for row in itertools.zip_longest(*pieces)]


PROMPTS = {"req_0_2": [5, 9, 11, 30, 2, 7, 8], "req_0_10": [40, 41, 42], "req_0_0": [1, 1, 2, 3, 5]}
ASKED = [2, 0, 3]


def recording(model: Model, kind: type[Runner] = Runner, asked: Sequence[int] = ASKED) -> tuple[Runner, Recorder]:
    """A runner over `model` and a recorder that expects PROMPTS."""
    runner = kind(model, PROMPTS)
    recorder = Recorder(runner, LAYERS, asked)
    recorder.store.begin(PROMPTS)
    return runner, recorder


def model_of(*kinds: Any) -> Model:
    return Model(Base(*(kinds if len(kinds) == LAYERS else kinds * LAYERS)))


def whole(prompts: dict[str, list[int]] = PROMPTS) -> list[tuple[str, int, int]]:
    return [(name, 0, len(prompt)) for name, prompt in prompts.items()]
