"""Steps that only decode and verify, replayed from recordings: one launch instead of hundreds.

A recording does the same on the same memory each time. So steps are rounded up to a few shapes (`Bucket`), their inputs go to where the
recording reads them, and what is added computes nothing that anybody reads: tokens of no sequence, with a negative slot, so that their
keys and values are stored nowhere. A shape is recorded when it is met for the second time; the first time shows kernels to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
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
class Recordings:
    """Work of a few shapes, each by a key of its own, recorded when it is met for the second time.

    num_replayed, num_eager: work that came from a recording, and work that could have. failed: why recording ended, None while it goes on.
    """

    record: Record
    device: str
    num_replayed: int = 0
    num_eager: int = 0
    failed: str | None = None
    _entries: dict[Hashable, _Entry] = field(default_factory=dict)

    @property
    def num_recorded(self) -> int:
        return sum(entry.replay is not None for entry in self._entries.values())

    def metrics(self) -> dict[str, Any]:
        """Counters, JSON-ready. off: why recording ended, None while it goes on."""
        return {"off": self.failed, "recorded": self.num_recorded, "steps_replayed": self.num_replayed, "steps_eager": self.num_eager}

    def meets(self, key: Hashable) -> bool:
        """Whether to do work of this shape, which is about to be done, by a recording."""
        if self.failed is not None:
            return False
        entry = self._entries.setdefault(key, _Entry())
        entry.times_met += 1
        if entry.times_met == 1 or (entry.replay is None and self.num_recorded >= MOST_RECORDINGS):
            self.num_eager += 1
            return False
        return True

    def fill(self, key: Hashable, arrays: dict[str, np.ndarray]) -> None:
        """Bring inputs to where the recording reads them."""
        self._places(key, arrays).fill(list(arrays.values()))

    def packed(self, key: Hashable, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Inputs as `take` takes them: bytes, to be staged with others."""
        self._places(key, arrays)
        return pack(list(arrays.values()))

    def take(self, key: Hashable, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Bring inputs that are on the device to where the recording reads them; returns those places by the arrays' names."""
        entry = self._entries[key]
        assert entry.places is not None
        entry.places.take(packed)
        return entry.there

    def run(self, key: Hashable, work: Callable[[dict[str, torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """The result of the work on the inputs that were brought last. It lasts until a recording is made or replayed again."""
        entry = self._entries[key]
        if entry.replay is None:
            entry.replay = self._recorded(lambda: work(entry.there))
        self.num_replayed += self.failed is None
        self.num_eager += self.failed is not None
        return entry.replay()

    def _places(self, key: Hashable, arrays: dict[str, np.ndarray]) -> Places:
        entry = self._entries[key]
        if entry.places is None:
            entry.places = Places(list(arrays.values()), self.device)
            entry.there = dict(zip(arrays, entry.places.tensors, strict=True))
        return entry.places

    def _recorded(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        try:
            return self.record(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # this work and that to come are done without; metrics say why
            self.failed = str(error).strip().splitlines()[0]
            return work


class StepGraphs:
    """compute: a batch on the device -> logits [rows, V], starting work there and waiting for none. longest_plain: longest sequence for
    which it asks the host nothing (ropes that follow the length), None for any."""

    def __init__(
        self,
        compute: Callable[[ForwardBatch], torch.Tensor | None],
        record: Record,
        block_size: int,
        device: str,
        longest_plain: int | None = None,
    ) -> None:
        self._compute, self._block_size, self._longest_plain = compute, block_size, longest_plain
        self.recordings = Recordings(record, device)

    def metrics(self) -> dict[str, Any]:
        return self.recordings.metrics()

    def meet(self, plan: SchedulerOutput, laid: Laid, absorbed: bool = False) -> Bucket | None:
        """The bucket to compute a step by, None for one that is computed as it comes. absorbed: see Bucket."""
        if not plan.scheduled or not all(item.samples and item.num_tokens == 1 for item in plan.scheduled):
            return None
        return self.bucket_for(laid, absorbed)

    def bucket_for(self, laid: Laid, absorbed: bool = False) -> Bucket | None:
        """The same for a step that decodes or verifies."""
        if self._longest_plain is not None and laid.longest > self._longest_plain:
            return None
        bucket = bucket_of(laid, absorbed)
        return bucket if self.recordings.meets(bucket) else None

    def run(self, bucket: Bucket, laid: Laid) -> torch.Tensor:
        """Logits [rows, V] of a step that `meet` has found a bucket for (part of a step's work). See `Recordings.run`."""
        self.recordings.fill(bucket, padded(bucket, laid, self._block_size))
        return self._replayed(bucket, laid)

    def packed(self, bucket: Bucket, laid: Laid) -> np.ndarray:
        """The step's inputs as `run_packed` takes them."""
        return self.recordings.packed(bucket, padded(bucket, laid, self._block_size))

    def run_packed(self, bucket: Bucket, laid: Laid, packed: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`run` of inputs that are on the device. token_ids int64 [T]: instead of the step's own."""
        there = self.recordings.take(bucket, packed)
        if token_ids is not None:
            there["token_ids"][: token_ids.shape[0]].copy_(token_ids)
        return self._replayed(bucket, laid)

    def _replayed(self, bucket: Bucket, laid: Laid) -> torch.Tensor:
        def work(there: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = self._compute(batch_of(there, bucket.max_query_len, bucket.max_context_len, longest=0))
            assert logits is not None
            return logits

        return self.recordings.run(bucket, work)[: laid.arrays["sample_rows"].shape[0]]


def bucket_of(laid: Laid, absorbed: bool = False) -> Bucket:
    """The smallest bucket that holds a step."""
    arrays = laid.arrays
    return Bucket(
        rounded(arrays["context_lens"].shape[0]),
        rounded(arrays["token_ids"].shape[0]),
        rounded(arrays["sample_rows"].shape[0]),
        1 << (laid.max_query_len - 1).bit_length(),
        rounded_context(laid.max_context_len),
        "visible" in arrays,
        absorbed,
    )


def rounded(count: int) -> int:
    """Up to a power of two, from 8 on to a multiple of an eighth to a quarter of it."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = max(8, 1 << (count.bit_length() - 3))
    return -(-count // step) * step


def rounded_context(length: int) -> int:
    """Up to a power of two that is not too small to be worth a recording of its own."""
    return max(LEAST_CONTEXT, 1 << (length - 1).bit_length())


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
        "token_ids": to_length(arrays["token_ids"], tokens, 0),
        "rope_lengths": to_length(arrays["rope_lengths"], tokens, 1),
        "sample_rows": np.arange(tokens, dtype=np.int64) if wants_all else to_length(arrays["sample_rows"], bucket.num_rows, 0),
        "query_start": to_length(arrays["query_start"], sequences + 1, int(arrays["query_start"][-1])),
        "context_lens": to_length(arrays["context_lens"], sequences, 0),
        "block_tables": tables,
        "slot_mapping": to_length(arrays["slot_mapping"], tokens, -1),
        "positions": to_length(arrays["positions"], tokens, 0),
        "source_rows": to_length(sources, tokens, -1),
    }
    if bucket.has_tree:
        out["visible"] = to_length(arrays["visible"], tokens, 0)
        out["tree_start"] = to_length(arrays["tree_start"], sequences, 0)
        out["slots_before"] = to_length(arrays["slots_before"], tokens, 0)
    return out


def to_length(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """A longer array [length], filled up with a value."""
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
