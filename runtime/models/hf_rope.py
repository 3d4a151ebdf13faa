"""Rope settings between `config.json` and RopeConfig, both ways. Standard library only."""

from __future__ import annotations

from typing import Any

from dspark.runtime.models.hf_values import check_kinds
from dspark.runtime.spec.errors import InputError, UnsupportedError
from dspark.runtime.spec.model_config import ROPE_KINDS, ModelConfig, RopeConfig

_NEEDED = {"llama3": ("factor", "low_freq_factor", "high_freq_factor"), "longrope": ("short_factor", "long_factor")}
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")


def read_rope(config: dict[str, Any], max_position: int, theta: float = 10000.0) -> RopeConfig:
    """Rope settings of a whole model, with the precedence of transformers: `rope_scaling`, else `rope_parameters`; a theta inside wins.

    theta: the family's base where the config has none.
    """
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise UnsupportedError(f"rope settings per layer type are not supported ({table!r:.80})", "supported: one table for all layers")
    check_kinds(table)
    partial = table.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedError(f"partial_rotary_factor {partial} is not supported, supported: 1.0")
    original = config.get("original_max_position_embeddings") or table.get("original_max_position_embeddings") or max_position
    base = table.get("rope_theta") or config.get("rope_theta") or theta
    return read_rope_table(table, max_position, int(original), float(base))


def read_rope_table(table: dict[str, Any], max_position: int, original: int, theta: float) -> RopeConfig:
    """RopeConfig of one checked table. original: the context the model was first trained at, where the kind needs it.

    Raises UnsupportedError for an unknown kind, InputError for one that lacks its numbers.
    """
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedError(f"rope scaling '{kind}' is not supported, supported: {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("yarn", "longrope") and table.get("factor") is None:
        table = {**table, "factor": max_position / original}
    bad = [key for key in _NEEDED.get(kind, ("factor",)) if not table.get(key)]
    if bad:
        what = "a list of positive numbers" if kind == "longrope" else "a positive number"
        raise InputError(f"config.json: rope scaling '{kind}' needs {what} for {', '.join(bad)}")
    values: dict[str, Any] = {"theta": theta, "kind": kind, "factor": float(table["factor"])}
    if kind == "dynamic":  # transformers takes the configured context as the original one here, whatever the table says
        values["original_max_position"] = max_position
    if kind in _WITH_ORIGINAL:
        values["original_max_position"] = original
    if kind == "llama3":
        values |= {key: float(table[key]) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "longrope":
        values |= {key: tuple(float(value) for value in table[key]) for key in ("short_factor", "long_factor")}
        if table.get("attention_factor") is not None:
            values["attention_factor"] = float(table["attention_factor"])
    if kind == "yarn":
        optional = {key: table[key] for key in ("attention_factor", "mscale", "mscale_all_dim") if table.get(key) is not None}
        values |= {key: float(value) for key, value in optional.items()}
        values |= {"beta_fast": float(table.get("beta_fast") or 32), "beta_slow": float(table.get("beta_slow") or 1)}
        values["truncate"] = bool(table.get("truncate", True))
    return RopeConfig(**values)


def check_rope(rope: RopeConfig, head_dim: int) -> None:
    """Raise InputError where the lists of a longrope do not have one number for each rotated pair of dimensions."""
    pairs = int(head_dim * rope.partial_rotary_factor) // 2
    bad = [f"{key} ({len(getattr(rope, key))})" for key in ("short_factor", "long_factor") if len(getattr(rope, key)) != pairs]
    if rope.kind == "longrope" and bad:
        raise InputError(f"config.json: rope scaling 'longrope' needs {pairs} numbers, one for each pair, in {', '.join(bad)}")


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The keys of a config that say a model's rope (one table for all layers; the other families write their own)."""
    keys: dict[str, Any] = {"rope_theta": model.rope.theta, "rope_scaling": write_rope_table(model.rope)}
    if model.rope.partial_rotary_factor != 1:
        keys["partial_rotary_factor"] = model.rope.partial_rotary_factor
    return keys


def write_rope_table(rope: RopeConfig) -> dict[str, Any] | None:
    """The scaling table, without theta; None for the default kind."""
    if rope.kind == "default":
        return None
    table: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in _WITH_ORIGINAL:
        table["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        table |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "longrope":
        table |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    if rope.kind == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    optional = {key: getattr(rope, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    return table | {key: value for key, value in optional.items() if value is not None}
