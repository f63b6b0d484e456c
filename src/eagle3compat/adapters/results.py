"""Stock returns what it got, in the order of request ids as text; nothing is checked."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import numbers
import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..adapter import GENERATOR, Adapter
from ..contract import Exists
from ..engine.checkpoint import check_folder
from ..engine.media import check_media
from ..errors import GeneratorDeadError, InputError, ModelNotFoundError, ResultError
from ..faults import tell_driver
from ..ledger import Ledger
from ..patcher import PATCHER

if TYPE_CHECKING:
    from ..engine.landed import Landed

CLASS = f"{GENERATOR}:VllmHiddenStatesGenerator"
REMEDY = "Nothing of this call was returned. Run `eagle3compat doctor` and report its output."


class Results(Adapter):
    """Refuses input that cannot be extracted before anything is loaded or sent, and checks every result.

    Returned is, in input order, one tensor a layer id as asked (order and duplicates included), each
    `[len(input_ids), hidden_size]`, finite and not all zero.
    """

    id = "results"
    seam = "results"
    breaks = (
        "more than ten samples in a call come back in the order 0, 1, 10, 11, 2 (0.4), so loss masks are paired with "
        "other samples; an empty prompt leaves the generator unusable; wrong shapes pass for success"
    )
    always = "stock returns what it got without a look at count, order, shape or values"
    relies_on = (Exists(f"{CLASS}.generate"), Exists(f"{CLASS}.__init__"))
    replaces = ("sorted",)
    requires = ("execution",)
    upstream = "https://github.com/vllm-project/speculators/pull/365"
    remove_when = "never: released stock code does not check"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        generator = module.VllmHiddenStatesGenerator
        ledger.rebind(self.id, module, "sorted", in_input_order)
        ledger.rebind(self.id, generator, "__init__", checked_constructor(generator.__init__))
        ledger.rebind(self.id, generator, "generate", checked_generate(generator.generate))


def in_input_order(request_ids: Iterable[str]) -> list[str]:
    """Request ids by the numbers in them: stock sorts `req_0_10` before `req_0_2`."""
    return sorted(request_ids, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


def checked_constructor(constructor: Any) -> Any:
    @functools.wraps(constructor)
    def __init__(self: Any, model_path: str, layer_ids: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        refuse_in_a_spawned_worker()
        check_model_path(model_path)
        check_layer_ids(layer_ids)
        check_sizes(inspect.signature(constructor).bind(self, model_path, layer_ids, *args, **kwargs).arguments)
        model_path = os.fspath(model_path)
        if os.path.isdir(model_path):
            check_folder(Path(model_path))
        if layer_ids is not None:
            layer_ids = [operator.index(layer) for layer in layer_ids]  # numpy's and torch's integers are none to vLLM
        try:
            constructor(self, model_path, layer_ids, *args, **kwargs)
        except ValueError as error:
            if "out of bounds" not in str(error):
                raise
            raise InputError(
                f"{error}. Layer ids count decoder layers from 0; those that vLLM serves a draft with are one higher."
            ) from error
        except OSError as error:
            if os.path.isdir(model_path):
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            folder = os.path.abspath(model_path)
            raise ModelNotFoundError(
                f"there is no folder {folder}, and {model_path} could not be had from the hub: {said}"
            ) from error
        self.__class__ = while_applied(type(self))  # type: ignore[arg-type]

    return __init__


def check_sizes(arguments: Mapping[str, Any]) -> None:
    """Raises InputError for a length or a number of ranks with which nothing can be extracted."""
    for name, least in (("max_model_len", 2), ("tensor_parallel_size", 1)):
        given = arguments.get(name, least)
        if not isinstance(given, numbers.Integral) or isinstance(given, bool) or given < least:
            raise InputError(f"{name} is {given!r}. It must be an integer of {least} or more.")


@functools.cache
def while_applied(kind: Any) -> Any:
    """The same class, whose `generate` outlives `revert()`: stock's own would then meet our executor unprepared."""

    class Guarded(kind):  # type: ignore[misc]
        def generate(self, token_ids: Any) -> Any:
            if not PATCHER.active:
                raise GeneratorDeadError("eagle3compat.revert() was called after it was made.")
            return super().generate(token_ids)

    Guarded.__name__, Guarded.__qualname__, Guarded.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Guarded


