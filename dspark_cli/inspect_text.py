"""The facts of `dspark inspect` as a screenful of text: a label and what it says, in the order in which people ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Facts = dict[str, Any]
_SHOWN_FILES = 6
_SHOWN_DIGITS = 12
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def lines(facts: Facts) -> Iterator[str]:
    """What to print."""
    kind = _adapter if "peft_type" in facts else _draft if "draft_method" in facts else _model
    pairs = list(kind(facts))
    width = max(len(label) for label, _ in pairs) + 2
    for label, text in pairs:
        yield f"{label:<{width}}{text}"


def size(num_bytes: int) -> str:
    """Such as "6.3 GB"."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def _model(facts: Facts) -> Iterator[tuple[str, str]]:
    """A checkpoint or an engine."""
    yield "format", facts["format"]
    yield "model", f"{facts['family']}, {facts['parameters']:,} parameters, {facts['layers']} layers, context {facts['context']:,}"
    yield "", facts["shape"]
    if facts["experts"]:
        yield "", facts["experts"]
    window = f", window {facts['sliding_window']} in {facts['sliding_layers']} layers" if facts["sliding_window"] else ""
    yield "", f"lm_head {'tied to the embedding' if facts['tied_head'] else 'of its own'}, rope {facts['rope']}{window}"
    yield from _weights(facts)
    if facts.get("kv_cache"):
        yield "KV cache", facts["kv_cache"]
    yield from _memory(facts)
    if "tokenizer" in facts:
        yield "tokenizer", facts["tokenizer"]
    yield from _files(facts)
    if "lineage" in facts:
        yield from _lineage(facts["lineage"])
        tools = ", ".join(f"{name} {version}" for name, version in facts["lineage"].get("tools", {}).items())
        yield from _distilled(facts["lineage"])
        yield "made", " by ".join(part for part in (facts["created"], tools) if part)
        yield "audit", facts["audit"].removeprefix("audit ")
    yield from _quality(facts.get("quality") or {})
    yield from _pairing(facts.get("pairing"))
    for note in facts["notes"]:
        yield "note", note


def _weights(facts: Facts) -> Iterator[tuple[str, str]]:
    """As they are stored; of a checkpoint, and as an engine would store them."""
    method = f" by {facts['method']}" if facts.get("method") else ""
    stored = f"{facts['scheme']}{method}, the rest {facts['dtype']}" if facts["scheme"] else facts["dtype"]
    if "tensor_types" in facts:
        yield "weights", f"{facts['tensor_types']} tensors, in an engine {stored}"
    else:
        yield "weights", f"{stored}, {size(facts['weight_bytes'])}"
    if facts.get("ignored_layers"):
        yield "", f"left dense: {', '.join(facts['ignored_layers'])}"


def _memory(facts: Facts) -> Iterator[tuple[str, str]]:
    need = facts["memory"]
    parts = (
        f"weights {size(need['weights_bytes'])}, activations {size(need['activation_bytes'])}, the program {size(need['program_bytes'])}"
    )
    cache = f"{need['kv_tokens']:,} tokens for {need['max_num_seqs']} sequences, {facts['kv_bytes_per_token']:,} bytes a token in"
    yield "memory", f"about {size(need['total_bytes'])} for a run on a CPU with the default flags"
    yield "", f"  {parts}"
    yield "", f"  KV cache {size(need['kv_cache_bytes'])} when full: {cache} {need['kv_dtype']}"


def _files(facts: Facts) -> Iterator[tuple[str, str]]:
    """Of a checkpoint: what convert would read. Of an engine: what is missing, if anything."""
    if "files" in facts:
        yield from _file_lines("files", facts["files"])
    if facts.get("missing_files"):
        yield "MISSING", f"{', '.join(facts['missing_files'])}: this engine does not load; convert the checkpoint again"


def _lineage(lineage: Facts, label: str = "made from") -> Iterator[tuple[str, str]]:
    """The source with its files, the adapters merged in, and what the source itself was made from."""
    source = f"{lineage.get('source', 'unknown')} ({lineage.get('format', 'unknown')})"
    yield from _file_lines(label, lineage.get("files", {}), source)
    for adapter in lineage.get("adapters", ()):
        yield from _file_lines("adapter", adapter.get("files", {}), f"{adapter['source']} x{adapter['weight']:g}")
    if lineage.get("made_of"):
        yield from _lineage(lineage["made_of"], "that from")


def _file_lines(label: str, files: Facts, source: str | None = None) -> Iterator[tuple[str, str]]:
    """A summary, then a line for each file: weights first, the largest."""
    total = sum(entry["bytes"] for entry in files.values())
    summary = f"{len(files)} {'file' if len(files) == 1 else 'files'}, {size(total)}" if files else ""
    yield label, ", ".join(part for part in (source, summary) if part)
    ordered = sorted(files.items(), key=lambda item: -item[1]["bytes"])
    for name, entry in ordered[:_SHOWN_FILES]:
        digest = f"  xxh3 {entry['xxh3'][:_SHOWN_DIGITS]}" if "xxh3" in entry else ""
        yield "", f"  {name}  {size(entry['bytes'])}{digest}"
    if len(ordered) > _SHOWN_FILES:
        yield "", f"  and {len(ordered) - _SHOWN_FILES} more (--json names all)"


