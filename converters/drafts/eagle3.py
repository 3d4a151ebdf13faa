"""EAGLE-3 configs: DeepSpec's, the original one (SpecForge, AngelSlim, ModelOpt), and vLLM speculators'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dspark.converters.drafts.fields import Faults, Fields
from dspark.converters.drafts.layers import NO_TAPS, read_layers, speculators_layers
from dspark.runtime.spec.model_config import ModelConfig
from dspark.runtime.speculation.heads.config import DraftConfig

_NORM_KEYS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_EAGLE_KEYS = (
    *("eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    *("use_mtp_layernorm", "next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers", "eagle_decoder_type"),
    *_NORM_KEYS,
)
_SPECULATORS_KEYS = (
    *("architectures", "speculators_model_type", "speculators_config", "speculators_version", "transformer_layer_config"),
    *("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "auto_map", "dtype"),
    *("torch_dtype", "transformers_version", "model_type", "tie_word_embeddings", "enable_sp_ulysses", "draft_attn_kernel"),
    *("has_no_defaults_at_init", "_name_or_path", *_NORM_KEYS),
)
_WHY_RESIDUAL = "drafts of both kinds are published, and the wrong one is accepted a little less without a word"


def read_deepspec(config: dict[str, Any], tensors: frozenset[str], target: ModelConfig, faults: Faults) -> DraftConfig | None:
    """DeepSpec: `target_layer_ids` are outputs of layers."""
    fields = Fields(config, faults)
    count = config.get("draft_num_hidden_layers") or config.get("num_hidden_layers")
    layers = {**config, "num_hidden_layers": count}
    if isinstance(config.get("layer_types"), list) and isinstance(count, int):
        layers["layer_types"] = config["layer_types"][:count]  # copied from the target with the other keys
    return _read(layers, fields, fields.integers("target_layer_ids"), tensors, target, faults)


def read_original(config: dict[str, Any], tensors: frozenset[str], target: ModelConfig, faults: Faults) -> DraftConfig | None:
    """LlamaForCausalLMEagle3. A list in `eagle_config` is SpecForge's and counts outputs of layers; one beside the ordinary keys counts the
    states that layers are the input of, as engines do. Without a list: outputs of the second, the middle and the fourth last layer."""
    fields, nested = Fields(config, faults), Fields(config, faults).below("eagle_config")
    nested.refuse_others(_EAGLE_KEYS)
    for key, only in (
        *(("use_aux_hidden_state", True), ("use_input_layernorm_in_first_layer", True), ("use_last_layernorm", True)),
        *(("use_mtp_layernorm", False), ("parallel_draft_step", 1)),
    ):
        nested.refuse_unless(key, only, str(only).lower())
    fields.refuse_unless("parallel_drafting", False, "false")
    inputs, outputs = (table.integers("eagle_aux_hidden_state_layer_ids") for table in (fields, nested))
    if outputs is None and inputs is not None:
        outputs = [layer - 1 for layer in inputs]
    if outputs is None:
        outputs = usual_taps(target)
    merged = Fields({**config, **{key: nested.table[key] for key in _NORM_KEYS if key in nested}}, faults)
    return _read(config, merged, outputs, tensors, target, faults)


def read_speculators(config: dict[str, Any], tensors: frozenset[str], target: ModelConfig, faults: Faults) -> DraftConfig | None:
    """vLLM speculators: layers number the states that they are the input of."""
    fields = Fields(config, faults)
    fields.refuse_others(_SPECULATORS_KEYS)
    if "norm_before_residual" not in fields:
        faults.add(f"norm_before_residual is missing: {_WHY_RESIDUAL}")
    ids = fields.integers("eagle_aux_hidden_state_layer_ids")
    outputs = usual_taps(target) if ids is None else [layer - 1 for layer in ids]
    return _read(
        speculators_layers(fields, "llama"), Fields({"draft_vocab_size": 32000, **config}, faults), outputs, tensors, target, faults
    )


def usual_taps(target: ModelConfig) -> list[int]:
    """The layers that EAGLE-3 taps where nothing else is said, as outputs."""
    return [1, target.num_layers // 2 - 1, target.num_layers - 4]


def _read(
    layers: dict[str, Any], fields: Fields, taps: list[int] | None, tensors: frozenset[str], target: ModelConfig, faults: Faults
) -> DraftConfig | None:
    model = read_layers(layers, faults)
    if taps is None:
        faults.add(NO_TAPS, "fc", "input_norm.")
    if model is None:
        return None
    if model.num_layers != 1:
        faults.add(f"an EAGLE-3 draft of {model.num_layers} layers is not supported, supported: 1")
    norms: dict[str, Any] = {key: fields.flag(key, False) for key in _NORM_KEYS}
    if norms["norm_before_fc"] and norms["fc_norm"]:
        faults.add("norm_before_fc and fc_norm are both true, allowed: one of them")
    return DraftConfig(
        method="eagle3",
        model=replace(model, num_layers=1, qk_norm="layers.0.self_attn.q_norm.weight" in tensors),
        taps=tuple(taps or ()),
        target_hidden_size=fields.integer("target_hidden_size", None, 1) or target.hidden_size,
        target_num_layers=fields.integer("num_target_layers", None, 1) or target.num_layers,
        draft_vocab_size=fields.integer("draft_vocab_size", None, 1) or model.vocab_size,
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        trained_steps=fields.integer("ttt_length", None, 1),
        **norms,
    )
