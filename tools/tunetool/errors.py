"""Errors that people read, and the exit codes of contract 3 (docs/reference/exit-codes.md)."""

from __future__ import annotations

from enum import IntEnum

from tunetool.node.common.refusal import on_one_line


class ExitCode(IntEnum):
    """The exit codes of a process."""

    OK = 0
    """Everything that was judged holds, or the requested work was done completely."""
    FALLS_SHORT = 1
    """Something was judged and falls short."""
    USAGE = 2
    """The call itself was wrong; nothing was done."""
    NOT_JUDGED = 3
    """Something could not be judged, and nothing that was judged falls short."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM, after cleaning up."""


class TunetoolError(Exception):
    """One line that names the thing in backticks, and a hint that says what to do.

    ``exit_code``: exit code of the command if the error is not caught.
    """

    exit_code = ExitCode.NOT_JUDGED
    raw: str = ""
    """Output of the failed program, kept beside the record in the file ``raw_name``."""
    raw_name = "messages.txt"

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = on_one_line(message)
        super().__init__(self.message)
        self.hint = hint and on_one_line(hint)

    @property
    def line(self) -> str:
        """Message and hint in one line."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class UsageProblem(TunetoolError):
    """The call was wrong: unreadable input, an impossible value. Raised before any work is done."""

    exit_code = ExitCode.USAGE


class CannotJudge(TunetoolError):
    """The work could not be done or could not be judged (busy, unproven, missing program)."""

    exit_code = ExitCode.NOT_JUDGED


def fault_of_ours(error: BaseException) -> str:
    """One line about an exception that nobody foresaw."""
    return f"a fault of tunetool itself: `{type(error).__name__}`: {error}"


class Unforeseen(TunetoolError):
    """A fault of tunetool itself. Its cause is the unexpected exception."""

    exit_code = ExitCode.NOT_JUDGED
