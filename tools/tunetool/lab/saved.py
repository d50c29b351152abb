"""Saved states of a node: its memory, its root disk and its drives. ``Restores`` starts nodes from one, or from the
snapshot, in seconds.

Built as the snapshot is (``snapshot.py``): the drives are pulled, the memory is written to a file, and the disk of that
moment is frozen. The drives' files are kept beside it, and every restore works on sparse copies.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.lab import node, programs, qemu, quiesce, snapshot, ssh
from tunetool.lab.qemu import QemuEnded, Qmp
from tunetool.lab.quiesce import DriveUse, Mount
from tunetool.lab.snapshot import Snapshot
from tunetool.lab.state import InDirectory, Lab, NodeState, decode_node

Say = Callable[[str], None]
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
ATTEMPTS = 3
"""Tries per node: of 40 restores under load 2 lost a hot-plug event and 1 hung in udev; the next try worked. QEMU
itself crashes now and then, too (``fleet.PULL_ATTEMPTS``)."""


@dataclass(frozen=True)
class Saved:
    """One saved state. ``node`` has the drives as they were attached, ``drive_use`` what was on them."""

    directory: Path
    node: NodeState
    drive_use: DriveUse

    @property
    def snapshot(self) -> Snapshot:
        """Memory and disk, laid out as in the snapshot that every node starts from."""
        return Snapshot(self.directory)

    drives = InDirectory("drives")
    """The drives' files. Never written again."""


def names(lab: Lab, name: str) -> list[str]:
    """The saved states of a node."""
    directory = lab.saved_dir(name)
    return sorted(path.parent.name for path in directory.glob("*/saved.json") if _NAME.match(path.parent.name))


def every(lab: Lab) -> list[Saved]:
    """Every saved state of the lab."""
    files = sorted(lab.saved_dir("").glob("*/*/saved.json"))
    return [_read(path) for path in files if _NAME.match(path.parent.name)]


def find(lab: Lab, name: str, wanted: str) -> Saved:
    """The saved state ``wanted`` of a node, which need not exist now."""
    known = names(lab, name)
    if wanted in known:
        return _read(lab.saved_dir(name) / wanted / "saved.json")
    lab.read(name)
    listed = ", ".join(f"`{each}`" for each in known)
    raise UsageProblem(
        f"`{wanted}` is not a saved state of `{name}`",
        f"there is {listed}" if known else f"save one: tunetool lab save {name} {wanted}",
    )


def check_name(lab: Lab, name: str, wanted: str) -> None:
    """Refuse an invalid name, and one that exists: later states may use the disk of an earlier one."""
    if not _NAME.match(wanted):
        raise UsageProblem(f"`{wanted}` cannot name a saved state", "letters, digits, `.`, `_` and `-`")
    if wanted in names(lab, name):
        raise UsageProblem(f"`{name}` has a saved state `{wanted}` already", "choose another name")


def look(lab: Lab, state: NodeState) -> DriveUse:
    """What is on the drives of a running node."""
    return quiesce.parse(ssh.run(lab, state, quiesce.LOOK).stdout, state.name)


