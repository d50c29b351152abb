"""The door: find the command, run it, turn errors into one line and an exit code."""

from __future__ import annotations

import importlib
import signal
import sys
from types import FrameType
from typing import NoReturn

import click

from tunetool import __version__
from tunetool.errors import ExitCode, TunetoolError

# name -> one-line help. The module of a command is imported only when it is called, so that `--help` is quick.
COMMANDS = {
    "bench": "What a user runs, timed: `checkpoint` by every engine; `ds-io` as DeepSpeed does I/O, with proof.",
    "inspect": "One screen of this node: drives, PCIe paths, volume, memory, GPUs, ceilings, and what to mend.",
    "lab": "Virtual nodes with NVMe drives, for rehearsing a change before real nodes see it.",
    "plan": "Arithmetic before a job: `checkpoint` says how often to save.",
    "prebuild": "Compile DeepSpeed's ops once, so that nothing compiles in the middle of a job.",
    "report": "Look at records: show one, list them, compare two.",
    "provision": "Build the nodes of an inventory, or plan what that would cost their drives.",
    "rebuild": "Make the scratch volume anew if every local drive came back blank (at boot).",
    "stage": "Copy a tree to memory or a local disk, whole or not at all, with checksums; verify it; evict it.",
    "tune": "Find the best settings of DeepSpeed's aio block for this storage.",
    "verify": "Check the node against its manifest, measure its storage, and judge.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tunetool.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tunetool")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Turn a GPU node into one whose storage is provably fast, and keep proving it.

    Exit codes: 0 it holds, 1 it falls short, 2 the call was wrong, 3 it could not be judged, 130 interrupted.
    """
    ctx.obj = {"debug": debug}


def main() -> NoReturn:
    """Entry point of the ``tunetool`` program."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else ExitCode.OK)
    except click.exceptions.Abort:
        _leave("interrupted", None, ExitCode.INTERRUPTED)
    except KeyboardInterrupt:
        _leave("interrupted", None, ExitCode.INTERRUPTED)
    except click.ClickException as error:
        hint = None
        if isinstance(error, click.UsageError) and error.ctx is not None:
            hint = f"see `{error.ctx.command_path} --help`"
        _leave(error.format_message(), hint, ExitCode.USAGE)
    except TunetoolError as error:
        if debug:
            raise
        _leave(error.message, error.hint, error.exit_code)
    except BrokenPipeError:
        # The reader of a pipe went away (`| head`): nothing left to tell anyone.
        sys.stderr.close()
        sys.exit(ExitCode.NOT_JUDGED)
    except OSError as error:
        if debug:
            raise
        _leave(f"`{error.filename or 'system call'}`: {error.strerror or error}", None, ExitCode.NOT_JUDGED)


def _leave(message: str, hint: str | None, code: ExitCode) -> NoReturn:
    click.echo(f"error: {message}" if code != ExitCode.INTERRUPTED else message, err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    sys.exit(code)


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    # So that SIGTERM unwinds through the same `finally` blocks as Ctrl-C.
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
