"""`dspark generate --dry-run`: what a job would do, need and take, printed. Nothing is loaded but the tokenizer."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.kv_cache import choose_cache_dtype
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.speculation.choice import choose_speculation
from dspark_cli.console import Console
from dspark_cli.inspect_text import size

if TYPE_CHECKING:
    from dspark.runtime.jobs.dry_run import DryRun
    from dspark.runtime.jobs.earlier import EarlierAnswers
    from dspark.runtime.jobs.job import Loaders
    from dspark.runtime.roofline.room import Room
    from dspark.runtime.roofline.weights import ModelShape
    from dspark_cli.generate import ConsoleReporter, JobOptions

_LABEL = 15


def run_dry(
    console: Console, options: JobOptions, config: EngineConfig, sampling: dict[str, Any], loaders: Loaders, reporter: ConsoleReporter
) -> int:
    """Report what the job would do; returns the exit code that it would have."""
    from dspark.runtime.jobs.defaults import defaults_in_force
    from dspark.runtime.jobs.dry_run import dry_run
    from dspark.runtime.jobs.earlier import earlier_answers
    from dspark.runtime.jobs.scan import open_input
    from dspark.runtime.roofline.room import job_device, room_of
    from dspark.runtime.roofline.weights import ModelShape

    assert options.engine is not None
    open_input(options.input).close()
    manifest = load_manifest(options.engine)
    cache_dtype = choose_cache_dtype(manifest.kv_cache, manifest.model.dtype, config.kv_cache_dtype)
    choose_speculation(config, options.engine)
    defaults = defaults_in_force(sampling, options.engine)
    builder = loaders.load_builder(options.engine, manifest, config, defaults)
    context = manifest.model.context_length
    layout = "cpu" if job_device(config.device) == "cpu" else "stored"
    shape = ModelShape(manifest.model, manifest.quant, cache_dtype, layout)
    room = room_of(shape, config, min(config.max_model_len or context, context))
    found = dry_run(
        options.input,
        builder,
        config.block_size,
        defaults.max_tokens or context,
        options.limit,
        options.allow_duplicate_ids,
        reporter.failed,
        room.num_blocks,
    )
    reporter.close()
    earlier = earlier_answers(options.output) if found.num_servable else None
    time = estimate(options.engine, config, shape, room, found, earlier) if found.num_servable else None
    console.document(
        {
            **found.document(),
            "earlier_answers": {**asdict(earlier), "source": str(earlier.source)} if earlier else None,
            "memory": {**asdict(room), "max_num_seqs": sequences_at_once(config, room, found)},
            "time": time,
        }
    )
    for label, text in lines(config, found, earlier, room, time):
        console.data(f"{label:<{_LABEL}}{text}")
    return found.exit_code


def sequences_at_once(config: EngineConfig, room: Room, found: DryRun) -> dict[str, int | None]:
    """Of those that --max-num-seqs allows, how many the KV cache holds: of the job's mean length, and of its longest line."""
    allowed = min(config.max_num_seqs, found.num_answers)
    if not found.num_answers:
        return {"allowed": allowed, "mean": None, "longest": None}
    mean = (found.prompt_tokens["total"] * found.num_answers / found.num_servable + found.most_output_tokens) / found.num_answers
    return {
        "allowed": allowed,
        "mean": room.max_num_seqs(mean, config.block_size),
        "longest": room.max_num_seqs(found.longest_request, config.block_size),
    }


def estimate(
    engine_dir: Path, config: EngineConfig, shape: ModelShape, room: Room, found: DryRun, earlier: EarlierAnswers | None
) -> dict[str, Any]:
    """Seconds of the job, JSON-ready: with answers of one token, as long as earlier ones, as long as allowed.

    "basis" says what they follow from: "step times" that `dspark pair` measured here, as far as these reach, or the "limit" of the machine.
    Without either there is only "unknown", the reason.
    """
    from dspark.runtime.roofline.job import JobTokens, Limits, at_the_limit, from_step_times
    from dspark_cli.dry_run_device import limit_of, step_times

    most = JobTokens(
        found.num_servable,
        found.num_answers,
        found.prompt_tokens["total"],
        found.shared_tokens if config.enable_prefix_caching else 0,
        found.most_output_tokens,
        found.longest_answer,
        found.context_tokens,
    )
    held = (most.prompt_tokens - most.shared_tokens) / most.num_requests + most.output_tokens / most.num_answers / 2
    fits = room.max_num_seqs(held, config.block_size)
    at_once = min(config.max_num_seqs, most.num_answers, fits if fits is not None else config.max_num_seqs)
    limits = Limits(max(at_once, 1), config.max_num_batched_tokens)
    cases = {"shortest": most.shortened(1), "longest": most}
    if earlier is not None:
        cases["expected"] = most.shortened(earlier.tokens_per_line * most.num_requests / most.num_answers)
    cost = step_times(engine_dir, config, shape.config.dtype, room.device)
    if cost is not None:
        estimates = {name: from_step_times(cost, tokens, limits) for name, tokens in cases.items()}
        known = {name: known for name, known in estimates.items() if known is not None}
        if "longest" in known:
            return {"basis": "step times", "device": "as paired", **_seconds(known)}
    device, reason = limit_of(config, shape, room)
    if device is None:
        return {"unknown": reason}
    times = {name: at_the_limit(shape, device, tokens, limits) for name, tokens in cases.items()}
    return {
        "basis": "limit",
        "device": device.name,
        "source": device.source,
        "bandwidth_bytes_per_s": device.bandwidth,
        "flops_per_s": dict(device.rates),
        **_seconds(times),
        "parts": times["longest"].parts,
    }


