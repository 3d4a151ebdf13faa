"""`dspark pair ENGINE`: which way of drafting is fastest on a job's own lines; the winner is kept in the engine."""

# ruff: noqa: RUF009 - flag() and argument() return fields of frozen dataclasses
from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dspark.runtime.spec.engine_config import DEVICE_CHOICES, KERNEL_CHOICES, SPECULATIVE_CHOICES, EngineConfig
from dspark.runtime.spec.errors import InputError, UsageError
from dspark.runtime.spec.openmp import bound_spinning
from dspark_cli.console import Console
from dspark_cli.options import add_command, argument, flag
from dspark_cli.pair_distill import DistillFlags, discard_work, learned_prompts, make_draft
from dspark_cli.pair_measure import Wanted, measure_all

if TYPE_CHECKING:
    from dspark.runtime.spec.request import Request
    from dspark.runtime.speculation.pairing import Pairing


@dataclass(frozen=True)
class PairOptions:
    """Flags of `dspark pair`."""

    engine: Path = argument("engine directory; the winner is stored in it")
    draft: Path | None = flag(
        None,
        "a draft: an engine with a small model, or a published DSpark, DFlash or EAGLE-3 head (default: the engine's own)",
        metavar="DIR",
    )
    method: str = flag("auto", "what to store; auto: the fastest on the lines of --prompts", choices=SPECULATIVE_CHOICES)
    prompts: Path | None = flag(None, "lines of the job to measure on, JSONL", metavar="FILE")
    map_vocabulary: bool = flag(
        False, "take a draft model of another vocabulary: its tokens are matched by their strings", names="--map-vocabulary"
    )
    max_num_seqs: int = flag(64, "the job's batch size: most sequences in one step", low=1, high=4096)
    samples: int = flag(128, "lines to measure on", low=1, high=100000)
    rounds: int = flag(2, "runs of each alternative that count; one more learns what steps cost", low=1, high=20)
    device: str = flag("auto", "where to run", choices=DEVICE_CHOICES)
    kernels: str = flag("auto", "which kernels to take", choices=KERNEL_CHOICES)
    threads: int | None = flag(None, "CPU threads (default: the cores this process may use)", low=1, high=1024)
    dry_run: bool = flag(False, "check and measure, store nothing", names="--dry-run")


@dataclass(frozen=True)
class _Draft:
    """method: of the drafter. directory: where it is laid out. is_staged: it is yet to be moved into the engine. was_made: this command
    has trained it, so it is kept even where plain decoding is faster."""

    method: str
    directory: Path
    is_staged: bool = False
    was_made: bool = False


def pair(console: Console, options: PairOptions, distill: DistillFlags) -> int:
    """Check a draft against an engine, measure the ways of drafting on the job's own lines, store the fastest.

    The engine gets draft/ and pairing.json, which --speculative auto reads. No text changes, whatever is stored. With --distill the draft
    is made first, and a stopped command goes on where it was. Exit codes: 0 stored (or "off": plain decoding is fastest), 2 the draft does
    not fit, with every mismatch named.
    """
    bound_spinning()
    from dspark.converters.drafts.pairing import staging_directory
    from dspark.runtime.spec.manifest import load_manifest
    from dspark.runtime.speculation.pairing import DRAFT_METHODS

    load_manifest(options.engine)
    _check(options, distill)
    staging = staging_directory(options.engine)
    try:
        draft = _draft(console, options, distill, staging)
        if options.method in DRAFT_METHODS and (draft is None or options.method != draft.method):
            found = "there is no draft" if draft is None else f"the draft is for {draft.method}"
            raise UsageError(f"--method is {options.method}, but {found}", "give one with --draft DIR")
        return _decide(console, options, draft)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check(options: PairOptions, distill: DistillFlags) -> None:
    """Flags that do not go together, before anything is loaded."""
    if distill.distill:
        if options.draft is not None:
            raise UsageError("--distill makes a draft, and --draft names one", "leave one of them out")
        if options.prompts is None:
            raise UsageError("--distill learns from lines of the job, and none are given", "add --prompts FILE")
        if options.method not in ("auto", distill.draft_kind):
            what = f"--distill makes a draft of kind {distill.draft_kind}, and --method is {options.method}"
            raise UsageError(what, f"type --method auto or --method {distill.draft_kind}")
    elif idle := distill.changed():
        raise UsageError(
            f"{idle[0]} is for a draft that --distill makes, and that is not asked for", f"add --distill, or leave {idle[0]} out"
        )
    if options.map_vocabulary and options.draft is None:
        raise UsageError("--map-vocabulary is for a draft that is taken, and none is named", "add --draft DIR, or leave it out")
    if not distill.distill and options.method == "auto" and options.prompts is None:
        raise UsageError("nothing is given to measure on", "add --prompts FILE with lines of the job, or name a --method")


