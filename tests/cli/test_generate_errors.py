"""What `dspark generate` refuses: one line, an exit code, and nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_job import ENGINE, questions, records, write_lines
from standin_engine import load_standin

from dspark.runtime.spec.errors import UsageError

ERROR_PATHS = {
    "no engine": (("in.jsonl", "out.jsonl"), "no engine is given; type --engine DIR"),
    "engine missing": (("in.jsonl", "out.jsonl", "--engine", "nowhere"), "'nowhere' is no directory, so it is no engine; make one with"),
    "input missing": (("none.jsonl", "out.jsonl", *ENGINE), "input 'none.jsonl' cannot be read (No such file or directory)"),
    "input is a directory": (("engine", "out.jsonl", *ENGINE), "input 'engine' is a directory; give a JSONL file"),
    "input is a device": (("/dev/null", "out.jsonl", *ENGINE), "is no regular file"),
    "output is a directory": (("in.jsonl", "engine", *ENGINE), "is a directory, allowed: a file"),
    "output directory missing": (("in.jsonl", "no/out.jsonl", *ENGINE), "mkdir -p"),
    "same file": (("in.jsonl", "in.jsonl", *ENGINE), "must be different files"),
    "errors is output": (("in.jsonl", "out.jsonl", *ENGINE, "--errors", "out.jsonl"), "must be different files"),
    "bad choice": (("in.jsonl", "out.jsonl", *ENGINE, "--order", "random"), "--order is random, allowed: input, completion"),
    "bad number": (("in.jsonl", "out.jsonl", *ENGINE, "--max-num-seqs", "many"), "--max-num-seqs is 'many', allowed: an integer"),
    "bad float": (("in.jsonl", "out.jsonl", *ENGINE, "--temperature", "warm"), "--temperature is 'warm', allowed: a number"),
    "out of range": (("in.jsonl", "out.jsonl", *ENGINE, "--max-num-seqs", "0"), "--max-num-seqs is 0, allowed: from 1 to 4096"),
    "sampling out of range": (("in.jsonl", "out.jsonl", *ENGINE, "--top-p", "2"), "top_p is 2.0, allowed: a number above 0 to 1"),
    "unknown flag": (("in.jsonl", "out.jsonl", *ENGINE, "--temprature", "1"), "did you mean --temperature?"),
    "missing argument": (("in.jsonl",), "missing argument"),
    "bad bias": (("in.jsonl", "out.jsonl", *ENGINE, "--logit-bias", "7"), "--logit-bias is '7', allowed: ID=NUMBER"),
    "bad until": (("in.jsonl", "out.jsonl", *ENGINE, "--until", "noon"), "--until is 'noon', allowed: HH:MM or a duration"),
    "config missing": (("in.jsonl", "out.jsonl", *ENGINE, "--config", "no.toml"), "configuration file 'no.toml' cannot be read"),
    "utf-16": (("utf16.jsonl", "out.jsonl", *ENGINE), "is UTF-16, allowed: UTF-8; type: iconv"),
    "binary": (("binary.jsonl", "out.jsonl", *ENGINE), "is not UTF-8 text"),
    "duplicates": (("twice.jsonl", "out.jsonl", *ENGINE), "custom_id 'a' stands in line 1 and in line 4"),
    "duplicate of a default id": (("default.jsonl", "out.jsonl", *ENGINE), "custom_id 'line-2' stands in line 1 and in line 2"),
}


@pytest.mark.parametrize("case", ERROR_PATHS)
def test_every_error_is_one_line_exit_2_and_nothing_is_written(generate: Any, tmp_path: Path, case: str) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(2))
    (tmp_path / "utf16.jsonl").write_bytes((tmp_path / "in.jsonl").read_text().encode("utf-16"))
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(200, 0, -1)) * 20)
    write_lines(tmp_path / "twice.jsonl", {"custom_id": "a", "prompt": "x"}, "", {"prompt": "y"}, {"id": "a", "prompt": "z"})
    write_lines(tmp_path / "default.jsonl", {"custom_id": "line-2", "prompt": "x"}, {"prompt": "y"})
    before = sorted(path.name for path in tmp_path.rglob("*"))
    arguments, expected = ERROR_PATHS[case]
    code, lines = generate(*arguments)
    assert (code, len(lines)) == (2, 1), lines
    assert lines[0].startswith("error: ") and expected in lines[0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_engine_that_cannot_be_loaded_leaves_nothing(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(2))
    write_lines(tmp_path / "out.jsonl", {"old": "answers"})

    def load(engine_dir: Path, config: Any) -> Any:
        raise UsageError("--device is cuda, but this machine has no GPU", "type --device cpu")

    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, load=load)
    assert code == 2 and lines[-1] == "error: --device is cuda, but this machine has no GPU; type --device cpu"
    assert records(tmp_path / "out.jsonl") == [{"old": "answers"}]
    assert not list(tmp_path.glob("*.journal"))


def test_a_bug_is_one_line_and_a_log_file(generate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_lines(tmp_path / "in.jsonl", *questions(2))

    def load(engine_dir: Path, config: Any) -> Any:
        engine, make_builder = load_standin()(engine_dir, config)
        engine.fail_at_step = 1
        return engine, make_builder

    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, "--quiet", load=load)
    assert code == 1 and len(lines) == 1
    log = Path(lines[0].rsplit("'", 2)[1])
    assert log.is_relative_to(tmp_path) and "RuntimeError: the stand-in was told to fail" in log.read_text()


def test_metrics_over_another_file_of_the_job_are_refused_first(generate: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", *questions(1))
    code, lines = generate("in.jsonl", "out.jsonl", *ENGINE, "--metrics", "in.jsonl")
    assert code == 2 and "another file of the job" in lines[0] and generate.loads == 0
