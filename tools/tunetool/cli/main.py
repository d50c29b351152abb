"""The entry point: find the command, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import errno
import importlib
import io
import os
import re
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

from tunetool import __version__
from tunetool.cli.groups import HELP_OPTIONS, OUTPUT, Group, NamedOutput, OutputLost, ReaderGone, nearest
from tunetool.ctrl_c import as_interrupt, never_lost
from tunetool.errors import CannotJudge, ExitCode, TunetoolError, fault_of_ours
from tunetool.node.common.refusal import on_one_line

# name -> one-line help. The module of a command is imported only when it is called, so that `--help` is quick.
COMMANDS = {
    "inspect": "Show one screen of this node: drives, PCIe, volume, memory, GPUs, limits; or what differs in a fleet.",
    "init": "Write an inventory to start from: your nodes, how to log in, which drives, and why each default.",
    "provision": "Build the nodes of an inventory, or plan what building would do to their drives.",
    "verify": "Check a node against its manifest, measure its storage, and judge both.",
    "accept": "Measure whether a machine, or each node of a fleet, keeps every promise of a goals file.",
    "tune": "Find the best settings of DeepSpeed's `aio` block for this storage.",
    "ds-config": "Write a whole DeepSpeed configuration for a model and a node.",
    "stage": "Copy a directory tree to memory or a local disk with checksums, verify the copy, or evict it.",
    "checkpoint": "List, show, verify and compare checkpoints of torch's distributed format.",
    "bench": "Run a benchmark, such as checkpoints, loading weights or fine-tuning, or the whole chain.",
    "advise": "Compute before a run: how often to save, what a model needs, who reads what, what a network costs.",
    "report": "Show, list or compare records, or judge them by goals.",
    "lab": "Run virtual nodes with NVMe drives, to rehearse a change before real nodes get it.",
    "doctor": "Show what this machine lacks for which command, and the line that installs it.",
    "build-ops": "Compile DeepSpeed's ops once, so that no job has to compile them.",
    "build-wheelhouse": "Fetch the wheels of training environments once, for nodes without a package index.",
}
_QUOTED = re.compile(r"'(-[\w-]+)'(?: / '-[\w-]+')*")
"""An option name in click's quotation marks."""
HIDDEN = ("ephemeral-rebuild",)
"""Commands that systemd calls, not people."""
PRINT_LAST = ("init", "inspect", "advise", "report", "build-ops", "ds-config", "checkpoint")
"""Commands that judge nothing and print when everything else is done, as ``--help`` of every command does."""