def _seconds(times: dict[str, Any]) -> dict[str, Any]:
    longest = times["longest"]
    seconds = {f"{name}_s": times[name].seconds if name in times else None for name in ("shortest", "expected", "longest")}
    return {**seconds, "num_steps": longest.num_steps, "tokens_per_step": longest.tokens_per_step}


def lines(
    config: EngineConfig, found: DryRun, earlier: EarlierAnswers | None, room: Room, time: dict[str, Any] | None
) -> list[tuple[str, str]]:
    """What is printed: a label and what it says."""
    shown = [("lines", f"{found.num_lines}: {found.num_servable} can be served, {found.num_errors} would be error records")]
    if found.num_servable:
        prompt = found.prompt_tokens
        share = 100 * found.shared_tokens / prompt["total"]
        shown.append(("prompt tokens", f"{prompt['total']} (p50 {prompt['p50']}, p90 {prompt['p90']}, max {prompt['max']})"))
        shown.append(("shared", f"{found.shared_tokens} prompt tokens ({share:.0f}%) in beginnings in common"))
        shown.append(("output tokens", f"at most {found.most_output_tokens}{_expected(found, earlier)}"))
    shown.append(("memory", _memory(room)))
    if found.num_servable:
        shown.append(("sequences", _sequences(sequences_at_once(config, room, found))))
    if time is not None:
        shown += [("time" if i == 0 else "", text) for i, text in enumerate(_time(config, earlier, time))]
    return [*shown, ("exit code", str(found.exit_code))]


def _expected(found: DryRun, earlier: EarlierAnswers | None) -> str:
    if earlier is None:
        return ""
    expected = min(round(earlier.tokens_per_line * found.num_servable), found.most_output_tokens)
    return f"; about {expected} if lines are answered like the {earlier.num_lines} in '{earlier.source}'"


def _memory(room: Room) -> str:
    where = "the GPU" if room.device == "cuda" else "this machine"
    free = f"; {size(room.free_bytes)} are free on {where}" if room.free_bytes is not None else ""
    cache = f", KV cache {size(room.pool_bytes)}" if room.pool_bytes is not None else ""
    return f"weights {size(room.weights_bytes)}{cache}{free}"


def _sequences(counts: dict[str, int | None]) -> str:
    if counts["mean"] is None:
        return f"{counts['allowed']} at once; how many the KV cache holds is not known without the GPU"
    return f"{counts['allowed']} at once; the KV cache holds {counts['mean']} of the mean length, {counts['longest']} of the longest line's"


def _time(config: EngineConfig, earlier: EarlierAnswers | None, time: dict[str, Any]) -> list[str]:
    if "unknown" in time:
        return [f"not known: {time['unknown']}"]
    ends = [
        f"{duration(time[key])} {words}"
        for key, words in (
            ("shortest_s", "if every answer has one token"),
            ("expected_s", f"if they are like those in '{earlier.source}'" if earlier is not None else ""),
            ("longest_s", "if all are as long as allowed"),
        )
        if time[key] is not None
    ]
    drafts = " without drafts" if config.speculative != "off" else ""
    if time["basis"] == "step times":
        note = f"an estimate{drafts} from the step times that dspark pair measured here; loading is not in it"
        return [f"about {', '.join(ends)}", note]
    rates = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {name}" for name, rate in time["flops_per_s"].items())
    return [
        f"at least {', '.join(ends)}",
        f"a bound{drafts}, no promise: no program reaches the machine's limit",
        f"{time['device']}: {time['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s, {rates} ({time['source']})",
    ]


def duration(seconds: float) -> str:
    """Such as "0.04 s", "12 s", "3 min 20 s" and "2 h 5 min"."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
