"""What is refused before anything is loaded or sent, and the order in which requests are read."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from eagle3compat.adapters.results import (
    check_layer_ids,
    check_model_path,
    check_prompts,
    in_input_order,
    token_lists,
)
from eagle3compat.errors import InputError, ModelNotFoundError


class Array:
    """Has `tolist`, as tensors and numpy arrays do."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def tolist(self) -> Any:
        return self.content


def test_requests_are_ordered_by_their_numbers() -> None:
    names = [f"req_{call}_{sample}" for call in (0, 9, 10) for sample in range(120)]
    assert sorted(names) != names
    for seed in range(5):
        shuffled = random.Random(seed).sample(names, len(names))
        assert in_input_order(shuffled) == names


@pytest.mark.parametrize("given", [{"req_0_10": 1, "req_0_2": 2}.keys(), iter(["req_0_10", "req_0_2"])])
def test_any_iterable_of_request_ids_is_ordered(given: Any) -> None:
    assert in_input_order(given) == ["req_0_2", "req_0_10"]


@pytest.mark.parametrize(
    ("given", "lists"),
    [
        ([[1, 2], [3]], [[1, 2], [3]]),
        (([1], (2, 3)), [[1], [2, 3]]),
        ([Array([1, 2]), [3]], [[1, 2], [3]]),
        (Array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_prompts_become_lists(given: Any, lists: list[list[int]]) -> None:
    assert token_lists(given) == lists


def test_the_caller_s_lists_are_not_the_ones_that_are_used() -> None:
    given = [[1, 2]]
    token_lists(given)[0].append(3)
    assert given == [[1, 2]]


@pytest.mark.parametrize("given", [[1, 2, 3], Array([1, 2, 3]), None, 5, [None]])
def test_what_is_no_list_of_prompts_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="prompt"):
        token_lists(given)


@pytest.mark.parametrize("kind", [set, frozenset, bytes, bytearray, memoryview, dict.fromkeys])
def test_what_has_no_order_or_is_no_list_of_tokens_is_refused(kind: Any) -> None:
    given = kind(b"ab")
    with pytest.raises(InputError, match=f"token_ids is a {type(given).__name__}"):
        token_lists(given)
    with pytest.raises(InputError, match=f"prompt 1 is a {type(given).__name__}. Pass a list of token ids") as caught:
        token_lists([[1], given])
    assert caught.value.index == 1


def test_an_array_of_text_is_no_list_of_tokens() -> None:
    with pytest.raises(InputError, match="prompt 0 is a bytes\\. Pass a list of token ids"):
        token_lists([Array(b"abc")])


@pytest.mark.parametrize("token", [1.0, 1.5, "1", None])
def test_what_is_no_token_id_is_refused_with_the_prompt_s_index(token: Any) -> None:
    with pytest.raises(InputError, match="prompt 1") as caught:
        check_prompts(token_lists([[1], [2, token]]), 10)
    assert caught.value.index == 1


def test_sound_prompts_pass() -> None:
    check_prompts([[0, 9], [5]], 10)


@pytest.mark.parametrize(
    ("prompts", "index", "says"),
    [
        ([], None, "token_ids cannot be empty"),
        ([[1], []], 1, "prompt 1 is empty"),
        ([[1], [2, 10]], 1, "prompt 1 holds token id 10, outside the model's vocabulary [0, 9]"),
        ([[-1, 12]], 0, "prompt 0 holds token id -1"),
    ],
)
def test_bad_prompts_are_refused(prompts: list[list[int]], index: int | None, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)) as caught:
        check_prompts(prompts, 10)
    assert caught.value.index == index
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("layers", [None, [0], [5, 1, 5], (2, 3), range(3)])
def test_sound_layer_ids_pass(layers: Any) -> None:
    check_layer_ids(layers)


class Integer:
    """An integer of another library, such as numpy's."""

    def __index__(self) -> int:
        return 3


def test_an_integer_of_another_library_is_a_layer_id() -> None:
    check_layer_ids([Integer()])


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([], "layer_ids is empty"),
        (["2"], "layer id '2' is not an integer"),
        ([1, 2.0], "layer id 2.0 is not an integer"),
        ([True], "layer id True is not an integer"),
        ([None], "layer id None is not an integer"),
        ("12", "layer id '1' is not an integer"),
        (5, "layer_ids"),
        (iter([1]), "layer_ids"),
    ],
)
def test_bad_layer_ids_are_refused(layers: Any, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        check_layer_ids(layers)


@pytest.mark.parametrize("path", ["owner/name", "name", "meta-llama/Llama-3.1-8B"])
def test_a_hub_id_is_left_to_transformers(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_model_path(path)


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "../model", "~/no-such-model", "a/b/c"])
def test_a_local_path_that_is_not_there_is_named(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=f"no model at {re.escape(path)}") as caught:
        check_model_path(path)
    assert isinstance(caught.value, FileNotFoundError)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    for path in (tmp_path, str(tmp_path)):
        with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
            check_model_path(path)


def test_a_folder_with_a_config_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "model", str(tmp_path / "model"), "model", "./model"):
        check_model_path(path)


@pytest.mark.parametrize("path", [None, 5, ""])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(InputError):
        check_model_path(path)
