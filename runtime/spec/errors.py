"""Every error a user can cause or meet, with its exit code.

The command line prints `message` and `hint` as one line and exits with `exit_code`; nothing else in the project decides exit codes.
"""


class DsparkError(Exception):
    """Base of all expected failures.

    message: what is wrong, with the value and what is allowed. hint: what to type next (may be empty).
    """

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def one_line(self) -> str:
        """Message and hint on one line."""
        text = f"{self.message}; {self.hint}" if self.hint else self.message
        return " ".join(text.split())


class UsageError(DsparkError):
    """A flag, a configuration key or a combination of them is wrong."""


class InputError(DsparkError):
    """An input file, checkpoint or engine directory cannot be used."""


class UnsupportedError(InputError):
    """A format, family or feature that this version does not have; the message names what it has."""


class MachineError(DsparkError):
    """The machine failed in mid-run (disk full, memory, device lost): what is done is kept."""

    exit_code = 7


class LockedError(DsparkError):
    """Another run holds this output."""

    exit_code = 5


class QualityError(DsparkError):
    """An audit or a quality gate refused: nothing was published."""

    exit_code = 6


class StoppedError(DsparkError):
    """Stopped on purpose before the end: the same command continues."""

    exit_code = 4


class RequestError(DsparkError):
    """One request cannot be served; all others can.

    code: stable machine-readable word. param: the field at fault, or None.
    """

    def __init__(self, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
