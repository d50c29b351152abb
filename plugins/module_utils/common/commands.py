"""Running the system's own programs: argument lists, bounded time, one error line."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from .file_lock import held
from .refusal import Expected, on_one_line


class CommandError(Expected):
    """A program is missing, failed or did not end. The message names it and quotes its last line."""

    def __init__(self, message: str) -> None:
        super().__init__(on_one_line(message))


class NotInstalled(CommandError):
    """The program is missing; the caller may try another one."""


@dataclass(frozen=True)
class Result:
    """The output of a program."""

    returncode: int
    stdout: str
    stderr: str


def in_c_locale(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program whose words and numbers are read: neither is the user's language then."""
    return {**environment, "LC_ALL": "C"}


def captured(
    argv: Sequence[str], timeout: float | None, own_locale: bool = False, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` without input, and keep what it prints as text, whatever its exit status is.

    ``timeout`` is in seconds; None where it takes as long as there are bytes to copy. ``own_locale``: for a program
    that needs the user's, or passes its environment on; any other runs in the C locale. ``settings``: further ones of
    ``subprocess.run``, whose exceptions it raises; ``pass_fds`` come on top of the lock of the node.
    """
    if not own_locale:
        settings["env"] = in_c_locale(settings.get("env", os.environ))
    return subprocess.run(
        list(argv),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        pass_fds=(*held(), *settings.pop("pass_fds", ())),
        **{"errors": "replace", **settings},
    )


def last_line(text: str, none: str = "it printed nothing") -> str:
    """The last line of a program's words that has any; ``none`` where there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else none


def run(argv: Sequence[str], accept: Sequence[int] = (0,), timeout: float = 300.0) -> Result:
    """Run ``argv`` without a shell and without input, in the C locale.

    ``timeout`` is in seconds. An exit status outside ``accept`` raises ``CommandError``, a missing
    program ``NotInstalled``.
    """
    # A login without /sbin on its PATH (an ordinary user, some cron) must still find mdadm and wipefs.
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin"
    try:
        done = captured(argv, timeout, env=dict(os.environ, PATH=path))
    except FileNotFoundError:
        raise NotInstalled("`%s` is not installed" % argv[0]) from None
    except subprocess.TimeoutExpired:
        raise CommandError("`%s` did not end within %g s" % (" ".join(argv), timeout)) from None
    if done.returncode not in accept:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise CommandError(
            "`%s` failed with exit status %d: %s" % (" ".join(argv), done.returncode, "; ".join(lines[-3:]))
        )
    return Result(done.returncode, done.stdout, done.stderr)
