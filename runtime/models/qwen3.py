"""Qwen3 (dense): Llama's layout with an RMS norm over each head of q and k before rope; head_dim is its own number."""

from dspark.runtime.models.base import Family, decoder_tensors

QWEN3 = Family("qwen3", ("qwen3",), ("Qwen3ForCausalLM",), decoder_tensors)
