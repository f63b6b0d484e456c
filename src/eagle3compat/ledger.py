"""What was rebound, so that it can be verified and undone."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

_ABSENT = object()


class Entry:
    """One rebinding: `holder.name` was `original` (or absent from the holder itself) and is now `replacement`."""

    def __init__(self, adapter: str, holder: Any, name: str, original: Any, replacement: Any) -> None:
        self.adapter, self.holder, self.name = adapter, holder, name
        self.original, self.replacement = original, replacement

    @property
    def in_place(self) -> bool:
        """The object in place is the truth, not a flag that was set; one that wraps ours (`__wrapped__`) is ours."""
        current = vars(self.holder).get(self.name, _ABSENT)
        seen: set[int] = set()
        while current is not self.replacement and hasattr(current, "__wrapped__") and id(current) not in seen:
            seen.add(id(current))
            current = current.__wrapped__
        return current is self.replacement

    def __str__(self) -> str:
        holder = getattr(self.holder, "__name__", repr(self.holder))
        return f"{holder}.{self.name}"


class Ledger:
    """Rebinds names in modules and classes, and takes it back in reverse order."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def rebind(self, adapter: str, holder: Any, name: str, replacement: Any) -> None:
        """Bind `holder.name` to `replacement`.

        A name that `holder` only inherits, or takes from the builtins, is remembered as absent: restoring deletes it.
        """
        original = vars(holder).get(name, _ABSENT)
        setattr(holder, name, replacement)
        self._entries.append(Entry(adapter, holder, name, original, replacement))

    def of(self, adapter: str) -> list[Entry]:
        """The rebindings of one adapter."""
        return [entry for entry in self._entries if entry.adapter == adapter]

    def displaced(self) -> list[Entry]:
        """Rebindings that somebody else has replaced since."""
        return [entry for entry in self._entries if not entry.in_place]

    def restore(self, adapter: str | None = None, within: ModuleType | None = None) -> list[Entry]:
        """Undo every rebinding, or those of one adapter; with `within`, only in that module and its classes.

        Returns the entries that were left alone because another patcher has since put its own object there: taking
        that away would break code that this library does not know.
        """
        left = []
        holders = None if within is None else {id(holder) for holder in (within, *vars(within).values())}
        chosen = [e for e in self._entries if adapter in (None, e.adapter)]
        for entry in reversed([e for e in chosen if holders is None or id(e.holder) in holders]):
            self._entries.remove(entry)
            if vars(entry.holder).get(entry.name, _ABSENT) is not entry.replacement:
                left.append(entry)
            elif entry.original is _ABSENT:
                delattr(entry.holder, entry.name)
            else:
                setattr(entry.holder, entry.name, entry.original)
        return left
