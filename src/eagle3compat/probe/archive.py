"""The files of a wheel or a source distribution, read where they are."""

from __future__ import annotations

import fnmatch
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

from ..errors import InputError
from .remote import NetworkError, RangeFile


class Tree:
    """The files of one archive by name, each read when it is asked for."""

    def __init__(
        self,
        label: str,
        names: Iterable[str],
        read: Callable[[str], bytes],
        prefetch: Callable[[Iterable[str]], None] = lambda names: None,
    ) -> None:
        self.label, self.read, self.prefetch = label, read, prefetch
        self.files = frozenset(names)
        self.folders: dict[str, set[str]] = {"": set()}
        for name in self.files:
            parts = name.split("/")
            for depth, part in enumerate(parts):
                self.folders.setdefault("/".join(parts[:depth]), set()).add(part)

    @property
    def root(self) -> Entry:
        return Entry(self, "")


@dataclass(frozen=True)
class Entry:
    """A file or a folder in a tree; what `pathlib.Path` has of that name does the same."""

    tree: Tree
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        stem, dot, end = self.name.rpartition(".")
        return dot + end if stem else ""

    def is_dir(self) -> bool:
        return self.path in self.tree.folders

    def is_file(self) -> bool:
        return self.path in self.tree.files

    def read_bytes(self) -> bytes:
        return self.tree.read(self.path)

    def __truediv__(self, name: str, /) -> Entry:
        return Entry(self.tree, f"{self.path}/{name}" if self.path else name)

    def glob(self, pattern: str, /) -> Iterator[Entry]:
        """Of one level: a pattern has no slash here."""
        names = self.tree.folders.get(self.path, set())
        return (self / name for name in sorted(fnmatch.filter(names, pattern)))

    def __str__(self) -> str:
        return f"{self.tree.label}/{self.path}"


def open_archive(file: BinaryIO | RangeFile, label: str) -> Tree:
    """The tree of a wheel (or another zip) or of a `.tar.gz`.

    Raises InputError where it is neither, and NetworkError where it is damaged on the way.
    """
    try:
        return _tar(file, label) if label.endswith((".tar.gz", ".tgz")) else _zip(file, label)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise InputError(f"{label} is no wheel or source distribution: {error}. Check it, or its address.") from None


def _zip(file: BinaryIO | RangeFile, label: str) -> Tree:
    archive = zipfile.ZipFile(file)
    starts = sorted([info.header_offset for info in archive.infolist()] + [archive.start_dir])
    ends = dict(pairwise(starts))

    def read(name: str) -> bytes:
        info = archive.getinfo(name)
        try:
            if isinstance(file, RangeFile):
                file.load(info.header_offset, ends[info.header_offset])
            return archive.read(info)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise NetworkError(label, f"its member {name} is damaged: {error}", "Download it again.") from None

    def prefetch(names: Iterable[str]) -> None:
        if isinstance(file, RangeFile):
            starts = (archive.getinfo(name).header_offset for name in names)
            file.load_all((start, ends[start]) for start in starts)

    return Tree(label, (i.filename for i in archive.infolist() if not i.is_dir()), read, prefetch)


def _tar(file: BinaryIO | RangeFile, label: str) -> Tree:
    """All of its Python source and metadata in memory: a compressed tar cannot be read in parts."""
    kept = {}
    with tarfile.open(fileobj=file, mode="r:gz") as archive:
        for member in archive:
            if member.isfile() and member.name.endswith((".py", "/PKG-INFO", "requirements/common.txt")):
                content = archive.extractfile(member)
                kept[member.name] = content.read() if content else b""
    return Tree(label, kept, kept.__getitem__)
