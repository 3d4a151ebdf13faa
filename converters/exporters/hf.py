"""A dense Hugging Face checkpoint: every weight in the engine's dtype, quantized ones as the numbers that their codes stand for."""

from __future__ import annotations

from dspark.converters.exporters.base import Exporter


class HfExporter(Exporter):
    """Every engine can be written so."""

    format = "hf"
    quantizes = False

    def check(self) -> None:
        source = self.source
        quantized = [linear for linear in source.linears.values() if not linear.is_dense]
        if not quantized or source.quant is None:
            return
        self.notes.append(
            f"{len(quantized)} quantized layers ({source.quant.describe()}) are written dequantized, in {source.model.dtype}: the "
            "checkpoint has the quantized model's accuracy at the size of a dense one"
        )
        if any(scheme is not None and scheme.storage == "int8" for linear in quantized for scheme in linear.schemes):
            self.notes.append(
                "the engine also rounds activations to 8 bits, which a dense checkpoint does not: its answers differ a little"
            )
