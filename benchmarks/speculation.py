"""Measure what speculation gains over plain decoding of the same engine, in one process and in turns.

    python benchmarks/cpu.py --speculation --engine ENGINE [--workload FILE ...] [--batch 1,32] [--methods ngram,auto,draft,ngram+draft]
                             [--ends eos,ignore_eos] [--rounds R] [--lines-at-one N] [--threads N] [--out FILE]

For each workload, batch size and way of ending, every round answers the lines with plain decoding and with each method, in an order that
moves on by one from round to round. A ratio is tokens per CPU-second over plain decoding's of the same round; the bound below it is the
lower end of a one-sided 95 % confidence interval of their geometric mean over the rounds (Student's t on the logarithms). Each run starts
as a job does: an empty KV cache, no memory of other answers, and of step times what the engine's pairing says.

eos: an answer ends where the model ends it. ignore_eos: at its line's max_tokens, so that all methods write the same number of tokens;
what stands behind an end of text repeats itself more than answers do, and flatters n-grams.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dspark.runtime.engine import Engine
from dspark.runtime.jobs.lines import is_blank, parse_line
from dspark.runtime.jobs.prompts import PromptBuilder
from dspark.runtime.jobs.tokenizer import load_codec
from dspark.runtime.spec.engine_config import EngineConfig
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams
from dspark.runtime.speculation.choice import Choice, choose_speculation, draft_method
from dspark.runtime.speculation.pairing import DRAFT_FOLDER, with_ngrams

HERE = Path(__file__).resolve().parent
METHODS = ("ngram", "auto", "draft", "ngram+draft")
ENDS = ("eos", "ignore_eos")
GENERATED = ("copy", "chat")
MOST_TOKENS = 192
"""Of an answer whose line does not say."""
T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729)
"""One-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
T_95_MANY = 1.725
"""For more of them: a little too careful."""


@dataclass(frozen=True)
class Run:
    """One answering of all lines. tokens: written, all answers together. accepted_length: tokens that a verified draft brought, the
    target's own among them; tokens_per_step: of a line, steps without a draft counted too. behind_prompts_s: from each line's first token
    to its last, of lines one at a time: no draft can make a prompt shorter."""

    cpu_s: float
    wall_s: float
    tokens: int
    accepted_length: float | None = None
    tokens_per_step: float | None = None
    behind_prompts_s: float | None = None

    @property
    def rate(self) -> float:
        """Tokens per CPU-second."""
        return self.tokens / self.cpu_s


@dataclass(frozen=True)
class Cell:
    """What is measured under the same conditions."""

    workload: str
    batch: int
    ends: str


def paired_ratio(plain: list[float], own: list[float]) -> tuple[float, float | None]:
    """(geometric mean of own / plain, the lower end of its one-sided 95 % confidence interval; None with one pair). One entry a round."""
    logs = [math.log(b / a) for a, b in zip(plain, own, strict=True)]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), None
    quantile = T_95[len(logs) - 2] if len(logs) - 2 < len(T_95) else T_95_MANY
    return math.exp(middle), math.exp(middle - quantile * statistics.stdev(logs) / math.sqrt(len(logs)))


def read_requests(path: Path, engine_dir: Path, vocab_size: int, context: int, ends: str) -> list[Request]:
    """The lines of a workload as requests that end as `ends` says. A line that cannot be used ends the program."""
    builder = PromptBuilder(load_codec(engine_dir), SamplingParams(), context, vocab_size)
    found = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if is_blank(raw, number):
                continue
            request = builder.build(parse_line(raw.rstrip(b"\r\n"), number), len(found))
            most = min(request.params.max_tokens or MOST_TOKENS, context - len(request.prompt_token_ids))
            params = replace(request.params, max_tokens=most, ignore_eos=ends == "ignore_eos")
            found.append(replace(request, params=params))
    if not found:
        raise SystemExit(f"{path} has no lines")
    return found


def choices(methods: list[str], engine_dir: Path) -> dict[str, Choice]:
    """The ways of drafting by name, plain decoding first. One that is another under a second name is left out, with a line on stderr."""
    own = engine_dir / DRAFT_FOLDER
    found = {"off": Choice("off")}
    for name in methods:
        if name.endswith("draft"):
            if not own.is_dir():
                print(f"{name}: left out, the engine has no draft", file=sys.stderr)
                continue
            method = draft_method(own)
            choice = choose_speculation(EngineConfig(speculative=method, draft=str(own)), engine_dir)
            choice = replace(choice, method=with_ngrams(method)) if name.startswith("ngram+") else choice
        else:
            choice = choose_speculation(EngineConfig(speculative=name), engine_dir)
        twin = next((other for other, known in found.items() if (known.method, known.draft) == (choice.method, choice.draft)), None)
        if twin is None:
            found[name] = choice
        else:
            print(f"{name}: left out, it is {twin} ({choice.method})", file=sys.stderr)
    return found


def run_once(engine: Engine, choice: Choice, requests: list[Request], batch: int) -> Run:
    """Answer the requests, `batch` at a time, with an empty cache."""
    engine.config = replace(engine.config, max_num_seqs=batch)
    run = engine.again(choice)
    cpu, wall = time.process_time(), time.perf_counter()
    for request in requests:
        run.add(request)
    outputs = list(run.drain())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.completions)
    speculation = run.metrics()["speculation"] or {}
    behind = sum(output.finished_at_s - output.first_token_at_s for output in outputs) if batch == 1 else None
    return Run(cpu, wall, tokens, speculation.get("mean_accepted_length"), speculation.get("tokens_per_step"), behind)


