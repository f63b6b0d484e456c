"""Where a package comes from: an index, a wheel here or on a server, a folder. Nothing is installed or imported."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..detect import VERSION_LINE
from ..errors import InputError
from ..places import Place
from . import index
from .archive import open_archive
from .remote import RangeFile, open_remote
from .versions import allows, final, key, newest

_METADATA = ("{name}-*.dist-info", "{name}_*-*.dist-info", "{name}-*.egg-info", "{name}.egg-info")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz")
_LAYOUTS = ("", "src", "lib/python*/site-packages", "Lib/site-packages")


@dataclass(frozen=True)
class Source:
    """A package whose source can be read. `place` is its own folder, `beside` the folder that holds it.

    `url` is where an archive on a server is, `remote` its file where it is read in parts.
    """

    name: str
    origin: str
    place: Place
    beside: Place
    url: str = ""
    remote: RangeFile | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.version or '(version unknown)'}"

    @cached_property
    def version(self) -> str | None:
        """From metadata, or else the package's own version file; None where neither says it."""
        found = re.search(r"^Version:\s*(\S+)", self._metadata, re.MULTILINE)
        if found is None:
            texts = (_text(self.place / name) for name in ("_version.py", "version.py"))
            found = next(filter(None, (re.search(VERSION_LINE, text, re.MULTILINE) for text in texts)), None)
        return found[1] if found else None

    def requirement(self, name: str) -> str | None:
        """What it requires of the distribution `name`, such as `transformers>=5.5.3`; None if nothing is known."""
        required = re.findall(r"^Requires-Dist:\s*(.*)$", self._metadata, re.MULTILINE)
        required += _text(self.beside / "requirements" / "common.txt").splitlines()
        said = (line for line in required if re.match(rf"{re.escape(name)}\b(?!-)", line) and "extra ==" not in line)
        return next(said, None)

    @cached_property
    def _metadata(self) -> str:
        for pattern in _METADATA:
            for folder in self.beside.glob(pattern.format(name=self.name)):
                for file in ("METADATA", "PKG-INFO"):
                    if text := _text(folder / file):
                        return text
        return _text(self.beside / "PKG-INFO")


def _text(place: Place) -> str:
    return place.read_bytes().decode("utf-8", "replace") if place.is_file() else ""


def locate(target: str, package: str, indexes: Sequence[str]) -> Source:
    """The source of `package` that `target` names.

    `target` is a version, `NAME==VERSION` for a distribution of another name, `latest`, a wheel or source archive
    (here or at an http(s) address), the address of a package index, or a folder that has the package: a checkout, an
    unpacked archive, site-packages, an environment.

    Raises InputError where it names nothing that can be read, NetworkError where a server could not be asked.
    """
    if re.match(r"https?://", target):
        try:
            path = urllib.parse.urlsplit(target).path
        except ValueError as error:
            raise InputError(f"'{target}' is no address: {error}. Check it.") from None
        if path.endswith(_ARCHIVES):
            return _remote(target, urllib.parse.unquote(path.rpartition("/")[2]), package)
        file = index.find(package, None, [target])
        return _remote(file.url, file.name, package)
    path = os.path.expanduser(target)
    if os.path.isdir(path):
        return _folder(Path(path), package)
    if os.path.isfile(path):
        return _local(Path(path), package)
    name, _, version = target.rpartition("==")
    if version == "latest" or key(version) is not None:
        file = index.find(name or package, None if version == "latest" else version, indexes)
        return _remote(file.url, file.name, package)
    raise InputError(
        f"'{target}' is no version, and there is no such file or folder. Give a version (0.33.0), `latest`, a wheel, "
        f"the address of a wheel or of an index, or a folder with a `{package}` package."
    )


def _remote(url: str, name: str, package: str) -> Source:
    if url.startswith("file:"):
        return _local(Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)), package)
    file = open_remote(url)
    root = open_archive(file, name).root
    host = urllib.parse.urlsplit(url).netloc.rpartition("@")[2]
    return _within(root, package, f"{name} on {host}", url, file if isinstance(file, RangeFile) else None)


def _local(path: Path, package: str) -> Source:
    return _within(open_archive(path.open("rb"), path.name).root, package, str(path))


def _within(root: Place, package: str, origin: str, url: str = "", remote: RangeFile | None = None) -> Source:
    """The package at the top of an archive or, as in a source distribution, in its only folder."""
    for beside in _candidates(root):
        if (beside / package / "__init__.py").is_file():
            return Source(package, origin, beside / package, beside, url, remote)
    raise InputError(f"{origin} holds no package `{package}`. Check that it is the one that was meant.")


def _candidates(root: Place) -> Iterator[Place]:
    yield root
    for top in root.glob("*"):
        yield top
        yield top / "src"
        yield top / "purelib"


def _folder(path: Path, package: str) -> Source:
    path = path.resolve()
    if path.name == package and (path / "__init__.py").is_file():
        return Source(package, str(path), path, path.parent)
    for layout in _LAYOUTS:
        for beside in sorted(path.glob(layout)) if layout else [path]:
            if (beside / package / "__init__.py").is_file():
                return Source(package, str(beside / package), beside / package, beside)
    raise InputError(f"{path} holds no package `{package}`: there is no {package}/__init__.py in it. Check the folder.")


def transformers(vllm: Source, speculators: Source, indexes: Sequence[str]) -> Source:
    """The transformers that would be there: the one beside vLLM's folder or, from the index, one that both allow.

    Where vLLM leaves the choice it is the newest transformers 4, for which every in-process release of speculators was
    written.
    """
    if isinstance(vllm.place, Path) and (vllm.beside / "transformers" / "__init__.py").is_file():
        return _folder(vllm.place.parent, "transformers")
    offered = index.versions("transformers", indexes)
    asked = [r for r in (vllm.requirement("transformers"), speculators.requirement("transformers")) if r]
    for requirements in (["transformers<5", *asked], asked, asked[:1]):
        fitting = [v for v in offered if final(v) and all(allows(requirement, v) for requirement in requirements)]
        if fitting:
            file = index.find("transformers", newest(fitting), indexes)
            return _remote(file.url, file.name, "transformers")
    raise InputError(f"no transformers on the index meets {' and '.join(asked)}. Name one with --transformers.")
