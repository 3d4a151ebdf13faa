"""Checkpoints that AutoAWQ 0.2.9 quantizes, for dspark to convert. Run in its environment, which has no dspark.

    python tests/interop/write_autoawq.py DIR

DIR/foreign gets a checkpoint NAME for each case and NAME.reference.safetensors: tokens, `weight.MODULE`, each quantized layer's weight as
AutoAWQ's code unpacks it in float16, and the logits of a dense model that has these weights, in float32 (AutoAWQ cannot run on a CPU).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import transformers
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, make_tiny_checkpoint

TOKENS = torch.tensor([(7 * i) % 317 + 3 for i in range(48)])
GROUP_SIZES = {"awq-w4-g32": 32, "awq-w4-g128": 128}


def quantize(dense: Path, out: Path, group_size: int) -> None:
    """AWQ itself (scales and clipping), on random tokens; zero points, version GEMM."""
    model = AutoAWQForCausalLM.from_pretrained(str(dense), device_map="cpu", torch_dtype=torch.float16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, VOCAB_SIZE, (64,), generator=generator).tolist() for _ in range(16)]
    settings = {"zero_point": True, "q_group_size": group_size, "w_bit": 4, "version": "GEMM"}
    model.quantize(tokenizer, quant_config=settings, calib_data=rows, max_calib_seq_len=64)
    model.save_quantized(str(out))
    tokenizer.save_pretrained(out)


def describe(out: Path, group_size: int) -> int:
    """Write what AutoAWQ's code makes of a checkpoint; how many layers it holds quantized."""
    state = {name: tensor for path in out.glob("*.safetensors") for name, tensor in load_file(path).items()}
    reference = {}
    for module in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        packed = (state.pop(f"{module}.{leaf}") for leaf in ("qweight", "qzeros", "scales"))
        weight = dequantize_gemm(*packed, 4, group_size).t().contiguous()
        reference[f"weight.{module}"] = state[f"{module}.weight"] = weight
    config = transformers.AutoConfig.from_pretrained(out)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    with torch.inference_mode():
        logits = model(TOKENS[None]).logits[0].contiguous()
    save_file({**reference, "tokens": TOKENS, "logits": logits}, out.parent / f"{out.name}.reference.safetensors")
    return len(reference)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    foreign = directory / "foreign"
    dense = make_tiny_checkpoint(foreign / "sources" / "llama", "llama-wide", seed=3, dtype="float16")
    for name, group_size in GROUP_SIZES.items():
        quantize(dense, foreign / name, group_size)
        print(f"wrote {name}: {describe(foreign / name, group_size)} layers quantized")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
