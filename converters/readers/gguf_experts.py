"""Experts in a GGUF file's config: what its metadata says, what its tensors show, and what llama.cpp fixes for the architecture.

Keys: llama.cpp's `conversion/base.py` and `conversion/qwen.py`. What stands in no file: `src/models/{llama,qwen2moe,qwen3moe}.cpp`, which
take a softmax over all experts before the choice, and know for each architecture whether the shares of those chosen then add up to 1.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from dspark.converters.readers.gguf_metadata import Metadata
from dspark.runtime.spec.errors import UnsupportedError

# keys of other architectures' routers -> the values that change nothing
_NEUTRAL = {"expert_weights_scale": (0, 1), "expert_gating_func": (0, 1), "expert_group_count": (0, 1)}  # gating 1: softmax


def expert_config(metadata: Metadata, tensors: Container[str], shares_add_up: bool) -> dict[str, Any]:
    """Keys of a Hugging Face config beyond those of a model without experts. tensors: the file's names.

    `decoder_sparse_step` and `mlp_only_layers` stand in no file: every layer has experts, since llama.cpp neither writes nor reads a file
    in which one has not. Widths that a file leaves out are llama.cpp's: feed_forward_length / experts taken, and feed_forward_length for
    the shared expert. Mixtral's experts are feed_forward_length wide.
    Raises InputError for counts that are no positive integers, UnsupportedError for a router that works otherwise.
    """
    _refuse_other_routers(metadata, shares_add_up)
    used, inner = metadata.positive("expert_used_count"), metadata.uniform("feed_forward_length")
    return {
        "num_experts": metadata.positive("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.get("expert_feed_forward_length") or inner // used,
        "shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length") or inner,
        "norm_topk_prob": shares_add_up,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
    }


def _refuse_other_routers(metadata: Metadata, shares_add_up: bool) -> None:
    """llama.cpp reads none of these keys here (or applies a scale that the family has not): a file that has them is another model."""
    neutral = _NEUTRAL | {"expert_weights_norm": (shares_add_up,)}
    odd = [f"{key} {metadata.get(key)}" for key, values in neutral.items() if metadata.get(key, values[0]) not in values]
    if odd:
        what = f"GGUF {metadata.architecture} with {', '.join(odd)} is not supported"
        raise UnsupportedError(what, "convert the model's Hugging Face checkpoint")
