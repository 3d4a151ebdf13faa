"""DSpark and DFlash configs: DeepSpec's flat one, the nested one of z-lab and SpecForge, and vLLM speculators'."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dspark.converters.drafts.fields import Faults, Fields
from dspark.converters.drafts.layers import NO_TAPS, read_layers, speculators_layers
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.config import MARKOV_HEADS, DraftConfig

_HEAD_KEYS = (
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "block_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
    "shift_label",
    "projector_type",
    "attention_mode",
    "target_hidden_size",
    "draft_vocab_size",
)
_TRAINING_KEYS = (
    *("num_anchors", "max_anchors", "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "tv_loss_alpha", "loss_decay_gamma"),
    *("auf", "lambda_base_start", "lambda_base_decay_ratio", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
)
_SPECULATORS_KEYS = (
    *("architectures", "speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config"),
    *("aux_hidden_state_layer_ids", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type"),
    *("tie_word_embeddings", "sliding_window_non_causal", "has_no_defaults_at_init", "_name_or_path"),
)
_WHY_MASK = "it is the token that the draft was trained with, and no other one serves"
_WHY_BLOCK = "it is the number of rows that the draft was trained with"


@dataclass(frozen=True)
class Heads:
    """The parts of a config. anchor_first: what the packaging means when it does not say `sample_from_anchor`."""

    layers: dict[str, Any]
    fields: Fields
    taps: list[int] | None
    anchor_first: bool


def read_flat(config: dict[str, Any], tensors: frozenset[str], target: ModelConfig, faults: Faults) -> DraftConfig | None:
    """DeepSpec: everything beside the ordinary keys."""
    fields = Fields(config, faults)
    return _read(Heads(config, fields, fields.integers("target_layer_ids"), True), tensors, target, faults)


def read_nested(config: dict[str, Any], tensors: frozenset[str], target: ModelConfig, faults: Faults) -> DraftConfig | None:
    """z-lab and SpecForge: a table `dflash_config`, whose keys may stand beside it too. Without a list of layers z-lab's rule gives them,
    one for each draft layer."""
    nested = Fields(config, faults).below("dflash_config")
    nested.refuse_others((*_HEAD_KEYS, *_TRAINING_KEYS))
    nested.refuse_unless("attention_mode", "gqa", "gqa")
    fields = Fields({**{key: config[key] for key in _HEAD_KEYS if key in config}, **nested.table}, faults)
    taps = fields.integers("target_layer_ids")
    if "target_layer_ids" not in fields:
        taps = spread_taps(target.num_layers, int(config.get("num_hidden_layers") or 0))
    anchor_first = fields.table.get("projector_type") == "dspark" or bool(fields.table.get("markov_rank"))
    return _read(Heads(config, fields, taps, anchor_first), tensors, target, faults)


def read_speculators(config: dict[str, Any], tensors: frozenset[str], target: ModelConfig, faults: Faults) -> DraftConfig | None:
    """vLLM speculators: layers number the states that they are the input of, one more than the layer whose output that is."""
    plain = Fields(config, faults)
    plain.refuse_others((*_HEAD_KEYS, *_TRAINING_KEYS, *_SPECULATORS_KEYS))
    dspark = config["speculators_model_type"] == "dspark"
    assumed = {"block_size": 8, "draft_vocab_size": 32000}  # by their configuration classes, for keys that are not there
    if dspark:
        assumed |= {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
    ids = plain.integers("aux_hidden_state_layer_ids")
    taps = None if ids is None else [layer - 1 for layer in ids]
    return _read(Heads(speculators_layers(plain, "qwen3"), Fields({**assumed, **config}, faults), taps, dspark), tensors, target, faults)


def spread_taps(target_layers: int, count: int) -> list[int] | None:
    """z-lab's layers: from the second to the fourth last, evenly; the middle one where a draft taps one."""
    if count < 1:
        return None
    if count == 1:
        return [target_layers // 2]
    return [round(1 + index * (target_layers - 4) / (count - 1)) for index in range(count)]


def _read(heads: Heads, tensors: frozenset[str], target: ModelConfig, faults: Faults) -> DraftConfig | None:
    fields = heads.fields
    model = read_layers(heads.layers, faults)
    if heads.taps is None:
        faults.add(NO_TAPS, "fc.")
    if heads.layers.get("is_causal"):
        faults.add("is_causal is true: blocks whose rows see only what is before them are not supported, supported: false")
    rank = fields.integer("markov_rank", 0) or 0
    markov = fields.text("markov_head_type", "vanilla", MARKOV_HEADS)
    confidence = fields.flag("enable_confidence_head", False)
    with_markov = confidence and fields.flag("confidence_head_with_markov", rank > 0)
    if with_markov and rank == 0:
        faults.add("confidence_head_with_markov is true with markov_rank 0: there is no Markov head to read", "confidence_head.")
    mask = fields.needed("mask_token_id", 0, _WHY_MASK)
    block_size = fields.needed("block_size", 1, _WHY_BLOCK)
    anchor = _anchor(heads, faults)
    if not anchor and block_size == 1 and "block_size" in fields:
        faults.add("block_size is 1 with sample_from_anchor false: such a block proposes nothing")
    if model is None:
        return None
    return DraftConfig(
        method="dspark" if rank or confidence else "dflash",
        model=replace(model, qk_norm=True),
        taps=tuple(heads.taps or ()),
        target_hidden_size=fields.integer("target_hidden_size", None, 1) or target.hidden_size,
        target_num_layers=fields.integer("num_target_layers", None, 1) or target.num_layers,
        draft_vocab_size=fields.integer("draft_vocab_size", None, 1) or model.vocab_size,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        block_size=block_size,
        mask_token_id=mask,
        sample_from_anchor=anchor,
        markov=markov if rank else None,
        markov_rank=rank,
        confidence=confidence,
        confidence_with_markov=with_markov,
    )


def _anchor(heads: Heads, faults: Faults) -> bool:
    """Whether row k predicts the next place. `shift_label` is the name that trainers give the same choice."""
    said = {key: heads.fields.flag(key, heads.anchor_first) for key in ("sample_from_anchor", "shift_label") if key in heads.fields}
    if len(set(said.values())) > 1:
        faults.add(f"sample_from_anchor is {said['sample_from_anchor']} and shift_label {said['shift_label']}, allowed: the same for both")
    return next(iter(said.values()), heads.anchor_first)
