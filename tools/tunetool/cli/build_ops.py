"""``tunetool build-ops``: compile DeepSpeed's ops once."""

from __future__ import annotations

import os

import click


@click.command("build-ops")
@click.option(
    "--python", metavar="PATH", help="The Python whose torch and DeepSpeed they are for. Default: tunetool's."
)
@click.option(
    "--op",
    "ops",
    multiple=True,
    type=click.Choice(["async_io", "gds", "utils", "cpu_adam"]),
    help="Only this one (again for more). Default: all that this machine can build.",
)
@click.option("--rebuild", is_flag=True, help="Also what is built already.")
def command(python: str | None, ops: tuple[str, ...], rebuild: bool) -> int:
    """Compile DeepSpeed's ops once; no other command compiles anything.

    They land where DeepSpeed itself looks for them (TORCH_EXTENSIONS_DIR, or torch_extensions in the cache). A lock
    that a build left behind when it died, for which DeepSpeed waits for ever, is removed, after a look whether anybody
    builds.
    """
    from tunetool.cli.verify import check_python
    from tunetool.measure.aio.build_ops import build_ops
    from tunetool.report.progress import best_progress

    interpreter = check_python(python)
    found, built = build_ops(interpreter, ops, rebuild, os.environ, best_progress())
    click.echo(f"{found.python}: torch {found.torch}, deepspeed {found.deepspeed}")
    for each in built:
        seconds = f" in {each.seconds:.0f} s" if each.seconds >= 1 else ""
        click.echo(f"{each.op:9} {each.status}{seconds}: {each.detail}")
    return 0
