"""Measurements beside the limit: kernels that were timed one by one, and whole jobs by the metrics that they wrote.

A timed kernel is a JSON object with `seconds`, `dtype` and its shape:

    {"op": "linear", "rows", "outputs", "inputs", "scheme": null or the fields of a QuantScheme}
    {"op": "paged_attention", "num_seqs", "query_tokens", "context_tokens", "num_heads", "num_kv_heads", "head_dim"}
    {"op": "rms_norm" | "add_rms_norm" | "silu_and_mul", "rows", "size"}

of attention also `window` and `kv_dtype` where they are not none and dtype. Each is expected to have found its inputs outside of the cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark.runtime.roofline.devices import Device
from dspark.runtime.roofline.job import JobTokens, mean_step
from dspark.runtime.roofline.ops import VECTOR, Group, Op, step_ops
from dspark.runtime.roofline.weights import WIDTH, ModelShape, arithmetic_of, linear_bytes
from dspark.runtime.spec.errors import InputError
from dspark.runtime.spec.quant import QuantScheme

Record = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What was timed, and the least that it takes on a device. bound: what most of the limit's time waits for, see `Device.bound`."""

    name: str
    seconds: float
    limit_s: float
    bound: str

    @property
    def fraction(self) -> float:
        """Of the limit's speed that was reached."""
        return self.limit_s / self.seconds


def timed_kernels(document: Record, device: Device) -> list[Measured]:
    """Every entry of a document's `timings`. Raises InputError where there are none, or one cannot be read."""
    timings = document.get("timings")
    if not isinstance(timings, list) or not timings:
        raise InputError("the measurements have no 'timings'", "give a file with timed kernels, or the metrics of dspark generate")
    return [_timed(number, record, device) for number, record in enumerate(timings)]


def _timed(number: int, record: Record, device: Device) -> Measured:
    try:
        build = _OPS[record["op"]]
        op, seconds = build(record), float(record["seconds"])
    except (KeyError, TypeError, ValueError) as error:
        known = ", ".join(_OPS)
        raise InputError(f"timings[{number}] cannot be read ({error!r})", f"known operations: {known}; each with its shape") from error
    if seconds <= 0:
        raise InputError(f"timings[{number}] has seconds {seconds}, allowed: above 0")
    return Measured(op.name, seconds, device.seconds(op, cold=True), device.bound(op, cold=True))


def measured_job(metrics: Record, shape: ModelShape, device: Device) -> Measured:
    """A whole job of `dspark generate --metrics`: the seconds of its forward passes beside those of as many mean steps.

    Raises InputError for a document that is none, or of a job without a step.
    """
    try:
        lines, tokens, engine = metrics["lines"], metrics["tokens"], metrics["engine"]
        answered = int(lines["ok"]) - min(int(lines.get("resumed", 0)), int(lines["ok"]))
        steps, seconds = int(engine["num_steps"]), float(engine["forward_s"])
        prompt, cached, output = int(tokens["prompt"]), int(tokens["cached"]), int(tokens["output"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"the metrics cannot be read ({error!r})", "give what dspark generate --metrics FILE wrote") from error
    if min(answered, steps, output) < 1 or seconds <= 0:
        raise InputError("the metrics are of a job that computed nothing", "give those of a run that answered lines")
    context = output * (prompt / answered + output / answered / 2)
    job = JobTokens(answered, answered, prompt, cached, output, 0, context)
    times: defaultdict[str, float] = defaultdict(float)
    for op in step_ops(shape, mean_step(job, steps)):
        times[device.bound(op)] += device.seconds(op)
    name = f"{steps} steps of {job.computed_tokens / steps:.1f} tokens"
    return Measured(name, seconds, steps * sum(times.values()), max(times, key=lambda bound: times[bound]))


def _linear(record: Record) -> Op:
    scheme = QuantScheme.from_json(record["scheme"]) if record.get("scheme") else None
    rows, outputs, inputs, dtype = record["rows"], record["outputs"], record["inputs"], record["dtype"]
    weights = linear_bytes(scheme, outputs, inputs, dtype)
    activations = WIDTH[dtype] * rows * (inputs + outputs)
    name = f"linear {scheme.name if scheme else dtype} {rows} x {inputs} -> {outputs}"
    return Op(name, arithmetic_of(scheme, dtype), 2 * rows * outputs * inputs, weights, 0, activations)


def _attention(record: Record) -> Op:
    group = Group(record["num_seqs"], record["query_tokens"], record["context_tokens"])
    heads, kv_heads, dim, dtype = record["num_heads"], record["num_kv_heads"], record["head_dim"], record["dtype"]
    window, count = record.get("window"), group.num_seqs
    kv_bytes = count * 2 * kv_heads * dim * WIDTH[record.get("kv_dtype") or dtype] * group.keys_read(window)
    rows = 2 * count * group.query_tokens * heads * dim * WIDTH[dtype]
    name = f"paged_attention {count} x {group.query_tokens} in {group.context_tokens}"
    return Op(name, dtype, 4 * count * heads * dim * group.keys_seen(window), 0, kv_bytes, rows)


def _row_op(flops: int, passes: int) -> Callable[[Record], Op]:
    def build(record: Record) -> Op:
        elements = record["rows"] * record["size"]
        name = f"{record['op']} {record['rows']} x {record['size']}"
        return Op(name, VECTOR, flops * elements, 0, 0, passes * elements * WIDTH[record["dtype"]])

    return build


_OPS: dict[str, Callable[[Record], Op]] = {
    "linear": _linear,
    "paged_attention": _attention,
    "rms_norm": _row_op(4, 2),
    "add_rms_norm": _row_op(5, 4),
    "silu_and_mul": _row_op(6, 3),
}
