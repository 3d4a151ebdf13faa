"""A whole draft, and a drafter's part of a step, on a device at whose numbers nobody may look.

The device is torch's "meta": its tensors are shapes, so every look at a number of theirs (a copy to the host, `item`, a selection by a
mask) is an error. Kernels do not run; what the one copy to the host brings is made up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from host_copies import Copies
from step_rig import BLOCK, CHAIN, TREE, decodes

from dspark.kernels.triton import launch as launcher
from dspark.runtime.execution.forward_batch import build_forward_batch
from dspark.runtime.execution.loader import load_model
from dspark.runtime.layers.rope import RotaryTables
from dspark.runtime.models.decoder import Decoder
from dspark.runtime.sampling import device
from dspark.runtime.sampling.device import DeviceRows
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.draft_model import DraftModel
from dspark.runtime.speculation.draft_vocabulary import DraftVocabulary
from dspark.runtime.speculation.heads.load import load_drafter

EOS = frozenset({7})
HEADS = ["deepspec-vanilla", "deepspec-rnn", "zlab-dflash", "speculators-dflash", "eagle3-original", "eagle3-specforge"]
VOCAB = 320


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what is copied to the host."""
    seen: list[tuple[int, ...]] = []

    def to_host(tensor: torch.Tensor) -> np.ndarray:
        assert tensor.is_meta
        seen.append(tuple(tensor.shape))
        return np.full(tensor.shape, 3, np.int32)

    monkeypatch.setattr(launcher, "decline", lambda facts: None)
    monkeypatch.setattr(launcher, "launch", lambda *args, **config: None)
    monkeypatch.setattr(device, "_to_host", to_host)
    return seen


@pytest.fixture
def there(target: Any, fetched: list[tuple[int, ...]]) -> Decoder:
    return load_model(target.engine, device="meta", interpreted=True)


def drafter_of(kind: str, model: Decoder, stored: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, keep: bool) -> Any:
    """kind "mapped": a draft model of another vocabulary. Loading may look at numbers, and finds that an embedding is its own."""
    sampler = Sampler(EOS, device_rows=DeviceRows(EOS))
    if kind in ("draft-model", "mapped"):
        tables = None, None
        if kind == "mapped":
            tables = torch.arange(VOCAB), torch.where(torch.arange(VOCAB) % 5 > 0, torch.arange(VOCAB), -1)
        vocabulary = DraftVocabulary(VOCAB, *tables)
        for name, value in vars(vocabulary).items():
            if isinstance(value, torch.Tensor):
                setattr(vocabulary, name, value.to("meta"))
        made: Any = DraftModel(model, vocabulary, sampler, 256, 6, keep)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "equal", lambda one, other: False)
            made = load_drafter(stored(kind).directory, model, sampler, 256, keep_distributions=keep)
    made.allocate(40)
    return made


def sequences(**options: Any) -> list[Sequence]:
    """Lines with all kinds of options that draw alone, all but their newest token computed."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.2, "top_p": 0.9},
        {"logit_bias": ((5, 2.0),), "min_tokens": 30},
    ]
    found = []
    for i, own in enumerate(kinds):
        seq = Sequence(Request(i, [(7 * j + i) % 300 for j in range(20 + i)], SamplingParams(**own, **options)), 0, i)
        seq.num_computed, seq.table.blocks = seq.num_tokens - 1, [3 * i, 3 * i + 1, 3 * i + 2]
        found.append(seq)
    return found


@pytest.mark.parametrize("kind", [*HEADS, "draft-model", "mapped"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_draft_takes_one_copy_there_and_one_back(
    there: Decoder, stored: Callable[..., Any], fetched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, kind: str, keep: bool
) -> None:
    """Whatever its length: a look at every token, or inputs that go token by token, leave a GPU waiting for most of a draft."""
    drafter = drafter_of(kind, there, stored, monkeypatch, keep)
    with Copies() as copies:
        drafts = drafter.draft(sequences(), [12] * 4)
    assert len(copies.sizes) == len(fetched) == 1
    assert all(draft is not None and draft.token_ids[0] == 3 for draft in drafts)
    assert all((draft.distributions is not None and draft.distributions.is_meta) == keep for draft in drafts)


@pytest.mark.parametrize("kind", [*HEADS, "draft-model"])
@pytest.mark.parametrize("drafts", [{}, {1: CHAIN}, {0: TREE, 2: CHAIN}])
@torch.inference_mode()
def test_what_a_drafter_does_in_a_recorded_step_looks_at_nothing(
    there: Decoder, stored: Callable[..., Any], fetched: list, monkeypatch: pytest.MonkeyPatch, kind: str, drafts: dict[int, Draft]
) -> None:
    """A recording cannot wait for the host."""
    drafter = drafter_of(kind, there, stored, monkeypatch, keep=False)
    batch = build_forward_batch(decodes(3, drafts), BLOCK, "meta")
    rotations = RotaryTables(there.config, 256, "meta").lookup(batch.attention.positions, batch.rope_lengths, batch.longest)
    features = torch.empty(batch.token_ids.shape[0], len(drafter.taps) * there.config.hidden_size, device="meta")
    with Copies() as copies:
        drafter.absorb(batch, rotations, features)
    assert copies.sizes == [] and fetched == []
