"""Models with code of their own (Kimi-K2.5) fail at the tokenizer, which stock loads without `trust_remote_code`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..adapter import Adapter
from ..contract import Exists
from ..ledger import Ledger


class Tokenizer(Adapter):
    """Loads the tokenizer as stock already loads the model and its config: with `trust_remote_code=True`."""

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


class TrustingTokenizer:
    """`AutoTokenizer` with `trust_remote_code=True` unless the caller says otherwise."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def from_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("trust_remote_code", True)
        return self._original.from_pretrained(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
