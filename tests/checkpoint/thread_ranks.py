"""Ranks that are threads of the test, each on a node of its own name: what they do together ends, or fails in time."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tunetool.checkpoint import resume
from waiting import PATIENCE


class ThreadRanks:
    """Stands for torch.distributed in ``latest``. A rank that does not come breaks the collective of the others."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts, self._own = hosts, threading.local()
        self._barrier, self._sent = threading.Barrier(len(hosts)), [b""] * len(hosts)

    def get_world_size(self) -> int:
        return len(self.hosts)

    def get_rank(self) -> int:
        return int(self._own.rank)

    def all_gather_object(self, received: list[Any], mine: Any) -> None:
        self._sent[self.get_rank()] = pickle.dumps(mine)
        self._barrier.wait(PATIENCE)
        received[:] = map(pickle.loads, self._sent)
        self._barrier.wait(PATIENCE)

    def broadcast_object_list(self, sent: list[Any], src: int) -> None:
        received: list[Any] = []
        self.all_gather_object(received, sent)
        sent[:] = received[src]

    def run(self, work: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What ``work`` returns on each rank, or the exception that it raises there."""

        def one(rank: int) -> Any:
            self._own.rank = rank
            try:
                return work(rank)
            except Exception as error:
                return error

        monkeypatch.setattr(resume, "_distributed", lambda: self)
        monkeypatch.setattr(socket, "gethostname", lambda: self.hosts[self.get_rank()])
        with ThreadPoolExecutor(len(self.hosts)) as threads:
            return list(threads.map(one, range(len(self.hosts))))
