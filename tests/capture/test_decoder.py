"""The decoder layers are found wherever wrappers put them, and are not mistaken for another tower's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import LAYERS, Base, Model, Pair

from eagle3compat.capture.decoder import find_decoder
from eagle3compat.errors import UnprovenCaptureError


class Tower(torch.nn.Module):
    """As many blocks as the language model has layers."""

    def __init__(self, blocks: int = LAYERS) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(blocks))


class Multimodal(torch.nn.Module):
    """A vision tower before a language model, which it names as vLLM's multimodal models do."""

    def __init__(self, language: torch.nn.Module) -> None:
        super().__init__()
        self.visual = Tower()
        self.language_model = language

    def get_language_model(self) -> torch.nn.Module:
        return self.language_model


class Wrapper(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner


def base() -> Base:
    return Base(*[Pair] * LAYERS)


@pytest.mark.parametrize("depth", range(4))
def test_within_any_number_of_wrappers(depth: int) -> None:
    inner = base()
    model: Any = inner
    for _ in range(depth):
        model = Wrapper(model)
    decoder = find_decoder(model, LAYERS)
    assert decoder.base is inner
    assert decoder.layers == list(inner.layers)
    assert set(decoder.after) == {"embed", "norm"}


@pytest.mark.parametrize("wrap", [lambda inner: inner, Model, lambda inner: Wrapper(Model(inner))])
def test_beside_a_vision_tower_of_as_many_layers(wrap: Any) -> None:
    inner = base()
    assert find_decoder(Multimodal(wrap(inner)), LAYERS).base is inner


def test_the_control_without_the_wrapper_s_word_the_tower_is_found() -> None:
    model = Multimodal(Model(base()))
    model.get_language_model = None  # type: ignore[assignment]
    assert find_decoder(model, LAYERS).base is model.visual


def test_lists_of_other_lengths_are_passed_over() -> None:
    model = Wrapper(base())
    model.experts = Tower(LAYERS + 1)
    model.empty = Tower(0)
    assert isinstance(find_decoder(model, LAYERS).base, Base)


def test_lists_within_the_layers_are_not_looked_at() -> None:
    inner = base()
    inner.layers[0].experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    with pytest.raises(UnprovenCaptureError, match=r"no list of 2 decoder layers .*lists found: layers \(4\)"):
        find_decoder(inner, 2)


@pytest.mark.parametrize(("layers", "norm"), [("h", "ln_f"), ("blocks", "norm_f"), ("layers", "final_layernorm")])
def test_whatever_the_list_and_the_norm_are_called(layers: str, norm: str) -> None:
    inner = base()
    inner._modules[layers], inner._modules[norm] = inner._modules.pop("layers"), inner._modules.pop("norm")
    found = find_decoder(Model(inner), LAYERS)
    assert found.layers == list(inner._modules[layers])
    assert norm in found.after


def test_of_two_lists_the_larger_is_meant() -> None:
    inner = base()
    small = torch.nn.ModuleList(torch.nn.LayerNorm(2) for _ in range(LAYERS))
    inner._modules = {"layer_norms": small, **inner._modules}
    found = find_decoder(Model(inner), LAYERS)
    assert found.layers == list(inner.layers)
    assert "layer_norms" not in found.after


@pytest.mark.parametrize("layers", [0, 3, 5])
def test_the_lists_that_were_found_are_named(layers: int) -> None:
    with pytest.raises(UnprovenCaptureError, match=r"lists found: model\.layers \(4\)"):
        find_decoder(Model(base()), layers)


def test_a_model_without_lists_is_refused() -> None:
    with pytest.raises(UnprovenCaptureError, match="lists found: none"):
        find_decoder(torch.nn.Linear(2, 2), LAYERS)
