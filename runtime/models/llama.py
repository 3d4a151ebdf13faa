"""Llama 1-3.x and the models that share its layout (SmolLM2, TinyLlama, Yi, ...). Attention and feed-forward biases follow the config."""

from dspark.runtime.models.base import Family, decoder_tensors

LLAMA = Family("llama", ("llama",), ("LlamaForCausalLM",), decoder_tensors)
