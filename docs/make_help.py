"""Write docs/help.md, the help of every command, from the program itself: python docs/make_help.py [--check]"""

import argparse
import sys
from pathlib import Path

from typer.testing import CliRunner

from dspark_cli.app import app
from dspark_cli.options import COMMANDS

TARGET = Path(__file__).with_name("help.md")
WIDTH = 110
HEAD = """# Every command and its flags

Written by `make docs` from the program; `tests/test_docs.py` fails when it is out of date.
"""


def help_text(arguments: list[str]) -> str:
    """What `dspark ARGUMENTS --help` prints, WIDTH columns wide."""
    result = CliRunner().invoke(app, [*arguments, "--help"], prog_name="dspark", terminal_width=WIDTH, color=False)
    if result.exit_code:
        raise RuntimeError(f"dspark {' '.join(arguments)} --help ended with {result.exit_code}: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def document() -> str:
    """The whole file."""
    parts = [HEAD]
    for arguments in ([], *([name] for name in COMMANDS)):
        command = " ".join(["dspark", *arguments, "--help"])
        parts.append(f"## `{command}`\n\n```console\n$ {command}\n{help_text(arguments)}\n```\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the file is current")
    text = document()
    if parser.parse_args().check:
        current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        sys.exit(0 if current else f"{TARGET.name} is out of date; type: make docs")
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
