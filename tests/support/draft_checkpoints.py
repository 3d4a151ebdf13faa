"""Tiny random drafting heads in every packaging, and the truth about each: what its numbers mean, said once more beside the config.

The truth is what the straight-line implementation (`draft_reference`) works from, so that a fault in reading a config shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB_SIZE

HIDDEN, TARGET_LAYERS, MASK, THETA, EPS = 64, 8, 3, 10000.0, 1e-6
REDUCED = 96
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """Names of tensors are plain ones: DeepSpec's, `layers.0` for EAGLE-3's layer. states: indices into transformers' hidden_states."""

    method: str
    states: tuple[int, ...]
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    inner: int = 96
    block: int = 5
    anchor_first: bool = True
    markov: str | None = None
    rank: int = 8
    confidence: bool = False
    confidence_with_markov: bool = True
    vocab: int = VOCAB_SIZE
    own_embedding: bool = True
    own_head: bool = True
    qk_norm: bool = True
    bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class MadeDraft:
    """tensors: by plain name."""

    path: Path
    truth: Truth
    tensors: Tensors
    config: dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """config: the packaging's keys for a truth. rename: plain tensor names -> published ones. extra: tensors that only training reads."""

    truth: Truth
    config: Callable[[Truth], dict[str, Any]]
    rename: Callable[[str], str] = str
    extra: Callable[[Truth, Tensors], Tensors] = field(default=lambda truth, tensors: {})


def _layer_keys(truth: Truth, model_type: str = "qwen3") -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "intermediate_size": truth.inner,
        "num_hidden_layers": truth.layers,
        "num_attention_heads": truth.heads,
        "num_key_value_heads": truth.kv_heads,
        "head_dim": truth.head_dim,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
        "attention_bias": truth.bias,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "max_position_embeddings": 256,
        "vocab_size": VOCAB_SIZE,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    }


def _outputs(truth: Truth) -> list[int]:
    return [state - 1 for state in truth.states]


def _deepspec(truth: Truth) -> dict[str, Any]:
    keys: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "block_size": truth.block, "mask_token_id": MASK, "num_anchors": 512}
    keys |= {"target_layer_ids": _outputs(truth), "num_target_layers": TARGET_LAYERS, "markov_rank": truth.rank if truth.markov else 0}
    if truth.markov:
        keys["markov_head_type"] = truth.markov
    keys["enable_confidence_head"] = truth.confidence
    if truth.confidence:
        keys["confidence_head_with_markov"] = truth.confidence_with_markov
    return {**_layer_keys(truth), **keys}


