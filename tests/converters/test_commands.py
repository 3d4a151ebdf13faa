"""`dspark convert`, `quantize` and `inspect` as a user types them: exit codes, one line per error, JSON for scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from case_checkpoints import llama_config, llama_state, save_checkpoint

from dspark_cli.app import run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    config = llama_config()
    return save_checkpoint(tmp_path / "ckpt", config, llama_state(config))


def typed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_convert_quantize_inspect(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(capsys, "convert", source, tmp_path / "dense")
    assert code == 0 and out == "" and "audit passed" in err.splitlines()[-1]
    code, out, err = typed(capsys, "quantize", tmp_path / "dense", tmp_path / "q", "--scheme", "w4a16", "--json", "--quiet")
    document = json.loads(out)
    assert code == 0 and err == "" and document["scheme"] == "w4a16 group 128" and document["quality"]["method"] == "rtn"
    code, out, _ = typed(capsys, "inspect", tmp_path / "q")
    assert code == 0 and "w4a16 group 128" in out and "passed (logits within" in out
    for path, kind in ((tmp_path / "q", "engine"), (source, "safetensors")):
        code, out, _ = typed(capsys, "inspect", path, "--json")
        facts = json.loads(out)
        assert code == 0 and facts["format"] == kind and facts["parameters"] == sum(t.numel() for t in llama_state(llama_config()).values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "nosuch", "e"], "'nosuch' does not exist"),
        (["convert", "{source}", "{source}"], "exists and is no engine"),
        (["convert", "{source}", "e", "--dtype", "int8"], "--dtype"),
        (["convert", "{source}", "e", "--lora", "x"], "adapter 'x' does not exist"),
        (["convert", "{source}", "e", "--lora", "x=much"], "--lora is 'x=much', allowed: DIR or DIR=WEIGHT"),
        (["convert", "{source}", "e", "--lora", "{source}"], "is no adapter: it has no adapter_config.json"),
        (["quantize", "{source}", "e"], "--scheme is missing; type --scheme with one of w8a16"),
        (["quantize", "{source}", "e", "--scheme", "w4a16", "--group-size", "48"], "--group-size"),
        (["quantize", "{source}", "e", "--scheme", "w4a16", "--method", "gptq"], "--method"),
        (["inspect", "{source}/config.json"], "no checkpoint that dspark knows"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(capsys, *(argument.format(source=source) for argument in arguments))
    assert code == 2 and out == "" and words in err
    assert sum(line.startswith("error:") for line in err.splitlines()) == 1 and "Traceback" not in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_a_failed_audit_exits_6(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.converters.audit.verdict.MAX_RELATIVE_ERROR", -1.0)
    code, _, err = typed(capsys, "convert", source, tmp_path / "engine")
    assert code == 6 and "audit failed" in err and not (tmp_path / "engine").exists()


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
from dspark_cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def test_a_full_disk_exits_7_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", LIMITED, "convert", str(source), str(tmp_path / "engine"), "--no-audit"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7 and "a file may not grow further" in done.stderr and "Traceback" not in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("command", ["convert", "quantize", "inspect"])
def test_help_imports_no_torch(command: str) -> None:
    code = f"import sys; from dspark_cli.app import run; run(['{command}', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--json" in done.stdout
