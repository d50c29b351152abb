"""Replicas of what ``Saver`` saved: the first rank of each node replicates its node's files."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tunetool.checkpoint.markers import METADATA
from tunetool.checkpoint.os_errors import warn
from tunetool.checkpoint.peers import peer_of, switch_of
from tunetool.checkpoint.replica_worker import warned
from tunetool.checkpoint.replicating import NothingHere, Replica, check_settings, replicate
from tunetool.errors import TunetoolError, UsageProblem

SETTINGS = ("peer", "peer_dir", "ssh", "python", "rate", "max_to_keep", "patience")
"""The arguments of ``replicate`` that a call may give."""
_EVERY = 0.2
"""Seconds between two looks whether a replication has ended."""


class SaverReplicas:
    """Every rank of a job has one, and calls its methods for the same steps.

    ``settings``: arguments of ``replicate``; without ``peer`` it is that of ``peer_of`` by Slurm's switches, and the
    peer keeps two replicas of a node unless ``max_to_keep`` says otherwise.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        for name in settings:
            if name not in SETTINGS:
                raise UsageProblem(f"`replicas` takes no `{name}`", f"give some of: {', '.join(SETTINGS)}")
        self._settings = {"max_to_keep": 2, **settings}
        check_settings(self._settings.get("rate", "auto"), self._settings["max_to_keep"], settings.get("patience", 120))
        self._leads: list[int] | None = None
        self._group: dist.ProcessGroup | None = None
        self.last: Replica | None = None
        """The last one that this rank began."""
        self._next: tuple[Path, bytes | None] | None = None
        self._deciding = threading.Lock()

    def meet(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        """Learn once which nodes there are: a collective of the ranks of ``group``; None: there is one process."""
        if self._leads is not None:
            return
        here = (socket.gethostname(), switch_of(os.environ))
        hosts, rank = [here], 0
        if group is not None:
            hosts, rank = [here] * dist.get_world_size(group), dist.get_rank(group)
            dist.all_gather_object(hosts, here, group=group)
        names = [name for name, _ in hosts]
        self._settings.setdefault("peer", peer_of(names, here[0], dict(hosts)))
        leads = [each for each, name in enumerate(names) if names.index(name) == each]
        self._leads = leads if rank in leads else []
        if self._settings["peer"] is None:
            self._leads = []
            if rank == 0:
                warn(f"no replicas: all ranks are on `{here[0]}`. hint: give `peer`, another node")
        elif group is not None and len(self._leads) > 1:
            ranks = [dist.get_global_rank(group, each) for each in leads]
            self._group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)

    def begin(self, step_dir: Path) -> None:
        """Replicate a step that was just saved. While the one before is being replicated, the newest one waits."""
        if not self._leads:
            return
        content = _metadata_of(step_dir)
        if self._group is not None:
            # Its first rank is the coordinator of the save, whose node alone has the file.
            shared = [content]
            dist.broadcast_object_list(shared, src=dist.get_global_rank(self._group, 0), group=self._group)
            content = shared[0]
        with self._deciding:
            waits = self._next is not None
            if not waits and (self.last is None or not self.last.running):
                self._replicate(step_dir, content)
                return
            self._next = step_dir, content
        if not waits:
            threading.Thread(target=self._go_on, args=[self.last], name="tunetool-replicas", daemon=True).start()

    def _go_on(self, before: Replica) -> None:
        while before.running:
            time.sleep(_EVERY)
        with self._deciding:
            step, self._next = self._next, None
            if step is not None:
                self._replicate(*step)

    def _replicate(self, step_dir: Path, metadata: bytes | None) -> None:
        if self.last is not None:
            self.last.wait()  # it has ended
        try:
            self.last = replicate(step_dir, metadata=metadata, **self._settings)
        except NothingHere:
            return
        except TunetoolError as error:
            warned(step_dir, self._settings["peer"], error)


def _metadata_of(step_dir: Path) -> bytes | None:
    try:
        return (step_dir / METADATA).read_bytes()
    except OSError:
        return None
