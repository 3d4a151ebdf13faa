"""One step of a decoder as operations, each with the bytes that must cross memory once and the arithmetic that must be done.

Letters as in docs/kernels.md: T tokens, R rows whose logits are wanted, H hidden size, e bytes of an activation. Counted is what the engine
does: projections that read one input are one product, in the last layer only R rows go beyond attention, K and V of a sequence are
read once for all its queries. Left out: what a kernel computes to widen codes, block tables, sampling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from dspark.runtime.models.base import norm_names
from dspark.runtime.roofline.weights import HEAD, Linear, ModelShape

VECTOR = "float32"
"""What norms, rotations and activations are computed in, outside of matrix units."""


@dataclass(frozen=True)
class Op:
    """An operation of one rank. Bytes of weights, of the KV cache, of activations, and of what goes to other ranks.

    arithmetic: dtype whose rate counts for the FLOPs. Numbers are fractions where a step is a mean of steps.
    """

    name: str
    arithmetic: str
    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    link_bytes: float = 0.0

    @property
    def num_bytes(self) -> float:
        """Through this rank's own memory."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes


@dataclass(frozen=True)
class Group:
    """Sequences of one step that are alike: query_tokens computed of each, context_tokens then in its cache (these included), and of
    how many of its tokens the logits are wanted. Raises ValueError for what no sequence can be."""

    num_seqs: float
    query_tokens: float
    context_tokens: float
    logit_rows: float = 1.0

    def __post_init__(self) -> None:
        if self.num_seqs < 0 or self.query_tokens < 1 or self.context_tokens < self.query_tokens:
            raise ValueError(f"{self.num_seqs} sequences of {self.query_tokens} tokens in a context of {self.context_tokens} cannot be")

    def keys_seen(self, window: int | None) -> float:
        """Over the queries of one sequence: the sum of the keys that each sees."""
        last, count = self.context_tokens, self.query_tokens
        first = last - count + 1
        if window is None or last <= window:
            return count * (first + last) / 2
        if first >= window:
            return count * window
        below = window - first + 1
        return below * (first + window) / 2 + (count - below) * window

    def keys_read(self, window: int | None) -> float:
        """Keys of one sequence that any of its queries sees."""
        return self.context_tokens if window is None else min(self.context_tokens, window + self.query_tokens - 1)


@dataclass(frozen=True)
class Step:
    """What one step computes."""

    groups: tuple[Group, ...]

    @property
    def num_tokens(self) -> float:
        return sum(group.num_seqs * group.query_tokens for group in self.groups)

    @property
    def num_rows(self) -> float:
        """Tokens whose logits are wanted."""
        return sum(group.num_seqs * group.logit_rows for group in self.groups)


def decode(num_seqs: int, context_tokens: int) -> Step:
    """One more token of each sequence, of which the context then has so many."""
    return Step((Group(num_seqs, 1, context_tokens),))


def verify(num_seqs: int, context_tokens: int, query_tokens: int) -> Step:
    """A token and query_tokens - 1 drafted ones of each sequence, all of whose logits are wanted."""
    return Step((Group(num_seqs, query_tokens, context_tokens, query_tokens),))


def prefill(num_seqs: int, query_tokens: int, context_tokens: int | None = None) -> Step:
    """query_tokens of each prompt, the last ones of a context (by default the whole of it), and the logits of the last."""
    return Step((Group(num_seqs, query_tokens, context_tokens or query_tokens),))


def expected_experts(num_experts: int, experts_per_token: int, num_tokens: float) -> float:
    """How many experts num_tokens tokens take together, if each takes its own at random: E (1 - (1 - k / E) ** T)."""
    return num_experts * (1 - (1 - experts_per_token / num_experts) ** num_tokens)


