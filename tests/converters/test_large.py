"""A checkpoint several times larger than the memory that converting it may take."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from peak_memory import needs_proc, peak_anon_bytes
from tiny_models import build_tokenizer, save_tokenizer

LAYERS, HIDDEN, INNER, VOCAB = 12, 4096, 14336, 128256
KV_WIDTH = 1024
MOST_ANON_BYTES = 1_500_000_000


def tensor_shapes() -> dict[str, list[int]]:
    """A Llama of 3.1e9 parameters, 6.3 GB in bfloat16."""
    shapes = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": [HIDDEN],
            layer + "post_attention_layernorm.weight": [HIDDEN],
            layer + "self_attn.q_proj.weight": [HIDDEN, HIDDEN],
            layer + "self_attn.k_proj.weight": [KV_WIDTH, HIDDEN],
            layer + "self_attn.v_proj.weight": [KV_WIDTH, HIDDEN],
            layer + "self_attn.o_proj.weight": [HIDDEN, HIDDEN],
            layer + "mlp.gate_proj.weight": [INNER, HIDDEN],
            layer + "mlp.up_proj.weight": [INNER, HIDDEN],
            layer + "mlp.down_proj.weight": [HIDDEN, INNER],
        }
    return shapes


def write_sparse_checkpoint(directory: Path) -> int:
    """A checkpoint of zeros in a file with holes: it takes no room on the disk. Returns the bytes of its tensors."""
    directory.mkdir()
    header, offset = {}, 0
    for name, shape in tensor_shapes().items():
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 8,
        "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    save_tokenizer(directory, build_tokenizer())
    return offset


@pytest.mark.slow
@needs_proc
def test_memory_does_not_follow_the_checkpoint(tmp_path: Path) -> None:
    """A converter that gathers the tensors first cannot convert what it cannot hold."""
    size = write_sparse_checkpoint(tmp_path / "checkpoint")
    assert size > 6e9
    command = [
        sys.executable,
        "-P",
        "-m",
        "dspark_cli.app",
        "convert",
        str(tmp_path / "checkpoint"),
        str(tmp_path / "engine"),
        "--no-audit",
    ]
    most = peak_anon_bytes(command)
    written = sum(path.stat().st_size for path in (tmp_path / "engine").glob("*.safetensors"))
    assert written >= size
    assert most < MOST_ANON_BYTES, f"{most / 1e9:.2f} GB"
