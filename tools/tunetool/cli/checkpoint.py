"""``tunetool checkpoint``: list, show, verify and compare checkpoints of torch's distributed format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.cli.groups import Group, answering
from tunetool.cli.output import write_text
from tunetool.errors import ExitCode
from tunetool.options import shared as options
from tunetool.options.fields import argument, takes
from tunetool.options.shared import AsJson
from tunetool.options.values import DIRECTORY, TEXT

if TYPE_CHECKING:
    from rich.console import Console


@click.group("checkpoint", cls=Group)
def command() -> None:
    """List, show, verify and compare checkpoints, of tunetool's writer and of torch's own.

    Needs no GPU and no job. Reads alone, and runs no code that a checkpoint names.
    """


@dataclass(frozen=True)
class _Options(AsJson):
    python: str | None = options.python()

    def go_on(self) -> None:
        """Go on under the Python that has torch. Raises ``CannotJudge`` where there is none."""
        from tunetool.cli.bench import go_on_under
        from tunetool.training_python import TORCH

        go_on_under(self.python, TORCH)

    def finish(
        self, kind: str, code: ExitCode, document: Callable[[], dict[str, Any]], show: Callable[[Console], None]
    ) -> int:
        """Write the JSON, print, and return the exit code."""
        from tunetool.report.page import table_console

        with answering(code):
            if self.json_to is not None:
                schema = {"schema": f"tunetool.checkpoint.{kind}/1"}
                write_text(json.dumps({**schema, **document()}, indent=2) + "\n", self.json_to)
            if self.json_to != "-":
                show(table_console())
        return int(code)


@dataclass(frozen=True)
class ListOptions(_Options):
    """What `checkpoint ls` takes."""

    directories: tuple[Path, ...] = argument("DIR...", type=DIRECTORY, nargs=-1, required=True)

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        from tunetool.checkpoint.catalogue import need_directories

        need_directories(self.directories)


@command.command("ls")
@takes(ListOptions)
def list_steps(given: ListOptions) -> int:
    """List the steps in every DIR, the nearest tier first, such as scratch, then shared storage.

    DIR is a directory of steps, or one step. Shows whether each is whole, and from which one a job would resume. Also
    lists the replicas of other nodes that are kept there.

    Exit codes: 0 listed; 2 the call was wrong; 3 it could not be done.
    """
    given.go_on()
    from tunetool.checkpoint.catalogue import catalogue
    from tunetool.checkpoint.steps import now_ns
    from tunetool.report.checkpoints import print_steps, steps_document

    steps = catalogue(given.directories)
    return given.finish(
        "ls", ExitCode.OK, lambda: steps_document(steps), lambda console: print_steps(steps, now_ns(), console)
    )


@dataclass(frozen=True)
class _OneStep(_Options):
    step: Path = argument("STEP", type=DIRECTORY)

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        from tunetool.checkpoint.steps import need_checkpoint

        need_checkpoint(self.step)


@dataclass(frozen=True)
class ShowOptions(_OneStep):
    """What `checkpoint show` takes."""

    step: Path = argument("STEP", type=DIRECTORY)
    glob: str | None = argument("[GLOB]", type=TEXT, required=False)


@command.command("show")
@takes(ShowOptions)
def show(given: ShowOptions) -> int:
    """Show the tensors and objects in STEP whose names match GLOB: dtypes, shapes, bytes, ranks, files.

    Reads `.metadata` alone.

    Exit codes: 0 shown; 2 the call was wrong, STEP cannot be read, or nothing matches; 3 it could not be done.
    """
    given.go_on()
    from tunetool.checkpoint.contents import contents
    from tunetool.report.checkpoints import contents_document, print_contents

    held = contents(given.step, given.glob)
    return given.finish(
        "show", ExitCode.OK, lambda: contents_document(held), lambda console: print_contents(held, console)
    )


@dataclass(frozen=True)
class VerifyOptions(_OneStep):
    """What `checkpoint verify` takes."""


@command.command("verify")
@takes(VerifyOptions)
def verify(given: VerifyOptions) -> int:
    """Read STEP past the page cache, compare it with its checksums, and name everything that is damaged.

    A drained step is compared with the drain's checksums too. A checkpoint without checksums, such as one of torch's
    own writer, is not proven: its lengths and structure are checked.

    Exit codes: 0 sound; 1 damaged, or not whole; 2 the call was wrong; 3 it could not be judged, since there are no
    checksums, or this user may not read a file.
    """
    given.go_on()
    from tunetool.checkpoint.verification import verify
    from tunetool.report.checkpoints import print_verification, verification_document
    from tunetool.report.progress import best_progress

    found = verify(given.step, best_progress())
    return given.finish(
        "verify", found.code, lambda: verification_document(found), lambda console: print_verification(found, console)
    )


@dataclass(frozen=True)
class DiffOptions(_Options):
    """What `checkpoint diff` takes."""

    a: Path = argument("A", type=DIRECTORY)
    b: Path = argument("B", type=DIRECTORY)
    glob: str | None = argument("[GLOB]", type=TEXT, required=False)

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        from tunetool.checkpoint.steps import need_checkpoint

        for step in (self.a, self.b):
            need_checkpoint(step)


@command.command("diff")
@takes(DiffOptions)
def diff(given: DiffOptions) -> int:
    """Compare the steps A and B: what only one has, what differs, and by how much.

    GLOB: names of the tensors and objects to compare. A tensor is compared as a whole, in whichever parts it was saved;
    an object by its pickle, which is not read.

    Exit codes: 0 equal; 1 different; 2 the call was wrong, or a `.metadata` cannot be read; 3 something in them is
    damaged, or could not be read, or nothing differs and something was not compared.
    """
    given.go_on()
    from tunetool.checkpoint.differences import code_of, compare
    from tunetool.report.checkpoints import differences_document, print_differences
    from tunetool.report.progress import best_progress

    compared = compare(given.a, given.b, given.glob, best_progress())
    return given.finish(
        "diff",
        code_of(compared),
        lambda: differences_document(compared),
        lambda console: print_differences(compared, console),
    )
