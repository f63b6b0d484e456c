"""Finds the file of a release on a package index, as pip is told to look: PIP_INDEX_URL, pip's configuration, PyPI."""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path

from ..errors import InputError
from .remote import NetworkError, read_url, with_user
from .versions import newest, same

PYPI = "https://pypi.org/simple"
ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"
_WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(?:-(?P<build>\d[^-]*))?-[^-]+-[^-]+-(?P<platform>[^-]+)\.whl")
_SOURCE = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)\.(?:tar\.gz|zip)")


@dataclass(frozen=True)
class File:
    """A file that an index offers. Files of one release hold the same Python source, whatever they are built for."""

    url: str
    name: str
    version: str
    yanked: bool

    @property
    def preference(self) -> tuple[bool, int, bool, str]:
        """Wheels before source, which cannot be read in parts; then later builds, then this platform's."""
        wheel = _WHEEL.fullmatch(self.name)
        build = int(re.match(r"\d+", wheel["build"])[0]) if wheel and wheel["build"] else 0  # type: ignore[index]
        return wheel is not None, build, bool(wheel and "x86_64" in wheel["platform"]), self.name


def configured() -> list[str]:
    """The addresses of the indexes that pip would ask here, the first one first."""
    settings = _pip_settings()
    first = os.environ.get("PIP_INDEX_URL") or settings.get("index-url") or PYPI
    more = os.environ.get("PIP_EXTRA_INDEX_URL") or settings.get("extra-index-url") or ""
    return [first, *more.split()]


def _pip_settings() -> dict[str, str]:
    """pip's configuration files, later ones over earlier ones: the machine's, the user's, the environment's."""
    chosen = os.environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return {}
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    shared = (Path(folder, "pip") for folder in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"))
    folders = [*shared, Path("/etc"), Path.home() / ".pip", home / "pip", Path(sys.prefix)]
    parser = configparser.RawConfigParser()
    try:
        parser.read([*(folder / "pip.conf" for folder in folders), *([chosen] if chosen else [])], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise InputError(f"pip's configuration cannot be read: {error}. Mend it, or set PIP_INDEX_URL.") from None
    settings: dict[str, str] = {}
    for section in ("global", "install", "download"):
        if parser.has_section(section):
            settings.update(parser.items(section))
    return settings


def find(project: str, version: str | None, indexes: Sequence[str]) -> File:
    """The file to read of a release, by default of the newest.

    Raises InputError where the indexes have no such release, NetworkError where one that might could not be asked.
    """
    fault: NetworkError | None = None
    seen: list[str] = []
    for index in indexes:
        try:
            files = _files(project, index)
        except NetworkError as error:
            fault = fault or error
            continue
        offered = [file.version for file in files if not file.yanked]
        seen += offered
        wanted = version or newest(offered)
        matching = [file for file in files if wanted is not None and same(wanted, file.version)]
        if matching:
            return max(matching, key=lambda file: file.preference)
    if fault is not None:
        raise fault
    raise InputError(_absent(project, version, seen, indexes))


def versions(project: str, indexes: Sequence[str]) -> list[str]:
    """Every version of a project that the first index with any of it offers, none of them yanked."""
    for index in indexes:
        files = [file for file in _files(project, index) if not file.yanked]
        if files:
            return list(dict.fromkeys(file.version for file in files))
    raise InputError(_absent(project, None, [], indexes))


def _absent(project: str, version: str | None, seen: Sequence[str], indexes: Sequence[str]) -> str:
    where = " and ".join(urllib.parse.urlsplit(index).netloc.rpartition("@")[2] or index for index in indexes)
    if not seen:
        return f"{where} has no files of {project}. Check the name, --index-url and PIP_INDEX_URL."
    return f"{where} has no {project} {version}; the newest there is {newest(seen)}. Check the version."


@lru_cache(maxsize=16)
def _files(project: str, index: str) -> tuple[File, ...]:
    """What one index offers of a project; nothing if it does not know it. Raises NetworkError."""
    return tuple(_read(project, index))


def _read(project: str, index: str) -> Iterator[File]:
    page = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', project).lower()}/"
    if page.startswith("file:"):
        page += "index.html"
    try:
        body, answer = read_url(page, {"Accept": ACCEPT})
    except NetworkError as error:
        if error.status == 404 or (page.startswith("file:") and "No such file" in error.fault):
            return
        raise
    try:
        links = _json(body) if "json" in answer.headers.get("Content-Type", "") else _html(body)
    except (ValueError, LookupError, TypeError):
        raise NetworkError(page, "the answer is no page of a package index") from None
    for address, yanked in links:
        url = urllib.parse.urljoin(with_user(answer.geturl(), page), address).partition("#")[0]
        name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
        match = _WHEEL.fullmatch(name) or _SOURCE.fullmatch(name)
        if match and re.sub(r"[-_.]+", "-", match["name"]).lower() == re.sub(r"[-_.]+", "-", project).lower():
            yield File(url, name, match["version"], yanked)


def _json(body: bytes) -> list[tuple[str, bool]]:
    return [(file["url"], bool(file.get("yanked"))) for file in json.loads(body)["files"]]


def _html(body: bytes) -> list[tuple[str, bool]]:
    links = _Links()
    links.feed(body.decode("utf-8", "replace"))
    return links.found


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and given.get("href"):
            self.found.append((str(given["href"]), "data-yanked" in given))
