"""GGUF files of transformers models, as llama.cpp's converter writes them.

Tensor names come from the gguf package's own table, so that they are no echo of the reader's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from case_checkpoints import permute_rows

ARCHITECTURE_OF = {"mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
_PERMUTED = ("llama", "granite", "smollm3")


Change = Callable[[str, Any], Iterator[tuple[str, Any]]]


def write_model_gguf(
    path: Path, model: Any, block_type: str | None = None, divisors: Any = None, change: Change | None = None, **metadata: Any
) -> Path:
    """block_type: of the matrices but routers, None for F32. divisors: a `rope_freqs.weight`. change: a tensor of the file (name, float32
    array) -> what is written in its place. metadata: keys below the architecture's prefix, None for one that is left out.
    """
    import gguf

    config = model.config
    arch = ARCHITECTURE_OF.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(path), arch)
    _add_sizes(writer, config)
    if _num_experts(config):
        _experts(writer, config)
    extra = {"gemma2": _gemma, "gemma3": _gemma, "phi3": _phi3, "granite": _granite, "llama": _llama}.get(arch)
    if extra:
        extra(writer, config)
    for key, value in metadata.items():
        writer.kv_data[0].pop(f"{arch}.{key}", None)
        if value is not None:
            add = writer.add_bool if isinstance(value, bool) else writer.add_uint32 if isinstance(value, int) else writer.add_float32
            add(f"{arch}.{key}", value)
    names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers)
    tied = bool(config.tie_word_embeddings)
    for name, array in _parts(model.state_dict()):
        if tied and name == "lm_head.weight":
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and arch in _PERMUTED:
            array = permute_rows(array, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        for changed, value in change(theirs, array) if change else [(theirs, array)]:
            _add_tensor(writer, changed, value, block_type)
    if divisors is not None:
        _add_tensor(writer, "rope_freqs.weight", divisors, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_gguf(source: Path, directory: Path, count: int, stem: str = "m") -> list[Path]:
    """What llama-gguf-split does: the metadata in the first part, the tensors spread over all."""
    import gguf

    whole = gguf.GGUFReader(str(source))
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(str(path), whole.fields["general.architecture"].contents() if number == 0 else "")
        if number == 0:
            for field in whole.fields.values():
                if field.name.startswith("GGUF.") or field.name == "general.architecture":
                    continue
                element = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], element)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def _add_tensor(writer: Any, name: str, array: Any, block_type: str | None) -> None:
    import gguf
    import numpy as np

    array = np.ascontiguousarray(array, np.float32)
    if block_type is None or array.ndim < 2 or "ffn_gate_inp" in name:
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType[block_type]
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def _parts(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors as float32 arrays; stacks of gate and up projections [E, 2 * width, hidden] as two; the shared expert's gate flat."""
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            half = array.shape[1] // 2
            yield name.replace("gate_up_proj", "gate_proj.weight"), array[:, :half]
            yield name.replace("gate_up_proj", "up_proj.weight"), array[:, half:]
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", array
        else:
            yield name, array[0] if name.endswith("shared_expert_gate.weight") else array


def _num_experts(config: Any) -> int:
    return getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0)


def _experts(writer: Any, config: Any) -> None:
    writer.add_expert_count(_num_experts(config))
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


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
