"""Makes a launcher from its name on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.fleet.playbook import HostSelection
from tunetool.launch.deepspeed import DeepspeedLauncher
from tunetool.launch.job import Launcher
from tunetool.launch.slurm import SlurmLauncher, parse_options
from tunetool.launch.ssh import SshLauncher
from tunetool.launch.this_machine import LocalLauncher
from tunetool.measure.progress import Progress

NAMES = ("auto", "local", "ssh", "deepspeed", "slurm")


def launcher(
    name: str,
    inventory: Path | None,
    limit: str | None,
    progress: Progress,
    slurm: Sequence[str] = (),
    ansible: Sequence[str] = (),
) -> Launcher:
    """The launcher with this name. ``auto``: ``ssh`` if there is an inventory, otherwise ``local``.

    ``slurm``: options for the batch script, each ``KEY=VALUE``; ``ansible``: further ones for ansible-playbook.
    Raises ``UsageProblem`` for an unknown name, a missing inventory, or a missing program.
    """
    if name == "auto":
        name = "local" if inventory is None else "ssh"
    if name not in NAMES:
        raise UsageProblem(f"`{name}` is not a launcher", f"one of {', '.join(NAMES)}")
    if slurm and name != "slurm":
        raise UsageProblem(f"`--slurm {slurm[0]}` is not for the launcher `{name}`", "add `--launcher slurm`")
    if name == "local":
        if inventory is not None:
            raise UsageProblem("`--launcher local` takes no inventory", "omit `-i`, or use `--launcher ssh`")
        return LocalLauncher(progress)
    if inventory is None:
        raise UsageProblem(f"the launcher `{name}` needs an inventory", "name one with `-i`")
    if name == "deepspeed":
        return DeepspeedLauncher(HostSelection(inventory, limit, ansible=ansible), progress)
    if name == "slurm":
        return SlurmLauncher(parse_options(slurm), progress)
    return SshLauncher(HostSelection(inventory, limit, ansible=ansible), progress)