def refuse_in_a_spawned_worker() -> None:
    """Raise where a spawned worker imports the user's script again and that makes a generator there.

    multiprocessing says so in `_inheriting`, by which it too refuses to start processes then.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        error = InputError(
            "a spawned worker imports this script again, and the script makes a generator there. Put the script's work "
            'under `if __name__ == "__main__":`.'
        )
        tell_driver(error)
        raise error


def check_model_path(model_path: Any) -> None:
    """Refuse a path that is not there; a hub id (`owner/name`) is left to transformers."""
    if not isinstance(model_path, (str, os.PathLike)) or not os.fspath(model_path):
        raise InputError(f"model_path is {model_path!r}. Pass the folder of a model, or its id on the hub.")
    path = os.fspath(model_path)
    local = os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1
    if local and not os.path.isdir(path):
        raise ModelNotFoundError(f"there is no model at {path}: no such folder. Check the path.")
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise ModelNotFoundError(f"{path} holds no config.json, so it is not a model folder. Check the path.")


def check_layer_ids(layer_ids: Any) -> None:
    """Refuse what stock would take and fail on later; bounds are checked by stock against the model's config."""
    if layer_ids is None:
        return
    if not hasattr(layer_ids, "__len__") or isinstance(layer_ids, (Set, Mapping)) or _is_scalar(layer_ids):
        raise InputError(f"layer_ids is {layer_ids!r}, not a list. Pass a list of integers, or None.")
    if len(layer_ids) == 0:
        raise InputError("layer_ids is empty, so nothing would be captured. Name at least one layer, or pass None.")
    for layer in layer_ids:
        if isinstance(layer, bool) or not _is_integer(layer):
            raise InputError(f"layer id {layer!r} is not an integer. Layer ids count decoder layers from 0.")


def _is_scalar(value: Any) -> bool:
    return getattr(value, "ndim", 1) == 0


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


NO_LISTS = (Set, Mapping, bytes, bytearray, memoryview, str)
"""What can be gone through and is no list of tokens: a set has lost their order, bytes are text before a tokenizer."""
LISTS = "Pass a list of lists of token ids, or a tensor [prompts, tokens]."


def token_lists(token_ids: Any) -> list[list[int]]:
    """The prompts of a call as lists, whatever stock accepts: lists, a list of tensors, or a tensor `[n, length]`."""
    token_ids = _plain(token_ids)
    if isinstance(token_ids, NO_LISTS):
        raise InputError(f"token_ids is a {type(token_ids).__name__}. {LISTS}")
    try:
        prompts = [_listed(index, ids) for index, ids in enumerate(token_ids)]
    except TypeError:
        raise InputError(f"token_ids is not a list of prompts. {LISTS}") from None
    for index, prompt in enumerate(prompts):
        try:
            prompts[index] = [_token(token) for token in prompt]
        except TypeError:
            wrong = next(token for token in prompt if isinstance(token, bool) or not _is_integer(token))
            raise InputError(f"prompt {index} holds {wrong!r}, which is not a token id.", index) from None
    return prompts


def _listed(index: int, ids: Any) -> list[Any]:
    ids = _plain(ids)
    if isinstance(ids, NO_LISTS):
        raise InputError(f"prompt {index} is a {type(ids).__name__}. Pass a list of token ids.", index)
    return list(ids)


def _plain(values: Any) -> Any:
    """A tensor or an array as lists; what holds bytes or text stays what it is."""
    return values.tolist() if hasattr(values, "tolist") and not isinstance(values, NO_LISTS) else values


