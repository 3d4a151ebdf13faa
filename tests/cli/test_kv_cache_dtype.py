"""`dspark generate --kv-cache-dtype`: refused before anything is written, and a setting that a job's results depend on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from standin_engine import load_standin, load_standin_builder, make_standin_engine_dir
from standin_job import run_standin

from dspark.runtime.jobs.job import Loaders
from dspark.runtime.spec.kv_cache import KVCacheConfig
from dspark.runtime.spec.manifest import load_manifest


def run(capfd: pytest.CaptureFixture[str], *arguments: str, load=None) -> tuple[int, list[str]]:
    """(exit code, lines of stderr)"""
    capfd.readouterr()
    code = run_standin(["in.jsonl", "out.jsonl", "--engine", "engine", *arguments], Loaders(load or load_standin(), load_standin_builder))
    return code, capfd.readouterr().err.splitlines()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an engine and nine lines."""
    monkeypatch.chdir(tmp_path)
    make_standin_engine_dir(tmp_path / "engine")
    lines = [{"custom_id": f"q{i}", "prompt": f"question {i}", "max_tokens": 12} for i in range(9)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def calibrate(directory: Path) -> None:
    replace(load_manifest(directory / "engine"), kv_cache=KVCacheConfig("int8", "channel")).save(directory / "engine")


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_an_engine_without_scales_is_refused_in_one_line(here: Path, capfd: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    code, lines = run(capfd, "--kv-cache-dtype", "int8", *more)
    assert code == 2 and len(lines) == 1
    assert "no scales for the KV cache" in lines[0] and "dspark quantize" in lines[0]
    assert sorted(path.name for path in here.iterdir()) == ["engine", "in.jsonl"]


def test_an_unfinished_job_does_not_go_on_with_another_cache(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Half of OUT from one cache and half from another would be nobody's answer."""
    calibrate(here)

    def load(engine_dir: Path, config: object):
        engine, make_builder = load_standin()(engine_dir, config)
        engine.fail_at_step, engine.error = 3, MemoryError()
        return engine, make_builder

    assert run(capfd, "--max-num-seqs", "2", load=load)[0] == 7
    code, lines = run(capfd, "--kv-cache-dtype", "model")
    assert code == 2 and len(lines) == 1 and 'kv-cache-dtype "int8", now unset' in lines[0]
    code, lines = run(capfd, "--kv-cache-dtype", "int8")  # what auto took
    assert code == 0
    assert "already done" in run(capfd)[1][-1]
    assert "already done" not in run(capfd, "--kv-cache-dtype", "bfloat16")[1][-1]
