"""GGUF checkpoints (llama.cpp) of the architectures llama (Mistral too), qwen2 and qwen3, as Hugging Face ones.

llama.cpp rotates neighbouring pairs where Hugging Face rotates halves, so for architecture `llama` its converter reorders the rows of q
and k within each head to 0, D/2, 1, D/2+1, ...; `read` undoes that. The other architectures keep the order.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.converters.readers.base import TensorInfo, majority_dtype
from dspark.converters.readers.gguf_file import GgufTensor
from dspark.converters.readers.gguf_parts import GgufParts
from dspark.converters.readers.gguf_tokenizer import bundle_from_metadata
from dspark.converters.tokenizer_files import TokenizerBundle, load_gguf_tokenizer
from dspark.runtime.spec.errors import InputError, UnsupportedError

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
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
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Llama 3.1 and 3.2: what the divisors in rope_freqs.weight were computed with, the factor apart
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufReader:
    """One .gguf file, or any part of a split one."""

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufParts(path)
        self._meta = self._file.metadata
        self._arch = str(self._meta.get("general.architecture", "unknown"))
        if self._arch not in ARCHITECTURES or self._key("expert_count"):
            what = f"{self._arch} with experts" if self._arch in ARCHITECTURES else self._arch
            raise UnsupportedError(f"GGUF architecture '{what}' is not supported, supported: {', '.join(ARCHITECTURES)}")
        self._name_of = {hugging_face_name(name): name for name in self._file.tensors if name != ROPE_FACTORS}

    def config(self) -> dict[str, Any]:
        heads, kv_heads = self._head_counts()
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None:
            raise InputError(f"'{self.path}' has no token_embd.weight", "use a GGUF of a whole model")
        config = {
            "architectures": [ARCHITECTURES[self._arch]],
            "model_type": self._arch,
            "vocab_size": embedding.shape[0],
            "hidden_size": self._need("embedding_length"),
            "intermediate_size": self._uniform("feed_forward_length"),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self._head_dim(heads),
            "max_position_embeddings": self._need("context_length"),
            "rms_norm_eps": _short_float(self._need("attention.layer_norm_rms_epsilon")),
            "rope_theta": _short_float(self._key("rope.freq_base", 10000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._file.tensors,
            "attention_bias": "blk.0.attn_output.bias" in self._file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._file.tensors,
            "bos_token_id": self._meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._end_ids(),
            "pad_token_id": self._meta.get("tokenizer.ggml.padding_token_id"),
        }
        window = self._key("attention.sliding_window")
        if window and self._arch == "llama":
            config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        elif window:
            raise UnsupportedError(f"GGUF {self._arch} with attention.sliding_window {window} is not supported", "supported: llama")
        return config

    def generation_config(self) -> dict[str, Any] | None:
        ids = {
            "bos_token_id": self._meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._end_ids(),
            "pad_token_id": self._meta.get("tokenizer.ggml.padding_token_id"),
        }
        return {key: value for key, value in ids.items() if value not in (None, [])} or None

    def tensors(self) -> dict[str, TensorInfo]:
        return {ours: self._info(self._file.tensors[theirs]) for ours, theirs in self._name_of.items()}

    def read(self, name: str) -> torch.Tensor:
        """Decoded to float32, whatever the block type: the writer rounds once, to the engine's dtype."""
        import torch

        weight = torch.from_numpy(self._file.decode(self._name_of[name]))
        if self._arch != "llama":
            return weight
        heads, kv_heads = self._head_counts()
        if name.rsplit(".", 1)[0].endswith("q_proj"):
            return unpermute_rows(weight, heads)
        return unpermute_rows(weight, kv_heads) if name.rsplit(".", 1)[0].endswith("k_proj") else weight

    def storage_dtype(self) -> str:
        """Block-quantized matrices have no float dtype of their own: bfloat16 holds them with far less error than their rounding."""
        plain = {name: info for name, info in self.tensors().items() if info.dtype in _PLAIN.values()}
        matrices = [info for info in self.tensors().values() if len(info.shape) == 2]
        blocks = sum(info.num_elements for info in matrices if info.dtype not in _PLAIN.values())
        return "bfloat16" if 2 * blocks > sum(info.num_elements for info in matrices) else majority_dtype(plain)

    def tokenizer(self) -> TokenizerBundle | None:
        return bundle_from_metadata(self._meta, self.path)

    def reference_tokenizer(self) -> Any:
        """transformers' own reading of a SentencePiece file, None for the rest, which decode every text to itself.

        transformers 5.24 gives some byte-level files another tokenizer than the model's own (it knows few `tokenizer.ggml.pre`) and leaves
        out what Phi-3 does after special tokens.
        """
        sentencepiece = self._meta.get("tokenizer.ggml.model") == "llama" and self._meta.get("tokenizer.ggml.add_space_prefix", True)
        return load_gguf_tokenizer(self._file.paths[0]) if sentencepiece and self._arch == "llama" else None

    def files(self) -> list[Path]:
        return list(self._file.paths)

    def _info(self, tensor: GgufTensor) -> TensorInfo:
        return TensorInfo(_PLAIN.get(tensor.type_name, tensor.type_name), tensor.shape)

    def _key(self, key: str, default: Any = None) -> Any:
        return self._meta.get(f"{self._arch}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._key(key)
        if value is None:
            raise InputError(f"'{self.path}' lacks the metadata key {self._arch}.{key}", "use a GGUF of a whole model")
        return value

    def _uniform(self, key: str) -> int:
        """A size that may be given per layer; the layers must agree."""
        value = self._need(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedError(f"GGUF with a different {key} in each layer is not supported ({value[:4]}...)")
            value = value[0]
        return int(value)

    def _head_counts(self) -> tuple[int, int]:
        heads = self._uniform("attention.head_count")
        return heads, self._uniform("attention.head_count_kv") if self._key("attention.head_count_kv") is not None else heads

    def _head_dim(self, heads: int) -> int:
        rotary = self._key("rope.dimension_count")
        size = int(self._key("attention.key_length") or rotary or self._need("embedding_length") // heads)
        if (rotary or size) != size or self._key("attention.value_length", size) != size:
            raise UnsupportedError(
                f"GGUF with head sizes key {size}, value {self._key('attention.value_length', size)}, rotary {rotary} is not supported",
                "supported: one size for all three",
            )
        return size

    def _end_ids(self) -> int | list[int] | None:
        """Ids that end a text: end of sequence, then end of turn and end of message where the model has them."""
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = list(dict.fromkeys(self._meta[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in self._meta))
        return ids[0] if len(ids) == 1 else ids or None

    def _rope_scaling(self) -> dict[str, Any] | None:
        if ROPE_FACTORS in self._file.tensors:
            return self._llama3_scaling()
        factor = self._key("rope.scaling.factor", self._key("rope.scale_linear"))
        kind = self._key("rope.scaling.type", "linear" if factor not in (None, 0, 1) else "none")
        if kind == "none" or factor in (None, 0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn" or self._key("rope.scaling.yarn_log_multiplier"):
            raise UnsupportedError(f"GGUF rope scaling '{kind}' of this kind is not supported, supported: none, linear, yarn, llama3")
        original = self._need("rope.scaling.original_context_length")
        table = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        gain = self._key("rope.scaling.attn_factor", 1.0)
        if gain != 1.0:  # llama.cpp multiplies its own temperature by it, Hugging Face replaces the temperature
            table["attention_factor"] = gain * (1 + 0.1 * math.log(factor))
        betas = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
        return table | {ours: self._key(theirs) for ours, theirs in betas.items() if self._key(theirs) is not None}

    def _llama3_scaling(self) -> dict[str, Any]:
        """The llama3 settings whose divisors are the ones in the file; refused when they are no such divisors."""
        import numpy as np

        stored = self._file.decode(ROPE_FACTORS).ravel()
        factor = float(stored.max())
        theta = float(self._key("rope.freq_base", 10000.0))
        wavelength = 2 * np.pi * theta ** (np.arange(stored.size) / stored.size)
        original, low, high = (_LLAMA3[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not np.allclose(stored, expected, rtol=1e-3):
            what = f"'{self.path}' has {ROPE_FACTORS} that are not those of Llama 3.1 or 3.2"
            raise UnsupportedError(what, "convert the original checkpoint")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def hugging_face_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; an unknown name stays, so that the check of names reports it."""
    stem, _, leaf = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    return name


def unpermute_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows [num_heads * D, ...] from llama.cpp's order 0, D/2, 1, ... within each head to Hugging Face's 0, 1, 2, ..."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _short_float(value: float) -> float:
    """A float32 that was written from a short decimal, as that decimal: 9.999999747378752e-06 -> 1e-05."""
    return float(f"{value:.7g}")