def _quality(quality: Facts) -> Iterator[tuple[str, str]]:
    """What quantizing, or merging into a quantized base, has cost."""
    if quality.get("mean_sqnr_db") is not None:
        worst = f"worst {quality['worst_sqnr_db']} dB ({quality['worst_layer']})"
        yield "quality", f"SQNR of the weights: mean {quality['mean_sqnr_db']} dB, {worst}"
    if "mean_error_before" in quality:
        before, after = quality["mean_error_before"], quality["mean_error_after"]
        yield "quality", f"adapted layers {before:.2%} from a full-precision merge, {after:.2%} after quantizing again"
    evaluation = quality.get("evaluation")
    if evaluation:
        yield "measured", f"on {evaluation['file']}: {', '.join(_measured(evaluation))}"
    calibration = quality.get("calibration")
    if calibration:
        known = [f"{key.replace('_', ' ')} {value}" for key, value in calibration.items() if isinstance(value, str | int | float)]
        yield "calibrated", ", ".join(known)


def _pairing(pairing: Facts | None) -> Iterator[tuple[str, str]]:
    """What --speculative auto does, and what it was measured with."""
    if pairing is None:
        return
    row = next((row for row in pairing["measured"] if row["method"] == pairing["method"]), None)
    gain = f", {row['ratio']:.2f} times plain decoding at {row['tokens_per_step'] or 1.0:.2f} tokens a step" if row else ", not measured"
    yield "drafts", f"{pairing['method']}{'' if pairing['method'] == 'off' else gain}"
    machine = pairing["machine"]
    yield "", f"  paired on {machine['processor']}, {machine['threads']} threads, {machine['dtype']}"
    if not pairing["draft_is_there"]:
        yield "MISSING", f"{pairing['draft']}/: pair the engine again"


def _measured(evaluation: Facts) -> Iterator[str]:
    """Figures of an evaluation; one that is not finite is null there."""
    names = {"perplexity": "perplexity", "baseline_perplexity": "baseline's", "ppl_increase_pct": "increase in percent"}
    names |= {"mean_kl": "mean KL in nats", "top1_agreement": "top-1 agreement"}
    for key, words in names.items():
        if evaluation.get(key) is not None:
            yield f"{words} {evaluation[key]:.4g}"


def _adapter(facts: Facts) -> Iterator[tuple[str, str]]:
    """A LoRA adapter, or another one that is not read."""
    for key, value in facts.items():
        if key not in ("files", "file_bytes") and value not in (None, [], {}):
            yield key.replace("_", " "), _plain(value)
    yield from _file_lines("files", facts["files"])
    if "not_supported" not in facts:
        yield "to merge it", "dspark convert BASE ENGINE --lora DIR; a run then needs what the base model needs"


def _draft(facts: Facts) -> Iterator[tuple[str, str]]:
    """A drafting head by itself."""
    length = f", up to {facts['draft_tokens']} tokens a draft" if facts["draft_tokens"] else ""
    yield "format", f"draft: {facts['draft_method']}{length}"
    yield "head", f"{facts['parameters']:,} parameters, {facts['layers']} layers; packaging: {facts['packaging'] or 'not said'}"
    yield "", f"{facts['shape']}, vocabulary {facts['draft_vocabulary']}"
    yield "for", f"a target with {facts['target']}"
    yield "", f"reads its layers {', '.join(map(str, facts['reads_layers']))}"
    if facts["uses_of_target"]:
        yield "", f"uses its {' and its '.join(facts['uses_of_target'])}"
    if facts["markov_head"]:
        yield "bias", f"on the token before, {facts['markov_head']}"
    if facts["confidence_head"]:
        fitted = " ".join(f"{value:.2f}" for value in facts["temperatures"])
        yield "confidence", f"temperatures {fitted}" if fitted else "without temperatures: dspark pair fits them"
    yield from _distilled(facts["lineage"])
    yield from _file_lines("files", facts["files"])
    if facts["missing_files"]:
        yield "MISSING", f"{', '.join(facts['missing_files'])}: this draft does not load; pair the engine with it again"
    yield "to use it", "dspark pair ENGINE --draft DIR --prompts FILE"


def _distilled(lineage: Facts) -> Iterator[tuple[str, str]]:
    """What `dspark pair --distill` trained a draft on, and what that came to on lines that were held out."""
    if "held_out" not in lineage:
        return
    lines = lineage["lines"]
    tokens, name = f"{lineage['answer_tokens']:,} tokens", lineage["prompts_file"]
    yield "trained on", f"{lines['training']} answers ({tokens}) to '{name}', {lineage['steps']} steps"
    lengths = [lineage["held_out"][when]["mean_accepted_length"] for when in ("before", "after")]
    yield "held out", f"{lines['held_out']} lines: {lengths[0]:.2f} tokens a round before training, {lengths[1]:.2f} after"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
