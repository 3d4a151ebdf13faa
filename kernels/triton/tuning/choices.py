"""What can be chosen for a key, and how it is written into a cache file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dspark.kernels.triton.gemm_tiles import GemmTile
from dspark.kernels.triton.tiles import AttentionTile


@dataclass(frozen=True)
class AttentionChoice:
    """split_keys: keys of a program of a shared context, a multiple of the tile's keys; 0 shares none."""

    tile: AttentionTile
    split_keys: int = 0


Choice = GemmTile | AttentionChoice


@dataclass(frozen=True)
class Tuned:
    """What was measured for a key. seconds: of the choice; untuned_seconds: of what would be taken without tuning, which the choice may be.
    tried: how many others were; declined: those that could not run or were wrong, and why."""

    choice: Choice
    seconds: float
    untuned_seconds: float
    tried: int
    declined: Mapping[str, str]


def text(choice: Choice) -> str:
    """A choice in a few words."""
    if isinstance(choice, AttentionChoice):
        tile = choice.tile
        split = f", {choice.split_keys} keys a program" if choice.split_keys else ""
        return f"{tile.rows} x {tile.keys} keys, {tile.warps} warps, {tile.stages} stages{split}"
    split = f", {choice.splits} splits" if choice.splits > 1 else ""
    return f"{choice.rows} x {choice.cols} x {choice.depth}, {choice.warps} warps, {choice.stages} stages{split}"


def as_json(tuned: Tuned) -> dict[str, Any]:
    """The entry of a cache file."""
    return {
        "tile": numbers(tuned.choice),
        "us": round(tuned.seconds * 1e6, 3),
        "untuned_us": round(tuned.untuned_seconds * 1e6, 3),
        "tried": tuned.tried,
        "declined": dict(tuned.declined),
    }


def from_json(entry: Any) -> Tuned:
    """Raises ValueError for what is no such entry."""
    try:
        choice = _choice(entry["tile"])
        declined = {str(name): str(reason) for name, reason in dict(entry.get("declined", {})).items()}
        return Tuned(choice, float(entry["us"]) / 1e6, float(entry["untuned_us"]) / 1e6, int(entry.get("tried", 0)), declined)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no entry of a tile: {error!r}") from error


def numbers(choice: Choice) -> dict[str, int]:
    """A choice as names and integers."""
    if isinstance(choice, AttentionChoice):
        return {**{field.name: getattr(choice.tile, field.name) for field in fields(AttentionTile)}, "split_keys": choice.split_keys}
    return {field.name: getattr(choice, field.name) for field in fields(GemmTile)}


def _choice(values: Any) -> Choice:
    given = dict(values)
    if not all(type(value) is int for value in given.values()):
        raise ValueError(f"a tile has numbers that are no integers: {given}")
    if "keys" in given:
        split_keys = given.pop("split_keys", 0)
        return AttentionChoice(AttentionTile(**given), split_keys)
    return GemmTile(**given)
