"""`dspark pair --distill`: a draft is made, measured and stored by one command, which a stopped one goes on with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from distill_cases import Job, make_job
from engine_runs import run_requests, texts
from speculation_lines import requests

from dspark.converters.distill.train import Trainer
from dspark.runtime.speculation.heads.stored import load_stored
from dspark.runtime.speculation.pairing import load_pairing
from dspark_cli import pair_distill
from dspark_cli.app import run

QUICK = ("--budget", "600", "--max-prompts", "24", "--draft-length", "3")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("distill"))


@pytest.fixture
def job(made: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """An engine of its own for each test, few epochs, short answers."""
    monkeypatch.setattr(pair_distill, "MOST_EPOCHS", 2)
    lines = [{**json.loads(line), "max_tokens": 12, "temperature": 0} for line in made.prompts.read_text().splitlines()]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Job(shutil.copytree(made.engine, tmp_path / "engine"), tmp_path / "lines.jsonl")


def pair(job: Job, *flags: Any) -> int:
    common = ["pair", str(job.engine), "--prompts", str(job.prompts), "--threads", "1", "--rounds", "1", "--max-num-seqs", "8"]
    return run([*common, "--distill", *QUICK, *map(str, flags)])


@pytest.mark.parametrize("kind", ["dspark", "draft-model"])
def test_a_draft_is_made_measured_and_stored(job: Job, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pair(job, "--draft-kind", kind, "--draft-layers", 1) == 0
    printed = capsys.readouterr()
    for method in ("off", "ngram", kind, f"ngram+{kind}"):
        assert f" {method} " in printed.out
    for words in ("held out", "before training, on the held-out lines:", "tokens a round, acceptance by position", "stored: "):
        assert words in printed.err
    pairing = load_pairing(job.engine)
    assert pairing is not None and pairing.draft == "draft"  # kept, whoever was fastest
    assert sorted(path.name for path in job.engine.iterdir() if path.name.startswith(".")) == []
    assert not [row for row in pairing.measured if row["differing_lines"]]  # float32
    plain = run_requests(job.engine, requests())
    assert texts(run_requests(job.engine, requests(), speculative=kind, num_speculative_tokens=3)) == texts(plain)
    assert run(["inspect", str(job.engine / "draft")]) == 0
    assert "tokens a round before training" in capsys.readouterr().out


def test_only_lines_that_were_not_learned_from_are_measured_on(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert pair(job, "--draft-layers", 1) == 0
    learned = load_stored(job.engine / "draft").lineage["training_prompts"]
    assert f"pair: {48 - len(learned)} lines of" in capsys.readouterr().err
    assert pair(job, "--draft-layers", 1, "--max-num-seqs", 48) == 0
    assert f"{len(learned)} of the lines measured on were learned from" in capsys.readouterr().err


def test_a_stopped_command_goes_on_and_a_finished_draft_is_not_made_again(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_step, steps = Trainer._step, list[int]()

    def step(trainer: Trainer, state: Any) -> float:
        if len(steps) == 2:
            trainer.save(state)
            raise KeyboardInterrupt
        steps.append(state.step)
        return take_step(trainer, state)

    monkeypatch.setattr(Trainer, "_step", step)
    assert pair(job, "--draft-layers", 1) == 4
    assert "the same command continues" in capsys.readouterr().err
    assert load_pairing(job.engine) is None
    assert pair(job, "--draft-layers", 2) == 2
    assert "the interrupted distillation had other settings: layers" in capsys.readouterr().err
    steps.extend([-1] * 10)
    assert pair(job, "--draft-layers", 1, "--dry-run") == 0
    assert steps[:2] == [0, 1] and steps[12] == 2  # the third step, not the first again
    assert not (job.engine / "draft").exists() and load_pairing(job.engine) is None
    capsys.readouterr()
    count = len(steps)
    assert pair(job, "--draft-layers", 1, "--draft-seed", 7) == 2
    assert "a draft of other settings is finished" in capsys.readouterr().err
    assert pair(job, "--draft-layers", 1) == 0
    assert "finished already" in capsys.readouterr().err and len(steps) == count
    assert (job.engine / "draft" / "draft.json").is_file()


def test_what_cannot_be_distilled_is_one_line(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "few.jsonl").write_text('{"prompt": "the river"}\n')
    cases = (
        (["--draft", str(job.engine)], "--distill makes a draft, and --draft names one"),
        (["--method", "ngram"], "--distill makes a draft of kind dspark, and --method is ngram"),
        (["--draft-kind", "draft-model", "--draft-layers", "9"], "a draft model of 9 layers"),
        (["--prompts", str(tmp_path / "few.jsonl")], "has 1 usable prompts, needed: at least 2"),
        (["--prompts", str(tmp_path / "none.jsonl")], "cannot be read"),
        (["--draft-kind", "magic"], "allowed: dspark, draft-model"),
        (["--budget", "soon"], "--budget is 'soon', allowed: a number"),
    )
    for flags, message in cases:
        assert pair(job, *flags) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and message in errors[0]
    assert run(["pair", str(job.engine), "--distill"]) == 2
    assert "add --prompts FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--budget", "5"], "--budget"),
        (["--draft-kind", "draft-model"], "--draft-kind"),
        (["--draft-layers", "2"], "--draft-layers"),
        (["--max-prompts", "9"], "--max-prompts"),
        (["--fresh"], "--fresh"),
        (["--map-vocabulary"], "--map-vocabulary"),
    ],
)
def test_a_flag_without_what_it_is_for_is_refused(job: Job, flags: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would change nothing, and its user would not know."""
    capsys.readouterr()
    assert run(["pair", str(job.engine), "--prompts", str(job.prompts), *flags]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert (
        len(errors) == 1
        and errors[0].startswith(f"error: {name} is for a draft")
        and f"leave {'it' if 'map' in name else name} out" in errors[0]
    )
