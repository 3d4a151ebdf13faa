"""The `dspark` command. Imports the standard library, typer and the specs only, so that help is there at once."""

from __future__ import annotations

import atexit
import difflib
import os
import sys
from typing import Any

import typer

from dspark import __version__
from dspark_cli import convert, doctor, eval, export, generate, inspect, pair, quantize, tune
from dspark_cli.console import EXIT_STOPPED, Console, report
from dspark_cli.options import COMMANDS

app = typer.Typer(
    name="dspark",
    help="Convert, quantize and run language models over JSONL files in large offline batches.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich takes longer to import than the rest together, and logs stay readable
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

_CLICK_INTERRUPTED = 130
"""What click returns for Ctrl-C before a command has begun."""

# typer has its own copy of click in newer releases and the real one in older: the base class is found, not imported.
ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit()


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version")) -> None:
    pass


for _module in (convert, quantize, eval, export, generate, pair, tune, inspect, doctor):
    _module.register(app)


def usage_line(error: Any, arguments: list[str]) -> str:
    """A parser error as one line: what, what was probably meant, what to type next."""
    context = getattr(error, "ctx", None)
    path = " ".join(["dspark", *(word for word in arguments[:1] if word in COMMANDS)])
    text = error.format_message()
    name = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and context is not None:
        known = [option for parameter in context.command.params for option in (*parameter.opts, *parameter.secondary_opts)]
        near = difflib.get_close_matches(name, known, 1, 0.5)
        text = f"no such flag {name}" + (f", did you mean {near[0]}?" if near else "")
    text = " ".join(text.split()).rstrip(".")
    return f"{text[:1].lower()}{text[1:]}; type {path} --help"


def run(arguments: list[str] | None = None, application: typer.Typer = app) -> int:
    """Run the command line and return the exit code."""
    console = Console("dspark")
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = typer.main.get_command(application).main(args=arguments or ["--help"], prog_name="dspark", standalone_mode=False)
    except ClickError as error:
        console.error(usage_line(error, arguments))
        return 2
    except Exception as error:
        return report(console, error)
    return EXIT_STOPPED if code == _CLICK_INTERRUPTED else int(code or 0)


def _fill_closed_streams() -> None:
    """Let what a caller has closed (`2>&-`) lead nowhere. Python has None for it, and the next file opened would take its number, where any
    library that prints would write into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end


def main() -> None:
    """Entry of the script `dspark`.

    Once torch is loaded the process ends without the interpreter's teardown, in which torch spends most of a second. What was registered
    for the end is run, and output that cannot be written still ends in an error.
    """
    _fill_closed_streams()
    code = run()
    if "torch" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    main()
