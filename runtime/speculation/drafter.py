"""What the parts of speculation are to each other.

A *drafter* is a model, or heads on the target's features, and lives where the target's model runs. Its keys and values lie in layers of
their own behind the very block ids of the target's (the pool has more layers, the block tables are the same): a position's entry depends
on the tokens up to it and on nothing else, so shared prefixes, copies on write, preemption and rollback hold for it without a line of its
own. What it writes past the newest token is overwritten when the tokens there are known.

A *proposer* makes drafts for sequences, from a drafter or from text alone; the *speculator* asks proposers, cuts drafts to what pays, and
learns from what came of them. None of them can change a text: that is the verifier's (`verify`).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any, Protocol

from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.speculation.draft import Draft, Verified

if TYPE_CHECKING:
    import torch

    from dspark.runtime.execution.forward_batch import ForwardBatch
    from dspark.runtime.execution.graphs import Record
    from dspark.runtime.layers.rope import Rotations


class Drafter(Protocol):
    """Device side. taps: target layers whose output (the residual stream after them, raw) it reads, ascending; -1 is the embedding's.

    max_tokens: the longest draft it makes, in tokens; so many positions past the newest token are writable in its layers while it drafts.
    bytes_per_block: of its own layers.
    """

    taps: tuple[int, ...]
    max_tokens: int
    bytes_per_block: int

    def allocate(self, num_blocks: int) -> None:
        """Make its layers' caches, once, for the pool's number of blocks."""

    def count_step(self, copies: Rows[tuple[int, int]]) -> None:
        """A step is about to be computed: what the host has to note of it. Before `absorb`, and at steps that are replayed too. copies: its
        block copies (source, target), which `copy_blocks` makes on the device."""

    def absorb(self, batch: ForwardBatch, rotations: Rotations, features: torch.Tensor | None) -> None:
        """Take note of the tokens that the target has just computed, drafts among them. features [T, len(taps) * H], tap after tap.

        A step whose tokens are all sampled (`execution.graphs`: it decodes and verifies) is recorded with this and replayed. So of such a
        step it does the same for the same shapes, asks the device nothing, and writes nothing for a token with a negative slot.
        """

    def why_not_recorded(self) -> str | None:
        """Why such steps cannot be recorded with its part in them, or None."""

    def draft(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """A draft for each sequence: its newest token is not computed yet, all others are (num_computed == num_tokens - 1). What it has
        started on the device is done when it returns."""

    def record(self, record: Record) -> None:
        """Replay what it does over and over for a draft from recordings, from now on. They may be replayed beside the target's."""

    def metrics(self) -> dict[str, Any]:
        """What came of that, JSON-ready, {} where it records nothing."""

    def copy_blocks(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks int64 [n] in its layers, as the target's are copied."""

    def copy_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what single slots int64 [n] hold, as the target's are: the accepted path of a tree moves to its positions."""


class Proposer(Protocol):
    """Host side. name: stands in metrics. max_tokens: the longest draft."""

    name: str
    max_tokens: int

    def propose(self, sequences: list[Sequence], rooms: list[int]) -> list[Draft | None]:
        """A draft, or none, for each sequence, of at most its room of tokens."""

    def learn(self, seq: Sequence, draft: Draft, verified: Verified) -> None:
        """What came of a draft of this proposer."""

    def forget(self, seq: Sequence) -> None:
        """The sequence ended, or lost its blocks."""
