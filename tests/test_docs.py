"""Documents say what the program does: help is generated, every flag and every code is in a table."""

import ast
import importlib.util
import re
import shlex
from types import ModuleType

import pytest
from source_tree import ROOT, package_sources, repository_files

from dspark.runtime.spec import errors
from dspark_cli import app, console
from dspark_cli.options import COMMANDS, command_fields, flag_names, kind_of

DOCS = ROOT / "docs"
CODE_SOURCES = [path for path in package_sources() if path.is_relative_to(ROOT / "runtime")]
EXIT_CODES = {0, 3, console.EXIT_BUG, *(error.exit_code for error in vars(errors).values() if isinstance(error, type))}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def make_help() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_help", DOCS / "make_help.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_help_is_current(make_help: ModuleType) -> None:
    assert read("docs/help.md") == make_help.document(), "docs/help.md is out of date; type: make docs"


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_flag_is_in_the_help(command: str) -> None:
    section = read("docs/help.md").split(f"## `dspark {command} --help`")[1].split("\n## ")[0]
    flags = [
        name
        for cls, spec in command_fields(command)
        if not spec.metadata.get("argument")
        for name in flag_names(spec, kind_of(cls, spec)).split("/")
    ]
    assert "--config" in flags
    assert not [name for name in flags if not re.search(rf"{name}(?![\w-])", section)]


@pytest.mark.parametrize("name", ["README.md", "docs/jobs.md"])
def test_exit_codes_have_a_table(name: str) -> None:
    """Exactly the codes that the program has: one too many is a promise."""
    text = read(name)
    table = text[text.index("| code | meaning |") :].split("\n\n")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == EXIT_CODES


def error_codes() -> dict[str, str]:
    """Every code word that an error record can have, and where: texts in the place of RequestError's or LineError's `code`."""
    found: dict[str, str] = {}
    for path in CODE_SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("RequestError", "LineError"):
                continue
            values = [*node.args[1:2], *(keyword.value for keyword in node.keywords if keyword.arg == "code")]
            for value in values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[value.value] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


def test_every_error_code_is_documented() -> None:
    codes = error_codes()
    assert len(codes) > 10
    documented = set(re.findall(r"^\| `(\w+)` \|", read("docs/lines.md") + read("docs/jobs.md"), re.MULTILINE))
    assert not {code: place for code, place in codes.items() if code not in documented}


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in repository_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert not broken


def commands_in(name: str) -> list[list[str]]:
    """The dspark command lines of a document's shell blocks, with comments and continuation words cut off."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", read(name), re.DOTALL) for line in block.splitlines()]
    found = [line[line.index("dspark ") :].split(";")[0] for line in lines if re.match(r"(until )?dspark ", line)]
    return [shlex.split(line, comments=True)[1:] for line in found]


@pytest.mark.parametrize("name", ["README.md", "docs/jobs.md", "samples/README.md"])
def test_commands_in_documents_use_real_flags(name: str) -> None:
    for words in commands_in(name):
        assert words[0] in COMMANDS, words
        known = {flag for cls, spec in command_fields(words[0]) for flag in flag_names(spec, kind_of(cls, spec)).split("/")}
        assert not [word for word in words if word.startswith("--") and word not in known], words


def test_the_readme_has_commands() -> None:
    assert {words[0] for words in commands_in("README.md")} >= {"convert", "quantize", "generate"}


def test_every_command_of_the_program_is_registered() -> None:
    """COMMANDS is what the other tests walk."""
    assert {info.name for info in app.app.registered_commands} == set(COMMANDS)
