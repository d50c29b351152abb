"""``tunetool lab``: virtual nodes with NVMe drives."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.cli.groups import Group
from tunetool.errors import UsageProblem
from tunetool.options.fields import option, takes
from tunetool.options.values import NEW_FILE, Value

if TYPE_CHECKING:
    from tunetool.lab.fleet import Started

_SHORT_UNITS = {"K": "KiB", "M": "MiB", "G": "GiB", "T": "TiB"}
MIN_DRIVE = 64 * 2**20
MIN_MEMORY = 512 * 2**20
MAX_DRIVES = 24
MAX_NODES = 16


def size_not_below(least: int) -> Any:
    """A size in bytes, from QEMU's form (``4G`` is 4 GiB) or from tunetool's (``4GiB``)."""

    def read(name: str, text: str) -> int:
        from tunetool.node.units import UnitError, parse_size

        try:
            size = parse_size(text[:-1] + _SHORT_UNITS[text[-1]] if text[-1:] in _SHORT_UNITS else text)
        except UnitError:
            raise click.BadParameter(f"`{text}` is not a size; write `4G` or `4GiB`") from None
        if size < least:
            raise click.BadParameter(f"`{text}` is less than {least // 2**20}MiB")
        if size % 2**20:
            raise click.BadParameter(f"`{text}` is not a whole number of MiB")
        return size

    return Value("size", read)


@click.group("lab", cls=Group)
def command() -> None:
    """Run virtual nodes with NVMe drives, to rehearse a change before real nodes get it.

    A node has data drives with the serials LAB<n>NV1, LAB<n>NV2 ... and one more, LAB<n>SYS, that tunetool must not
    touch: it is nvme0n1 and holds a mounted file system. A measurement in a virtual node says nothing about real
    drives.

    Exit codes: 0 done; 2 the call was wrong; 3 it could not be done; `ssh` ends with the code of its command.
    """


@dataclass(frozen=True)
class UpOptions:
    """What `lab up` takes."""

    nodes: int = option("--nodes", default=1, type=click.IntRange(1, MAX_NODES), help="Number of nodes.")
    drives: int = option(
        "--drives", default=8, type=click.IntRange(1, MAX_DRIVES), help="Number of data drives of each node."
    )
    drive_size: int = option(
        "--drive-size", default="4G", type=size_not_below(MIN_DRIVE), help="Size of each drive, such as `4G` or `4GiB`."
    )
    memory: int = option(
        "--memory", default="2G", type=size_not_below(MIN_MEMORY), help="Memory of each node, such as `2G` or `2GiB`."
    )
    os_name: str = option(
        "--os", default="debian12", type=click.Choice(["debian12", "debian13"]), help="Operating system of the nodes."
    )
    fresh: bool = option("--fresh", is_flag=True, help="Build the image again.")
    offline: bool = option("--offline", is_flag=True, help="Let the nodes reach each other and nothing else.")
    numa: bool = option("--numa", is_flag=True, help="Spread the drives over both NUMA nodes of each node.")


@command.command()
@takes(UpOptions)
def up(given: UpOptions) -> int:
    """Start nodes; those that run already stay as they are.

    The first call builds an image and a snapshot, in minutes; later calls restore the snapshot, in seconds. Writes
    inventory/lab/hosts.yml, where that directory exists.
    """
    from tunetool.lab import fleet, inventory
    from tunetool.lab.state import Lab

    lab = Lab()
    settings = fleet.Settings(
        nodes=given.nodes,
        drives=given.drives,
        drive_size=given.drive_size,
        memory=given.memory,
        os_name=given.os_name,
        fresh=given.fresh,
        offline=given.offline,
        numa=given.numa,
    )
    with _progress() as say:
        started_nodes = fleet.up(lab, settings, say)
        # A private lab (TUNETOOL_LAB_DIR) must not overwrite the inventory of the default lab.
        if inventory.DEFAULT_PATH.parent.is_dir() and "TUNETOOL_LAB_DIR" not in os.environ:
            inventory.write(lab, inventory.DEFAULT_PATH)
    for started in started_nodes:
        click.echo(_line(started))
    return 0


@command.command()
def status() -> None:
    """Show every node: state, ssh port, acceleration, drives and faults."""
    from rich import box
    from rich.table import Table

    from tunetool.lab import node, saved
    from tunetool.lab.state import Lab
    from tunetool.report.page import PipeConsole

    lab = Lab()
    console = PipeConsole()
    table = Table("node", "state", "port", "accel", "os", "drives", "faults", "saved", pad_edge=False)
    table.box = box.SIMPLE_HEAD if console.is_terminal else None
    for each in lab.nodes():
        table.add_row(
            each.name,
            "running" if node.alive(lab, each.name) else "dead",
            str(each.ssh_port),
            each.accel,
            each.os_name,
            " ".join(drive.serial for drive in each.drives),
            ", ".join(f"{fault.kind} {fault.serial}" for fault in each.faults) or "-",
            " ".join(saved.names(lab, each.name)) or "-",
        )
    if table.row_count == 0:
        click.echo("no nodes")
        return
    # A pipe has no width: keep one node per line there.
    console.print(table) if console.is_terminal else PipeConsole(width=400).print(table)


@command.command(context_settings={"ignore_unknown_options": True})
@click.argument("node")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def ssh(node: str, arguments: tuple[str, ...]) -> None:
    """Log in to NODE as root, or run a command there: `tunetool lab ssh node1 -- lsblk`.

    Ends with the exit code of the command.
    """
    from tunetool.lab import ssh as lab_ssh
    from tunetool.lab.programs import require
    from tunetool.lab.state import Lab

    lab = Lab()
    state = lab.read(node)
    _need_running(lab, node)
    require("ssh")
    sys.stdout.flush()
    line = lab_ssh.command(lab, state, list(arguments))
    os.execvp(line[0], line)  # noqa: S606 -- an argument list; ssh takes over the terminal


@command.command()
@click.argument("node")
@click.argument("kind")
@click.option("--drive", "serial", metavar="SERIAL", help="Serial of the drive. Default: that of the third data drive.")
def fault(node: str, kind: str, serial: str | None) -> None:
    """Break NODE in one way.

    \b
    Drives:    slow-drive io-errors remove-drive swap-drive extra-drive mixed-size
               4k-sectors metadata duplicate-serial empty-serial
    In use:    in-use partition-in-use btrfs-in-use lvm
    Contents:  has-filesystem has-partitions btrfs lvm-idle luks swap-signature zfs-label
    """
    from tunetool.lab import fleet
    from tunetool.lab.state import Lab

    with _progress() as say:
        done = fleet.inject(Lab(), node, kind, serial, say)
    click.echo(f"{node}: {done.kind} on {done.serial}")


@command.command()
@click.argument("node")
@click.argument("name")
def save(node: str, name: str) -> None:
    """Save the running NODE with its drives as NAME, for `reset NODE --to NAME`.

    Unmounts the file systems on its drives for a moment, so no program may use them. The node runs on afterwards.
    """
    from tunetool.lab import fleet
    from tunetool.lab.state import Lab

    with _progress() as say:
        started = fleet.save(Lab(), node, name, say)
    click.echo(f"{node}: saved as {name}, {started.seconds:.1f} s")


@command.command()
@click.argument("node")
@click.option("--to", metavar="NAME", help="Name under which `save` saved the node. Default: its first snapshot.")
def reset(node: str, to: str | None) -> None:
    """Bring NODE back to its snapshot, with blank drives and without faults."""
    from tunetool.lab import fleet
    from tunetool.lab.state import Lab

    with _progress() as say:
        started = fleet.reset(Lab(), node, say, to=to)
    click.echo(_line(started))


@command.command()
@click.argument("node")
@click.option("--power-loss", is_flag=True, help="Take the power away instead of shutting down.")
@click.option("--shuffle", is_flag=True, help="Move every data drive to another slot: other names, same serials.")
@click.option("--blank-drives", is_flag=True, help="Bring back blank data drives, as a cloud does after a stop.")
@click.option(
    "--new-serials", is_flag=True, help="With --blank-drives: give the drives other serials (LAB1NV1 -> LAB1NW1)."
)
def reboot(node: str, power_loss: bool, shuffle: bool, blank_drives: bool, new_serials: bool) -> None:
    """Boot NODE with the kernel, initramfs and kernel command line that its own disk holds."""
    from tunetool.lab import fleet
    from tunetool.lab.renewal import Change
    from tunetool.lab.state import Lab

    with _progress() as say:
        change = Change(shuffle, blank_drives, new_serials)
        started = fleet.reboot(Lab(), node, say, power_loss=power_loss, change=change)
    click.echo(_line(started))


@command.command()
@click.argument("node", required=False)
def down(node: str | None) -> None:
    """End NODE, or the whole lab, and remove everything but the cached image."""
    from tunetool.lab import fleet
    from tunetool.lab.state import Lab

    ended = fleet.down(Lab(), node)
    click.echo(f"ended: {', '.join(ended)}" if ended else "no nodes")


@command.command()
@click.option(
    "--output",
    type=NEW_FILE,
    metavar="FILE",
    help="File for the inventory. Default: inventory/lab/hosts.yml.",
)
def inventory(output: Path | None) -> None:
    """Write the Ansible inventory of the nodes. `down` removes it."""
    from tunetool.lab import inventory as lab_inventory
    from tunetool.lab.state import Lab

    lab = Lab()
    if not lab.nodes():
        raise UsageProblem("the lab has no nodes", "start one with `tunetool lab up`")
    path = output or lab_inventory.DEFAULT_PATH
    lab_inventory.write(lab, path)
    click.echo(path)


def _need_running(lab: Any, name: str) -> None:
    from tunetool.errors import CannotJudge
    from tunetool.lab import node

    if not node.alive(lab, name):
        raise CannotJudge(f"`{name}` does not run", f"start it with `tunetool lab reset {name}`")


def _line(started: Started) -> str:
    node = started.node
    drives = f"{node.drive_count} drives of {node.drive_size / 2**30:g} GiB"
    took = "already running" if started.seconds is None else f"{started.seconds:.1f} s"
    return f"{node.name}: ssh port {node.ssh_port}, {drives}, {node.os_name}, {node.accel}, {took}"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One status line on a terminal, plain lines elsewhere; always on stderr."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(text, err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("working") as shown:
        yield shown.update
