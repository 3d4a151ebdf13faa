"""What the user chose for one run. Field metadata is the source of the flags and the docs table."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from dspark.runtime.spec.errors import UsageError
from dspark.runtime.spec.kv_cache import CACHE_CHOICES

KERNEL_CHOICES = ("auto", "reference", "triton")
SPECULATIVE_CHOICES = ("off", "auto", "ngram", "draft-model", "dspark", "dflash", "eagle3")
GRAPH_CHOICES = ("auto", "off")
SAMPLING_CHOICES = ("coupled", "rejection")
DEVICE_CHOICES = ("auto", "cpu", "cuda")
TYPICAL_TOKENS_PER_SEQ = 512
"""Tokens of an ordinary prompt and answer."""


def setting(
    default: Any,
    help: str,
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    metavar: str | None = None,
) -> Any:
    """An engine field with its help text and what is allowed. metavar: what stands for the value in the help."""
    return field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high, "metavar": metavar})


@dataclass(frozen=True)
class EngineConfig:
    """Shape and limits of the running engine. None means: chosen from the model, the machine or the job, and reported."""

    max_num_seqs: int = setting(64, "most sequences in one step", low=1, high=4096)
    max_num_batched_tokens: int = setting(512, "most tokens in one step; bounds the memory of activations", low=16, high=1 << 20)
    max_model_len: int | None = setting(None, "longest prompt and answer together, in tokens (default: the model's context)", low=1)
    block_size: int = setting(16, "tokens in one block of the KV cache", choices=(8, 16, 32, 64))
    kv_cache_memory_bytes: int | None = setting(None, "bytes of the KV cache (default: from the memory that is free)", low=1)
    kv_cache_dtype: str = setting("auto", "numbers of the KV cache (auto: what the engine was calibrated for)", choices=CACHE_CHOICES)
    gpu_memory_utilization: float = setting(0.9, "share of the GPU's memory to use", low=0.05, high=1.0)
    enable_prefix_caching: bool = setting(True, "share the KV blocks of equal prompt beginnings")
    device: str = setting("auto", "where to run", choices=DEVICE_CHOICES)
    kernels: str = setting("auto", "which kernels to take", choices=KERNEL_CHOICES)
    cuda_graphs: str = setting(
        "auto", "replay steps that decode and verify from recordings (auto: on a GPU, where the kernels allow it)", choices=GRAPH_CHOICES
    )
    autotune: float = setting(
        0.0,
        "on a GPU: first measure which tiles of its kernels are fastest for this engine, for so many seconds at most, and keep them for "
        "later runs (0: take what is known); dspark tune does the same without a job",
        low=0,
        high=86400,
        metavar="SECONDS",
    )
    threads: int | None = setting(None, "CPU threads (default: the cores this process may use)", low=1, high=1024)
    deterministic: bool = setting(False, "batch-invariant arithmetic: the same bytes whatever the batch, order or pool size")
    seed: int = setting(0, "job seed of the random streams of lines without a seed", low=0, high=2**64 - 1)
    speculative: str = setting(
        "off",
        "speculative decoding, which changes no text (auto: the engine's pairing, else ngram, as far as it pays at the present load)",
        choices=SPECULATIVE_CHOICES,
    )
    draft: str | None = setting(
        None, "draft for --speculative: an engine, or the draft of a paired one (default: the engine's own)", metavar="DIR"
    )
    draft_memory: str | None = setting(None, "keep what n-gram drafts remember of answers in FILE, from job to job", metavar="FILE")
    num_speculative_tokens: int | None = setting(None, "most draft tokens of a sequence in a step (auto: chosen)", low=1, high=64)
    speculative_tree: bool = setting(False, "verify several continuations of a text at once (n-gram drafts)")
    speculative_sampling: str = setting(
        "coupled",
        "which drafted tokens of drawn answers are kept (coupled: no text changes; rejection: a few more, other texts of the same law)",
        choices=SAMPLING_CHOICES,
    )
    weight_shadow: bool = setting(False, "keep a bfloat16 copy of quantized weights for large batches (faster, more memory)")

    def __post_init__(self) -> None:
        for f in fields(self):
            check_setting(f.name, getattr(self, f.name), f.metadata)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below --max-num-seqs {self.max_num_seqs}",
                f"type --max-num-batched-tokens {self.max_num_seqs} or more",
            )

    def default_pool_tokens(self, max_model_len: int) -> int:
        """Tokens of the KV cache on a CPU when its bytes are not given: an ordinary prompt and answer for each sequence, one of full length
        at least, in whole blocks."""
        tokens = max(self.max_num_seqs * TYPICAL_TOKENS_PER_SEQ, max_model_len)
        return -(-tokens // self.block_size) * self.block_size


def check_setting(name: str, value: Any, metadata: Any) -> None:
    """Raise UsageError when a value is not allowed by its field's metadata."""
    if value is None:
        return
    flag = "--" + name.replace("_", "-")
    choices, low, high = metadata.get("choices") or (), metadata.get("low"), metadata.get("high")
    if choices and value not in choices:
        raise UsageError(f"{flag} is {value}, allowed: {', '.join(map(str, choices))}")
    if (low is not None and value < low) or (high is not None and value > high):
        allowed = f"from {low:g}" + (f" to {high:g}" if high is not None else "")
        raise UsageError(f"{flag} is {value}, allowed: {allowed}")