class _LazyGroup(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS and cmd_name not in HIDDEN:
            return None
        command: click.Command = importlib.import_module(f"tunetool.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError:
            # Its help or its version.
            raise ReaderGone(ExitCode.OK) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            ended = super().invoke(ctx)
            # Text still in the buffer must not fail later: Python would then end with 120.
            sys.stdout.flush()
        except BrokenPipeError:
            done = ctx.invoked_subcommand in PRINT_LAST or not set(HELP_OPTIONS).isdisjoint(sys.argv[1:])
            raise ReaderGone(ExitCode.OK if done else ExitCode.NOT_JUDGED) from None
        return ended


@click.command("tunetool", cls=_LazyGroup, context_settings={"help_option_names": HELP_OPTIONS})
@click.version_option(__version__, prog_name="tunetool")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Turn a GPU node into one whose storage is provably fast, and keep proving it.

    Exit codes: 0 done, or everything that was judged holds; 1 something falls short; 2 the call was wrong; 3 something
    could not be judged or done; 130 interrupted.
    """
    ctx.obj = {"debug": debug}
    if sys.platform != "linux":
        raise CannotJudge(
            f"tunetool needs Linux, and this is `{sys.platform}`",
            "call it on a node, or on a control machine with Linux that reaches the nodes by ssh",
        )


def main(command: click.Command = cli) -> NoReturn:
    """Entry point of the ``tunetool`` program, and of those in perf/, each of which is one ``command``."""
    debug = "--debug" in sys.argv
    # SIGTERM unwinds through the same `finally` blocks as Ctrl-C.
    signal.signal(signal.SIGTERM, as_interrupt)
    never_lost()
    # A timer, or `env -i`, may have none: what is installed would count as missing.
    os.environ.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    _name_output()
    try:
        ended = command.main(prog_name=command.name, standalone_mode=False)
        sys.exit(ended if isinstance(ended, int) else ExitCode.OK)
    except click.exceptions.Abort:
        _leave("interrupted", None, ExitCode.INTERRUPTED)
    except KeyboardInterrupt:
        _leave("interrupted", None, ExitCode.INTERRUPTED)
    except click.ClickException as error:
        _leave(*usage(error), ExitCode.USAGE)
    except ReaderGone as error:
        _leave_in_silence(error.code)
    except OutputLost as error:
        _leave_unprinted(str(error), error.code)
    except TunetoolError as error:
        if debug:
            traceback.print_exc()
        _leave(error.message, error.hint, error.exit_code)
    except OSError as error:
        if debug:
            traceback.print_exc()
        _leave_failed(error)
    except Exception as error:
        # Python would end with 1, which means here that something falls short.
        if debug:
            traceback.print_exc()
        _leave(fault_of_ours(error), "report it with what `tunetool --debug` prints", ExitCode.NOT_JUDGED)


def _name_output() -> None:
    given = sys.stdout
    if isinstance(given, io.TextIOWrapper):
        sys.stdout = NamedOutput(
            given.buffer,
            encoding=given.encoding,
            errors=given.errors,
            line_buffering=given.line_buffering,
            write_through=given.write_through,
        )


def usage(error: click.ClickException) -> tuple[str, str | None]:
    """Message and hint of what click refuses."""
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path} --help`" if context is not None else None
    if isinstance(error, click.NoSuchOption):
        names = [name for each in context.command.params for name in each.opts] if context is not None else []
        return f"`{error.option_name}` is not an option", nearest(error.option_name, names) or hint
    if isinstance(error, click.MissingParameter) and error.param is not None:
        option = isinstance(error.param, click.Option)
        return f"`{error.param.opts[-1] if option else error.param.human_readable_name}` is missing", hint
    return _QUOTED.sub(r"`\1`", error.format_message()).rstrip("."), hint


def _leave(message: str, hint: str | None, code: ExitCode) -> NoReturn:
    message = on_one_line(message)
    try:
        click.echo(f"error: {message}" if code != ExitCode.INTERRUPTED else message, err=True)
        if hint:
            click.echo(f"hint: {on_one_line(hint)}", err=True)
        sys.stdout.flush()
    except OSError:
        # Neither stream takes anything: a pipe without a reader, a full disk.
        _leave_in_silence(code)
    sys.exit(code)


_CURES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or have the quota raised",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.EROFS: "name a directory that can be written to",
}


def _leave_failed(error: OSError) -> NoReturn:
    reason = error.strerror or str(error)
    if error.filename == OUTPUT:
        _leave_unprinted(reason, ExitCode.NOT_JUDGED)
    _leave(f"`{error.filename or 'system call'}`: {reason}", _CURES.get(error.errno or 0), ExitCode.NOT_JUDGED)


def _leave_unprinted(reason: str, code: ExitCode) -> NoReturn:
    # Python writes what is left in the buffer when it ends, and would end with 120.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _leave(f"`standard output` cannot be written: {reason}", "make room where it goes, or send it elsewhere", code)


def _leave_in_silence(code: int) -> NoReturn:
    """End after the reader closed the pipe (`| head`)."""
    # Both may be that pipe (`2>&1 |`), and Python writes what is left in their buffers when it ends.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    sys.exit(code)


if __name__ == "__main__":
    main()
