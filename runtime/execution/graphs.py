"""Steps that only decode and verify, replayed from recordings: one launch instead of hundreds.

A recording does the same on the same memory each time. So steps are rounded up to a few shapes (`Bucket`), their inputs go to where the
recording reads them, and what is added computes nothing that anybody reads: tokens of no sequence, with a negative slot, so that their
keys and values are stored nowhere. A shape is recorded when it is met for the second time; the first time shows kernels to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dspark.kernels.staging import Places, pack
from dspark.runtime.execution.forward_batch import ForwardBatch, Laid, batch_of
from dspark.runtime.scheduling.plan import SchedulerOutput
from dspark.runtime.speculation.drafter import Drafter

Record = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Records work -> what does it again. The result lies in the same memory each time."""

LEAST_CONTEXT = 512
MOST_RECORDINGS = 64
"""Each holds memory of its own for what kernels leave behind; further shapes are computed as they come."""


@dataclass(frozen=True)
class Bucket:
    """A shape of steps. num_rows: tokens whose logits are wanted. has_tree: with draft trees. absorbed: a drafter takes note of them."""

    num_sequences: int
    num_tokens: int
    num_rows: int
    max_query_len: int
    max_context_len: int
    has_tree: bool
    absorbed: bool = False


@dataclass
class _Entry:
    """there: the places' tensors by the names of arrays."""

    times_met: int = 0
    places: Places | None = None
    there: dict[str, torch.Tensor] = field(default_factory=dict)
    replay: Callable[[], torch.Tensor] | None = None


