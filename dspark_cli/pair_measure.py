"""`dspark pair`: the alternatives measured on a job's lines, and the table of what came of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cli.console import Console

if TYPE_CHECKING:
    from dspark.runtime.engine import Engine
    from dspark.runtime.spec.request import Request
    from dspark.runtime.speculation.choice import Choice
    from dspark.runtime.speculation.pairing import Pairing

SHOWN_POSITIONS = 6
STORED_OF_DRAFTER = ("confidence", "draft_ms_per_token")


@dataclass(frozen=True)
class Wanted:
    """method: to store, or "auto". rounds: that count. name: of the file that the lines are from."""

    method: str
    rounds: int
    name: str


def measure_all(
    console: Console, engine: Engine, wanted: Wanted, requests: list[Request], method: str | None, draft: Path | None
) -> Pairing:
    """Answer the requests with every alternative, print the table, say what is to be stored. method, draft: of the loaded drafter."""
    from dspark.converters.drafts.pairing import best_of, measure
    from dspark.runtime.speculation.pairing import Pairing

    machine = engine.executor.machine
    console.note(f"pair: {len(requests)} lines of '{wanted.name}', {engine.max_num_seqs} at a time, {wanted.rounds} rounds")
    found = measure(engine, alternatives(wanted.method, method, draft), requests, wanted.rounds, console.detail)
    rows = [entry.row(found[0], machine.device == "cpu") for entry in found]
    winner = best_of(rows) if wanted.method == "auto" else wanted.method
    for line in table(rows, winner):
        console.data(line)
    own = next((entry.speculation for entry in found if entry.speculation and entry.method == winner), None) or {}
    others = next((entry.speculation for entry in reversed(found) if entry.speculation), None) or {}
    return Pairing(
        method=winner,
        draft=None,
        machine=machine,
        acceptance=own.get("acceptance", {}),
        step_cost_ms=own.get("step_cost_ms") or others.get("step_cost_ms", {}),
        drafter={key: own[key] for key in STORED_OF_DRAFTER if key in own},
        measured=rows,
        conditions={"lines": len(requests), "max_num_seqs": engine.max_num_seqs, "rounds": wanted.rounds},
    )


def alternatives(wanted: str, method: str | None, directory: Path | None) -> list[Choice]:
    """Plain decoding first, then what is asked about: n-grams, the draft, and both."""
    from dspark.runtime.speculation.choice import Choice
    from dspark.runtime.speculation.pairing import with_ngrams

    found = [Choice("off")]
    if wanted in ("auto", "ngram"):
        found.append(Choice("ngram"))
    if method is not None and wanted in ("auto", method):
        found.append(Choice(method, directory))
    if method is not None and wanted == "auto":
        found.append(Choice(with_ngrams(method), directory))
    return found


def table(rows: list[dict[str, Any]], winner: str) -> list[str]:
    """The measurement, a line for each alternative; the stored one is marked."""
    width = max(12, *(len(row["method"]) for row in rows))
    lines = [f"  {'method':<{width}} {'tokens/step':>11} {'tokens/s':>9} {'tokens/CPU-s':>12} {'ratio':>6}  acceptance by position"]
    for row in rows:
        mark = "*" if row["method"] == winner else " "
        figures = (
            f"{row['tokens_per_step'] or 1.0:>11.2f} {row['tokens_per_s']:>9.1f} {row['tokens_per_cpu_s']:>12.1f} {row['ratio']:>6.2f}"
        )
        lines.append(f"{mark} {row['method']:<{width}} {figures}  {_by_position(row['acceptance'])}")
    return lines


def _by_position(acceptance: dict[str, Any]) -> str:
    """All sources together, weighted by what was tried."""
    shown = []
    for depth in range(SHOWN_POSITIONS):
        entries = [(entry["by_position"][depth], entry["tried"][depth]) for entry in acceptance.values() if depth < len(entry["tried"])]
        tried = sum(count for _, count in entries)
        if not tried:
            break
        shown.append(f"{sum(rate * count for rate, count in entries) / tried:.2f}")
    return " ".join(shown)
