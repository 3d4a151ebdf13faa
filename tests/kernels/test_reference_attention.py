"""The attention reference against torch's own SDPA on contiguous keys, and against numbers worked out by hand."""

import math

import pytest
import torch
from kernel_cases import CASES, Case, attention_batch
from tolerances import tolerance

from dspark.kernels.reference.attention import paged_attention


def path_of(parents: list[int], node: int) -> list[int] | None:
    """The nodes from the first level to this one; None for a token before the tree (node < 0)."""
    if node < 0:
        return None
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def naive(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Each sequence gathered by slot, through scaled_dot_product_attention in float64 with an explicit mask."""
    q, k_cache, v_cache, batch, scale, window, softcap, kv_scales = case.args(dtype)
    num_heads, block_size, head_dim = q.shape[1], k_cache.shape[2], q.shape[2]
    outputs = []
    for i in range(batch.num_sequences):
        first, last = int(batch.query_start[i]), int(batch.query_start[i + 1])
        context = int(batch.context_lens[i])
        keys, values = (
            torch.stack([cache[int(batch.block_tables[i, p // block_size]), :, p % block_size] for p in range(context)], 1).double()
            for cache in (k_cache.float(), v_cache.float())
        )
        if kv_scales is not None:
            keys, values = keys * kv_scales.k[:, None].double(), values * kv_scales.v[:, None].double()
        mask = torch.zeros(last - first, context, dtype=torch.bool)
        num_nodes = len((case.shape.get("trees") or [None] * batch.num_sequences)[i] or ())
        for row in range(last - first):
            seen = path_of(case.shape["trees"][i], row - (last - first) + num_nodes) if num_nodes else None
            position = context - (last - first) + row
            # a node's own path is what the sequence would be behind the tokens before the tree
            line = list(range(position + 1)) if seen is None else [*range(context - num_nodes), *(context - num_nodes + n for n in seen)]
            mask[row, line[-window:] if window else line] = True
        group = num_heads // keys.shape[0]
        heads = q[first:last].transpose(0, 1).double()
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        if softcap:
            scores = softcap * (heads @ keys.mT * scale / softcap).tanh()
            out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values
        else:
            out = torch.nn.functional.scaled_dot_product_attention(heads, keys, values, mask, scale=scale)
        outputs.append(out.transpose(0, 1).reshape(last - first, num_heads * head_dim))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES["paged_attention"] if not case.is_empty], ids=str)
def test_equals_sdpa_on_gathered_keys(case: Case, dtype: torch.dtype) -> None:
    rtol, atol = tolerance(case.op, dtype)
    actual = paged_attention(*case.args(dtype))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), naive(case, dtype), rtol=rtol, atol=atol)


def test_two_keys_by_hand() -> None:
    """Query 1, keys 0 and ln 3: weights 1/4 and 3/4, values 10 and 20 -> 17.5. The first query sees only the first key."""
    batch, num_blocks = attention_batch([(2, 2)], block_size=2)
    k_cache, v_cache = torch.zeros(num_blocks, 1, 2, 1), torch.zeros(num_blocks, 1, 2, 1)
    block = int(batch.block_tables[0, 0])
    k_cache[block, 0, :, 0] = torch.tensor([0.0, 3.0]).clamp(min=1).log()
    v_cache[block, 0, :, 0] = torch.tensor([10.0, 20.0])
    out = paged_attention(torch.ones(2, 1, 1), k_cache, v_cache, batch, 1.0, None)
    torch.testing.assert_close(out, torch.tensor([[10.0], [17.5]]))
    only_own = paged_attention(torch.ones(2, 1, 1), k_cache, v_cache, batch, 1.0, 1)
    torch.testing.assert_close(only_own, torch.tensor([[10.0], [20.0]]))
    capped = paged_attention(torch.ones(2, 1, 1), k_cache, v_cache, batch, 1e6, None, softcap=math.log(3))
    torch.testing.assert_close(capped, torch.tensor([[10.0], [17.5]]))  # a score far beyond the cap becomes the cap
