"""What a quantized engine is measured on before it is published, and held to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.converters.mapping import MappedModel
from dspark.converters.quality.evaluation import Evaluation
from dspark.converters.quality.gate import QualityLimits, check
from dspark.converters.quality.measure import compare
from dspark.converters.quality.remedy import Asked
from dspark.converters.quality.subject import Subject, open_subject, run_dtype
from dspark.converters.quality.windows import TokenSet, held_out_samples, line_samples, resolve_context, text_windows
from dspark.converters.quantize import QuantPlan
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.quant import default_group_size

EVAL_TOKENS = 16384
"""Tokens that a gate scores: enough for a KL of a thousandth to stand clear of its own error."""
MIN_HELD_OUT_TOKENS = 4096
"""With fewer that the quantizer was not shown, a gate without a file of its own measures on those that it was."""


@dataclass
class Gate:
    """file: a text or JSONL file to measure on. limits: beyond them nothing is published. evaluation: the last check's.

    calibrated_on: the quantizer saw samples of this very file; what it did not see is measured on, where there is enough of it.
    asked: what the user typed, which a remedy types again.
    """

    file: Path
    limits: QualityLimits
    context_length: int | None = None
    max_tokens: int = EVAL_TOKENS
    device: str = "cpu"
    calibrated_on: bool = False
    asked: Asked = field(default_factory=Asked)
    evaluation: Evaluation | None = field(default=None, init=False)

    def check(self, directory: Path, source: MappedModel, plan: QuantPlan) -> dict[str, Any]:
        """Compare the engine in `directory`, not yet published, with the source it was made from; the record for the manifest.

        Raises QualityError beyond a limit, InputError for a file that cannot be used.
        """
        tokens = self._tokens(directory, source, plan)
        engine, baseline = open_subject(directory, engine_only=True), Subject(Path(source.reader.path), source.config, None, source)
        kernels = [subject.kernels(None, self.device, "auto") for subject in (baseline, engine)]
        states = [subject.states(chosen, tokens.samples) for subject, chosen in zip((baseline, engine), kernels, strict=True)]
        dtypes = tuple(map(run_dtype, reversed(kernels)))
        comparison = compare(states[0], states[1], tokens.samples)
        self.evaluation = Evaluation(tokens, comparison, dtypes, Path(source.reader.path).resolve().name, self.limits)
        asked = replace(self.asked, default_group_size=default_group_size({inputs for _, inputs in plan.layers.values()}))
        check(comparison, self.limits, plan.config, plan.report, asked)
        return self.evaluation.record()

    def _tokens(self, directory: Path, source: MappedModel, plan: QuantPlan) -> TokenSet:
        codec, context = load_codec(directory), resolve_context(source.config, self.context_length)
        if self.calibrated_on and sum(map(len, plan.held_out)) >= MIN_HELD_OUT_TOKENS:
            return held_out_samples(self.file, plan.held_out, context, self.max_tokens)
        if self.file.suffix == ".jsonl":
            tokens = line_samples(self.file, codec, source.config, context, self.max_tokens)
        else:
            tokens = text_windows(self.file, codec, source.config, min(context, self.max_tokens), self.max_tokens)
        if not self.calibrated_on:
            return tokens
        note = f"the quantizer was shown samples of this text, and beyond them it has fewer than {MIN_HELD_OUT_TOKENS} tokens"
        return replace(tokens, notes=(*tokens.notes, f"{note}: --eval FILE measures on another"))