def step_ops(shape: ModelShape, step: Step) -> Iterator[Op]:
    """Every operation of a step, in order of use. Of the reduction over ranks each operation's own part stands in an op of its own."""
    config, tokens, rows = shape.config, step.num_tokens, step.num_rows
    yield Op("embedding", VECTOR, 0, tokens * config.hidden_size * shape.width, 0, tokens * config.hidden_size * shape.width)
    norms = norm_names(config)
    if norms.before_attention:
        yield _norm(shape, tokens)
    for layer in range(config.num_layers):
        last = layer + 1 == config.num_layers
        after = rows if last else tokens
        name = f"model.layers.{layer}"
        yield from _products(shape, "qkv_proj", [f"{name}.self_attn.{part}_proj" for part in "qkv"], tokens)
        yield _rope(shape, layer, tokens)
        yield _attention(shape, layer, step)
        yield from _products(shape, "o_proj", [f"{name}.self_attn.o_proj"], after)
        yield from _all_reduce(shape, after)
        yield from _residual(shape, after, norms.after_attention, norms.before_mlp)
        yield from _experts(shape, layer, after) if config.has_experts(layer) else _mlp(shape, f"{name}.mlp", after)
        yield from _all_reduce(shape, after)
        yield from _residual(shape, after, norms.after_mlp, None if last else norms.before_attention)
    yield _norm(shape, rows)
    yield from _products(shape, "head", [HEAD], rows)
    if shape.tensor_parallel > 1:
        others = (shape.tensor_parallel - 1) / shape.tensor_parallel
        yield Op("all_reduce", VECTOR, link_bytes=others * rows * config.vocab_size * shape.width)


def by_name(ops: Iterable[Op]) -> dict[str, Op]:
    """Operations of one name added up, in order of first use. Where they differ in arithmetic, the name has it too."""
    found: dict[tuple[str, str], Op] = {}
    for op in ops:
        known = found.get((op.name, op.arithmetic), Op(op.name, op.arithmetic))
        found[op.name, op.arithmetic] = Op(
            op.name,
            op.arithmetic,
            known.flops + op.flops,
            known.weight_bytes + op.weight_bytes,
            known.kv_bytes + op.kv_bytes,
            known.activation_bytes + op.activation_bytes,
            known.link_bytes + op.link_bytes,
        )
    names = [name for name, _ in found]
    return {name if names.count(name) == 1 else f"{name} {arithmetic}": op for (name, arithmetic), op in found.items()}


def linear_op(name: str, linears: list[Linear], rows: float, width: int, arithmetic: str) -> Op:
    """x [rows, K] times weights that read the same x, side by side: 2 M N K FLOPs, e M (K + N) bytes of activations."""
    outputs, inputs = sum(linear.num_outputs for linear in linears), linears[0].num_inputs
    weights = sum(linear.num_bytes for linear in linears)
    return Op(name, arithmetic, 2 * rows * outputs * inputs, weights, 0, width * rows * (inputs + outputs))


def _products(shape: ModelShape, name: str, modules: list[str], rows: float) -> Iterator[Op]:
    """One product for each arithmetic among the modules."""
    linears = sorted((shape.linears[module] for module in modules), key=lambda linear: linear.arithmetic)
    for arithmetic, members in groupby(linears, lambda linear: linear.arithmetic):
        yield linear_op(name, list(members), rows, shape.width, arithmetic)


def _norm(shape: ModelShape, rows: float) -> Op:
    """rms_norm: a row is read and written."""
    size = shape.config.hidden_size
    return Op("norms", VECTOR, 4 * rows * size, size * shape.width, 0, 2 * rows * size * shape.width)


def _residual(shape: ModelShape, rows: float, post_norm: str | None, next_norm: str | None) -> Iterator[Op]:
    """A block's result onto the residual stream, normed before where the family does, and the next block's input made from the sum."""
    size = shape.config.hidden_size
    if post_norm:
        yield _norm(shape, rows)
    if next_norm:
        yield Op("norms", VECTOR, 5 * rows * size, size * shape.width, 0, 4 * rows * size * shape.width)
    else:
        yield Op("norms", VECTOR, rows * size, 0, 0, 3 * rows * size * shape.width)


