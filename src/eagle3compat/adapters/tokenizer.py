"""Models with code of their own (Kimi-K2.5) fail at the tokenizer, which stock loads without `trust_remote_code`."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from ..adapter import Adapter
from ..contract import Exists
from ..errors import InputError
from ..ledger import Ledger


class Tokenizer(Adapter):
    """Loads the tokenizer as stock already loads the model and its config: with `trust_remote_code=True`.

    A folder that holds no tokenizer is refused: transformers 5 makes an empty one of it.
    """

    id = "tokenizer"
    seam = "configs"
    breaks = (
        "models whose tokenizer is code in their own repository raise `ValueError: ... requires you to execute the "
        "tokenizer file ... trust_remote_code=True`, or wait for an answer on the terminal"
    )
    always = "stock loads config and model with trust_remote_code=True, and the tokenizer without"
    replaces = ("AutoTokenizer",)
    relies_on = (Exists("transformers:AutoTokenizer"),)
    upstream = "https://github.com/vllm-project/speculators"
    remove_when = "the supported stock releases pass trust_remote_code to the tokenizer"

    def install(self, module: ModuleType, ledger: Ledger) -> None:
        ledger.rebind(self.id, module, "AutoTokenizer", TrustingTokenizer(module.AutoTokenizer))


ANY_FAMILY = ("tokenizer.json", "tekken.json")


class TrustingTokenizer:
    """`AutoTokenizer` with `trust_remote_code=True` unless the caller says otherwise; an empty tokenizer is refused."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("trust_remote_code", True)
        model = os.fspath(args[0]) if args and isinstance(args[0], (str, os.PathLike)) else ""
        try:
            tokenizer = self._original.from_pretrained(*args, **kwargs)
        except Exception as error:  # whatever transformers' many tokenizers raise, often without naming a file
            if not os.path.isdir(model):
                raise
            said = " ".join(str(error).split()) or "(no message)"
            raise InputError(
                f"the tokenizer in {model} does not load: {type(error).__name__}: {said[:300]}. Fetch its files "
                "and config.json, which is read with them, again, or install what it asks for."
            ) from error
        check_vocabulary(tokenizer, model)
        return tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def check_vocabulary(tokenizer: Any, model: str) -> None:
    """Refuse a tokenizer whose folder has none of its files: transformers 5 makes one without a vocabulary of that."""
    names = getattr(tokenizer, "vocab_files_names", None)
    if not names or not os.path.isdir(model):
        return
    wanted = [*dict.fromkeys([*names.values(), *ANY_FAMILY])]
    if not any(os.path.isfile(os.path.join(model, name)) for name in wanted):
        raise InputError(
            f"{model} holds no tokenizer: none of {', '.join(wanted)} is there. "
            "Fetch the model's tokenizer files as well."
        )
