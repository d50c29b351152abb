"""Groups of commands: their help, and the hint for a misspelt name."""

from __future__ import annotations

import difflib
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from tunetool.errors import ExitCode, UsageProblem

HELP_OPTIONS = ["-h", "--help"]


class ReaderGone(Exception):
    """The reader of standard output closed it. Not an ``OSError``: click ends every closed pipe with 1, which means
    here that something falls short."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__("standard output was closed")
        self.code = code
        """What the command ends with. A judgement that nobody got is no pass; what was judged to fall short, or was
        wrong with the call, holds."""


class OutputLost(Exception):
    """Standard output took not all: what it goes to is full. ``code``: as of ``ReaderGone``."""

    def __init__(self, reason: str, code: ExitCode) -> None:
        super().__init__(reason)
        self.code = code


OUTPUT = "standard output"


class NamedOutput(io.TextIOWrapper):
    """Standard output whose errors name it, as those of a file name the file."""

    def write(self, text: str) -> int:
        """Write ``text``."""
        with _named():
            return super().write(text)

    def flush(self) -> None:
        """Write what is held back."""
        with _named():
            super().flush()

    def close(self) -> None:
        """Let go of the stream below, which belongs to whoever opened it and is still used after this one."""
        if not self.closed:
            self.detach()

    @property
    def closed(self) -> bool:
        """Whether nothing can be written any more."""
        try:
            return super().closed
        except ValueError:  # it was let go
            return True


@contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        error.filename = OUTPUT
        raise


@contextmanager
def answering(code: ExitCode) -> Iterator[None]:
    """What is printed within is the answer of a command that ends with ``code``.

    Raises ``ReaderGone`` or ``OutputLost`` where not all of it could be printed.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise ReaderGone(code or ExitCode.NOT_JUDGED) from None
    except OSError as error:
        if error.filename != OUTPUT:
            raise
        raise OutputLost(error.strerror or str(error), code or ExitCode.NOT_JUDGED) from None


class Group(click.Group):
    """A group that suggests the nearest name for one that does not exist. Alone, it prints its help and ends with 2."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the group's own options."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of that name. Raises ``UsageProblem``, with the nearest name as a hint."""
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            names = self.list_commands(ctx)
            raise UsageProblem(
                f"`{ctx.command_path} {name}` is not a command",
                nearest(name, names) or f"{ctx.command_path} has: {', '.join(names)}",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each name with its whole first sentence; click would cut it to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(200)) for name, each in commands if each is not None])


def nearest(word: str, words: Sequence[str]) -> str | None:
    """``did you mean ...?``, or None if no word is near."""
    near = difflib.get_close_matches(word, words, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(f'`{each}`' for each in near)}?" if near else None
