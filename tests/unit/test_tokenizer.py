"""The tokenizer is loaded as the model is, and one without a vocabulary is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3compat.adapters.tokenizer import TrustingTokenizer
from eagle3compat.errors import InputError


class Loaded:
    """A tokenizer, with the options that it was loaded with."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012  as transformers has it

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


class Auto:
    """Stands in for AutoTokenizer, which with transformers 5 takes any folder."""

    @staticmethod
    def from_pretrained(model: str, **options: Any) -> Loaded:
        return Loaded(options)


def test_the_model_s_own_code_is_trusted_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").touch()
    tokenizer = TrustingTokenizer(Auto)
    assert tokenizer.from_pretrained(str(tmp_path)).options == {"trust_remote_code": True}
    assert tokenizer.from_pretrained(str(tmp_path), trust_remote_code=False).options == {"trust_remote_code": False}


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.json", "tekken.json"])
def test_any_of_its_files_will_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    TrustingTokenizer(Auto).from_pretrained(str(tmp_path))


def test_a_folder_without_any_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tokenizer: none of tiktoken\.model, tokenizer\.json"):
        TrustingTokenizer(Auto).from_pretrained(str(tmp_path))


def test_a_hub_id_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    TrustingTokenizer(Auto).from_pretrained("owner/name")
