"""Drawing on the device: what goes there and what comes back.

The device is torch's "meta": its tensors are shapes, so that every look at a number of theirs (a copy to the host, `item`, a selection by a
mask) is an error. The kernels' arithmetic is tested in tests/kernels/test_triton_sampling.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from dspark.kernels.facts import KernelFacts
from dspark.kernels.ops import Kernels
from dspark.kernels.triton import launch as launcher
from dspark.runtime.sampling import device
from dspark.runtime.sampling.device import DeviceRows, device_rows_for, spread_rows
from dspark.runtime.sampling.filters import probabilities
from dspark.runtime.sampling.reject import _uniform
from dspark.runtime.sampling.rng import row_key, uniform
from dspark.runtime.sampling.sampler import Sampler
from dspark.runtime.scheduling.plan import ScheduledSequence
from dspark.runtime.scheduling.sequence import Sequence
from dspark.runtime.spec.errors import MachineError
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.draft import Draft
from dspark.runtime.speculation.rejection import verify_rejection
from dspark.runtime.speculation.verify import verify_coupled

VOCAB = 500
EOS = frozenset({7})


def sequence(number: int, **options: Any) -> Sequence:
    seq = Sequence(Request(number, [1, 2, 3], SamplingParams(**options), draw_key=1000 + number), 0, number)
    seq.token_ids += [4, 4, 9]
    seq.num_computed = seq.num_tokens - 1
    return seq


def sequences() -> list[Sequence]:
    """All kinds of options."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 20},
        {"repetition_penalty": 1.3},
        {"temperature": 1.2, "top_p": 0.8, "presence_penalty": 0.5},
        {"temperature": 0.7, "min_p": 0.1, "min_tokens": 9},
        {"logit_bias": ((5, 100.0),)},
    ]
    return [sequence(i, **options) for i, options in enumerate(kinds)]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what the one function that may copies to the host. Kernels do not run; what comes back says that token 3 was drawn."""
    seen: list[tuple[int, ...]] = []

    def to_host(tensor: torch.Tensor) -> np.ndarray:
        assert tensor.is_meta
        seen.append(tuple(tensor.shape))
        return np.full(tensor.shape, 3, np.int32)

    monkeypatch.setattr(launcher, "launch", lambda *args, **config: None)
    monkeypatch.setattr(device, "_to_host", to_host)
    return seen


def logits(rows: int) -> torch.Tensor:
    return torch.empty(rows, VOCAB, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("gaps", [False, True])
def test_a_step_waits_for_the_device_once(copies: list[tuple[int, ...]], gaps: bool) -> None:
    """Whatever the options: one copy brings all tokens, and the gaps too."""
    tokens, found = Sampler(EOS, gaps, DeviceRows(EOS)).sample(logits(7), sequences())
    assert tokens == [3] * 7 and (found is not None) == gaps
    assert copies == [(7, 3)]


def test_a_prepared_step_waits_for_nothing(copies: list[tuple[int, ...]]) -> None:
    rows = sequences()
    tokens = DeviceRows(EOS).prepare(rows, [row.num_tokens for row in rows])(logits(7))
    assert tokens.shape == (7,) and tokens.dtype is torch.int64 and tokens.is_meta and copies == []


@pytest.mark.parametrize("verify", [verify_coupled, verify_rejection])
def test_verified_drafts_wait_for_the_device_once(copies: list[tuple[int, ...]], verify: Any) -> None:
    """Token 3 is drawn everywhere, and every draft is kept that the rejection rule is asked about."""
    spread = torch.empty(2, VOCAB, device="meta")
    drafts = [Draft((3, 3), (0.5, 0.5), "a"), Draft((7, 3), (0.5, 0.5), "a", None, spread), None]
    items = [ScheduledSequence(sequence(i, temperature=1.0), 1, draft) for i, draft in enumerate(drafts)]
    gained = verify(Sampler(EOS, False, DeviceRows(EOS)), logits(7), items)
    assert copies == [(7, 3)]
    second = [7, 3, 3] if verify is verify_rejection else [3]
    assert [verified.token_ids for verified in gained] == [[3, 3, 3], second, [3]]


def test_drafts_of_a_device_stay_there(copies: list[tuple[int, ...]]) -> None:
    """Only the tokens come back; the rows that survival and distributions are computed from do not."""
    tokens, rows = Sampler(EOS, False, DeviceRows(EOS)).sample_drafts(logits(7), sequences())
    assert tokens == [3] * 7 and copies == [(7, 3)] and rows.is_meta and rows.dtype is torch.float32


def test_a_row_without_a_finite_logit_is_an_error(monkeypatch: pytest.MonkeyPatch, copies: list[tuple[int, ...]]) -> None:
    monkeypatch.setattr(device, "_to_host", lambda tensor: np.full(tensor.shape, -1, np.int32))
    sampler = Sampler(EOS, False, DeviceRows(EOS))
    with pytest.raises(MachineError, match="no finite logits for request 0 at token 6"):
        sampler.sample(logits(7), sequences())
    assert sampler.sample_drafts(logits(7), sequences())[0] == [-1] * 7


def test_acceptance_numbers_are_those_of_the_compiled_loops() -> None:
    for key in (0, 1, 2**63, 2**64 - 1, *(row_key(5, 1, position) for position in range(200))):
        assert uniform(key) == _uniform(np.uint64(key))


def test_the_host_draws_where_no_kernel_does() -> None:
    facts = {"dtype": torch.float32, "head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "block_size": 16}
    assert device_rows_for(Kernels(KernelFacts("cpu", **facts)), EOS) is None  # type: ignore[arg-type]


def test_spreads_of_many_rows_are_those_of_each() -> None:
    """What drafts were drawn from is computed side by side, with each row's own options; equal tokens at a cut are told apart by id."""
    generator = torch.Generator().manual_seed(2)
    options = list(itertools.product([0.3, 1.0, 1.7], [0, 1, 7, 900], [1.0, 0.9, 0.3], [0.0, 0.05]))
    logits = torch.randn(len(options), 300, generator=generator) * 3
    logits[::4] = logits[::4].round()
    logits[::5, ::3] = -torch.inf
    columns = [torch.tensor(column)[:, None] for column in zip(*options, strict=True)]
    found = spread_rows(logits, columns[0], columns[1], columns[2].double(), columns[3])
    for row, own in enumerate(options):
        torch.testing.assert_close(found[row], probabilities(logits[row], *own), rtol=1e-5, atol=1e-7)
    plain = [i for i, (_, top_k, top_p, _) in enumerate(options) if top_k == 0 and top_p == 1.0]
    without = spread_rows(logits[plain], columns[0][plain], columns[1][plain], columns[2][plain].double(), columns[3][plain], False)
    torch.testing.assert_close(without, found[plain])
