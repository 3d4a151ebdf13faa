"""What a command prints: data to stdout, everything else to stderr, one line per error, and the exit code of each failure.

Elsewhere than on a terminal a run prints one line at its start, one at its end and one per problem: cron mails whatever is printed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from dspark.runtime.spec.errors import DsparkError, MachineError, StoppedError

EXIT_BUG = 1
EXIT_STOPPED = StoppedError.exit_code
EXIT_MACHINE = MachineError.exit_code
DISK_ERRORS = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file may not grow further"}
PROGRESS_INTERVAL_S = 0.5

logger = logging.getLogger("dspark")


def has_colour(stream: TextIO) -> bool:
    """Colour only on a terminal, and never with NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Progress:
    """A bar on a terminal, nothing elsewhere. Close it before printing the last line."""

    def __init__(self, total: int, unit: str, done: int, shown: bool) -> None:
        self._bar: Any = None
        if shown:
            from tqdm import tqdm  # only where a bar is drawn

            self._bar = tqdm(
                total=total, initial=done, unit=unit, file=sys.stderr, mininterval=PROGRESS_INTERVAL_S, dynamic_ncols=True, leave=False
            )

    def advance(self, count: int, **shown: Any) -> None:
        """Count finished units; `shown` appears behind the bar, such as tokens/s."""
        if self._bar is not None:
            self._bar.update(count)
            if shown:
                self._bar.set_postfix(shown, refresh=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class _LogToStderr(logging.Handler):
    """Warnings of the libraries as one line each."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print_line(f"{record.levelname.lower()}: {record.getMessage()}")


class Console:
    """One command's output."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.json = False
        self.quiet = False
        self.verbose = False
        self._bar: Progress | None = None
        self._stderr_handler = _LogToStderr(self)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        logger.handlers = [self._stderr_handler]

    def configure(self, json: bool, quiet: bool, verbose: bool, log_file: Path | None) -> None:
        """Take the flags. Raises OSError when the log file cannot be opened."""
        self.json, self.quiet, self.verbose = json, quiet, verbose
        self._stderr_handler.setLevel(logging.DEBUG if verbose else logging.WARNING)
        if log_file is not None:
            handler = logging.FileHandler(log_file, encoding="utf-8")
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
            logger.addHandler(handler)

    def data(self, text: str) -> None:
        """What the command is for, on stdout (not with --json, which prints one document)."""
        if not self.json:
            sys.stdout.write(text + "\n")

    def document(self, value: Any) -> None:
        """The command's JSON document, printed with --json only."""
        if self.json:
            sys.stdout.write(json.dumps(value, ensure_ascii=False, allow_nan=False, default=str) + "\n")

    def note(self, text: str) -> None:
        """A line at the start or the end of a run."""
        self._log(logging.INFO, text)
        if not self.quiet:
            self.print_line(text)

    def detail(self, text: str) -> None:
        """A line for --verbose and the log file."""
        self._log(logging.DEBUG, text)
        if self.verbose and not self.quiet:
            self.print_line(text)

    def problem(self, text: str) -> None:
        """Something went wrong but the run goes on; printed even with --quiet."""
        self._log(logging.WARNING, text)
        self.print_line(f"warning: {text}")

    def error(self, text: str) -> None:
        """The one line of a failed run."""
        self._log(logging.ERROR, text)
        word = "\x1b[1;31merror:\x1b[0m" if has_colour(sys.stderr) else "error:"
        self.print_line(f"{word} {text}")

    def progress(self, total: int, unit: str, done: int = 0) -> Progress:
        """A bar on a terminal; elsewhere, with --quiet and with --json nothing. done: units finished before, not part of the rate."""
        self._bar = Progress(total, unit, done, sys.stderr.isatty() and not self.quiet and not self.json)
        return self._bar

    def print_line(self, text: str) -> None:
        """One line on stderr, above a bar that is being drawn."""
        line = " ".join(text.split()) + "\n"
        if self._bar is not None and self._bar._bar is not None:
            self._bar._bar.clear()
        with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more: the run's files tell all
            sys.stderr.write(line)
            sys.stderr.flush()

    def _log(self, level: int, text: str) -> None:
        for handler in logger.handlers:
            if handler is not self._stderr_handler:
                handler.handle(logger.makeRecord(logger.name, level, "", 0, text, (), None))


def write_traceback(command: str) -> Path:
    """Append the current exception to a log file and name it: the user's state directory, else the temporary one."""
    import tempfile

    from platformdirs import user_state_path

    stamp = time.strftime("%Y%m%d-%H%M%S")
    text = f"dspark {command}: {time.strftime('%Y-%m-%d %H:%M:%S')} {sys.argv}\n{traceback.format_exc()}\n"
    for directory in (user_state_path("dspark"), Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"dspark-{command}-{stamp}-{os.getpid()}.log"
            path.write_text(text, encoding="utf-8")
            return path
    return Path(os.devnull)


def is_out_of_memory(error: BaseException) -> bool:
    """Python's own error, or torch's (which is not imported here): OutOfMemoryError on a GPU, a RuntimeError on the CPU."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)


def report(console: Console, error: BaseException) -> int:
    """Print an exception as one line and return its exit code."""
    if isinstance(error, DsparkError):
        if isinstance(error, StoppedError):
            console.print_line(error.one_line())
        else:
            console.error(error.one_line())
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        console.print_line("stopped; the same command continues")
        return EXIT_STOPPED
    if isinstance(error, BrokenPipeError):
        _forget_stdout()
        return 0
    if is_out_of_memory(error):
        console.error("out of memory; what is done is kept, the same command continues; free memory or lower --max-num-seqs")
        return EXIT_MACHINE
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        where = f" ('{error.filename}')" if error.filename else ""
        console.error(f"{DISK_ERRORS[error.errno]}{where}; what is done is kept, the same command continues; make room first")
        return EXIT_MACHINE
    if isinstance(error, OSError) and error.filename is not None:
        console.error(f"'{error.filename}': {error.strerror}; check that the path exists and may be used")
        return 2
    try:
        raise error
    except BaseException:
        path = write_traceback(console.command)
    console.error(f"a bug in dspark: {type(error).__name__}: {str(error)[:200]}; please report it with '{path}'")
    return EXIT_BUG


def _forget_stdout() -> None:
    """The reader of stdout has gone (| head): nothing to say, and nothing more may be written at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(console: Console, body: Callable[[], int | None]) -> int:
    """Run a command's body and return the process's exit code; never raises."""
    try:
        code = body() or 0
    except (Exception, KeyboardInterrupt) as error:
        code = report(console, error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    except OSError as error:
        code = report(console, error)
    return code
