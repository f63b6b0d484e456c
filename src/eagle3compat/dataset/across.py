"""What only shows when files are compared with each other.

A row of hidden states depends on the tokens up to it and on nothing else, unless there is an image among them: prompts
of text that begin alike have rows that begin alike, and one prompt has one result. Kept of each file are digests and
its number, some half a kilobyte.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .content import Facts
from .faults import Fault

APART = 0.5
"""A row is another one when its difference is over half of its own norm. Rounding in bf16 gives 0.01 to 0.1."""
WRONG_ROWS = 0.05
"""The part of rows, and at least two of them, that must be others: one may be, where a mixture's routing tips."""
CACHED = 512 * 2**20
"""Bytes of the first rows of files that are kept in memory: 64 rows of 4 layers of 4096 in bf16 are 2 MiB."""
MOST_PARTIES = 16
"""Where so many results of one prefix differ, further ones are not compared with each other."""

Heads = Callable[[int, int], Any]
"""The first rows of a file, `[layers, rows, H]`, by its index and their number; None where they cannot be had again."""

PrefixKey = tuple[bytes, int, int]
"""The digest of a prompt prefix, and the layers and hidden size of the files that are compared on it."""


@dataclass
class Party:
    """Files of one prefix whose rows agree with those of the first."""

    first: int
    members: array[int] = field(default_factory=lambda: array("q"))
    loose: bool = False
    """Those beyond MOST_PARTIES: they agree with none of the others, and were not compared with each other."""


