"""Checkpoints with the faults and oddities that users of other tools reported, written for this project.

A small random Llama (2 layers, 128 wide, 4 query and 2 key/value heads, 320 tokens, context 256) whose config and weights a test changes
before saving; `reference_logits` is transformers on the same config and weights. Weights are drawn so that a wrong tensor shows.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

from tiny_models import BOS_ID, CHAT_TEMPLATE, CONTEXT, EOS_ID, PAD_ID, VOCAB_SIZE, build_tokenizer, save_tokenizer

DROP = "__drop__"
State = dict[str, Any]

LINEAR_TABLE = {"factor": 4.0}
# every way in which checkpoints spell their rope settings: name -> (changes of the config, name of the reference it must equal)
ROPE_SPELLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "none_null": ({"rope_scaling": None}, "none"),
    "none_absent": ({"rope_scaling": DROP}, "none"),
    "none_default": ({"rope_scaling": {"rope_type": "default"}}, "none"),
    "linear_type": ({"rope_scaling": {"type": "linear", **LINEAR_TABLE}}, "linear"),
    "linear_rope_type": ({"rope_scaling": {"rope_type": "linear", **LINEAR_TABLE}}, "linear"),
    "linear_both": ({"rope_scaling": {"type": "linear", "rope_type": "linear", **LINEAR_TABLE}}, "linear"),
    "linear_v5": (
        {"rope_scaling": DROP, "rope_theta": DROP, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, **LINEAR_TABLE}},
        "linear",
    ),
    "theta_v5": (
        {"rope_scaling": DROP, "rope_theta": DROP, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "theta",
    ),
    "llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "llama3",
    ),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}, "yarn"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}, "dynamic"),
}
ROPE_REFERENCES = {
    "none": "none_null",
    "linear": "linear_rope_type",
    "theta": "theta_v5",
    "llama3": "llama3",
    "yarn": "yarn",
    "dynamic": "dynamic",
}


def llama_config(**changes: Any) -> dict[str, Any]:
    """config.json of the base model in the spelling of transformers 4; DROP removes a key."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in {**config, **changes}.items() if value != DROP}


def llama_state(config: dict[str, Any], seed: int = 0, std: float = 0.15) -> State:
    """Random float32 weights of a config, by Hugging Face name."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query, key = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]

    def draw(*shape: int, spread: float = std) -> Any:
        return torch.randn(*shape, generator=generator) * spread

    state = {"model.embed_tokens.weight": draw(vocab, hidden, spread=1.0)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes = {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "o": (hidden, query)}
        for letter, shape in shapes.items():
            state[f"{name}.self_attn.{letter}_proj.weight"] = draw(*shape)
            if config.get("attention_bias"):
                state[f"{name}.self_attn.{letter}_proj.bias"] = draw(shape[0], spread=0.7)
        for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            state[f"{name}.mlp.{part}_proj.weight"] = draw(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            state[f"{name}.{norm}.weight"] = 1 + draw(hidden, spread=0.1)
    state["model.norm.weight"] = 1 + draw(hidden, spread=0.1)
    if not config.get("tie_word_embeddings"):
        state["lm_head.weight"] = draw(vocab, hidden, spread=0.3)
    return state


def cast(state: State, dtype: str) -> State:
    """The state with every tensor in another dtype."""
    import torch

    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}


def save_checkpoint(directory: str | Path, config: dict[str, Any], state: State, shards: int = 1, tokenizer: Any = None) -> Path:
    """Write config, weights (one file, or shards with an index) and tokenizer as Hugging Face does."""
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_tokenizer(path, tokenizer)
    state = {name: tensor.contiguous().clone() for name, tensor in state.items()}
    if shards == 1:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = list(state)
    per_shard = math.ceil(len(names) / shards)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[index * per_shard : (index + 1) * per_shard]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return path


class Canary:
    """Unpickling one makes the directory `path`: the proof that a loader runs what a pickle says."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (self.path,)


