"""`pairing.json`: what `dspark pair` found to draft best for an engine, and what it measured. Standard library only."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.runtime.spec.errors import InputError

PAIRING_NAME, DRAFT_FOLDER = "pairing.json", "draft"
SCHEMA_VERSION = "1.0"
METHODS = ("off", "ngram", "draft-model", "dspark", "dflash", "eagle3")
DRAFT_METHODS = METHODS[2:]
"""Methods that need a draft."""
_NGRAMS_FIRST = "ngram+"
_AGAIN = "pair the engine again: dspark pair ENGINE"


@dataclass(frozen=True)
class Machine:
    """What step times depend on besides the engine. processor: its model's name. threads: of the run. dtype: of its arithmetic."""

    processor: str
    device: str
    threads: int
    dtype: str


@dataclass(frozen=True)
class Pairing:
    """method: the winner, one of METHODS or a drafter with n-grams before it (`with_ngrams`). draft: the folder in the engine with its
    draft, None where it needs none.

    acceptance: source -> "by_position" and "tried", as `Acceptance.record`. step_cost_ms: tokens of a step -> milliseconds, measured on
    `machine`. drafter: what its confidence was worth and what drafting took, as its metrics have it. measured: a row for each alternative.
    conditions: lines, batch size and flags of the measurement.
    """

    method: str
    draft: str | None
    machine: Machine
    acceptance: dict[str, Any] = field(default_factory=dict)
    step_cost_ms: dict[str, float] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    measured: list[dict[str, Any]] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)
    created: int = 0
    schema_version: str = SCHEMA_VERSION

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()

    def cost_points(self, machine: Machine) -> dict[int, float]:
        """tokens of a step -> seconds, if they were measured on such a machine, else {}."""
        return {int(tokens): ms / 1e3 for tokens, ms in self.step_cost_ms.items()} if machine == self.machine else {}

    def drafter_on(self, machine: Machine | None) -> dict[str, Any]:
        """`drafter`, without the times where they were measured on another machine."""
        if machine == self.machine:
            return self.drafter
        return {key: value for key, value in self.drafter.items() if key != "draft_ms_per_token"}


def with_ngrams(method: str) -> str:
    """The method that drafts from text where that promises more, and else with a drafter of this method."""
    return _NGRAMS_FIRST + method


def drafter_of(method: str) -> str | None:
    """The method of the drafter that a method needs, None where it needs none (or is unknown)."""
    found = method.removeprefix(_NGRAMS_FIRST)
    return found if found in DRAFT_METHODS else None


def load_pairing(engine_dir: Path) -> Pairing | None:
    """An engine's pairing, None where it has none. Raises InputError when it is damaged or of a newer major schema."""
    path = engine_dir / PAIRING_NAME
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        version = str(data["schema_version"])
        if version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
            raise InputError(f"'{path}' has schema {version}, this dspark reads {SCHEMA_VERSION.split('.')[0]}.x", _AGAIN)
        pairing = Pairing(**{**data, "machine": Machine(**data["machine"])})
        known = pairing.method in METHODS or drafter_of(pairing.method) is not None
        known = known and (pairing.draft is None or Path(pairing.draft).name == pairing.draft)
        if not known or not all(int(tokens) > 0 and ms > 0 for tokens, ms in pairing.step_cost_ms.items()):
            raise ValueError("a value that it cannot have")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"'{path}' is damaged ({error})", _AGAIN) from error
    return pairing


def processor_name() -> str:
    """The processor's model and how many of its cores there are, as far as the system says."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"
