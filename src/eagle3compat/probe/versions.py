"""Orders versions, to pick a file from an index. Whether something works is never decided by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

Key: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...], str]"

_VERSION = re.compile(
    r"v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<stage>alpha|beta|preview|pre|a|b|c|rc)[-_.]?(?P<pre>\d*))?"
    r"(?:[-_.]?(?:post|rev|r)[-_.]?(?P<post>\d*)|-(?P<implicit>\d+))?"
    r"(?:[-_.]?(?P<dev>dev)[-_.]?(?P<development>\d*))?"
    r"(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE,
)
LONGEST = 200
"""Characters of a version: Python itself refuses to read a number of thousands of digits."""
_STAGES = {"a": 0, "alpha": 0, "b": 1, "beta": 1, "c": 2, "rc": 2, "pre": 2, "preview": 2}
_FINAL, _EARLIEST = (3,), (-1,)
_CLAUSE = re.compile(r"(===|==|!=|<=|>=|~=|<|>)\s*([^\s,;)]+)")


def key(version: str) -> Key | None:
    """Orders as PEP 440 does; None for what is no version."""
    found = _VERSION.fullmatch(version.strip()) if len(version) <= LONGEST else None
    if found is None:
        return None
    release = [int(part) for part in found["release"].split(".")]
    while len(release) > 1 and not release[-1]:
        release.pop()
    post = found["post"] if found["post"] is not None else found["implicit"]
    stage = (_STAGES[found["stage"].lower()], int(found["pre"] or 0)) if found["stage"] else _FINAL
    if found["dev"] and stage is _FINAL and post is None:
        stage = _EARLIEST
    development = (0, int(found["development"] or 0)) if found["dev"] else (1,)
    after = -1 if post is None else int(post or 0)
    return int(found["epoch"] or 0), tuple(release), stage, after, development, (found["local"] or "").lower()


def same(asked: str, version: str) -> bool:
    """Whether `version` is the one asked for; a local part such as `+cpu` counts only where it was asked for."""
    wanted, found = key(asked), key(version)
    if wanted is None or found is None:
        return asked == version
    return wanted == found if wanted[-1] else wanted[:-1] == found[:-1]


def final(version: str) -> bool:
    """Whether it is neither a development nor a pre-release."""
    found = key(version)
    return found is not None and found[2] == _FINAL and found[4] == (1,)


def newest(versions: Iterable[str]) -> str | None:
    """The greatest, a final one if there is any; None of none."""
    known = [version for version in versions if key(version) is not None]
    finals = [version for version in known if final(version)]
    return max(finals or known, key=lambda version: key(version) or (), default=None)


def allows(requirement: str, version: str) -> bool:
    """Whether a requirement such as `transformers>=4.56.0,<5` allows a version."""
    return all(_holds(sign, wanted, version) for sign, wanted in _CLAUSE.findall(requirement.partition(";")[0]))


def _holds(sign: str, wanted: str, version: str) -> bool:
    if wanted.endswith(".*"):
        return (sign == "==") == _begins(wanted[:-2], version)
    if sign in ("==", "===", "!="):
        return (sign != "!=") == same(wanted, version)
    asked, found = key(wanted), key(version)
    if asked is None or found is None:
        return False
    if sign == "~=":
        return found >= asked and _begins(wanted.rpartition(".")[0], version)
    return _ORDER[sign](found[:-1], asked[:-1])


def _begins(prefix: str, version: str) -> bool:
    parts = prefix.split(".")
    release = re.split(r"[^\d.]", version)[0].split(".")
    return [*release, *["0"] * len(parts)][: len(parts)] == parts


_ORDER: dict[str, Callable[[tuple[object, ...], tuple[object, ...]], bool]] = {
    ">=": lambda found, asked: found >= asked,
    "<=": lambda found, asked: found <= asked,
    ">": lambda found, asked: found > asked,
    "<": lambda found, asked: found < asked,
}
