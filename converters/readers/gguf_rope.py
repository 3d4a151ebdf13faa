"""Rope settings of a GGUF file as a Hugging Face table.

Three things can change the frequencies: metadata keys (`rope.scaling.*`: linear, yarn), a tensor `rope_freqs.weight` with what divides each
of them, and, in phi3, two such tensors for short and for long sequences. llama.cpp writes Llama 3.1's scaling as divisors; they are read
back as the settings that give them, and any other divisors as a longrope with one list for all lengths.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dspark.converters.readers.gguf_metadata import Metadata
from dspark.converters.readers.gguf_parts import GgufParts
from dspark.runtime.spec.errors import InputError, UnsupportedError

DIVISORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (DIVISORS, LONG, SHORT)
_LOW, _HIGH = 1.0, 4.0  # Llama 3.1 and all that were made from it
_USUAL_CONTEXT = 8192
# keys that change the rotation in ways that have no table -> the value that changes nothing
_NEUTRAL = {"rope.scaling.alpha": 0.0, "rope.scaling.yarn_log_multiplier": 0.0, "rope.scaling.yarn_attn_factor": 1.0}


def rope_scaling(metadata: Metadata, file: GgufParts) -> dict[str, Any] | None:
    """The `rope_scaling` table, None for plain rope. Raises UnsupportedError for a kind that is not there."""
    odd = [f"{key} {metadata.get(key)}" for key, value in _NEUTRAL.items() if metadata.get(key, value) not in (value, 0)]
    if odd:
        raise UnsupportedError(f"'{metadata.path}' has {', '.join(odd)}, which is not supported", "convert the original checkpoint")
    table = _from_keys(metadata)
    if LONG in file.tensors or SHORT in file.tensors:
        return _from_lengths(metadata, file)
    if DIVISORS not in file.tensors:
        return table
    if table is not None:
        raise UnsupportedError(f"'{metadata.path}' has both {DIVISORS} and rope scaling '{table['rope_type']}'", "supported: one of them")
    return _from_divisors(metadata, file.decode(DIVISORS).ravel())


def _from_keys(metadata: Metadata) -> dict[str, Any] | None:
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear"))
    kind = metadata.get("rope.scaling.type", "linear" if factor not in (None, 0, 1) else "none")
    if kind == "none" or factor in (None, 0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedError(f"GGUF rope scaling '{kind}' of this kind is not supported, supported: none, linear, yarn, llama3")
    original = metadata.need("rope.scaling.original_context_length")
    table = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    gain = metadata.get("rope.scaling.attn_factor", 1.0)
    if gain != 1.0:  # llama.cpp multiplies its own temperature by it, Hugging Face replaces the temperature
        table["attention_factor"] = gain * (1 + 0.1 * math.log(factor))
    betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    return table | {ours: metadata.get(theirs) for ours, theirs in betas.items() if metadata.get(theirs) is not None}


def _from_lengths(metadata: Metadata, file: GgufParts) -> dict[str, Any]:
    """Phi-3's longrope: one list up to the original context, another beyond."""
    if LONG not in file.tensors or SHORT not in file.tensors:
        raise InputError(f"'{metadata.path}' has one of {LONG} and {SHORT}, not both", "download it again")
    table: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": file.decode(SHORT).ravel().tolist(),
        "long_factor": file.decode(LONG).ravel().tolist(),
        "original_max_position_embeddings": metadata.need("rope.scaling.original_context_length"),
    }
    gain = metadata.get("rope.scaling.attn_factor")
    return table | ({"attention_factor": float(gain)} if gain else {})


def _from_divisors(metadata: Metadata, divisors: np.ndarray) -> dict[str, Any] | None:
    if np.all(divisors == 1):
        return None
    factor = float(divisors.max())
    theta = float(metadata.get("rope.freq_base", 10000.0))
    said = metadata.get("rope.scaling.original_context_length")
    contexts = [int(said)] if said else [_USUAL_CONTEXT, *(1 << power for power in range(5, 18))]
    for original in contexts:
        if np.allclose(divisors, llama3_divisors(divisors.size, theta, factor, original), rtol=1e-3):
            table = {"rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH}
            return table | {"original_max_position_embeddings": original}
    context = metadata.need("context_length")
    lists = {"short_factor": divisors.tolist(), "long_factor": divisors.tolist()}
    return {"rope_type": "longrope", **lists, "attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": context}


def llama3_divisors(size: int, theta: float, factor: float, original: int) -> np.ndarray:
    """What Llama 3.1's scaling divides each of `size` frequencies by: 1 for short waves, `factor` for long ones, blended between."""
    wavelength = 2 * np.pi * theta ** (np.arange(size) / size)
    smooth = np.clip((original / wavelength - _LOW) / (_HIGH - _LOW), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
