"""Jitted sampling: options that change single logits, and the draw of one token from a row of logits, the whole row in one program.

A row is read several times, a block at a time, from the L2 cache: for its largest logit, for the cuts of top-k and top-p, for the draw. The
cuts are found by bisection over the bit patterns of the weights e ** ((logit - largest) / temperature), whose order is that of the floats;
nothing is sorted. Masses are integers, multiples of 2**-40: they add up to the same in any order. Equal weights at a cut are told apart by
token id. Tokens race with exponential variates: see `runtime.sampling.rng`, whose numbers these are.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(9)
IS_RANDOM, INVERSE, TOP_K, TOP_P, MIN_P, KEY, DRAFT, SOURCE, CHANCE = (tl.constexpr(i) for i in range(9))
"""Columns of a row's options, int64 (floating-point numbers by their bits): see `sampling.draw_rows`."""
GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
U_MAX = tl.constexpr(1.0 - 2.0**-24)
UNIT = tl.constexpr(2.0**40)
LEAST_MASS = tl.constexpr(10995)
"""1e-8 of UNIT: a residual with less is what rounding leaves of two equal distributions."""
ONE_BITS = tl.constexpr(0x3F800000)


@triton.jit
def edit_kernel(logits_ptr, edits_ptr, num_edits, row_stride, BLOCK: tl.constexpr):
    """Grid (blocks of edits). logits float32 [rows, V] in place; edits int32 [5, num_edits], no (row, token) twice.

    Row, token, and bits of float32: the factor that divides a positive and multiplies a negative logit, what is subtracted, what is added
    (-inf forbids).
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_edits
    row = tl.load(edits_ptr + at, mask=mask, other=0).to(tl.int64)
    token = tl.load(edits_ptr + num_edits + at, mask=mask, other=0)
    factor = tl.load(edits_ptr + 2 * num_edits + at, mask=mask, other=0).to(tl.float32, bitcast=True)
    less = tl.load(edits_ptr + 3 * num_edits + at, mask=mask, other=0).to(tl.float32, bitcast=True)
    more = tl.load(edits_ptr + 4 * num_edits + at, mask=mask, other=0).to(tl.float32, bitcast=True)
    where = logits_ptr + row * row_stride + token
    x = tl.load(where, mask=mask, other=0.0)
    x = tl.where(x > 0.0, x / factor, x * factor) - less + more
    tl.store(where, tl.where(more == float("-inf"), more, x), mask=mask)


@triton.jit
def _weights(row_ptr, token, vocab, top, inverse):
    """float32 weights of tokens; 0 past the vocabulary."""
    x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.exp((x - top) * inverse)


@triton.jit
def _best(row_ptr, vocab, BLOCK: tl.constexpr):
    """(lowest id of the largest logit, that logit, whether it is finite and no logit is NaN)"""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.zeros([BLOCK], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        at = tl.where(x > best, token, at)
        best = tl.where(x > best, x, best)
        bad = bad | (x != x).to(tl.int32)
    top = tl.max(best, 0)
    is_good = (tl.max(bad, 0) == 0) & (top > float("-inf")) & (top < float("inf"))
    return tl.min(tl.where(best == top, at, 0x7FFFFFFF), 0), top, is_good


@triton.jit
def _largest_other(row_ptr, vocab, other, BLOCK: tl.constexpr):
    """The largest logit of the tokens other than one."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + token, mask=(token < vocab) & (token != other), other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, x)
    return tl.max(best, 0)


