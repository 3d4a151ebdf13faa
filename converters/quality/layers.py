"""The table of layers: what each quantized module costs and how far its outputs are off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dspark.runtime.spec.quant import QuantConfig, QuantScheme

LayersReport = Mapping[str, Mapping[str, Any]]
"""Module -> its entry in `manifest.quality["layers"]`. Keys that are read here:

    output_sqnr_db  signal to error of the module's outputs on calibration data, in dB; absent where that is not known
    sqnr_db         the same of its weights; None for a weight without error
    bytes           of what is stored
"""


@dataclass(frozen=True)
class LayerRow:
    """One module. error_db: power of the error relative to the signal, so that a larger number is worse; None where there is none or where
    it is not known. of_outputs: whether the table is of the modules' outputs, else of their weights.
    """

    module: str
    scheme: QuantScheme | None
    error_db: float | None
    of_outputs: bool
    num_bytes: int

    @property
    def bits(self) -> int | None:
        return None if self.scheme is None else self.scheme.weight_bits

    @property
    def kind(self) -> str:
        """Last part of the name, such as "down_proj"."""
        return self.module.rpartition(".")[2]


def layer_rows(quant: QuantConfig | None, layers: LayersReport) -> list[LayerRow]:
    """Rows in the report's order. All have the same measure, to be ranked by: outputs where those of any module were measured."""
    of_outputs = any(entry.get("output_sqnr_db") is not None for entry in layers.values())
    key = "output_sqnr_db" if of_outputs else "sqnr_db"
    return [
        LayerRow(module, quant.scheme_for(module) if quant else None, _error(entry.get(key)), of_outputs, int(entry.get("bytes", 0)))
        for module, entry in layers.items()
    ]


def worst_first(rows: list[LayerRow]) -> list[LayerRow]:
    """Rows that have an error, the largest first; equal ones in the model's order."""
    return sorted((row for row in rows if row.error_db is not None), key=lambda row: -row.error_db)  # type: ignore[operator]


def layer_table(rows: list[LayerRow]) -> list[str]:
    """The table as lines of text, a head first."""
    width = max([len("layer"), *(len(row.module) for row in rows)])
    of = "outputs" if rows and rows[0].of_outputs else "weights"
    lines = [f"{'layer':<{width}}  {'scheme':<20}  {'bits':>4}  {f'error of {of}':>16}  {'bytes':>12}"]
    for row in rows:
        scheme = "dense" if row.scheme is None else row.scheme.describe()
        bits = "" if row.bits is None else str(row.bits)
        error = "-" if row.error_db is None else f"{row.error_db:.2f} dB"
        lines.append(f"{row.module:<{width}}  {scheme:<20}  {bits:>4}  {error:>16}  {row.num_bytes:>12,}")
    return lines


def _error(sqnr_db: float | None) -> float | None:
    return None if sqnr_db is None else -float(sqnr_db)
