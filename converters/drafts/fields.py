"""Keys of a draft's config, read with every fault collected: a user who mends one must not meet the next one at the next try."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class Faults:
    """What is wrong with a draft checkpoint. unknown: beginnings of tensor names whose shapes cannot be told because of it."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.unknown: set[str] = set()

    def add(self, text: str, *unknown: str) -> None:
        if text not in self.found:
            self.found.append(text)
        self.unknown.update(unknown)


class Fields:
    """One table of a config. where: its name in messages, "" for the config itself. An absent or null key gives the default."""

    def __init__(self, table: dict[str, Any], faults: Faults, where: str = "") -> None:
        self.table, self.faults = table, faults
        self._prefix = f"{where}." if where else ""

    def __contains__(self, key: str) -> bool:
        return self.table.get(key) is not None

    def below(self, key: str) -> Fields:
        """The table under a key, an empty one when there is none."""
        value = self.table.get(key)
        if value is not None and not isinstance(value, dict):
            self._wrong(key, value, "a table")
        return Fields(value if isinstance(value, dict) else {}, self.faults, f"{self._prefix}{key}")

    def integer(self, key: str, default: int | None = None, least: int = 0) -> int | None:
        value = self.table.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            self._wrong(key, value, f"an integer from {least}")
            return default
        return value

    def needed(self, key: str, least: int, why: str, *unknown: str) -> int:
        """An integer that must be there; `least` stands in when it is not. unknown: see Faults."""
        value = self.integer(key, None, least)
        if value is None:
            if self.table.get(key) is None:
                self.faults.add(f"{self._prefix}{key} is missing: {why}")
            self.faults.unknown.update(unknown)
            return least
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.table.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
            return default
        return value

    def text(self, key: str, default: str, allowed: Collection[str]) -> str:
        value = self.table.get(key)
        if value is None:
            return default
        if value not in allowed:
            self._wrong(key, value, ", ".join(allowed))
            return default
        return str(value)

    def integers(self, key: str) -> list[int] | None:
        value = self.table.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or any(isinstance(entry, bool) or not isinstance(entry, int) for entry in value):
            self._wrong(key, value, "a list of integers")
            return None
        return list(value)

    def refuse_unless(self, key: str, only: Any, supported: str) -> None:
        """A key that changes what is computed, of which one value is supported."""
        value = self.table.get(key)
        if value is not None and value != only:
            self.faults.add(f"{self._prefix}{key} is {value!r:.60}, which is not supported, supported: {supported}")

    def refuse_others(self, known: Collection[str]) -> None:
        """Keys of the method's own table that nobody here knows: they may change what is computed."""
        others = sorted(key for key in self.table if key not in known)
        if others:
            self.faults.add(f"{self._prefix.rstrip('.') or 'config.json'} has options that are not supported: {', '.join(others)}")

    def _wrong(self, key: str, value: Any, allowed: str) -> None:
        self.faults.add(f"{self._prefix}{key} is {value!r:.60}, allowed: {allowed}")