@triton.jit
def _measures(row_ptr, vocab, top, inverse, a, b, c, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many weights have at least each of three bit patterns; with MASS their sum, in multiples of 1 / UNIT. int64."""
    from_a, from_b, from_c = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        weights = _weights(row_ptr, start + tl.arange(0, BLOCK), vocab, top, inverse)
        bits = weights.to(tl.int32, bitcast=True)
        each = tl.full([BLOCK], 1, tl.int64)
        if MASS:
            each = (weights * UNIT).to(tl.int64)
        from_a += tl.where(bits >= a, each, 0)
        from_b += tl.where(bits >= b, each, 0)
        from_c += tl.where(bits >= c, each, 0)
    return tl.sum(from_a, 0), tl.sum(from_b, 0), tl.sum(from_c, 0)


@triton.jit
def _cut(row_ptr, vocab, top, inverse, low, target, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bit pattern from `low` on whose measure is at least `target`, as that of `low` must be. Four parts a step."""
    high = low * 0 + (ONE_BITS + 1)  # nothing weighs more than 1
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        a = low + step
        b = tl.minimum(a + step, high)
        c = tl.minimum(b + step, high)
        from_a, from_b, from_c = _measures(row_ptr, vocab, top, inverse, a, b, c, MASS, BLOCK)
        high = tl.where(from_a < target, a, tl.where(from_b < target, b, tl.where(from_c < target, c, high)))
        low = tl.where(from_c >= target, c, tl.where(from_b >= target, b, tl.where(from_a >= target, a, low)))
    return low


@triton.jit
def _nth_equal(row_ptr, vocab, top, inverse, bits_wanted, n, BLOCK: tl.constexpr):
    """The id of the n-th token, counted from 1, whose weight has this bit pattern; there are at least n >= 1."""
    low = vocab * 0 - 1
    high = low + vocab
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, middle + 1, BLOCK):
            token = start + tl.arange(0, BLOCK)
            bits = _weights(row_ptr, token, vocab, top, inverse).to(tl.int32, bitcast=True)
            count += ((bits == bits_wanted) & (token <= middle)).to(tl.int32)
        enough = tl.sum(count, 0) >= n
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def _filter(row_ptr, vocab, top, inverse, top_k, top_p, BLOCK: tl.constexpr):
    """What top-k and then top-p keep: weights above a bit pattern, and those of that pattern up to a token id."""
    cut = vocab * 0 + 1
    equals = vocab.to(tl.int64)  # so many of the pattern itself
    if (top_k > 0) & (top_k < vocab):
        possible, _b, _c = _measures(row_ptr, vocab, top, inverse, cut, cut, cut, False, BLOCK)
        if possible > top_k:
            cut = _cut(row_ptr, vocab, top, inverse, cut, top_k, False, BLOCK)
            above, _b, _c = _measures(row_ptr, vocab, top, inverse, cut + 1, cut + 1, cut + 1, False, BLOCK)
            equals = top_k - above
    if top_p < 1.0:
        mass, _b, _c = _measures(row_ptr, vocab, top, inverse, cut + 1, cut + 1, cut + 1, True, BLOCK)
        each = (cut.to(tl.float32, bitcast=True) * UNIT).to(tl.int64)
        target = tl.maximum(tl.ceil(top_p * (mass + equals * each).to(tl.float64)).to(tl.int64), 1)
        if mass >= target:
            cut = _cut(row_ptr, vocab, top, inverse, cut + 1, target, True, BLOCK)
            equals = vocab.to(tl.int64)
            mass, _b, _c = _measures(row_ptr, vocab, top, inverse, cut + 1, cut + 1, cut + 1, True, BLOCK)
            each = (cut.to(tl.float32, bitcast=True) * UNIT).to(tl.int64)
        each = tl.maximum(each, 1)
        equals = tl.minimum(equals, (target - mass + each - 1) // each)  # dropped once those before have the target's mass
    last = vocab
    from_cut, above, _c = _measures(row_ptr, vocab, top, inverse, cut, cut + 1, cut + 1, False, BLOCK)
    if from_cut - above > equals:
        last = _nth_equal(row_ptr, vocab, top, inverse, cut, equals, BLOCK)
    return cut, last


@triton.jit
def _kept(weights, token, cut, last, min_p):
    """The weights that the filters keep, 0 for others."""
    bits = weights.to(tl.int32, bitcast=True)
    return tl.where(((bits > cut) | ((bits == cut) & (token <= last))) & (weights >= min_p), weights, 0.0)


@triton.jit
def _residual(probs, token, drawn_from_ptr, draft, source, vocab):
    """max(0, p - q). source -1: q is 1 at the draft."""
    q = tl.load(drawn_from_ptr + source.to(tl.int64) * vocab + token, mask=(token < vocab) & (source >= 0), other=0.0)
    return tl.maximum(probs - tl.where((source < 0) & (token == draft), 2.0, q), 0.0)


@triton.jit
def _exponentials(key, token):
    """E of tokens [BLOCK]: output token + 1 of SplitMix64 from `key` (uint64) as u in (0, 1), and -log(1 - u)."""
    z = key + (token + 1).to(tl.uint64) * GAMMA
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = z ^ (z >> 31)
    u = tl.minimum((2 * (z >> 32).to(tl.int64) + 1).to(tl.float32) * 2.0**-33, U_MAX)  # (n + 1/2) / 2**32, rounded once
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))  # what 1 - u loses is given back: exact to a few roundings