def save_pickles(directory: str | Path, config: dict[str, Any], content: Any, shards: int = 1, name: str = "pytorch_model.bin") -> Path:
    """Write config, tokenizer and whatever `torch.save` takes; with shards > 1 content is a state dict, split over files with an index."""
    import torch

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_tokenizer(path)
    if shards == 1:
        torch.save(content, path / name)
        return path
    names = list(content)
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"pytorch_model-{index + 1:05d}-of-{shards:05d}.bin"
        part = {key: content[key] for key in names[index::shards]}
        torch.save(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return path


def trainer_checkpoint(state: State) -> dict[str, Any]:
    """What a training loop over DistributedDataParallel saves."""
    return {
        "epoch": 3,
        "model": {f"module.{name}": tensor for name, tensor in state.items()},
        "optimizer": {"state": {0: {"exp_avg": state["lm_head.weight"]}}, "param_groups": [{"lr": 1e-4, "params": [0]}]},
    }


def reference_logits(config: dict[str, Any], state: State, token_ids: list[int]) -> Any:
    """Logits [T, vocab] of transformers in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig.from_dict(copy.deepcopy(config))).float().eval()
    weights = {name: tensor.float() for name, tensor in state.items()}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


def token_ids(count: int = 160, seed: int = 7) -> list[int]:
    """A long prompt: faults of rope and of row order grow with position."""
    import random

    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(count)]


# --------------------------------------------------------------------------- GGUF

_GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """GGUF name of a Hugging Face tensor."""
    stem, _, leaf = name.rpartition(".")
    if stem in _GGUF_TOP:
        return f"{_GGUF_TOP[stem]}.{leaf}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER[rest]}.{leaf}"


def permute_rows(weight: Any, num_heads: int) -> Any:
    """llama.cpp's row order of q and k for architecture `llama`: 0, D/2, 1, D/2 + 1, ... within each head."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute_rows(weight: Any, num_heads: int) -> Any:
    """Inverse of `permute_rows`."""
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: str | Path,
    config: dict[str, Any],
    state: State,
    block_type: str | None = None,
    pre: str | None = "gpt-2",
    metadata: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> State:
    """Write a GGUF file as llama.cpp's converter does and return the weights that it stands for (Hugging Face names and order).

    block_type: of the matrices, one that the gguf package can quantize; None keeps F32. metadata: more keys, with the architecture's
    prefix where it applies. tokenizer: the keys tokenizer.ggml.* of another tokenizer than the byte-level one.
    """
    import gguf
    import torch

    arch = config["model_type"]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if tokenizer is None:
        _add_tokenizer(writer, config["vocab_size"], pre)
    for key, value in (tokenizer or {}).items():
        if key.startswith("tokenizer."):
            _add_value(writer, key, value)
    for key, value in (metadata or {}).items():
        _add_value(writer, key, value)
    effective: State = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in state.items():
        count = heads.get(name.split(".")[-2]) if arch == "llama" else None
        array = tensor.float().numpy()
        stored = permute_rows(array, count) if count else array
        if block_type and array.ndim == 2:
            kind = gguf.GGMLQuantizationType[block_type]
            blocks = gguf.quants.quantize(stored, kind)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=kind)
            decoded = gguf.quants.dequantize(blocks, kind)
            effective[name] = torch.from_numpy((unpermute_rows(decoded, count) if count else decoded).copy())
        else:
            writer.add_tensor(gguf_name(name), stored)
            effective[name] = tensor.float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return effective


def _add_tokenizer(writer: Any, vocab_size: int, pre: str | None) -> None:
    described = json.loads(build_tokenizer(vocab_size).to_str())
    tokens = {index: token for token, index in described["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in described["added_tokens"]}
    tokens |= special
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens[index] for index in range(vocab_size)])
    writer.add_token_types([3 if index in special else 1 for index in range(vocab_size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
