"""Adapters that PEFT itself makes, on the tiny checkpoints, and PEFT's own logits for them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_models import make_tiny_checkpoint

TARGETS = ["q_proj", "v_proj", "down_proj"]


@dataclass(frozen=True)
class LoraCase:
    """One way to adapt a model. options: of LoraConfig. rows: size the embedding is given before training. tied: of the result."""

    family: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    rows: int | None = None
    tied: bool = False


CASES: dict[str, LoraCase] = {
    "plain": LoraCase(),
    "qwen2-biases": LoraCase("qwen2", {"target_modules": "all-linear"}),
    "qwen3": LoraCase("qwen3", {"target_modules": ["q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"]}),
    "phi3-fused-layers": LoraCase("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"], "use_dora": True}),
    "gemma3-scaled-embedding": LoraCase("gemma3", {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["norm"]}),
    "rslora": LoraCase(options={"r": 16, "lora_alpha": 8, "use_rslora": True}),
    "dora": LoraCase(options={"use_dora": True}),
    "dora-rslora": LoraCase(options={"use_dora": True, "use_rslora": True}),
    "dora-embedding": LoraCase(options={"use_dora": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "patterns": LoraCase(
        options={
            "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6, r"layers\.\d+\.self_attn\.v_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 32, "^model.layers.1.mlp.down_proj": 5, "_proj": 1},
        }
    ),
    "patterns-rslora": LoraCase(options={"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "layers-to-transform": LoraCase(options={"layers_to_transform": [1]}),
    "exclude-modules": LoraCase(options={"exclude_modules": r".*layers\.0.*down_proj"}),
    "regex-targets": LoraCase(options={"target_modules": r".*\.(q|up)_proj"}),
    "fan-in-fan-out": LoraCase(options={"fan_in_fan_out": True}),
    "modules-to-save": LoraCase(options={"modules_to_save": ["norm", "embed_tokens", "lm_head"]}),
    "embedding": LoraCase(options={"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding-and-head": LoraCase(options={"target_modules": ["embed_tokens", "lm_head"]}),
    "bias-lora-only": LoraCase("llama-bias", {"bias": "lora_only"}),
    "bias-all": LoraCase("llama-bias", {"bias": "all"}),
    "lora-bias": LoraCase("llama-bias", {"lora_bias": True}),
    "new-tokens": LoraCase(rows=324),
    "new-tokens-adapted": LoraCase(options={"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, rows=324),
    "new-tokens-saved": LoraCase(options={"modules_to_save": ["embed_tokens", "lm_head"]}, rows=324),
    "fewer-tokens": LoraCase(rows=300),
    "trained-tokens": LoraCase(options={"trainable_token_indices": [5, 9, 300]}),
    "trained-tokens-of-both": LoraCase(options={"trainable_token_indices": {"embed_tokens": [5, 9], "lm_head": [7]}}),
    "tied-plain": LoraCase("llama-tied", tied=True),
    "tied-head": LoraCase("llama-tied", {"target_modules": ["q_proj", "lm_head"]}),
    "tied-head-dora": LoraCase("llama-tied", {"target_modules": ["lm_head"], "use_dora": True}),
    "tied-head-saved": LoraCase("llama-tied", {"modules_to_save": ["lm_head"]}),
    "tied-embedding": LoraCase("llama-tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied-embedding-saved": LoraCase("llama-tied", {"modules_to_save": ["embed_tokens"]}),
    "tied-both": LoraCase("qwen2-tied", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}, tied=True),
    "tied-both-saved": LoraCase("qwen3-tied", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, tied=True),
    "tied-new-tokens": LoraCase("llama-tied", rows=324, tied=True),
    "tied-new-tokens-adapted": LoraCase("llama-tied", {"target_modules": ["q_proj", "embed_tokens"]}, rows=324),
    "tied-trained-tokens": LoraCase("llama-tied", {"trainable_token_indices": [5, 9]}, tied=True),
    "tied-trained-new-tokens": LoraCase("llama-tied", {"trainable_token_indices": [5, 320, 321, 322, 323]}, rows=324, tied=True),
}


def make_case(directory: Path, case: LoraCase, seed: int = 21) -> tuple[Path, Path]:
    """Base checkpoint and adapter of a case, written below `directory`."""
    base = make_tiny_checkpoint(directory / "base", case.family)
    return base, make_adapter(directory / "adapter", base, rows=case.rows, seed=seed, **case.options)


def make_adapter(directory: Path, base: Path, rows: int | None = None, seed: int = 21, **options: Any) -> Path:
    """An adapter as PEFT's save_pretrained writes it; everything that training would change is given random values."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": TARGETS, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = load_base(base, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**{**settings, **options}))
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if weight.requires_grad and "lora_A" not in name and "lora_B" not in name:
                    weight.add_(torch.randn_like(weight) * 0.2 * weight.std().clamp(min=0.1))
        adapted.save_pretrained(directory)
    return directory


def load_base(base: Path, rows: int | None = None) -> Any:
    """The base model in float32, its embedding resized the way a trainer does."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    return model


def peft_logits(base: Path | Any, adapters: list[tuple[Path, float]], token_ids: list[int], rows: int | None = None) -> Any:
    """Logits [T, vocab] of PEFT with the adapters active, not merged. base: directory or loaded model. Weights are for plain LoRA only."""
    import torch
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    model = load_base(base, rows) if isinstance(base, Path) else base
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(model, str(adapters[0][0]), adapter_name="a0")
        for index, (path, _) in enumerate(adapters[1:], 1):
            adapted.load_adapter(str(path), adapter_name=f"a{index}")
    adapted.base_model.set_adapter([f"a{index}" for index in range(len(adapters))])
    for module in adapted.modules():
        if isinstance(module, LoraLayer):
            for index, (_, weight) in enumerate(adapters):
                if f"a{index}" in module.scaling:
                    module.scaling[f"a{index}"] *= weight
    with torch.inference_mode():
        return adapted.eval()(torch.tensor([token_ids])).logits[0]


def edit_config(adapter: Path, **changes: Any) -> Path:
    """Change keys of adapter_config.json."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    return adapter


def rename_keys(adapter: Path, rename: Callable[[str], str | None]) -> Path:
    """Rename the adapter's tensors; None drops one."""
    from safetensors.torch import load_file, save_file

    path = adapter / "adapter_model.safetensors"
    state = {rename(key): tensor for key, tensor in load_file(path).items()}
    save_file({key: tensor for key, tensor in state.items() if key is not None}, path, metadata={"format": "pt"})
    return adapter
