"""What `--dry-run` says of memory, sequences and time: against sums done by hand, without a machine's own speed in any of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_job import ENGINE, write_lines
from standin_engine import load_standin, load_standin_builder, make_standin_engine_dir
from standin_job import run_standin

from dspark.runtime.jobs.job import Loaders
from dspark.runtime.roofline import machine, room
from dspark.runtime.roofline.devices import DEVICES, Device
from dspark.runtime.roofline.job import JobTokens, Limits, at_the_limit
from dspark.runtime.roofline.weights import ModelShape
from dspark.runtime.spec.manifest import load_manifest
from dspark.runtime.speculation.pairing import PAIRING_NAME, Machine, Pairing, processor_name
from dspark_cli.dry_run import duration

Dry = Callable[..., tuple[int, dict[str, Any], list[str]]]
DEVICE = Device("a CPU", 1e9, {"bfloat16": 4e9, "float32": 2e9}, cache_bytes=1000, source="made up")
COUNT, PROMPT, MOST = 6, 31, 8
BLOCK_BYTES = 16 * 2 * 1 * 1 * 8 * 2
"""Of the stand-in's model: one layer, one KV head of 8, bfloat16."""


@pytest.fixture
def dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Dry:
    """(exit code, document, lines of stderr) of a dry run over COUNT prompts of PROMPT tokens, on DEVICE; `dry.text`: what is printed."""
    monkeypatch.chdir(tmp_path)
    make_standin_engine_dir(tmp_path / "engine")
    monkeypatch.setattr(machine, "measured_cpu", lambda threads, arithmetics, working_bytes: DEVICE)
    lines = [{"custom_id": f"q{i}", "prompt": f"{i}" + "x" * (PROMPT - 1), "max_tokens": MOST} for i in range(COUNT)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(*flags: str) -> tuple[int, dict[str, Any], list[str]]:
        arguments = ["generate", "in.jsonl", "out.jsonl", "--engine", "engine", "--dry-run", "--device", "cpu", *flags]
        loaders = Loaders(load_standin(), load_standin_builder)
        capfd.readouterr()
        assert run_standin(arguments[1:], loaders) in (0, 2, 3)
        run.text = capfd.readouterr().out  # type: ignore[attr-defined]
        code = run_standin([*arguments[1:], "--json"], loaders)
        captured = capfd.readouterr()
        return code, json.loads(captured.out) if code != 2 else {}, captured.err.splitlines()

    return run


def text_of(dry: Dry) -> str:
    return dry.text  # type: ignore[attr-defined, no-any-return]


def job_of(max_num_seqs: int = COUNT) -> tuple[JobTokens, Limits]:
    context = COUNT * sum(range(PROMPT, PROMPT + MOST))
    return JobTokens(COUNT, COUNT, COUNT * PROMPT, 0, COUNT * MOST, MOST, context), Limits(max_num_seqs, 512)


def shape_of() -> ModelShape:
    return ModelShape(load_manifest("engine").model, None, layout="cpu")


def test_the_time_is_that_of_the_model_on_the_machine(dry: Dry) -> None:
    code, found, _ = dry()
    most, limits = job_of()
    longest, shortest = (at_the_limit(shape_of(), DEVICE, tokens, limits) for tokens in (most, most.shortened(1)))
    time = found["time"]
    assert code == 0 and time["basis"] == "limit" and time["device"] == "a CPU" and time["expected_s"] is None
    assert (time["longest_s"], time["shortest_s"]) == (pytest.approx(longest.seconds), pytest.approx(shortest.seconds))
    assert time["num_steps"] == MOST and time["shortest_s"] < time["longest_s"]
    assert sum(time["parts"].values()) == pytest.approx(1)
    assert "a bound, no promise" in text_of(dry) and "1 GB/s, 0.004 TFLOP/s in bfloat16" in text_of(dry)


def test_memory_and_sequences_are_those_of_the_run(dry: Dry) -> None:
    """A pool of 9 blocks of 16 tokens; a line and its answer have 39 tokens."""
    _, found, _ = dry("--kv-cache-memory-bytes", str(9 * BLOCK_BYTES + 7), "--max-num-seqs", "5")
    memory = found["memory"]
    assert (memory["pool_bytes"], memory["num_blocks"], memory["weights_bytes"]) == (9 * BLOCK_BYTES, 9, shape_of().weight_bytes)
    assert memory["max_num_seqs"] == {"allowed": 5, "mean": 9 * 16 // 39, "longest": 9 * 16 // 39}
    assert "5 at once; the KV cache holds 3 of the mean length" in text_of(dry)
    assert found["time"]["num_steps"] == -(-COUNT * MOST // (9 * 16 // 35))  # a sequence holds half of its answer in the mean


def test_a_line_that_the_pool_can_never_hold_is_foreseen(dry: Dry) -> None:
    """The run would make an error record of it, and exit with 3."""
    code, found, stderr = dry("--kv-cache-memory-bytes", str(2 * BLOCK_BYTES))
    assert code == 3 and found["num_errors"] == COUNT and found["num_servable"] == 0 and found["time"] is None
    assert "prompt and answer of up to 39 tokens need 3 KV blocks, the pool has 2" in stderr[0]


@pytest.mark.parametrize(
    ("memory", "words"), [("10", "one has 512 bytes"), (str(10**15), "--kv-cache-memory-bytes is 1000000000000000, this machine has")]
)
def test_a_cache_that_the_run_would_refuse_is_refused(dry: Dry, memory: str, words: str) -> None:
    code, _, stderr = dry("--kv-cache-memory-bytes", memory)
    assert code == 2 and len(stderr) == 1 and words in stderr[0]


def answered(tokens: int) -> dict[str, Any]:
    return {"custom_id": "q", "text": "", "usage": {"prompt_tokens": 1, "completion_tokens": tokens}, "error": None}


def test_answers_at_hand_say_what_to_expect(dry: Dry, tmp_path: Path) -> None:
    """Two of them have 2 and 4 tokens; an error record and a batch answer of 3 stand beside them."""
    chat = {"id": "b", "response": {"status_code": 200, "body": {"usage": {"completion_tokens": 3}}}}
    records = [answered(2), answered(4), {"custom_id": "bad", "error": {"code": "x"}}, chat]
    (tmp_path / "out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    _, found, _ = dry()
    assert found["earlier_answers"] == {"num_lines": 3, "tokens_per_line": 3.0, "source": "out.jsonl"}
    most, limits = job_of()
    assert found["time"]["expected_s"] == pytest.approx(at_the_limit(shape_of(), DEVICE, most.shortened(3), limits).seconds)
    assert found["time"]["shortest_s"] < found["time"]["expected_s"] < found["time"]["longest_s"]
    assert "about 18 if lines are answered like the 3 in 'out.jsonl'" in text_of(dry)


def test_an_unfinished_job_is_asked_before_an_older_output(dry: Dry, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text(json.dumps(answered(2)) + "\n")
    (tmp_path / "out.jsonl.journal").mkdir()
    entry = {"at": 0, "line": 1, "key": "0", "id": "0", "ok": True, "out": answered(5), "sum": "0"}
    (tmp_path / "out.jsonl.journal" / "results.jsonl").write_text(json.dumps(entry) + '\n{"at":1,"li')
    _, found, _ = dry()
    assert found["earlier_answers"]["tokens_per_line"] == 5.0


def pair(threads: int, points: dict[str, float]) -> None:
    known = Machine(processor_name(), "cpu", threads, "bfloat16")
    Path("engine", PAIRING_NAME).write_bytes(Pairing("ngram", None, known, step_cost_ms=points).to_bytes())


def test_step_times_of_a_pairing_on_this_machine_are_better_than_a_bound(dry: Dry) -> None:
    """28.5 tokens a step, 10 ms and 1 ms a token. A step of 186 tokens, as short answers make it, is beyond what was measured."""
    pair(3, {"1": 11.0, "64": 74.0})
    _, found, _ = dry("--threads", "3")
    time = found["time"]
    assert time["basis"] == "step times" and time["longest_s"] == pytest.approx(MOST * 0.038, rel=0.03)
    assert time["shortest_s"] is None and "one token" not in text_of(dry)
    assert "an estimate from the step times that dspark pair measured here" in text_of(dry) and "a bound" not in text_of(dry)


@pytest.mark.parametrize(("threads", "largest"), [("2", "64"), ("3", "8")], ids=["other threads", "smaller steps"])
def test_step_times_that_do_not_apply_are_left_alone(dry: Dry, threads: str, largest: str) -> None:
    pair(3, {"1": 11.0, largest: 74.0})
    assert dry("--threads", threads)[1]["time"]["basis"] == "limit"


def test_a_job_for_a_gpu_that_is_not_here_has_no_time(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room.torch.cuda, "is_available", lambda: False)
    code, found, _ = dry("--device", "cuda")
    assert code == 0 and "this machine has none" in found["time"]["unknown"]
    assert found["memory"]["num_blocks"] is None and "not known without the GPU" in text_of(dry)


def test_a_gpu_is_known_by_its_data_sheet(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 80 GB, 70 of them free: its pool is what 90 % leave beside the weights."""
    monkeypatch.setattr(room.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(room.torch.cuda, "mem_get_info", lambda: (70 * 10**9, 80 * 10**9))
    monkeypatch.setattr(machine, "this_gpu", lambda: ("NVIDIA H100 80GB HBM3", 80 * 10**9, DEVICES["h100"]))
    _, found, _ = dry("--device", "cuda")
    stored = replace(shape_of(), layout="stored")
    most, limits = job_of()
    assert found["time"]["device"] == "H100 SXM" and "data sheet" in found["time"]["source"]
    assert found["time"]["longest_s"] == pytest.approx(at_the_limit(stored, DEVICES["h100"], most, limits).seconds)
    left = 62 * 10**9 - stored.weight_bytes
    assert left - BLOCK_BYTES < found["memory"]["pool_bytes"] <= left
    monkeypatch.setattr(machine, "this_gpu", lambda: ("Tesla T4", 16 * 10**9, None))
    assert "no data sheet of Tesla T4 is known" in dry("--device", "cuda")[1]["time"]["unknown"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0413, "0.041 s"), (9.96, "10 s"), (59.4, "59 s"), (200, "3 min 20 s"), (3599.6, "1 h 0 min"), (7500, "2 h 5 min")],
)
def test_durations_read_aloud(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_dry_run_tells_what_would_happen_and_writes_nothing(generate: Any, tmp_path: Path) -> None:
    lines = [{"custom_id": f"q{i}", "prompt": "a beginning of thirty-two bytes " + str(i), "max_tokens": 5} for i in range(4)]
    write_lines(tmp_path / "in.jsonl", *lines, "nonsense", {"custom_id": "long", "prompt": "x" * 3000})
    before = sorted(path.name for path in tmp_path.rglob("*"))
    code, stderr = generate("in.jsonl", "out.jsonl", *ENGINE, "--dry-run", "--json")
    assert code == 3 and generate.loads == 0
    assert [line.split("'")[1] for line in stderr] == ["line-5", "long"]
    found = json.loads(generate.stdout)
    assert {key: found[key] for key in found if key not in ("memory", "time")} == {
        "num_lines": 6,
        "num_servable": 4,
        "num_errors": 2,
        "prompt_tokens": {"total": 132, "max": 33, "p50": 33, "p90": 33},
        "most_output_tokens": 20,
        "shared_tokens": 96,
        "num_answers": 4,
        "longest_answer": 5,
        "longest_request": 38,
        "context_tokens": 4 * (33 + 34 + 35 + 36 + 37),
        "earlier_answers": None,
        "exit_code": 3,
    }
    generate("in.jsonl", "out.jsonl", *ENGINE, "--dry-run")
    assert "6: 4 can be served, 2 would be error records" in generate.stdout and "96 prompt tokens (73%)" in generate.stdout
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
