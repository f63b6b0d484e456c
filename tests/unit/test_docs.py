"""README and docs say nothing that is not so: commands parse, links lead somewhere, every page is in the menu."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import eagle3compat
from eagle3compat.adapters import ADAPTERS
from eagle3compat.cli import _parser

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
PLACEHOLDERS = {"N": "2", "SECONDS": "60", "ID": "2", "ADAPTER": "capture"}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(page: Path) -> Iterator[str]:
    """Every `eagle3compat ...` of a page, in a block or in a line."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            match = re.match(r"\s*(?:\$ )?(?:[A-Z0-9_]+=\S+ )*(?:\S*/)?(eagle3compat (?!~=|[\d.]+$).*)", line)
            if match:
                yield match.group(1).split("  #")[0]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    for code in re.findall(r"`([^`\n]+)`", prose):
        match = re.match(r"(?:[A-Z0-9_]+=\S+ )*(eagle3compat [a-z-].*)", code)
        if match:
            yield match.group(1)


def words(command: str) -> list[str]:
    """A command with what its page leaves open filled in."""
    plain = command.replace("[", " ").replace("]", " ").replace("...", " ").replace("…", " ")
    return [PLACEHOLDERS.get(word, word) for word in shlex.split(plain)][1:]


def test_commands_are_found() -> None:
    found = [command for page in PAGES for command in commands(page)]
    for name in ("doctor", "plan", "explain", "run", "rehearse"):
        assert any(words(command)[0] == name for command in found), f"no page shows `eagle3compat {name}`"


@pages
def test_every_command_parses(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(page):
        given = words(command)
        if given[:1] == ["run"]:  # what follows is the program's own
            assert len(given) > 1, command
            continue
        if given[:1] == ["serve"] and len(given) > 1:  # what follows is vLLM's to parse
            continue
        assert parses(given), f"`{command}`: {capsys.readouterr().err}"


def parses(given: list[str]) -> bool:
    """Whether the real parser takes it; a name alone stands for the command in general."""
    try:
        _parser().parse_args([*given, "--help"] if len(given) == 1 else given)
    except SystemExit as end:
        return end.code == 0
    return True


def test_what_the_parser_does_not_take_is_found() -> None:
    assert parses(["doctor"])
    assert parses(["explain", "capture"])
    assert not parses(["nonsense"])
    assert not parses(["doctor", "--nonsense"])


def targets(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made by GitHub and by mkdocs."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in targets(target), f"{page.name} links to {link}"


def test_every_page_is_in_the_menu_once() -> None:
    menu = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert sorted(menu) == sorted(page.name for page in DOCS)


@pages
def test_python_in_the_docs_compiles(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        compile(block, page.name, "exec")


@pages
def test_adapters_that_are_named_exist(page: Path) -> None:
    ids = {adapter.id for adapter in ADAPTERS}
    for command in commands(page):
        given = words(command)
        if given[0] == "explain":
            assert given[1] in ids, command


def test_the_version_is_said_once_and_the_same_everywhere() -> None:
    stated = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert stated is not None
    assert stated.group(1) == eagle3compat.__version__
    assert f"## {eagle3compat.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_target_that_is_named_is_in_the_makefile() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for line in re.findall(r"\bmake ((?:[a-z-]+ ?)+?)(?:`|$|  )", page.read_text(encoding="utf-8"), re.M):
            for target in line.split():
                assert target in made, f"{page.name}: make {target}"
