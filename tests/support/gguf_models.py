"""GGUF files of transformers models, as llama.cpp's converter writes them.

Tensor names come from the gguf package's own table, so that they are no echo of the reader's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from case_checkpoints import permute_rows

ARCHITECTURE_OF = {"mistral": "llama", "gemma3_text": "gemma3"}
_PERMUTED = ("llama", "granite", "smollm3")


def write_model_gguf(path: Path, model: Any, block_type: str | None = None, divisors: Any = None, **metadata: Any) -> Path:
    """block_type: of the matrices, None for F32. divisors: a `rope_freqs.weight`. metadata: keys below the architecture's prefix."""
    import gguf

    config = model.config
    arch = ARCHITECTURE_OF.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), arch)
    _add_sizes(writer, config)
    extra = {"gemma2": _gemma, "gemma3": _gemma, "phi3": _phi3, "granite": _granite, "llama": _llama}.get(arch)
    if extra:
        extra(writer, config)
    for key, value in metadata.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{arch}.{key}", value)
    names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers)
    tied = bool(config.tie_word_embeddings)
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and arch in _PERMUTED:
            array = permute_rows(array, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        _add_tensor(writer, names.get_name(name, try_suffixes=(".weight", ".bias")), array, block_type)
    if divisors is not None:
        _add_tensor(writer, "rope_freqs.weight", divisors, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: Any, name: str, array: Any, block_type: str | None) -> None:
    import gguf
    import numpy as np

    array = np.ascontiguousarray(array, np.float32)
    if block_type is None or array.ndim != 2:
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType[block_type]
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _ropes(config: Any) -> dict[str, Any]:
    """The rope table of the full layers (transformers keeps one per layer type for some families)."""
    table = config.rope_parameters
    return table.get("full_attention", table)


def _add_sizes(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    table = _ropes(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(table["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * table.get("partial_rotary_factor", 1.0)))
    if config.model_type != "granite":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if table["rope_type"] in ("linear", "yarn"):
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType(table["rope_type"]))
        writer.add_rope_scaling_factor(table["factor"])
        if table["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(table["original_max_position_embeddings"])


def _llama(writer: Any, config: Any) -> None:
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _gemma(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _phi3(writer: Any, config: Any) -> None:
    import numpy as np

    table = _ropes(config)
    original = config.original_max_position_embeddings
    writer.add_sliding_window(config.sliding_window or 0)
    writer.add_rope_scaling_orig_ctx_len(original)
    if table["rope_type"] == "longrope":
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(table[f"{length}_factor"], np.float32))


def _granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
