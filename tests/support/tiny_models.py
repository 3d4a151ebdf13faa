"""Tiny random Hugging Face checkpoints of every family, written by transformers itself, with a small real tokenizer.

Weights are drawn so that the logits are far from flat (an untrained initialisation gives ties everywhere) and every bias and norm matters.
Each checkpoint is 2-3 layers, 64-128 wide, 320 tokens, context 256, and takes well under a second once transformers is imported.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
CONTEXT = 256
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2

CORPUS = [
    "the river runs under the old stone bridge and the mill turns slowly",
    "a small boat was tied to the landing while the rain came down",
    "count one two three four five six seven eight nine ten",
    "stop here please and then start again at the next line",
    "question and answer: what is the colour of the night sky",
]
PROMPTS = ["the river runs", "count one two", "stop here please", "what is the colour of"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('this template takes no system turn') }}{% endif %}" + CHAT_TEMPLATE
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def _longrope(num_pairs: int) -> dict[str, Any]:
    """Factors that differ from pair to pair, and the long ones from the short."""
    short = [1.0 + 0.02 * pair for pair in range(num_pairs)]
    long = [1.0 + 0.5 * pair for pair in range(num_pairs)]
    return {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}


_GEMMA: dict[str, Any] = {"sliding_window": 24, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

# name -> (transformers class stem, what differs from _BASE)
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-wide": ("Llama", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", _rope("dynamic", factor=2.0) | {"max_position_embeddings": 64}),
    "llama-llama3": (
        "Llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"num_hidden_layers": 3}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32, "attention_bias": True}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.125, "logits_scaling": 4.0, "mlp_bias": True},
    ),
    "granite-tied": ("Granite", {"tie_word_embeddings": True, "embedding_multiplier": 6.0, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-window": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 24, "mlp_bias": True},
    ),
    "olmo2": ("Olmo2", {"num_hidden_layers": 3}),
    "olmo2-mha": ("Olmo2", {"num_key_value_heads": 4, "attention_bias": True, "rms_norm_eps": 1e-5}),
    "phi3": ("Phi3", {"sliding_window": 24, "original_max_position_embeddings": 64}),
    "phi3-partial": ("Phi3", {"head_dim": 32, "partial_rotary_factor": 0.5, "hidden_size": 128, "tie_word_embeddings": True}),
    "phi3-longrope": (
        "Phi3",
        {"original_max_position_embeddings": 64, "rope_parameters": _longrope(12), "partial_rotary_factor": 0.75, "head_dim": 32}
        | {"hidden_size": 128},
    ),
    "gemma2": ("Gemma2", {"num_hidden_layers": 3, **_GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 6.0}),
    "gemma2-uncapped": ("Gemma2", {**_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 3, **_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3-linear": (
        "Gemma3Text",
        {"num_hidden_layers": 6, **_GEMMA, "tie_word_embeddings": False, "final_logit_softcapping": 6.0}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_hidden_layers": 3, "sliding_window": 24}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen2_moe-mixed": (
        "Qwen2Moe",
        {**_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False}
        | {"shared_expert_intermediate_size": 32, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 3},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3_moe-mixed": (
        "Qwen3Moe",
        {**_EXPERTS, "num_hidden_layers": 3, "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 24}
        | {"tie_word_embeddings": True, "attention_bias": True},
    ),
}
FAMILIES: list[str] = list(_VARIANTS)


def make_tiny_checkpoint(directory: str | Path, family: str, seed: int = 0, dtype: str = "float32", **config_overrides: Any) -> Path:
    """Write one checkpoint and return its directory. family: one of FAMILIES. The same arguments give the same bytes."""
    import torch

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(family, seed, **config_overrides)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    save_tokenizer(path, unk_token=None)  # transformers gives Qwen a default one, which the vocabulary does not have
    return path


def make_tiny_model(family: str, seed: int = 0, **config_overrides: Any) -> Any:
    """The transformers model itself, float32, in evaluation mode."""
    import torch
    import transformers

    stem, changes = _VARIANTS[family]
    config = getattr(transformers, f"{stem}Config")(**{**_BASE, **changes, **config_overrides})
    model = getattr(transformers, f"{stem.removesuffix('Text')}ForCausalLM")(config).float().eval()
    norm_center = 0.0 if stem.startswith("Gemma") else 1.0  # Gemma's norms multiply by 1 + weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            spread = _spread(name, bool(config.tie_word_embeddings))
            noise = torch.randn(weight.shape, generator=generator) * spread
            weight.copy_(norm_center + noise if name.endswith("norm.weight") else noise)
    return model


def _spread(name: str, tied: bool) -> float:
    """Standard deviation of one parameter's noise."""
    if name.endswith("norm.weight"):
        return 0.1
    if name.endswith(".bias"):
        return 0.4
    if "embed_tokens" in name:
        return 0.3 if tied else 1.0
    return 0.3 if "lm_head" in name else 0.15


@functools.cache
def _tokenizer_json(vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    return str(tokenizer.to_str())


def build_tokenizer(vocab_size: int = VOCAB_SIZE) -> Any:
    """A byte-level BPE tokenizer with exactly vocab_size tokens; ids 0, 1, 2 are pad, bos, eos."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(_tokenizer_json(vocab_size))


def save_tokenizer(directory: str | Path, tokenizer: Any = None, chat_template: str | None = CHAT_TEMPLATE, **config: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (tokenizer or build_tokenizer()).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
