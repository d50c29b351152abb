"""Which launcher."""

from __future__ import annotations

from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.launch.deepspeed import DeepspeedLauncher
from tunetool.launch.job import Launcher
from tunetool.launch.ssh import SshLauncher
from tunetool.launch.this_machine import LocalLauncher
from tunetool.measure.progress import Progress

NAMES = ("auto", "local", "ssh", "deepspeed", "slurm")


def launcher(name: str, inventory: Path | None, limit: str | None, progress: Progress) -> Launcher:
    """The launcher that is called ``name``. ``auto``: ``ssh`` with an inventory, ``local`` without one.

    Raises ``UsageProblem`` where it cannot be: the wrong name, no inventory, a program that is missing.
    """
    if name == "auto":
        name = "local" if inventory is None else "ssh"
    if name not in NAMES:
        raise UsageProblem(f"`{name}` is not a launcher", f"one of {', '.join(NAMES)}")
    if name == "local":
        if inventory is not None:
            raise UsageProblem("`--launcher local` takes no inventory", "leave out `-i`, or use `--launcher ssh`")
        return LocalLauncher(progress)
    if inventory is None:
        raise UsageProblem(f"the launcher `{name}` needs an inventory", "name one with `-i`")
    if name == "ssh":
        return SshLauncher(inventory, limit, progress)
    if name == "deepspeed":
        return DeepspeedLauncher(inventory, limit, progress)
    raise UsageProblem(f"the launcher `{name}` is not here yet")