class Across:
    """Takes the facts of files one after another; `faults()` then says what does not fit together."""

    def __init__(self, heads: Heads) -> None:
        self._read = heads
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._cached = 0
        self._signatures: dict[tuple[int, int, str], array[int]] = {}
        self._by_ids: dict[bytes, int] = {}
        self._by_states: dict[bytes, int] = {}
        self._prefixes: dict[PrefixKey, list[Party]] = {}
        self._lone: dict[PrefixKey, int] = {}
        self._prefix_rows: dict[PrefixKey, int] = {}
        self._same_states: list[tuple[int, int]] = []
        self._same_ids: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []
        """Pairs of files with the same prompt and the same states: a data set may well repeat itself."""
        self.changed: set[int] = set()
        """Files that were sound, and cannot be read again."""

    def add(self, facts: Facts, rows: tuple[int, ...]) -> None:
        """`rows` are the lengths of the prefixes that `facts` has digests of."""
        if facts.signature is None:
            return
        self._signatures.setdefault(facts.signature, array("q")).append(facts.index)
        if any(kind in ("zero", "not finite") for kind, _ in facts.faults):
            return  # they would differ from every other, which says nothing new
        same_ids = self._by_ids.setdefault(facts.ids_digest, facts.index)
        same_states = self._by_states.setdefault(facts.states_digest, facts.index)
        if same_states != facts.index and same_ids == same_states:
            self.copies.append((same_ids, facts.index))
            return  # what the first one agrees with, it agrees with
        if same_states != facts.index:
            self._same_states.append((same_states, facts.index))
        elif same_ids != facts.index:
            self._same_ids.append((same_ids, facts.index))
        for digest, length in zip(facts.prefix_digests, rows, strict=False):
            self._join((digest, *facts.signature[:2]), length, facts)

    def _join(self, key: PrefixKey, rows: int, facts: Facts) -> None:
        parties = self._prefixes.get(key)
        if parties is None:
            lone = self._lone.setdefault(key, facts.index)
            if lone == facts.index:
                self._remember(facts.index, facts.heads[:, :rows])
                return
            del self._lone[key]
            parties = self._prefixes[key] = [Party(lone, array("q", [lone]))]
            self._prefix_rows[key] = rows
        for party in parties:
            if party.loose:
                party.members.append(facts.index)
                return
            other = self._head(party.first, rows)
            if other is None or other.shape != facts.heads[:, :rows].shape:
                self.changed.add(party.first)
                party.first = facts.index
                party.members.append(facts.index)
                self._remember(facts.index, facts.heads[:, :rows])
                return
            if not apart(facts.heads[:, :rows], other):
                party.members.append(facts.index)
                return
        parties.append(Party(facts.index, array("q", [facts.index]), loose=len(parties) >= MOST_PARTIES))
        self._remember(facts.index, facts.heads[:, :rows])

    def _head(self, index: int, rows: int) -> Any:
        kept = self._cache.get(index)
        if kept is None or kept.shape[1] < rows:
            kept = self._read(index, rows)
            if kept is None:
                return None
            self._remember(index, kept)
        self._cache.move_to_end(index)
        return kept[:, :rows]

    def _remember(self, index: int, head: Any) -> None:
        old = self._cache.pop(index, None)
        kept = head.clone() if old is None or old.shape[1] < head.shape[1] else old  # not the rows beyond, as a view
        self._cache[index] = kept
        self._cached += kept.nbytes - (0 if old is None else old.nbytes)
        while self._cached > CACHED and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes

    def expected(self) -> tuple[int, int, str] | None:
        """Layers, hidden size and dtype of most files."""
        counts = {signature: len(members) for signature, members in self._signatures.items()}
        return Counter(counts).most_common(1)[0][0] if counts else None

    def unlike(self, expected: tuple[int, int, str], name: Callable[[int], str]) -> list[Fault]:
        """Files that are sound by themselves and have other layers, hidden size or dtype than the set."""
        found = []
        named = (("layers", "layers"), ("shape", "hidden size"), ("dtype", "dtype"))
        for signature, members in self._signatures.items():
            for (kind, what), have, want in zip(named, signature, expected, strict=True):
                if have != want:
                    said = f"{what} {have}, where the set has {want}"
                    found += [Fault(kind, name(index), index, said) for index in members]
        return found

    def faults(self, name: Callable[[int], str], differ: Callable[[int, int], str]) -> list[Fault]:
        """`differ` compares the whole states of two files with one prompt, and says how they differ, if they do."""
        found = []
        for first, second in self._same_states:
            for index, other in ((first, second), (second, first)):
                said = f"its states are those of {name(other)}, which has other token ids"
                found.append(Fault("same states", name(index), index, said))
        for first, second in self._same_ids:
            said = differ(first, second)
            if said:
                for index, other in ((first, second), (second, first)):
                    found.append(Fault("contradiction", name(index), index, f"same token ids as {name(other)}, {said}"))
        return found + self._prefix_faults(name)

    def _prefix_faults(self, name: Callable[[int], str]) -> list[Fault]:
        found: dict[int, Fault] = {}
        for key, parties in self._prefixes.items():
            if len(parties) == 1:
                continue
            rows = self._prefix_rows[key]
            ranked = sorted((party for party in parties if not party.loose), key=lambda party: -len(party.members))
            right = ranked[0] if len(ranked[0].members) > max(len(ranked[1].members), 1) else None
            for party in parties:
                for index in party.members if party is not right else ():
                    others = right or next(other for other in parties if other is not party)
                    said = f"its first {rows} token ids are those of {name(others.first)}, its rows are not"
                    if right is None:
                        said += "; one of them is wrong"
                    else:
                        said += f" ({len(right.members)} files agree with that one)"
                    found.setdefault(index, Fault("prefix", name(index), index, said))
        return [found[index] for index in sorted(found)]


def apart(got: Any, want: Any) -> bool:
    """Whether two heads `[layers, rows, H]` of one prompt prefix are of different rows, in any layer."""
    errors = row_errors(got, want)
    wrong = (~(errors <= APART)).sum(dim=-1)
    return bool((wrong >= max(2, WRONG_ROWS * errors.shape[-1])).any())


def row_errors(got: Any, want: Any) -> Any:
    """How far each row is off, as a part of the norm of the wanted row: `[..., rows]` in float32."""
    actual, expected = got.float(), want.float()
    return (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