def _rope(shape: ModelShape, layer: int, tokens: float) -> Op:
    """rope_store_kv: q, k and v are read, q is written, k and v into the cache; cosines and sines are float32 [T, rotated / 2] each."""
    config, heads, kv_heads = shape.config, shape.num_heads, shape.num_kv_heads
    rotated = int(config.head_dim * config.rope_of_layer(layer).partial_rotary_factor)
    normed = 4 * (heads + kv_heads) * config.head_dim if config.qk_norm else 0
    return Op(
        "rope_store_kv",
        VECTOR,
        tokens * (3 * (heads + kv_heads) * rotated + normed),
        0,
        tokens * 2 * kv_heads * config.head_dim * shape.kv_width,
        tokens * ((2 * heads + 2 * kv_heads) * config.head_dim * shape.width + 4 * rotated),
    )


def _attention(shape: ModelShape, layer: int, step: Step) -> Op:
    """Both products over the keys that are seen; keys and values from the cache, q in and the result out."""
    config, window = shape.config, shape.config.window_of_layer(layer)
    seen = sum(group.num_seqs * group.keys_seen(window) for group in step.groups)
    read = sum(group.num_seqs * group.keys_read(window) for group in step.groups)
    kv_bytes = 2 * shape.num_kv_heads * config.head_dim * shape.kv_width * read
    rows = 2 * step.num_tokens * shape.num_heads * config.head_dim * shape.width
    return Op("attention", config.dtype, 4 * shape.num_heads * config.head_dim * seen, 0, kv_bytes, rows)


def _mlp(shape: ModelShape, module: str, rows: float, prefix: str = "") -> Iterator[Op]:
    """A gated feed-forward block."""
    yield from _products(shape, f"{prefix}gate_up_proj", [f"{module}.gate_proj", f"{module}.up_proj"], rows)
    yield _activation(shape, rows, shape.linears[f"{module}.down_proj"].num_inputs)
    yield from _products(shape, f"{prefix}down_proj", [f"{module}.down_proj"], rows)


def _activation(shape: ModelShape, rows: float, inner: int) -> Op:
    """silu_and_mul and its like."""
    return Op("activation", VECTOR, 6 * rows * inner, 0, 0, 3 * rows * inner * shape.width)


def _experts(shape: ModelShape, layer: int, rows: float) -> Iterator[Op]:
    """A mixture of experts: the router, as many experts' weights as are expected to be taken, the shared expert."""
    config, module = shape.config, f"model.layers.{layer}.mlp"
    yield from _products(shape, "router", [f"{module}.gate"], rows)
    taken = rows * config.experts_per_token
    part = expected_experts(config.num_experts, config.experts_per_token, rows) / config.num_experts
    for leaves in (("gate_proj", "up_proj"), ("down_proj",)):
        linears = [shape.linears[f"{module}.experts.{expert}.{leaf}"] for expert in range(config.num_experts) for leaf in leaves]
        for arithmetic, group in groupby(sorted(linears, key=lambda linear: linear.arithmetic), lambda linear: linear.arithmetic):
            members = list(group)
            share = len(members) / config.num_experts / len(leaves)  # of the rows, where experts differ
            outputs, inputs = len(leaves) * members[0].num_outputs, members[0].num_inputs
            yield Op(
                "experts",
                arithmetic,
                2 * share * taken * outputs * inputs,
                part * sum(linear.num_bytes for linear in members),
                0,
                shape.width * share * taken * (inputs + outputs),
            )
    yield _activation(shape, taken, shape.linears[f"{module}.experts.0.down_proj"].num_inputs)
    yield Op("combine", VECTOR, 2 * taken * config.hidden_size, 0, 0, shape.width * (taken + rows) * config.hidden_size)
    if config.shared_expert_intermediate_size:
        yield from _products(shape, "router", [f"{module}.shared_expert_gate"], rows)
        yield from _mlp(shape, f"{module}.shared_expert", rows, "shared_")


def _all_reduce(shape: ModelShape, rows: float) -> Iterator[Op]:
    """The sum of all ranks' results, in a ring: each rank sends 2 (n - 1) / n of it."""
    if shape.tensor_parallel > 1:
        num_ranks, size = shape.tensor_parallel, rows * shape.config.hidden_size * shape.width
        others = (num_ranks - 1) / num_ranks
        yield Op("all_reduce", VECTOR, others * rows * shape.config.hidden_size, 0, 0, 2 * size, 2 * others * size)
