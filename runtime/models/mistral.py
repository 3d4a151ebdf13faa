"""Mistral: Llama's layout with sliding-window attention in every layer (a null window is full attention)."""

from dspark.runtime.models.base import Family, decoder_tensors

MISTRAL = Family("mistral", ("mistral",), ("MistralForCausalLM",), decoder_tensors)
