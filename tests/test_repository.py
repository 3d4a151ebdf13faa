"""The repository stands alone: no file that is too long to read, no sink for leftovers, nothing of one machine."""

import re
from pathlib import Path

import pytest
from source_tree import ROOT, repository_files

MAX_LINES = 400
LONGER: dict[str, str] = {}
"""Source file -> why it may be longer."""

FILES = repository_files()
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".jsonl", ".json", ".yml", ".yaml", ".cfg", ""}
MACHINE = {
    "a home directory": r"(?<![\w.])/(home|Users)/[a-z]|(?<![\w.])/root\b",
    "a working directory": r"(?<![\w.])/(work|mnt)/|(?<![\w.])/workspace\b",
    "an installed place": r"(?<![\w.])/opt/|\.pyenv",
    "a package index": r"pypi\.org|pythonhosted|download\.pytorch\.org|--(extra-)?index-url|--find-links|\bsimple/",
    "a private address": r"\b(10\.\d+|192\.168|172\.(1[6-9]|2\d|3[01]))\.\d+\.\d+\b",
    "an address of this machine": r"https?://(localhost|127\.0\.0\.1)",
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def test_there_are_files() -> None:
    assert len(FILES) > 100


def test_no_source_file_is_too_long_to_read() -> None:
    sizes = {relative(path): len(text_of(path).splitlines()) for path in FILES if path.suffix in (".py", ".sh")}
    assert not {name: size for name, size in sizes.items() if size > MAX_LINES and name not in LONGER}
    assert not {name for name in LONGER if sizes.get(name, 0) <= MAX_LINES}, "no longer longer: take them off the list"


def test_there_is_no_sink() -> None:
    assert not [relative(path) for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]


@pytest.mark.parametrize("what", list(MACHINE))
def test_nothing_of_one_machine_is_in_the_files(what: str) -> None:
    """A path or an index of the machine that something was written on works nowhere else."""
    found = [
        f"{relative(path)}:{number}: {line.strip()[:120]}"
        for path in FILES
        if path.suffix in TEXT_SUFFIXES and path != Path(__file__)
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if re.search(MACHINE[what], line)
    ]
    assert not found


def test_everything_is_text_and_small() -> None:
    """Weights and results do not belong into the history."""
    large = [relative(path) for path in FILES if path.stat().st_size > 1 << 20]
    assert not large
    assert not [relative(path) for path in FILES if b"\0" in path.read_bytes()[:4096]]


def test_the_fixed_top_level_is_there() -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", ".ci/run"):
        assert (ROOT / name).is_file(), name
    for name in ("dspark_cli", "converters", "runtime", "kernels", "tests", "samples", "docs", "benchmarks"):
        assert (ROOT / name).is_dir(), name


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".sh" or path.parts[-2:] == (".ci", "run")], ids=relative)
def test_scripts_can_be_started(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    assert text_of(path).startswith("#!/")


@pytest.mark.parametrize("target", ["demo", "test", "test-slow", "lint", "fmt", "docs", "bench", "gpu-check", "clean"])
def test_make_has_the_target(target: str) -> None:
    assert re.search(rf"^{target}:", text_of(ROOT / "Makefile"), re.MULTILINE)
