"""Restores nodes from the snapshot or from a saved state."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tunetool.lab import node, saved, snapshot
from tunetool.lab.qmp import QemuEnded
from tunetool.lab.state import Lab, NodeState

Say = Callable[[str], None]
ATTEMPTS = 3
"""Tries per node: of 40 restores under load 2 lost a hot-plug event and 1 hung in udev; the next try worked. QEMU
itself crashes now and then, too (``fleet.SAVE_ATTEMPTS``)."""


@dataclass(frozen=True)
class Source:
    """What a node starts from: the snapshot with blank drives, or a saved state."""

    snapshot: snapshot.Snapshot
    template: NodeState
    kept: saved.Saved | None = None

    @property
    def what(self) -> str:
        """Its name in messages."""
        return f"`{self.kept.directory.name}`" if self.kept else "the snapshot"

    def new_node(self, lab: Lab, name: str, port: int) -> NodeState:
        """The state of a node that will start from this source."""
        if self.kept:
            return saved.start(lab, self.kept, port)
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
        self._preparing[name] = node.start_preparing(self._lab, self.nodes[name], kept.standing if kept else None)

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