def take(lab: Lab, state: NodeState, found: DriveUse, wanted: str, say: Say) -> Saved:
    """Save a running node with what ``look`` found on its drives.

    The node has ended afterwards; restoring the saved state brings it back.
    """
    programs.require_space(lab.directory, state.memory, "the node's memory")
    ssh.end_masters(lab, state.name)
    try:
        ssh.run(lab, state, quiesce.take_down(found))
    except CannotJudge:
        # The first error matters more than an error of its clean-up.
        with contextlib.suppress(CannotJudge):
            ssh.run(lab, state, quiesce.bring_back(found))
        raise
    say(f"{state.name}: pulling its drives and saving its memory")
    target = lab.saved_dir(state.name) / wanted
    work = target.with_name(f".{wanted}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        with Qmp(lab.qmp_socket(state.name)) as qmp:
            node.detach(lab, state, qmp, state.drives)
            qmp.command("stop")
            snapshot.store(qmp, Snapshot(work).memory)
        with qemu.undisturbed():
            for pid in qemu.all_under(lab.node_dir(state.name)):
                qemu.end(pid)
            return _keep(lab, state, found, work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _keep(lab: Lab, state: NodeState, found: DriveUse, work: Path, target: Path) -> Saved:
    directory = lab.node_dir(state.name)
    (directory / "disk.qcow2").rename(Snapshot(work).disk)
    (work / "drives").mkdir()
    for drive in state.drives:
        drive.path.rename(work / "drives" / drive.path.name)
    kept = {"node": asdict(state), "standing": asdict(found)}
    (work / "saved.json").write_text(json.dumps(kept, default=str, indent=2) + "\n")
    work.rename(target)
    return Saved(target, state, found)


def remove(lab: Lab, name: str) -> None:
    """Remove all saved states of a node."""
    shutil.rmtree(lab.saved_dir(name), ignore_errors=True)


def start(lab: Lab, kept: Saved, port: int) -> NodeState:
    """The state of the node as it was saved, with paths for its own drives, which do not exist yet."""
    directory = lab.node_dir(kept.node.name) / "drives"
    drives = [replace(drive, path=directory / drive.path.name) for drive in kept.node.drives]
    return replace(kept.node, ssh_port=port, drives=drives, faults=list(kept.node.faults))


def _read(path: Path) -> Saved:
    try:
        data = json.loads(path.read_text())
        recorded = data["standing"]
        look = DriveUse(
            tuple(recorded["arrays"]),
            tuple(recorded["names"]),
            tuple(Mount(**mount) for mount in recorded["mounts"]),
            tuple((device, uuid) for device, uuid in recorded["swaps"]),
        )
        return Saved(path.parent, decode_node(data["node"]), look)
    except (ValueError, KeyError, TypeError) as error:
        raise CannotJudge(f"`{path}` cannot be read: {error}", "tunetool lab down") from error


@dataclass(frozen=True)
class Source:
    """What a node starts from: the snapshot with blank drives, or a saved state."""

    snapshot: snapshot.Snapshot
    template: NodeState
    kept: Saved | None = None

    @property
    def what(self) -> str:
        """Its name in messages."""
        return f"`{self.kept.directory.name}`" if self.kept else "the snapshot"

    def new_node(self, lab: Lab, name: str, port: int) -> NodeState:
        """The state of a node that will start from this source."""
        if self.kept:
            return start(lab, self.kept, port)
        return replace(self.template, name=name, index=int(name[4:]), ssh_port=port, drives=[], faults=[])


class Restores:
    """Restores nodes from one source; an incomplete node is restored again."""

    def __init__(self, lab: Lab, source: Source, say: Say) -> None:
        self.nodes: dict[str, NodeState] = {}
        self._lab, self._source, self._say = lab, source, say
        self._preparing: dict[str, subprocess.Popen[str]] = {}
        self._tries: dict[str, int] = {}

    def begin(self, name: str, port: int) -> None:
        """Start a node; ``finish`` waits until it is usable."""
        self._say(f"{name}: restoring {self._source.what} ({self._source.template.accel})")
        # `finish` tries a node again that fails at once, after the others have been started.
        with self._counted(name):
            self._begin(name, port)

    def finish(self, name: str) -> None:
        """Wait for a node, and start it again up to the number of tries."""
        while not self._finished(name):
            with self._counted(name):
                self._begin(name, self.nodes[name].ssh_port)

    def end(self) -> None:
        """End all nodes that were started here."""
        for script in self._preparing.values():
            script.kill()
            script.communicate()
        for name in self.nodes:
            node.end(self._lab, name)

    def _begin(self, name: str, port: int) -> None:
        if name in self._lab.names():
            node.end(self._lab, name)
        kept = self._source.kept
        self.nodes[name] = self._source.new_node(self._lab, name, port)
        node.start_restored(self._lab, self.nodes[name], self._source.snapshot, kept.drives if kept else None)
        self._preparing[name] = node.start_preparing(self._lab, self.nodes[name], kept.drive_use if kept else None)

    def _finished(self, name: str) -> bool:
        if name in self._preparing:
            with self._counted(name):
                node.finish_preparing(self.nodes[name], self._preparing.pop(name))
                return True
        return False

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        try:
            yield
        except (node.NotReady, QemuEnded) as error:
            self._tries[name] = self._tries.get(name, 0) + 1
            if self._tries[name] == ATTEMPTS:
                raise
            self._say(f"{error.message}: restoring {self._source.what} once more")
