"""GGUF checkpoints (llama.cpp) as Hugging Face ones: names, row order, config. What differs between architectures: `gguf_families`.

llama.cpp rotates neighbouring pairs where Hugging Face rotates halves, so for architecture `llama` and those derived from it its converter
reorders the rows of q and k within each head to 0, D/2, 1, D/2+1, ...; `read` undoes that. The other architectures keep the order.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import TensorInfo, majority_dtype
from dspark.converters.readers.gguf_experts import expert_config
from dspark.converters.readers.gguf_families import ARCHITECTURES
from dspark.converters.readers.gguf_metadata import Metadata
from dspark.converters.readers.gguf_names import Place, place_tensors
from dspark.converters.readers.gguf_parts import GgufParts
from dspark.converters.readers.gguf_rope import FACTOR_TENSORS, rope_scaling
from dspark.converters.readers.gguf_tokenizer import bundle_from_metadata
from dspark.converters.tokenizer_files import TokenizerBundle, load_gguf_tokenizer
from dspark.runtime.spec.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GgufReader:
    """One .gguf file, or any part of a split one."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufParts(path)
        self._meta = Metadata(self._file.metadata, path)
        arch = self._meta.architecture
        if arch not in ARCHITECTURES:
            raise UnsupportedError(f"GGUF architecture '{arch}' is not supported, supported: {', '.join(ARCHITECTURES)}")
        self._row = ARCHITECTURES[arch]
        if self._meta.get("expert_count") and self._row.shares_add_up is None:
            names = [name for name, row in ARCHITECTURES.items() if row.shares_add_up is not None]
            raise UnsupportedError(f"GGUF architecture '{arch} with experts' is not supported, supported with experts: {', '.join(names)}")
        weights = {name: tensor for name, tensor in self._file.tensors.items() if name not in FACTOR_TENSORS}
        self._places = place_tensors(weights, arch, path)

    def config(self) -> dict[str, Any]:
        try:
            return self._config()
        except (TypeError, ValueError, ZeroDivisionError) as error:  # a text where a number belongs, no heads
            raise InputError(f"'{self.path}' has metadata of the wrong kind ({error})", "download it again") from error

    def _config(self) -> dict[str, Any]:
        meta, tensors = self._meta, self._file.tensors
        embedding = tensors.get("token_embd.weight")
        if embedding is None:
            raise InputError(f"'{self.path}' has no token_embd.weight", "use a GGUF of a whole model")
        heads, kv_heads = meta.head_counts()
        size, rotary = meta.head_dim(), meta.get("rope.dimension_count")
        if (rotary or size) != size and self._row.family != "phi3":
            what = f"GGUF {meta.architecture} with heads of {size} and {rotary} rotated dimensions is not supported"
            raise UnsupportedError(what, "supported: the same number")
        config = {
            "architectures": [self._row.hugging_face],
            "model_type": self._row.family,
            "vocab_size": embedding.shape[0],
            "hidden_size": meta.need("embedding_length"),
            "intermediate_size": meta.uniform("feed_forward_length"),
            "num_hidden_layers": meta.need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": size,
            "max_position_embeddings": meta.need("context_length"),
            "rms_norm_eps": meta.short_float("attention.layer_norm_rms_epsilon"),
            "rope_theta": meta.short_float("rope.freq_base", 10000.0),
            "rope_scaling": rope_scaling(meta, self._file),
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            **self._special_ids(),
        }
        experts = expert_config(meta, tensors, bool(self._row.shares_add_up)) if meta.get("expert_count") else {}
        return config | self._row.extra(meta) | experts

    def generation_config(self) -> dict[str, Any] | None:
        return {key: value for key, value in self._special_ids().items() if value not in (None, [])} or None

    def tensors(self) -> dict[str, TensorInfo]:
        return {name: self._info(place) for name, place in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """Decoded to float32, whatever the block type: the writer rounds once, to the engine's dtype. Of a stack, one expert is decoded."""
        import torch

        place = self._places[name]
        weight = torch.from_numpy(self._file.decode_rows(place.source, place.first_row, place.num_rows)).reshape(place.shape)
        module = name.rpartition(".")[0]
        if self._row.norm_offset and module.endswith("norm"):
            return weight - 1
        if not self._row.permuted or not module.endswith(("q_proj", "k_proj")):
            return weight
        heads, kv_heads = self._meta.head_counts()
        return unpermute_rows(weight, heads if module.endswith("q_proj") else kv_heads)

    def storage_dtype(self) -> str:
        """Block-quantized matrices have no float dtype of their own: bfloat16 holds them with far less error than their rounding."""
        plain = {name: info for name, info in self.tensors().items() if info.dtype in _PLAIN.values()}
        matrices = [info for info in self.tensors().values() if len(info.shape) == 2]
        blocks = sum(info.num_elements for info in matrices if info.dtype not in _PLAIN.values())
        return "bfloat16" if 2 * blocks > sum(info.num_elements for info in matrices) else majority_dtype(plain)

    def tokenizer(self) -> TokenizerBundle | None:
        return bundle_from_metadata(self._meta.values, self.path)

    def reference_tokenizer(self) -> Any:
        """transformers' own reading of a SentencePiece file, None for the rest, which decode every text to itself.

        transformers 5.24 gives some byte-level files another tokenizer than the model's own (it knows few `tokenizer.ggml.pre`) and leaves
        out what Phi-3 does after special tokens.
        """
        values = self._meta.values
        sentencepiece = values.get("tokenizer.ggml.model") == "llama" and values.get("tokenizer.ggml.add_space_prefix", True)
        return load_gguf_tokenizer(self._file.paths[0]) if sentencepiece and self._meta.architecture == "llama" else None

    def files(self) -> list[Path]:
        return list(self._file.paths)

    def _info(self, place: Place) -> TensorInfo:
        block_type = self._file.tensors[place.source].type_name
        return TensorInfo(_PLAIN.get(block_type, block_type), place.shape)

    def _special_ids(self) -> dict[str, Any]:
        ids = {"bos_token_id": self._meta.token_id("bos"), "eos_token_id": self._meta.end_ids()}
        return {**ids, "pad_token_id": self._meta.token_id("padding")}


def unpermute_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [num_heads * D, ...] from llama.cpp's order 0, D/2, 1, ... within each head to Hugging Face's 0, 1, 2, ..."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
