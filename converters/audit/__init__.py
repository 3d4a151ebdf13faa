"""The check before an engine is published: does it compute what transformers computes from the same config and weights?

    logits      float32, relative 1e-3: transformers' model built from OUR config and OUR tensors against our engine, a long prompt
                included; whole models, or layer by layer where they do not fit the memory
    tokenizer   the engine's files against transformers' tokenizer of the source: ids and text of a few probes
    template    the engine's rendering of conversations, tools and their answers among them, against apply_chat_template

A model of which not even two layers fit is recorded as "not audited".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.converters.audit.logits import audit_logits
from dspark.converters.audit.reference import dense_state, reference_model
from dspark.converters.audit.tokenizer import PROBE_TEXTS, audit_tokenizer
from dspark.converters.readers.base import CheckpointReader
from dspark.runtime.spec.manifest import load_manifest

__all__ = ["PROBE_TEXTS", "audit_engine", "dense_state", "reference_model"]


def audit_engine(directory: Path, reader: CheckpointReader) -> dict[str, Any]:
    """The audit's record for the manifest; its "summary" is one line for the user.

    directory: the engine as written, not yet published. Raises QualityError when a check fails.
    """
    record: dict[str, Any] = {
        "logits": audit_logits(directory, load_manifest(directory)),
        "tokenizer": audit_tokenizer(directory, reader),
    }
    return {**record, "summary": _summary(record["logits"], record["tokenizer"]["summary"])}


def _summary(logits: dict[str, Any], tokenizer: str) -> str:
    if "max_relative_error" not in logits:
        return f"{logits['summary']}; {tokenizer}"
    how = " layer by layer" if "layer_errors" in logits else ""
    return f"audit passed{how} (logits within {logits['max_relative_error']:.1e} of transformers, {tokenizer})"