def _draft(console: Console, options: PairOptions, distill: DistillFlags, staging: Path) -> _Draft | None:
    """The draft that is made or named, laid out in `staging`, else the engine's own, if it has one."""
    from dspark.converters.drafts.pairing import prepare_draft
    from dspark.runtime.speculation.choice import draft_method
    from dspark.runtime.speculation.pairing import DRAFT_FOLDER

    source = options.draft
    if distill.distill:
        assert options.prompts is not None
        source = make_draft(console, options.engine, options.prompts, distill, options.device, options.threads)
    if source is None:
        own = options.engine / DRAFT_FOLDER
        return _Draft(draft_method(own), own) if own.is_dir() else None
    if not source.is_dir():
        raise InputError(f"'{source}' is no directory, so it is no draft", "name an engine or a draft checkpoint")
    method, notes = prepare_draft(options.engine, source, staging, options.map_vocabulary)
    for note in notes:
        console.note(f"note: {note}")
    return _Draft(method, staging, is_staged=True, was_made=distill.distill)


def _decide(console: Console, options: PairOptions, draft: _Draft | None) -> int:
    """Measure if there are lines, print the table, store."""
    from dspark.converters.drafts.pairing import store_pairing
    from dspark.runtime.speculation.pairing import DRAFT_FOLDER, drafter_of

    pairing = _measured(console, options, None if options.method in ("off", "ngram") else draft)
    needs_draft = drafter_of(pairing.method) is not None
    moved = draft if draft is not None and draft.is_staged and (needs_draft or draft.was_made) else None
    stays = draft is not None and not draft.is_staged
    pairing = replace(pairing, draft=DRAFT_FOLDER if moved is not None or stays else None, created=int(time.time()))
    if not options.dry_run:
        store_pairing(options.engine, pairing, moved.directory if moved is not None else None)
        if draft is not None and draft.was_made:
            discard_work(options.engine)
    why = " (plain decoding is fastest)" if pairing.method == "off" else ""
    console.note(f"{'would store' if options.dry_run else 'stored'}: {pairing.method}{why}")
    if moved is not None and not needs_draft and not options.dry_run:
        console.note(f"note: the draft is kept for --speculative {moved.method}")
    document = {"engine": str(options.engine), "method": pairing.method, "stored": not options.dry_run, "measured": pairing.measured}
    console.document(document)
    return 0


def _measured(console: Console, options: PairOptions, draft: _Draft | None) -> Pairing:
    """What is to be stored: measured on the lines, or as it was said. draft: what may be measured."""
    from dspark.converters.drafts.pairing import load_engine, sample_requests
    from dspark.converters.drafts.temperatures import add_temperatures, lacks_temperatures
    from dspark.runtime.spec.manifest import load_manifest
    from dspark.runtime.speculation.pairing import Pairing

    requests: list[Request] = []
    if options.prompts is not None:
        learned = learned_prompts(draft.directory) if draft is not None else frozenset()
        manifest, enough = load_manifest(options.engine), min(options.samples, options.max_num_seqs)
        requests, notes = sample_requests(options.prompts, options.engine, manifest, options.samples, learned, enough)
        for note in notes:
            console.note(f"note: {note}")
        if draft is not None and draft.is_staged and lacks_temperatures(draft.directory):
            console.note("pair: answering the lines once to see what the head's confidence is worth")
            fitted = add_temperatures(options.engine, draft.directory, requests, options.device, options.threads)
            console.note(f"note: {fitted or 'no answer is long enough to fit temperatures on'}")
    config = EngineConfig(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=max(512, options.max_num_seqs),
        device=options.device,
        kernels=options.kernels,
        threads=options.threads,
        speculative="auto" if draft is not None else "off",
        draft=str(draft.directory) if draft is not None else None,
    )
    engine = load_engine(options.engine, config)
    try:
        if options.prompts is None:
            return Pairing(options.method, None, engine.executor.machine)
        wanted = Wanted(options.method, options.rounds, str(options.prompts))
        found = (draft.method, draft.directory) if draft is not None else (None, None)
        return measure_all(console, engine, wanted, requests, *found)
    finally:
        engine.close()


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, pair, PairOptions, DistillFlags)
