"""`dspark generate` from its flags to its files, with the stand-in engine: the next night's rules, error records, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from command_job import ENGINE, questions, records, write_lines
from standin_engine import StandinEngine, load_standin, make_standin_engine_dir

from dspark.runtime.spec.errors import UsageError
from dspark_cli.generate import parse_deadline


def test_a_config_file_is_all_a_job_directory_needs(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(3))
    (tmp_path / "dspark.toml").write_text('engine = "engine"\nmax-tokens = 5\ntop_k = 4\n')
    code, lines = generate("in.jsonl", "out.jsonl")
    assert code == 0
    assert lines[0].startswith("generate: 3 lines of 'in.jsonl'") and "max_tokens 5" in lines[0] and "top_k 4" in lines[0]
    assert lines[1].startswith("done: 3 of 3 lines answered") and len(lines) == 2
    assert [record["custom_id"] for record in records(tmp_path / "out.jsonl")] == ["q0", "q1", "q2"]


def test_the_next_night_is_already_done_and_loads_no_engine(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(3))
    assert generate("in.jsonl", "out.jsonl", *ENGINE)[0] == 0
    before = (tmp_path / "out.jsonl").stat()
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE)
    assert code == 0 and generate.loads == 1
    assert lines == ["already done: 'out.jsonl' holds all 3 lines of 'in.jsonl'"]
    after = (tmp_path / "out.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_finished_job_with_errors_exits_3_again(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(2), '{"custom_id": "bad", "prompt": 7}')
    assert generate("in.jsonl", "out.jsonl", *ENGINE)[0] == 3
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE)
    assert code == 3 and "1 of them errors" in lines[0] and generate.loads == 1


@pytest.mark.parametrize("change", ["line", "engine", "default", "seed", "out", "new input"])
def test_anything_changed_is_a_new_job(generate: Any, tmp_path: Path, change: str) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(3))
    assert generate("in.jsonl", "out.jsonl", *ENGINE)[0] == 0
    flags: tuple[str, ...] = ()
    if change == "line":
        write_lines(tmp_path / "in.jsonl", *questions(2), {"custom_id": "q2", "prompt": "another question"})
    elif change == "engine":
        make_standin_engine_dir(tmp_path / "engine", created=1_800_000_000)
    elif change == "default":
        flags = ("--temperature", "0.5")
    elif change == "seed":
        flags = ("--seed", "9")
    elif change == "out":
        data = (tmp_path / "out.jsonl").read_bytes()
        (tmp_path / "out.jsonl").write_bytes(data[:-17])
    else:
        write_lines(tmp_path / "in.jsonl", *questions(5))
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, *flags)
    assert code == 0 and generate.loads == 2 and lines[-1].startswith("done: ")
    assert len(records(tmp_path / "out.jsonl")) == (5 if change == "new input" else 3)


@pytest.mark.parametrize(
    "flag", [("--max-num-seqs", "3"), ("--threads", "1"), ("--kernels", "reference"), ("--kv-cache-memory-bytes", "9999")]
)
def test_what_only_changes_the_speed_is_the_same_job(generate: Any, tmp_path: Path, flag: tuple[str, str]) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(3))
    assert generate("in.jsonl", "out.jsonl", *ENGINE)[0] == 0
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, *flag)
    assert code == 0 and lines[0].startswith("already done")


def stopped_job(generate: Any, tmp_path: Path, lines: list[Any]) -> int:
    """A job that stops after some lines; returns how many are done."""
    write_lines(tmp_path / "in.jsonl", *lines)

    def load(engine_dir: Path, config: Any) -> Any:
        engine, make_builder = load_standin()(engine_dir, config)
        engine.fail_at_step = 3
        engine.error = MemoryError()
        return engine, make_builder

    code, stderr = generate("in.jsonl", "out.jsonl", *ENGINE, "--max-num-seqs", "2", load=load)
    assert code == 7 and "out of memory" in stderr[-1]
    done = len((tmp_path / "out.jsonl.journal" / "results.jsonl").read_text().splitlines())
    assert 0 < done < len(lines)
    return done


def test_an_unfinished_job_refuses_other_settings_and_names_them(generate: Any, tmp_path: Path) -> None:
    done = stopped_job(generate, tmp_path, questions(9))
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, "--top-k", "7")
    assert code == 2 and len(lines) == 1
    assert "top_k 0, now 7" in lines[0] and "--fresh" in lines[0]
    assert len((tmp_path / "out.jsonl.journal" / "results.jsonl").read_text().splitlines()) == done
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE)
    assert code == 0 and f"({done} done before)" in lines[0]


def test_an_unfinished_job_of_another_engine_is_refused_until_fresh(generate: Any, tmp_path: Path) -> None:
    stopped_job(generate, tmp_path, questions(9))
    make_standin_engine_dir(tmp_path / "engine", created=1_800_000_000)
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE)
    assert code == 2 and "another engine" in lines[0]
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, "--fresh")
    assert code == 0 and "done before" not in lines[0]
    assert len(records(tmp_path / "out.jsonl")) == 9


def test_edited_moved_and_new_lines_redo_only_what_changed(generate: Any, tmp_path: Path) -> None:
    lines = questions(9)
    done = stopped_job(generate, tmp_path, lines)
    kept = {json.loads(row)["out"]["custom_id"] for row in (tmp_path / "out.jsonl.journal" / "results.jsonl").read_text().splitlines()}
    edited = next(line for line in lines if line["custom_id"] in kept)
    edited["prompt"] = "something else"
    lines.insert(0, {"custom_id": "first", "prompt": "a new line moves all the others"})
    write_lines(tmp_path / "in.jsonl", "", *lines)
    engines: list[StandinEngine] = []

    def load(engine_dir: Path, config: Any) -> Any:
        engine, make_builder = load_standin()(engine_dir, config)
        engines.append(engine)
        return engine, make_builder

    code, stderr = generate("in.jsonl", "out.jsonl", *ENGINE, load=load)
    assert code == 0 and f"({done - 1} done before)" in stderr[1]
    assert "belong to no line" in stderr[0]
    assert len(engines[0].order_added) == 10 - (done - 1)
    assert [record["custom_id"] for record in records(tmp_path / "out.jsonl")] == [line["custom_id"] for line in lines]
    moved = (tmp_path / "out.jsonl").read_bytes()
    assert generate("in.jsonl", "out.jsonl", *ENGINE, "--fresh")[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == moved


@pytest.mark.parametrize("errors", [(), ("--errors", "errors.jsonl")])
@pytest.mark.parametrize("finished", [True, False])
def test_error_records_are_final_unless_retry_failed(generate: Any, tmp_path: Path, errors: tuple[str, ...], finished: bool) -> None:
    lines: list[Any] = [*questions(4), {"custom_id": "big", "prompt": "TOO BIG for the pool"}, "nonsense", *questions(6)[4:]]
    write_lines(tmp_path / "in.jsonl", *lines)
    command = ("in.jsonl", "out.jsonl", *ENGINE, *errors)
    engines: list[StandinEngine] = []

    def load(engine_dir: Path, config: Any) -> Any:
        engine, make_builder = load_standin()(engine_dir, config)
        engine.max_num_seqs = 1
        if not finished and not engines:
            engine.fail_at_step, engine.error = 4, OSError(28, "No space left on device")
        engines.append(engine)
        return engine, make_builder

    assert generate(*command, load=load)[0] == (3 if finished else 7)
    if finished:
        assert generate(*command)[0] == 3 and len(engines) == 1
    code, stderr = generate(*command, "--retry-failed", load=load)
    assert code == 3
    assert any("line 5 ('big')" in line for line in stderr)
    assert any("line 6 ('line-6')" in line for line in stderr)
    if finished:
        assert engines[1].order_added == []  # the pool is as small as before; no answered line was done again
    merged = records(tmp_path / "out.jsonl") + (records(tmp_path / "errors.jsonl") if errors else [])
    assert sorted(record["custom_id"] for record in merged) == sorted(["q0", "q1", "q2", "q3", "big", "line-6", "q4", "q5"])


def test_errors_file_takes_the_failures_in_input_order(generate: Any, tmp_path: Path) -> None:
    bad = [{"custom_id": f"bad{i}", "prompt": "x", "temperature": -1 - i} for i in range(3)]
    good = questions(3)
    write_lines(tmp_path / "in.jsonl", bad[0], good[0], bad[1], good[1], good[2], bad[2])
    code, _ = generate("in.jsonl", "out.jsonl", *ENGINE, "--errors", "errors.jsonl")
    assert code == 3
    assert [record["custom_id"] for record in records(tmp_path / "out.jsonl")] == ["q0", "q1", "q2"]
    failures = records(tmp_path / "errors.jsonl")
    assert [record["custom_id"] for record in failures] == ["bad0", "bad1", "bad2"]
    assert [record["error"]["line"] for record in failures] == [1, 3, 6]


def test_completion_order_holds_every_line_once_and_drops_edited_ones(generate: Any, tmp_path: Path) -> None:
    lines = questions(9)
    write_lines(tmp_path / "in.jsonl", *lines)
    command = ("in.jsonl", "out.jsonl", *ENGINE, "--order", "completion", "--max-num-seqs", "2")

    def load(engine_dir: Path, config: Any) -> Any:
        engine, make_builder = load_standin()(engine_dir, config)
        engine.fail_at_step, engine.error = 4, MemoryError()
        return engine, make_builder

    assert generate(*command, load=load)[0] == 7
    done = [record["custom_id"] for record in records(tmp_path / "out.jsonl")]
    assert 1 < len(done) < 9  # OUT holds what is finished, while the job is unfinished
    next(line for line in lines if line["custom_id"] == done[0])["prompt"] = "edited"
    write_lines(tmp_path / "in.jsonl", *lines)
    code, stderr = generate(*command)
    assert code == 0 and f"({len(done) - 1} done before)" in stderr[1]
    assert sorted(record["custom_id"] for record in records(tmp_path / "out.jsonl")) == [f"q{i}" for i in range(9)]
    assert generate(*command)[1][0].startswith("already done")


def test_damage_to_out_in_completion_order_is_repaired(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(9))
    command = ("in.jsonl", "out.jsonl", *ENGINE, "--order", "completion", "--max-num-seqs", "2")

    def load(engine_dir: Path, config: Any) -> Any:
        engine, make_builder = load_standin()(engine_dir, config)
        engine.fail_at_step, engine.error = 6, MemoryError()
        return engine, make_builder

    assert generate(*command, load=load)[0] == 7
    rows = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert len(rows) >= 3
    (tmp_path / "out.jsonl").write_bytes(b"".join([*rows[:1], *rows[2:]])[:-5])
    assert generate(*command)[0] == 0
    assert sorted(record["custom_id"] for record in records(tmp_path / "out.jsonl")) == [f"q{i}" for i in range(9)]


def test_max_errors_stops_and_the_same_command_continues(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *[f"nonsense {i}" for i in range(5)], *questions(3))
    command = ("in.jsonl", "out.jsonl", *ENGINE, "--max-errors", "2")
    code, lines = generate(*command)
    assert code == 4 and lines[-1] == "stopped: 2 of 8 lines done (--max-errors 2 reached); the same command continues"
    assert generate(*command)[0] == 4
    assert generate(*command)[0] == 3
    assert len(records(tmp_path / "out.jsonl")) == 8


def test_limit_takes_the_first_lines_and_lifting_it_is_a_new_job(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(5))
    assert generate("in.jsonl", "out.jsonl", *ENGINE, "--limit", "2")[0] == 0
    assert [record["custom_id"] for record in records(tmp_path / "out.jsonl")] == ["q0", "q1"]
    assert generate("in.jsonl", "out.jsonl", *ENGINE, "--limit", "2")[1][0].startswith("already done")
    assert generate("in.jsonl", "out.jsonl", *ENGINE)[0] == 0
    assert len(records(tmp_path / "out.jsonl")) == 5


def test_until_stops_and_can_write_expired_records(generate: Any, tmp_path: Path) -> None:
    body = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}}
    write_lines(tmp_path / "in.jsonl", *questions(5), body)
    command = ("in.jsonl", "out.jsonl", *ENGINE, "--max-num-seqs", "1", "--until", "0s")
    code, lines = generate(*command)
    assert code == 4 and "--until is over" in lines[-1] and not (tmp_path / "out.jsonl").exists()
    code, lines = generate(*command, "--write-expired")
    assert code == 4
    out = records(tmp_path / "out.jsonl")
    assert len(out) == 6
    expired = [record for record in out if (record["error"] or {}).get("code") == "batch_expired"]
    assert 0 < len(expired) < 6 or expired
    assert generate(*command[:-2])[0] == 0
    assert not [record for record in records(tmp_path / "out.jsonl") if record["error"]]


def test_deadlines() -> None:
    now = datetime(2030, 1, 1, 22, 30)
    assert parse_deadline("06:00", now) == datetime(2030, 1, 2, 6, 0).timestamp()
    assert parse_deadline("23:15", now) == datetime(2030, 1, 1, 23, 15).timestamp()
    assert parse_deadline("7h30m", now) == datetime(2030, 1, 2, 6, 0).timestamp()
    assert parse_deadline("1.5m", now) == now.timestamp() + 90
    for wrong in ("25:00", "6", "soon", "06:61", ""):
        with pytest.raises(UsageError, match="HH:MM"):
            parse_deadline(wrong, now)


def test_duplicate_ids_are_kept_apart_when_allowed(generate: Any, tmp_path: Path) -> None:
    write_lines(
        tmp_path / "in.jsonl", {"custom_id": "a", "prompt": "one"}, {"custom_id": "a", "prompt": "two"}, {"custom_id": "a", "prompt": "one"}
    )
    code, _ = generate("in.jsonl", "out.jsonl", *ENGINE, "--allow-duplicate-ids")
    out = records(tmp_path / "out.jsonl")
    assert code == 0 and len(out) == 3
    assert out[0] == out[2] and out[0]["text"] != out[1]["text"]


def test_metrics_and_json_tell_the_same(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(4), "nonsense")
    code, _ = generate("in.jsonl", "out.jsonl", *ENGINE, "--metrics", "m.json", "--json")
    metrics = json.loads((tmp_path / "m.json").read_text())
    assert json.loads(generate.stdout) == metrics
    assert code == metrics["exit_code"] == 3
    assert metrics["lines"] == {"total": 5, "ok": 4, "failed": 1, "resumed": 0}
    usage = [record["usage"] for record in records(tmp_path / "out.jsonl") if not record["error"]]
    assert metrics["tokens"]["output"] == sum(u["completion_tokens"] for u in usage)
    assert metrics["tokens"]["prompt"] == sum(u["prompt_tokens"] for u in usage)
    times = metrics["time"]
    assert 0 < times["generate_s"] <= times["wall_s"] and times["first_token_s"] <= times["wall_s"]
    assert times["generate_cpu_s"] <= times["cpu_s"]
    assert metrics["memory"]["peak_rss_bytes"] >= metrics["memory"]["peak_anon_bytes"] > 0
    assert metrics["sampling_defaults"]["max_tokens"] == 512
    assert metrics["engine"]["steps"] > 0 and "host_overhead_fraction" in metrics["engine"]


def test_generation_config_gives_defaults_below_the_flags(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(1))
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 3}
    (tmp_path / "engine" / "generation_config.json").write_text(json.dumps(config))
    _, lines = generate("in.jsonl", "out.jsonl", *ENGINE, "--top-p", "0.5")
    assert "temperature 0.6" in lines[0] and "top_p 0.5" in lines[0] and "max_tokens 512" in lines[0]
    (tmp_path / "engine" / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "repetition_penalty": 1.1}))
    _, lines = generate("in.jsonl", "out.jsonl", *ENGINE)
    assert "greedy" in lines[0] and "repetition_penalty 1.1" in lines[0]


def test_quiet_prints_nothing_when_all_is_well(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(2))
    assert generate("in.jsonl", "out.jsonl", *ENGINE, "--quiet") == (0, [])
    assert generate.stdout == ""


def test_the_log_file_gets_what_was_not_printed(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *[f"nonsense {i}" for i in range(30)])
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, "--log-file", "log.txt")
    assert code == 3 and len(lines) == 1 + 20 + 1 + 1
    assert "10 further error lines" in lines[-2]
    assert "line 30 " in (tmp_path / "log.txt").read_text()


def test_an_output_that_is_a_link_is_written_where_it_points(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(2))
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "answers.jsonl").write_text("old\n")
    os.chmod(tmp_path / "real" / "answers.jsonl", 0o640)
    (tmp_path / "out.jsonl").symlink_to("real/answers.jsonl")
    assert generate("in.jsonl", "out.jsonl", *ENGINE)[0] == 0
    assert (tmp_path / "out.jsonl").is_symlink()
    assert len(records(tmp_path / "real" / "answers.jsonl")) == 2
    assert (tmp_path / "real" / "answers.jsonl").stat().st_mode & 0o777 == 0o640


def test_a_whole_process_imports_no_torch_for_a_finished_job(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(2))
    assert generate("in.jsonl", "out.jsonl", *ENGINE)[0] == 0
    program = (
        "import sys; from dspark_cli.app import run; code = run(['generate', 'in.jsonl', 'out.jsonl', '--engine', 'engine']);"
        "print(code, [m for m in ('torch', 'transformers', 'rich', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONSAFEPATH": "1"}
    )
    assert done.stdout == "0 []\n"
