"""``tunetool checkpoint``: list, show, verify, compare, fetch, export and import checkpoints."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.cli.groups import Group, answering
from tunetool.cli.output import write_text
from tunetool.ctrl_c import uninterrupted
from tunetool.errors import ExitCode
from tunetool.options import shared as options
from tunetool.options.fields import argument, number, option, repeatable, takes
from tunetool.options.shared import AsJson, Dry
from tunetool.options.values import DIRECTORY, FILE, PATH, SIZE, TEXT

if TYPE_CHECKING:
    from rich.console import Console

    from tunetool.checkpoint.renaming import Renaming


@click.group("checkpoint", cls=Group)
def command() -> None:
    """List, show, verify, compare, fetch, export and import checkpoints, of tunetool's writer and of torch's own.

    Needs no GPU and no job. Changes no checkpoint, and runs no code that one names.
    """


@dataclass(frozen=True)
class _Options(AsJson):
    python: str | None = options.python()

    def go_on(self) -> None:
        """Go on under the Python that has torch. Raises ``CannotJudge`` where there is none."""
        from tunetool.cli.bench import go_on_under
        from tunetool.training_python import TORCH

        go_on_under(self.python, TORCH)
        # Libraries that torch imports throw a Ctrl-C away that comes in them, or make another error of it.
        uninterrupted(lambda: importlib.import_module("torch"))

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


@dataclass(frozen=True)
class _Renaming(_Options, Dry):
    names: Path | None = option(
        "--names",
        type=FILE,
        help="JSON file that has for an old name, or a pattern with `*`, the new one, or null to leave it out.",
    )
    dtype: str | None = option(
        "--dtype",
        type=click.Choice(["bfloat16", "float16", "float32"]),
        help="Dtype of what is float64, float32, bfloat16 or float16. Default: as it is.",
    )

    def renaming(self, prefix: str | None) -> Renaming:
        """What ``--prefix`` and ``--names`` ask for. Raises ``UsageProblem``."""
        from tunetool.checkpoint.renaming import Renaming, read_names

        return Renaming(prefix or "", {} if self.names is None else read_names(self.names))


@dataclass(frozen=True)
class ExportOptions(_Renaming):
    """What `checkpoint export` takes."""

    step: Path = argument("STEP", type=DIRECTORY)
    out: Path = argument("OUT", type=DIRECTORY)
    prefix: str | None = option(
        "--prefix",
        type=TEXT,
        metavar="TEXT",
        help="What the names begin with of the tensors to export, such as `model.`; it is taken off. Default: all but "
        "an optimizer's.",
    )
    config: Path | None = option(
        "--config",
        type=PATH,
        help="A model's config.json, or its directory, from which the tokenizer's files are copied too.",
    )
    shard_size: int = option(
        "--shard-size", type=SIZE, default="5GB", help="Largest size of a file; a tensor that is larger has one alone."
    )
    processes: int = number("--processes", default=1, help="Number of processes; each writes files of its own.")

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        from tunetool.checkpoint.steps import need_checkpoint

        need_checkpoint(self.step)


@command.command("export")
@takes(ExportOptions)
def export(given: ExportOptions) -> int:
    """Write the tensors in STEP into the new directory OUT as safetensors files, as transformers reads them.

    Everything is compared with the checksums of the save, where there are some. OUT appears once it is whole.

    Exit codes: 0 exported; 2 the call was wrong, or a `.metadata` cannot be read; 3 it could not be done, for something
    in STEP is damaged, or there is no room.
    """
    given.go_on()
    from tunetool.checkpoint.exporting import Request, plan, run
    from tunetool.report.exports import export_document, print_export
    from tunetool.report.progress import best_progress

    request = Request(
        given.step,
        given.out,
        given.renaming(given.prefix),
        given.dtype,
        given.shard_size,
        given.config,
        given.processes,
    )
    done = plan(request)[0] if given.dry_run else run(request, best_progress())
    return given.finish(
        "export",
        ExitCode.OK,
        lambda: export_document(done, given.dry_run),
        lambda console: print_export(done, given.dry_run, console),
    )


@dataclass(frozen=True)
class ImportOptions(_Renaming):
    """What `checkpoint import` takes."""

    source: Path = argument("DIR", type=DIRECTORY)
    step: Path = argument("STEP", type=DIRECTORY)
    prefix: str | None = option(
        "--prefix", type=TEXT, metavar="TEXT", help="What is put in front of each name, such as `model.`."
    )


@command.command("import")
@takes(ImportOptions)
def import_files(given: ImportOptions) -> int:
    """Write the safetensors files in DIR into the new directory STEP, a checkpoint that a job can load.

    DIR may also be one file, or an index. STEP has checksums.

    Exit codes: 0 imported; 2 the call was wrong, or a file is not what it must be; 3 it could not be done.
    """
    given.go_on()
    from tunetool.loading.importing import ImportRequest, plan, run
    from tunetool.report.exports import import_document, print_import
    from tunetool.report.progress import best_progress

    request = ImportRequest(given.source, given.step, given.renaming(given.prefix), given.dtype)
    done = plan(request)[0] if given.dry_run else run(request, best_progress())
    return given.finish(
        "import",
        ExitCode.OK,
        lambda: import_document(done, given.dry_run),
        lambda console: print_import(done, given.dry_run, console),
    )


@dataclass(frozen=True)
class FetchOptions(_Options, Dry):
    """What `checkpoint fetch` takes."""

    step: Path = argument("STEP", type=DIRECTORY)
    tiers: tuple[str, ...] = repeatable(
        "--from",
        type=TEXT,
        metavar="DIR|HOST:DIR",
        required=True,
        help="Directory of steps, such as shared storage; or that of the node that has the replicas of this one, which "
        "ssh reaches. The nearest first.",
    )
    host: str | None = option(
        "--host",
        type=TEXT,
        metavar="NAME",
        help="Name under which this node saved: only what its ranks need comes. Default: all of a step in a DIR; in "
        "HOST:DIR what this node's host name has there.",
    )

    def check(self) -> None:
        """Raises ``UsageProblem``."""
        from tunetool.checkpoint.tiers import checked

        checked(self.step, self.tiers, self.host)


@command.command("fetch")
@takes(FetchOptions)
def fetch(given: FetchOptions) -> int:
    """Bring STEP, which is not there, from the first --from that has it whole, and check every byte.

    A source that is damaged is named, and the next one is tried. STEP appears by one rename; an interrupted call is
    continued by the next one.

    Exit codes: 0 brought, or --dry-run and it fits; 2 the call was wrong, or STEP is there; 3 no --from has it whole,
    or it does not fit.
    """
    given.go_on()
    from tunetool.checkpoint.step_fetch import fetch
    from tunetool.report.checkpoints import fetched_document, print_fetched
    from tunetool.report.progress import best_progress

    fetched = fetch(given.step, given.tiers, best_progress(), host=given.host, dry_run=given.dry_run)
    return given.finish(
        "fetch",
        ExitCode.OK if fetched.fits else ExitCode.NOT_JUDGED,
        lambda: fetched_document(fetched),
        lambda console: print_fetched(fetched, console),
    )
