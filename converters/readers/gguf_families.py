"""GGUF architectures: one row each, with what its tensors are called, how they are stored, and what its config says beyond the common part.

A row counts when its family is one of the runtime's. Constants that stand in no file (Gemma's score scale, SmolLM3's layers without rope)
are those of llama.cpp's `src/llama-model.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.converters.readers.gguf_metadata import Metadata
from dspark.runtime.models import FAMILIES
from dspark.runtime.spec.errors import UnsupportedError

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NAMES = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}


def _no_window(metadata: Metadata) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window")
    if window:
        what = f"GGUF {metadata.architecture} with attention.sliding_window {window} is not supported"
        raise UnsupportedError(what, "supported there: llama, gemma2, gemma3, phi3")
    return {}


def _qwen_moe(metadata: Metadata) -> dict[str, Any]:
    metadata.positive("expert_count")  # without it the model would read as one of the family's default size
    return _no_window(metadata)


def _llama(metadata: Metadata) -> dict[str, Any]:
    """Mixtral is a llama with experts, Mistral one with a window."""
    window = metadata.get("attention.sliding_window")
    if metadata.get("expert_count"):
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": window or None}
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window} if window else {}


def _score_scale(metadata: Metadata, layers_of_27b: int) -> dict[str, Any]:
    """Gemma divides scores by the root of the head size; its 27B models, by that of hidden size / heads."""
    is_27b = metadata.need("block_count") == layers_of_27b
    scale = metadata.need("embedding_length") // metadata.head_counts()[0] if is_27b else metadata.head_dim()
    return {"query_pre_attn_scalar": scale, "hidden_activation": "gelu_pytorch_tanh"}


def _layer_types(metadata: Metadata, full_every: int) -> list[str]:
    pattern = metadata.get("attention.sliding_window_pattern", full_every)
    if pattern != full_every:
        what = f"GGUF {metadata.architecture} with attention.sliding_window_pattern {pattern!r:.40} is not supported"
        raise UnsupportedError(what, f"supported: {full_every}")
    return ["sliding_attention" if (i + 1) % full_every else "full_attention" for i in range(metadata.need("block_count"))]


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_score_scale(metadata, layers_of_27b=46),
        "attn_logit_softcapping": metadata.short_float("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.short_float("final_logit_softcapping", 30.0),
        "sliding_window": metadata.get("attention.sliding_window", 4096),
        "layer_types": _layer_types(metadata, full_every=2),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    cap = metadata.get("final_logit_softcapping")
    return {
        **_score_scale(metadata, layers_of_27b=62),
        "final_logit_softcapping": cap or None,
        "sliding_window": metadata.need("attention.sliding_window"),
        "layer_types": _layer_types(metadata, full_every=6),
        "rope_theta": metadata.short_float("rope.freq_base"),
        "rope_local_base_freq": metadata.short_float("rope.freq_base_swa", 10000.0),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    """A window of 0 is none. The rotated part of a head may be smaller than the head."""
    rotary, size = metadata.get("rope.dimension_count"), metadata.head_dim()
    original = metadata.get("rope.scaling.original_context_length") or metadata.need("context_length")
    return {
        "sliding_window": metadata.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": (rotary or size) / size,
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    return {
        **_no_window(metadata),
        "embedding_multiplier": metadata.short_float("embedding_scale"),
        "residual_multiplier": metadata.short_float("residual_scale"),
        "attention_multiplier": metadata.short_float("attention.scale"),
        "logits_scaling": metadata.short_float("logit_scale"),
    }


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    """Every fourth layer has no rope."""
    layers = range(metadata.need("block_count"))
    return {**_no_window(metadata), "no_rope_layers": [int((i + 1) % 4 != 0) for i in layers], "use_sliding_window": False}


@dataclass(frozen=True)
class GgufArchitecture:
    """family, hugging_face: of the runtime's table. names: of a layer's tensors, where they differ from Llama's.

    permuted: rows of q and k are stored in pairs (see `unpermute_rows`). norm_offset: norms are stored as 1 + weight.
    extra: keys of the config beyond the common ones. shares_add_up: whether the shares of the experts that a token takes add up to 1, which
    stands in no file; None where files of this architecture have no experts.
    """

    family: str
    hugging_face: str
    names: Mapping[str, str] = field(default_factory=dict)
    permuted: bool = False
    norm_offset: bool = False
    extra: Callable[[Metadata], dict[str, Any]] = _no_window
    shares_add_up: bool | None = None

    def layer_names(self) -> dict[str, str]:
        return {**_LAYER_NAMES, **self.names}


_ROWS: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM", permuted=True, extra=_llama, shares_add_up=True),
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": GgufArchitecture("qwen2_moe", "Qwen2MoeForCausalLM", extra=_qwen_moe, shares_add_up=False),
    "qwen3moe": GgufArchitecture("qwen3_moe", "Qwen3MoeForCausalLM", extra=_qwen_moe, shares_add_up=True),
    "gemma2": GgufArchitecture("gemma2", "Gemma2ForCausalLM", _GEMMA_NAMES, norm_offset=True, extra=_gemma2),
    "gemma3": GgufArchitecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA_NAMES, norm_offset=True, extra=_gemma3),
    "phi3": GgufArchitecture("phi3", "Phi3ForCausalLM", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, extra=_phi3),
    "granite": GgufArchitecture("granite", "GraniteForCausalLM", permuted=True, extra=_granite),
    "olmo2": GgufArchitecture("olmo2", "Olmo2ForCausalLM", _POST_NORMS),
    "smollm3": GgufArchitecture("smollm3", "SmolLM3ForCausalLM", permuted=True, extra=_smollm3),
}
ARCHITECTURES = {name: row for name, row in _ROWS.items() if row.family in FAMILIES}