@triton.jit
def draw_kernel(
    logits_ptr,
    options_ptr,
    drawn_from_ptr,
    out_ptr,
    vocab,
    row_stride,
    FILTER: tl.constexpr,
    VERIFY: tl.constexpr,
    GAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows). out int32 [rows, 3]: the token (-1 without a finite best logit), whether its draft is kept, bits of the top-two gap.

    FILTER: some row has top-k or top-p. VERIFY: rows have drafts; the token of a row whose draft is not kept is what replaces it.
    """
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    own = options_ptr + row * COLUMNS
    token, top, is_good = _best(row_ptr, vocab, BLOCK)
    gap_bits = token * 0
    if GAPS:
        gap_bits = (top - _largest_other(row_ptr, vocab, token, BLOCK)).to(tl.int32, bitcast=True)
    draft, source = token * 0 - 1, token * 0 - 1
    keeps = token != token
    if VERIFY:
        draft = tl.load(own + DRAFT).to(tl.int32)
        source = tl.load(own + SOURCE).to(tl.int32)
        keeps = draft == token
    if is_good & (tl.load(own + IS_RANDOM) != 0):
        inverse = tl.load(own + INVERSE).to(tl.int32).to(tl.float32, bitcast=True)
        min_p = tl.load(own + MIN_P).to(tl.int32).to(tl.float32, bitcast=True)
        key = tl.load(own + KEY).to(tl.uint64, bitcast=True)
        cut, last = token * 0 + 1, token * 0 + vocab
        if FILTER:
            top_p = tl.load(own + TOP_P).to(tl.float64, bitcast=True)
            cut, last = _filter(row_ptr, vocab, top, inverse, tl.load(own + TOP_K), top_p, BLOCK)
        scale = top * 0.0 + 1.0
        from_residual = token != token
        if VERIFY:
            mass = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                mass += (_kept(_weights(row_ptr, ids, vocab, top, inverse), ids, cut, last, min_p) * UNIT).to(tl.int64)
            scale = 1.0 / (tl.sum(mass, 0).to(tl.float32) * (1.0 / UNIT))
            is_drafted = draft >= 0
            safe = tl.maximum(draft, 0)
            p = _kept(_weights(row_ptr, safe, vocab, top, inverse), safe, cut, last, min_p) * scale
            has_source = is_drafted & (source >= 0)
            q = tl.load(drawn_from_ptr + tl.maximum(source, 0).to(tl.int64) * vocab + safe, mask=has_source, other=1.0)
            chance = tl.load(own + CHANCE).to(tl.float64, bitcast=True)
            keeps = is_drafted & (chance * q.to(tl.float64) < p.to(tl.float64))
            if is_drafted & (not keeps):
                left = tl.zeros([BLOCK], tl.int64)
                for start in range(0, vocab, BLOCK):
                    ids = start + tl.arange(0, BLOCK)
                    probs = _kept(_weights(row_ptr, ids, vocab, top, inverse), ids, cut, last, min_p) * scale
                    left += (_residual(probs, ids, drawn_from_ptr, draft, source, vocab) * UNIT).to(tl.int64)
                from_residual = tl.sum(left, 0) > LEAST_MASS
        if not keeps:
            best_race = tl.full([BLOCK], float("inf"), tl.float32)
            at = tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocab, BLOCK):
                ids = start + tl.arange(0, BLOCK)
                probs = _kept(_weights(row_ptr, ids, vocab, top, inverse), ids, cut, last, min_p) * scale
                if VERIFY:  # noqa: SIM102 (a constant, unlike the inner one)
                    if from_residual:
                        probs = _residual(probs, ids, drawn_from_ptr, draft, source, vocab)
                race = tl.where(probs > 0.0, _exponentials(key, ids) / probs, float("inf"))
                at = tl.where(race < best_race, ids, at)
                best_race = tl.minimum(best_race, race)
            token = tl.min(tl.where(best_race == tl.min(best_race, 0), at, 0x7FFFFFFF), 0)
    tl.store(out_ptr + row * 3, tl.where(is_good, token, -1))
    tl.store(out_ptr + row * 3 + 1, keeps.to(tl.int32))
    tl.store(out_ptr + row * 3 + 2, gap_bits)