def measure(engine: Engine, found: dict[str, Choice], requests: list[Request], batch: int, rounds: int) -> dict[str, list[Run]]:
    """Every method's run of every round, plain decoding's among them."""
    runs: dict[str, list[Run]] = {name: [] for name in found}
    names = list(found)
    run_once(engine, found["off"], requests[: min(len(requests), batch)], batch)  # caches of the processor and the allocator
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            runs[name].append(run_once(engine, found[name], requests, batch))
    return runs


def summarize(cell: Cell, runs: dict[str, list[Run]], found: dict[str, Choice]) -> list[dict[str, Any]]:
    """A row for each method."""
    rows = []
    for name, own in runs.items():
        ratio, lower = paired_ratio([run.rate for run in runs["off"]], [run.rate for run in own])
        wall, _ = paired_ratio([run.tokens / run.wall_s for run in runs["off"]], [run.tokens / run.wall_s for run in own])
        rows.append(
            {
                **asdict(cell),
                "method": name,
                "drafts": found[name].method,
                "tokens": own[0].tokens,
                "tokens_per_cpu_s": statistics.median(run.rate for run in own),
                "ratio": ratio,
                "ratio_lower_95": lower,
                "wall_ratio": wall,
                "behind_prompts_ratio": _behind_prompts(runs["off"], own),
                "accepted_length": _median(run.accepted_length for run in own),
                "tokens_per_step": _median(run.tokens_per_step for run in own),
                "runs": [asdict(run) for run in own],
            }
        )
    return rows


def _behind_prompts(plain: list[Run], own: list[Run]) -> float | None:
    """By the clock, the ratio of tokens a second from each line's first token on."""
    rates = [[run.tokens / run.behind_prompts_s for run in runs if run.behind_prompts_s] for runs in (plain, own)]
    return paired_ratio(*rates)[0] if len(rates[0]) == len(rates[1]) == len(plain) else None


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


COLUMNS: dict[str, tuple[str, str]] = {
    "workload": ("workload", "{}"),
    "batch": ("batch", "{}"),
    "ends": ("ends", "{}"),
    "method": ("method", "{}"),
    "drafts": ("drafts with", "{}"),
    "tokens": ("tokens", "{}"),
    "tokens_per_cpu_s": ("tok/CPU-s", "{:.1f}"),
    "ratio": ("ratio", "{:.3f}"),
    "ratio_lower_95": ("at least (95 %)", "{:.3f}"),
    "wall_ratio": ("by the clock", "{:.3f}"),
    "behind_prompts_ratio": ("behind the prompts", "{:.3f}"),
    "accepted_length": ("accepted length", "{:.2f}"),
    "tokens_per_step": ("tokens/step", "{:.2f}"),
}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    cells = [[heading for heading, _ in COLUMNS.values()]]
    cells += [["-" if row[key] is None else form.format(row[key]) for key, (_, form) in COLUMNS.items()] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines)


def workloads(given: list[Path], generate: Callable[[str, Path], Path]) -> dict[str, Path]:
    """The files to run by name: those that are given, else those that are generated."""
    if given:
        return {path.stem: path for path in given}
    return {name: generate(name, HERE / ".envs" / "workloads") for name in GENERATED}


def parse_args(arguments: list[str]) -> argparse.Namespace:
    def listed(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            if wrong := [part for part in text.split(",") if part not in allowed]:
                raise argparse.ArgumentTypeError(f"{wrong[0]} is none of {', '.join(allowed)}")
            return text.split(",")

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--workload", type=Path, action="append", default=[], help="JSONL file; may be repeated (default: generated ones)")
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 32])
    parser.add_argument("--methods", type=listed(METHODS), default=list(METHODS))
    parser.add_argument("--ends", type=listed(ENDS), default=list(ENDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines-at-one", type=int, default=12, help="lines of a workload that are run one at a time")
    parser.add_argument("--lines", type=int, help="lines of a workload that are run in larger batches (default: all)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the JSON goes, with every run")
    return parser.parse_args(arguments)


def main(arguments: list[str], generate: Callable[[str, Path], Path], machine: dict[str, Any]) -> list[dict[str, Any]]:
    """Run what the arguments ask for, print the table, write the JSON after every cell. generate: (workload, folder) -> its file."""
    args = parse_args(arguments)
    own = args.engine / DRAFT_FOLDER
    draft = str(own) if own.is_dir() and any(name.endswith("draft") or name == "auto" for name in args.methods) else None
    config = EngineConfig(
        device="cpu", threads=args.threads, max_num_seqs=max(args.batch), speculative="auto" if draft else "off", draft=draft
    )
    engine = Engine.from_directory(args.engine, config, load_codec(args.engine))
    engine.warm_up()
    found = choices(args.methods, args.engine)
    settings = {"rounds": args.rounds, "threads": args.threads, "engine": args.engine.name}
    rows: list[dict[str, Any]] = []
    for name, path in workloads(args.workload, generate).items():
        for ends in args.ends:
            requests = read_requests(path, args.engine, engine.vocab_size, engine.max_model_len, ends)
            for batch in args.batch:
                cell = Cell(name, batch, ends)
                chosen = requests[: args.lines_at_one if batch == 1 else args.lines]
                rows += summarize(cell, measure(engine, found, chosen, batch, args.rounds), found)
                print(table(rows[-len(found) :]), file=sys.stderr, flush=True)
                if args.out is not None:
                    document = {"settings": settings, "machine": machine, "rows": rows}
                    args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    engine.close()
    print(table(rows))
    return rows
