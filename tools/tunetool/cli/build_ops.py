"""``tunetool build-ops``: compile DeepSpeed's ops once."""

from __future__ import annotations

import os
from dataclasses import dataclass

import click

from tunetool.options import shared as options
from tunetool.options.fields import option, repeatable, takes
from tunetool.options.shared import Dry


@dataclass(frozen=True)
class Options(Dry):
    """What the call says."""

    python: str | None = options.python()
    ops: tuple[str, ...] = repeatable(
        "--op",
        type=click.Choice(["async_io", "gds", "utils", "cpu_adam"]),
        help="Op to compile. Repeatable. Default: all that this machine can compile.",
    )
    rebuild: bool = option("--rebuild", is_flag=True, help="Compile again what is compiled already.")


@click.command("build-ops")
@takes(Options)
def command(given: Options) -> int:
    """Compile DeepSpeed's ops once; no other command compiles anything.

    Writes them to the directory that DeepSpeed itself uses: the training environment's directory of ops, or
    TORCH_EXTENSIONS_DIR, or torch_extensions in the user's cache. Removes the lock of a build that died, for which
    DeepSpeed would wait for ever.

    Exit codes: 0 every op that was asked for is compiled, `gds` by --op alone; 2 the call was wrong; 3 an op cannot be
    compiled here.
    """
    from tunetool.errors import CannotJudge
    from tunetool.measure.aio.build_ops import CANNOT_BE_BUILT, OPTIONAL, SHARED_RUNTIME, build_ops, cure
    from tunetool.report.progress import best_progress
    from tunetool.training_python import choose

    chosen = choose(given.python).need()
    environment = chosen.environment(os.environ)
    installed, built = build_ops(
        chosen.path, given.ops, given.rebuild, environment, best_progress(), dry_run=given.dry_run
    )
    click.echo(f"{installed.python}: torch {installed.torch}, deepspeed {installed.deepspeed}")
    for each in built:
        seconds = f" in {each.seconds:.0f} s" if each.seconds >= 1 else ""
        click.echo(f"{each.op:9} {each.status}{seconds}: {each.detail}")
    own = list(dict.fromkeys(path for each in built for path in each.own_runtime))
    if own:
        names = ", ".join(f"`{path}`" for path in own)
        click.echo(
            f"{names}: the compiler linked a C++ runtime of its own, and to print a number may end a job", err=True
        )
        click.echo(f"hint: compile it by a compiler that links libstdc++.so.6: {SHARED_RUNTIME}", err=True)
    lacking = [each.op for each in built if each.status == CANNOT_BE_BUILT and each.op not in OPTIONAL]
    if lacking:
        names = ", ".join(f"`{op}`" for op in lacking)
        raise CannotJudge(f"{names} of DeepSpeed's ops cannot be built here", cure(lacking, environment))
    return 0