def _token(value: Any) -> int:
    if isinstance(value, bool):  # an attention mask, say
        raise TypeError("a truth value is no token id")
    return operator.index(value)


def check_prompts(prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    if not prompts:
        raise InputError("token_ids cannot be empty: pass at least one prompt.")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise InputError(f"prompt {index} is empty. Drop it; nothing was extracted.", index)
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= vocabulary:
            wrong = low if low < 0 else high
            raise InputError(
                f"prompt {index} holds token id {wrong}, outside the model's vocabulary [0, {vocabulary - 1}]. "
                "It was made with another tokenizer.", index,
            )


def checked_generate(generate: Any) -> Any:
    @functools.wraps(generate)
    def checked(self: Any, token_ids: Any) -> list[dict[str, Any]]:
        if not hasattr(self.executor, "forget"):
            raise GeneratorDeadError("it was made before eagle3compat.apply().")
        with self.executor.lock:  # calls from several threads take turns
            return one_at_a_time(self, token_ids)

    def one_at_a_time(self: Any, token_ids: Any) -> list[dict[str, Any]]:
        if list(self.layer_ids) != self.executor.layer_ids:
            raise InputError(
                f"layer_ids was set to {list(self.layer_ids)} after the generator was made for "
                f"{self.executor.layer_ids}. Make a new generator for other layers."
            )
        prompts = token_lists(token_ids)
        model_config = self.vllm_config.model_config
        limit = model_config.max_model_len - 1
        check_prompts(prompts, model_config.get_vocab_size())
        check_media([prompt[:limit] for prompt in prompts], model_config)
        cut = [index for index, prompt in enumerate(prompts) if len(prompt) > limit]
        if cut and not getattr(self, "_eagle3compat_said_cut", False):
            import logging

            self._eagle3compat_said_cut = True
            logging.getLogger("eagle3compat").warning(
                "eagle3compat: %d of %d prompts are longer than %d tokens and are cut to that by stock (the first: "
                "prompt %d, %d tokens): max_model_len less one. This is said once.",
                len(cut), len(prompts), limit, cut[0], len(prompts[cut[0]]),
            )
        self.executor.forget()
        try:
            results: list[dict[str, Any]] = generate(self, prompts)
            wanted = [prompt[:limit] for prompt in prompts]
            check_results(results, wanted, self.layer_ids, model_config.get_hidden_size(), self.executor.landed)
        finally:
            self.executor.forget()
        return results

    return checked


def check_results(
    results: Sequence[dict[str, Any]],
    prompts: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    hidden_size: int,
    landed: Mapping[int, Landed],
) -> None:
    """Raise ResultError unless every prompt has, in order, one sound tensor a layer id.

    `landed` holds, by `id`, the tensors whose values have been looked at already, and what was found.
    """
    from ..engine.landing import fault_of

    if len(results) != len(prompts):
        raise ResultError(None, f"{len(results)} results came back for {len(prompts)} prompts", REMEDY)
    for index, (result, prompt) in enumerate(zip(results, prompts, strict=True)):
        if result["input_ids"].tolist() != list(prompt):
            raise ResultError(index, "its input_ids are those of another prompt", REMEDY)
        states = result["hidden_states"]
        if len(states) != len(layer_ids):
            raise ResultError(index, f"it has {len(states)} tensors for {len(layer_ids)} layer ids", REMEDY)
        for layer, state in zip(layer_ids, states, strict=True):
            wanted = (len(prompt), hidden_size)
            if tuple(state.shape) != wanted:
                raise ResultError(index, f"layer {layer} is {list(state.shape)}, not {list(wanted)}", REMEDY)
            known = landed.get(id(state))
            fault = known.fault if known is not None and known.tensor is state else fault_of(state)
            if fault:
                advice = "The model overflows on this input: try another dtype. " if "finite" in fault else ""
                raise ResultError(index, f"layer {layer} {fault}", advice + REMEDY)