def _zlab(truth: Truth) -> dict[str, Any]:
    keys = {"architectures": ["DFlashDraftModel"], "block_size": truth.block, "num_target_layers": TARGET_LAYERS}
    keys |= {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": _outputs(truth)}, "rope_theta": THETA, "rope_scaling": None}
    return {key: value for key, value in {**_layer_keys(truth), **keys}.items() if key != "rope_parameters"}


def _specforge(truth: Truth) -> dict[str, Any]:
    nested = {"mask_token_id": MASK, "target_layer_ids": _outputs(truth), "projector_type": "dspark", "markov_rank": truth.rank}
    nested |= {
        "markov_head_type": truth.markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": truth.confidence_with_markov,
    }
    nested |= {"confidence_head_alpha": 1.0, "attention_mode": "gqa"}
    keys: dict[str, Any] = {"architectures": ["DSparkDraftModel"], "block_size": truth.block, "num_target_layers": TARGET_LAYERS}
    return {**_layer_keys(truth), **keys, "dflash_config": nested, "draft_vocab_size": truth.vocab}


def _speculators(truth: Truth) -> dict[str, Any]:
    keys: dict[str, Any] = {"speculators_model_type": truth.method, "speculators_config": {"algorithm": truth.method}, "dtype": "bfloat16"}
    keys |= {"transformer_layer_config": _layer_keys(truth), "draft_vocab_size": truth.vocab, "block_size": truth.block}
    keys |= {"aux_hidden_state_layer_ids": list(truth.states), "mask_token_id": MASK, "target_hidden_size": None}
    if truth.method == "dspark":
        keys |= {"sample_from_anchor": truth.anchor_first, "markov_rank": truth.rank, "markov_head_type": truth.markov}
        keys |= {"enable_confidence_head": truth.confidence, "confidence_head_with_markov": truth.confidence_with_markov}
    return keys


def _eagle_deepspec(truth: Truth) -> dict[str, Any]:
    keys = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": _outputs(truth), "num_target_layers": TARGET_LAYERS}
    return {**_layer_keys(truth), **keys, "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1}


def _eagle_original(truth: Truth) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLMEagle3"], **_layer_keys(truth, "llama"), "draft_vocab_size": truth.vocab}


def _eagle_specforge(truth: Truth) -> dict[str, Any]:
    flags = {"fc_norm": truth.fc_norm, "norm_output": truth.norm_output}
    nested = {"eagle_aux_hidden_state_layer_ids": _outputs(truth), "use_aux_hidden_state": True}
    return {**_eagle_original(truth), **flags, "eagle_config": nested}


def _eagle_speculators(truth: Truth) -> dict[str, Any]:
    keys: dict[str, Any] = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": truth.vocab}
    keys |= {"transformer_layer_config": _layer_keys(truth, "llama"), "eagle_aux_hidden_state_layer_ids": list(truth.states)}
    return {**keys, "norm_before_residual": truth.norm_before_residual, "norm_before_fc": truth.norm_before_fc, "target_hidden_size": None}


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _known_targets(truth: Truth, tensors: Tensors) -> Tensors:
    """The mask of target tokens that `d2t` names."""
    known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    known[target_ids(tensors) if "d2t" in tensors else slice(None)] = True
    return {"t2d": known}


def target_ids(tensors: Tensors) -> torch.Tensor:
    """Target token of each draft token."""
    return tensors["d2t"] + torch.arange(tensors["d2t"].shape[0])


_SPARK = Truth("dspark", (2, 4, 7), markov="vanilla", confidence=True)
_FLASH = Truth("dflash", (0, 3, 6), heads=2, kv_heads=2, head_dim=32)
_EAGLE = Truth("eagle3", (2, 4, 5), layers=1)
KINDS: dict[str, Kind] = {
    "deepspec-vanilla": Kind(_SPARK, _deepspec),
    "deepspec-gated": Kind(replace(_SPARK, markov="gated", kv_heads=1, layers=3), _deepspec),
    "deepspec-rnn": Kind(replace(_SPARK, markov="rnn", confidence_with_markov=False), _deepspec),
    "deepspec-unsure": Kind(replace(_SPARK, confidence=False, bias=True, own_embedding=False, own_head=False), _deepspec),
    "deepspec-dflash": Kind(_FLASH, _deepspec),
    "zlab-dflash": Kind(replace(_FLASH, anchor_first=False, own_embedding=False, own_head=False, block=6), _zlab),
    "specforge-dspark": Kind(replace(_SPARK, own_embedding=False, own_head=False, vocab=REDUCED), _specforge, extra=_known_targets),
    "speculators-dspark": Kind(replace(_SPARK, vocab=REDUCED), _speculators, extra=_known_targets),
    "speculators-shifted": Kind(replace(_SPARK, anchor_first=False), _speculators),
    "speculators-dflash": Kind(replace(_FLASH, anchor_first=False, vocab=REDUCED), _speculators, extra=_known_targets),
    "eagle3-deepspec": Kind(replace(_EAGLE, states=(1, 2, 4, 5, 7)), _eagle_deepspec),
    "eagle3-original": Kind(replace(_EAGLE, vocab=REDUCED, qk_norm=False, own_embedding=False), _eagle_original, _midlayer, _known_targets),
    "eagle3-specforge": Kind(
        replace(_EAGLE, states=(1, 5, 7), qk_norm=False, vocab=REDUCED, fc_norm=True, norm_output=True), _eagle_specforge, _midlayer
    ),
    "eagle3-speculators": Kind(
        replace(_EAGLE, qk_norm=False, vocab=REDUCED, norm_before_residual=True, norm_before_fc=True, heads=2, head_dim=32),
        _eagle_speculators,
    ),
}
BLOCK_KINDS = [name for name, kind in KINDS.items() if kind.truth.method != "eagle3"]
EAGLE_KINDS = [name for name in KINDS if name not in BLOCK_KINDS]


def make_draft(
    directory: Path,
    kind: str,
    seed: int = 0,
    config_changes: dict[str, Any] | None = None,
    change_tensors: Callable[[Tensors], Tensors] = dict,
    **truth_changes: Any,
) -> MadeDraft:
    """Write one draft checkpoint. config_changes: keys of config.json that are set, or taken out where the value is None."""
    from safetensors.torch import save_file

    made, truth = KINDS[kind], replace(KINDS[kind].truth, **truth_changes)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = change_tensors(_random_tensors(truth, seed))
    config = {**made.config(truth), **(config_changes or {})}
    config = {key: value for key, value in config.items() if not (config_changes and key in config_changes and value is None)}
    published = {made.rename(name): tensor.contiguous() for name, tensor in {**tensors, **made.extra(truth, tensors)}.items()}
    save_file(published, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return MadeDraft(directory, truth, tensors, config)


def _random_tensors(truth: Truth, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, spread: float = 0.15) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    def norm(width: int) -> torch.Tensor:
        return 1 + matrix(width, spread=0.2)

    width, eagle = len(truth.states) * HIDDEN, truth.method == "eagle3"
    tensors: Tensors = {"fc.weight": matrix(HIDDEN, width), "norm.weight": norm(HIDDEN)}
    if truth.own_embedding:
        tensors["embed_tokens.weight"] = matrix(VOCAB_SIZE, HIDDEN, spread=1.0)
    if truth.own_head:
        tensors["lm_head.weight"] = matrix(truth.vocab, HIDDEN, spread=0.3)
    if truth.vocab < VOCAB_SIZE:
        ids = torch.randperm(VOCAB_SIZE, generator=generator)[: truth.vocab].sort().values
        tensors["d2t"] = ids - torch.arange(truth.vocab)
    if truth.norm_before_fc:
        tensors["input_norm.weight"] = norm(width)
    if truth.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": norm(HIDDEN) for i in range(len(truth.states))}
    if not eagle:
        tensors["hidden_norm.weight"] = norm(HIDDEN)
    for index in range(truth.layers):
        layer = f"layers.{index}"
        names = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if eagle else ()))
        tensors |= {f"{layer}.{name}.weight": norm(HIDDEN) for name in names}
        sizes = {"q": truth.heads * truth.head_dim, "k": truth.kv_heads * truth.head_dim, "v": truth.kv_heads * truth.head_dim}
        for name, size in sizes.items():
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = matrix(size, HIDDEN * (2 if eagle else 1))
        tensors[f"{layer}.self_attn.o_proj.weight"] = matrix(HIDDEN, sizes["q"])
        if truth.bias:
            tensors |= {f"{layer}.self_attn.{name}_proj.bias": matrix(size, spread=0.4) for name, size in {**sizes, "o": HIDDEN}.items()}
        if truth.qk_norm:
            tensors |= {f"{layer}.self_attn.{name}_norm.weight": norm(truth.head_dim) for name in "qk"}
        tensors |= {f"{layer}.mlp.{name}_proj.weight": matrix(truth.inner, HIDDEN) for name in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = matrix(HIDDEN, truth.inner)
    if truth.markov:
        tensors["markov_head.markov_w1.weight"] = matrix(VOCAB_SIZE, truth.rank, spread=1.0)
        tensors["markov_head.markov_w2.weight"] = matrix(truth.vocab, truth.rank, spread=0.5)
        inputs = {"gated": (truth.rank, HIDDEN + truth.rank, "gate"), "rnn": (3 * truth.rank, 2 * truth.rank + HIDDEN, "joint")}
        if truth.markov in inputs:
            outputs, width, name = inputs[truth.markov]
            tensors[f"markov_head.{name}_proj.weight"] = matrix(outputs, width)
            tensors[f"markov_head.{name}_proj.bias"] = matrix(outputs, spread=0.4)
    if truth.confidence:
        width = HIDDEN + (truth.rank if truth.markov and truth.confidence_with_markov else 0)
        tensors |= {"confidence_head.proj.weight": matrix(1, width, spread=0.2), "confidence_head.proj.bias": matrix(1)}
    return tensors