@dataclass
class StepGraphs:
    """compute: a batch on the device -> logits [T, V], starting work there and waiting for none. longest_plain: longest sequence for which
    it asks the host nothing (ropes that follow the length), None for any.

    num_replayed, num_eager: steps that came from a recording, and steps that could have had one.
    """

    compute: Callable[[ForwardBatch], torch.Tensor | None]
    record: Record
    block_size: int
    device: str
    longest_plain: int | None = None
    num_replayed: int = 0
    num_eager: int = 0
    failed: str | None = None
    _entries: dict[Bucket, _Entry] = field(default_factory=dict)

    @property
    def num_recorded(self) -> int:
        return sum(entry.replay is not None for entry in self._entries.values())

    def metrics(self) -> dict[str, Any]:
        """Counters, JSON-ready. off: why recording ended, None while it goes on."""
        return {"off": self.failed, "recorded": self.num_recorded, "steps_replayed": self.num_replayed, "steps_eager": self.num_eager}

    def meet(self, plan: SchedulerOutput, laid: Laid, absorbed: bool = False) -> Bucket | None:
        """The bucket to compute a step by, None for one that is computed as it comes. absorbed: see Bucket."""
        if not plan.scheduled or not all(item.samples and item.num_tokens == 1 for item in plan.scheduled):
            return None
        return self.bucket_for(laid, absorbed)

    def bucket_for(self, laid: Laid, absorbed: bool = False) -> Bucket | None:
        """The same for a step that decodes or verifies."""
        if self.failed is not None or (self.longest_plain is not None and laid.longest > self.longest_plain):
            return None
        bucket = bucket_of(laid, absorbed)
        entry = self._entries.setdefault(bucket, _Entry())
        entry.times_met += 1
        if entry.times_met == 1 or (entry.replay is None and self.num_recorded >= MOST_RECORDINGS):
            self.num_eager += 1
            return None
        return bucket

    def run(self, bucket: Bucket, laid: Laid) -> torch.Tensor:
        """Logits [rows, V] of a step that `meet` has found a bucket for (part of a step's work). They last until the next recording is
        made or replayed."""
        arrays = padded(bucket, laid, self.block_size)
        self._places(bucket, arrays).fill(list(arrays.values()))
        return self._replayed(bucket, laid)

    def packed(self, bucket: Bucket, laid: Laid) -> np.ndarray:
        """The step's inputs as `run_packed` takes them: bytes, to be staged with others."""
        arrays = padded(bucket, laid, self.block_size)
        self._places(bucket, arrays)
        return pack(list(arrays.values()))

    def run_packed(self, bucket: Bucket, laid: Laid, packed: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`run` of inputs that are on the device. token_ids int64 [T]: instead of the step's own."""
        entry = self._entries[bucket]
        assert entry.places is not None
        entry.places.take(packed)
        if token_ids is not None:
            entry.there["token_ids"][: token_ids.shape[0]].copy_(token_ids)
        return self._replayed(bucket, laid)

    def _places(self, bucket: Bucket, arrays: dict[str, np.ndarray]) -> Places:
        entry = self._entries[bucket]
        if entry.places is None:
            entry.places = Places(list(arrays.values()), self.device)
            entry.there = dict(zip(arrays, entry.places.tensors, strict=True))
        return entry.places

    def _replayed(self, bucket: Bucket, laid: Laid) -> torch.Tensor:
        entry = self._entries[bucket]
        if entry.replay is None:
            entry.replay = self._recorded(batch_of(entry.there, bucket.max_query_len, bucket.max_context_len, longest=0))
        self.num_replayed += self.failed is None
        self.num_eager += self.failed is not None
        return entry.replay()[: laid.arrays["sample_rows"].shape[0]]

    def _recorded(self, batch: ForwardBatch) -> Callable[[], torch.Tensor]:
        def work() -> torch.Tensor:
            batch.attention.prepared.clear()
            logits = self.compute(batch)
            assert logits is not None
            return logits

        try:
            return self.record(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # this step and those to come are computed without; metrics say why
            self.failed = str(error).strip().splitlines()[0]
            return work


def bucket_of(laid: Laid, absorbed: bool = False) -> Bucket:
    """The smallest bucket that holds a step."""
    arrays = laid.arrays
    return Bucket(
        rounded(arrays["context_lens"].shape[0]),
        rounded(arrays["token_ids"].shape[0]),
        rounded(arrays["sample_rows"].shape[0]),
        1 << (laid.max_query_len - 1).bit_length(),
        max(LEAST_CONTEXT, 1 << (laid.max_context_len - 1).bit_length()),
        "visible" in arrays,
        absorbed,
    )


def rounded(count: int) -> int:
    """Up to a power of two, from 8 on to a multiple of an eighth to a quarter of it."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = max(8, 1 << (count.bit_length() - 3))
    return -(-count // step) * step


def padded(bucket: Bucket, laid: Laid, block_size: int) -> dict[str, np.ndarray]:
    """A step's arrays in the bucket's shapes. Added sequences have no tokens and no keys, added tokens no sequence. Where all tokens'
    logits are wanted, those of the added ones are computed too, in order."""
    arrays = laid.arrays
    tokens, sequences = bucket.num_tokens, bucket.num_sequences
    wants_all = arrays["sample_rows"].shape == arrays["token_ids"].shape
    sources = arrays.get("source_rows", np.full(arrays["token_ids"].shape[0], -1, np.int64))
    tables = np.zeros((sequences, -(-bucket.max_context_len // block_size)), np.int32)
    found = arrays["block_tables"]
    tables[: found.shape[0], : found.shape[1]] = found
    out = {
        "token_ids": _to(arrays["token_ids"], tokens, 0),
        "rope_lengths": _to(arrays["rope_lengths"], tokens, 1),
        "sample_rows": np.arange(tokens, dtype=np.int64) if wants_all else _to(arrays["sample_rows"], bucket.num_rows, 0),
        "query_start": _to(arrays["query_start"], sequences + 1, int(arrays["query_start"][-1])),
        "context_lens": _to(arrays["context_lens"], sequences, 0),
        "block_tables": tables,
        "slot_mapping": _to(arrays["slot_mapping"], tokens, -1),
        "positions": _to(arrays["positions"], tokens, 0),
        "source_rows": _to(sources, tokens, -1),
    }
    if bucket.has_tree:
        out["visible"] = _to(arrays["visible"], tokens, 0)
        out["tree_start"] = _to(arrays["tree_start"], sequences, 0)
        out["slots_before"] = _to(arrays["slots_before"], tokens, 0)
    return out


def _to(array: np.ndarray, length: int, value: int) -> np.ndarray:
    out = np.full(length, value, array.dtype)
    out[: array.shape[0]] = array
    return out


def why_not(wanted: str, device: str, taken: dict[str, str], has_experts: bool, drafter: Drafter | None = None) -> str | None:
    """The reason for which a run records nothing, or None. taken: the implementation of each op."""
    if wanted == "off":
        return "--cuda-graphs is off"
    if device != "cuda":
        return f"needs a GPU, the device is {device}"
    waits = waits_for_host(taken, has_experts)
    return waits if waits is not None or drafter is None else drafter.why_not_recorded()


def waits_for_host(taken: dict[str, str], has_experts: bool) -> str | None:
    """The op of a model that cannot be recorded, in words, or None."""
    for op in ("rope_store_kv", "paged_attention", *(("moe_mlp",) if has_experts else ())):
        if taken[op] != "triton":
            return f"{op} is the {taken[op]} one, which waits for the host"
    return None


class CudaRecorder:
    """CUDA graphs that share one pool of memory: those of one recorder never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()  # compiles, and takes the libraries' working memory, before anything is recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay
