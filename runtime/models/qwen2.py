"""Qwen2 and Qwen2.5: Llama's layout with biases on q, k and v; a sliding window only where the config switches it on."""

from dspark.runtime.models.base import Family, decoder_tensors

QWEN2 = Family("qwen2", ("qwen2",), ("Qwen2ForCausalLM",), decoder_tensors)
