"""How wide tables are where nobody watches."""

from __future__ import annotations

import pytest

from eagle3compat.terminal import console, grid

WORDS = "word " * 100
PATH = "/a/path/that/must/not/be/cut/in/two/" * 4


@pytest.mark.parametrize(
    ("said", "width"),
    [
        ("short", 5), ("x" * 140, 140), (WORDS, 100), (f"{WORDS} {'x' * 120}", 126), (f"{WORDS} {PATH}", 150),
    ],
)  # fmt: skip
def test_what_is_piped_is_as_wide_as_it_is_or_wrapped_early(
    said: str, width: int, capsys: pytest.CaptureFixture[str]
) -> None:
    console().print(grid([("name", said)]))
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= max(width, len("name  ") + width)
    assert " ".join(said.split()) == " ".join(out.removeprefix("name").split())


def test_a_sentence_is_wrapped_as_a_table_is(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(WORDS)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_table_of_several_columns_has_the_room_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("one", "two")
    table.add_row(WORDS, WORDS)
    console().print(table)
    assert max(map(len, capsys.readouterr().out.splitlines())) == 160
