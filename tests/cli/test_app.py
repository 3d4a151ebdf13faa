# ruff: noqa: RUF009 - flag() and argument() return fields of frozen dataclasses
"""The command frame: quick help, one-line errors, configuration files, completion."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from dspark import __version__
from dspark.runtime.spec.errors import UsageError
from dspark_cli import options as options_module
from dspark_cli.app import app, run
from dspark_cli.config_file import read_config
from dspark_cli.console import Console
from dspark_cli.options import Kind, add_command, argument, flag

HEAVY = ("torch", "transformers", "numpy", "numba", "tokenizers", "rich", "psutil", "tqdm", "orjson")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["doctor", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    """The wall time of help is measured by hand (0.2 s idle); what makes it so is tested."""
    program = f"import sys; from dspark_cli.app import run; run({arguments!r}); print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"dspark {__version__}\n"


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage: dspark") and not captured.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generat"], "error: no such command 'generat'. Did you mean 'generate'?; type dspark --help"),
        (["--verison"], "error: no such flag --verison, did you mean --version?; type dspark --help"),
        (["doctor", "--devise", "cpu"], "error: no such flag --devise, did you mean --device?; type dspark doctor --help"),
        (["doctor", "extra"], "error: got unexpected extra argument(s) (extra); type dspark doctor --help"),
        (["doctor", "--device"], "error: option '--device' requires an argument; type dspark doctor --help"),
        (["doctor", "--device", "tpu"], "error: --device is tpu, allowed: auto, cpu, cuda"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err == expected + "\n"


def test_every_command_has_the_common_flags() -> None:
    assert {"generate", "doctor"} <= set(options_module.COMMANDS)
    for command in options_module.COMMANDS:
        assert {"json", "quiet", "verbose", "log_file"} <= set(options_module.config_keys(command))


def test_commands_stand_in_the_order_of_the_work() -> None:
    assert [command.name for command in app.registered_commands] == [
        "convert",
        "quantize",
        "eval",
        "export",
        "generate",
        "pair",
        "tune",
        "inspect",
        "doctor",
    ]


@dataclass(frozen=True)
class SampleOptions:
    """For the tests below."""

    place: Path = argument("where")
    count: int = flag(3, "how many", low=1)
    ratio: float = flag(0.5, "how much")
    kind: str = flag("a", "which", choices=("a", "b"))
    log: Path | None = flag(None, "a file")
    ignore: tuple[str, ...] = flag((), "patterns")
    fast: bool = flag(False, "quickly")


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SampleOptions]:
    """The options that the command `sample` was called with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options_module, "COMMANDS", dict(options_module.COMMANDS))
    seen: list[SampleOptions] = []
    application = typer.Typer(rich_markup_mode=None, add_completion=False)

    def sample(console: Console, options: SampleOptions) -> None:
        """Sample."""
        seen.append(options)

    add_command(application, sample, SampleOptions)
    APPLICATIONS[:] = [application]
    return seen


APPLICATIONS: list[typer.Typer] = []


def sample_run(*arguments: str) -> int:
    return run(list(arguments), APPLICATIONS[0])


def test_flags_defaults_and_types(sample: list[SampleOptions]) -> None:
    assert sample_run("here", "--count", "4", "--ratio", "1", "--ignore", "x*", "--ignore", "y", "--fast") == 0
    assert sample == [SampleOptions(Path("here"), 4, 1.0, "a", None, ("x*", "y"), True)]


def test_a_flag_wins_over_the_file_and_paths_are_relative_to_it(sample: list[SampleOptions], tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    text = (
        'count = 7\nratio = 2\nlog = "a.log"\nignore = ["z"]\nfast = true\ntemperature = 0.3\n[sample]\ncount = 8\n[generate]\ntop-k = 3\n'
    )
    (tmp_path / "conf" / "job.toml").write_text(text)
    assert sample_run("here", "--config", "conf/job.toml", "--no-fast") == 0
    assert sample == [SampleOptions(Path("here"), 8, 2.0, "a", Path("conf/a.log"), ("z",), False)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuont = 1", "has the key 'cuont', which is no flag (did you mean 'count'?)"),
        ("count = 'many'", "count is 'many', allowed: an integer"),
        ("count = true", "count is True, allowed: an integer"),
        ("count = 0", "--count is 0, allowed: from 1"),
        ("fast = 1", "fast is 1, allowed: true or false"),
        ("kind = 'c'", "--kind is c, allowed: a, b"),
        ("[sample]\nplace = 'x'", "has the key 'sample.place', which is no flag"),
        ("count = ", "is not valid TOML"),
    ],
)
def test_a_wrong_configuration_is_refused(
    sample: list[SampleOptions], tmp_path: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dspark.toml").write_text(text)
    assert sample_run("here") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and expected in lines[0]
    assert "dspark.toml" in lines[0] or expected.startswith("--")
    assert not sample


def test_keys_of_other_commands_are_known(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text("top-k = 3\ncount = 2\n")
    keys = {"one": {"count": Kind(int)}, "two": {"top_k": Kind(int)}}
    assert read_config(path, "one", keys) == {"count": 2}
    path.write_text("top-kk = 3\n")
    with pytest.raises(UsageError, match="did you mean 'top-k'"):
        read_config(path, "one", keys)


def test_completion_offers_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_DSPARK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "dspark gen")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        run(["x"])
    assert "generate" in capsys.readouterr().out


ENDING = """
import atexit, sys, torch
from dspark_cli.app import main
atexit.register(print, "at the end", end="")
sys.argv = ["dspark", *{arguments!r}]
main()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["--verison"], 2)])
def test_the_quick_end_runs_what_was_registered_and_keeps_the_code(arguments: list[str], code: int, tmp_path: Path) -> None:
    """With torch loaded the process ends without the interpreter's teardown; nothing that was printed may be lost by it."""
    done = subprocess.run([sys.executable, "-c", ENDING.format(arguments=arguments)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code and done.stdout.endswith("at the end")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_the_quick_end_tells_of_output_that_was_not_written(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", ENDING.format(arguments=["--version"])], stdout=full, cwd=tmp_path, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_fault(closed: str, tmp_path: Path) -> None:
    """A job that is started without one neither fails for it nor has a file of its own take the stream's number."""
    (tmp_path / "program.py").write_text(
        "import os, sys, torch\nfrom dspark_cli.app import main\n"
        "import atexit\natexit.register(lambda: open('numbers', 'w').write(str(min(os.open('x', os.O_CREAT), 3))))\n"
        "sys.argv = ['dspark', '--version']\nmain()\n"
    )
    done = subprocess.run(f"{sys.executable} program.py {closed}", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Error" not in done.stderr
    assert (tmp_path / "numbers").read_text() == "3"
