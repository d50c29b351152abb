"""Removes what a run leaves in /dev/shm: files that belong to the run and that no process has mapped.

DeepSpeed's shared buffers are ``deepspeed_allreduce_buffer_UID_ADDRESS_PORT_RANK`` with the run's MASTER_ADDR and
MASTER_PORT (deepspeed 0.19, ops/csrc/cpu/comm/shm.cpp; it never unlinks them); torch's are ``torch_PID_RANDOM_NUMBER``
of the process that made them (torch 2.13, torch/csrc/StorageSharing.cpp). NCCL and Python's shared memory have random
names (``nccl-*``, ``psm_*``), and ranks that a rank starts, as LLaMA-Factory's, meet at a port of their own: those that
processes of the run had mapped belong to the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")
_TORCH = re.compile(r"torch_(\d+)_")
_BUFFER = "deepspeed_allreduce_buffer_"
_MAPPED = ("nccl-", "psm_", _BUFFER)


class ShmCleanup:
    """The files of one run in ``shm`` on this node. Call ``look`` repeatedly while its processes run."""

    def __init__(self, shm: Path = SHM) -> None:
        self._shm = shm
        self._pids: set[int] = set()
        self._mapped: set[str] = set()
        self._buffers: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Record these processes of the run and the files that they have mapped."""
        for pid in pids:
            self._pids.add(pid)
            self._mapped |= {name for name in mapped_names(pid, self._shm) if name.startswith(_MAPPED)}

    def expect_buffers(self, address: str, port: str, world: int) -> None:
        """Add the names of DeepSpeed's buffers, which contain the address and port of the rendezvous."""
        begin = f"{_BUFFER}{os.getuid()}_{address}_{port}_"
        self._buffers |= {f"{begin}{rank}" for rank in range(world)}

    def remove(self) -> list[str]:
        """Remove the files of the run. Returns the names of files that remain because another process has them
        mapped."""
        try:
            entries = [entry for entry in os.scandir(self._shm) if self._ours(entry)]
        except OSError:
            return []
        if not entries:
            return []
        used = _in_use(self._shm)
        for entry in entries:
            if entry.name not in used:
                Path(entry.path).unlink(missing_ok=True)
        return sorted(entry.name for entry in entries if entry.name in used)

    def _ours(self, entry: os.DirEntry[str]) -> bool:
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            return False
        if status.st_uid != os.getuid() or not entry.is_file(follow_symlinks=False):
            return False
        torch = _TORCH.match(entry.name)
        return (
            entry.name in self._buffers
            or entry.name in self._mapped
            or (torch is not None and int(torch.group(1)) in self._pids)
        )


def mapped_names(pid: int, shm: Path = SHM) -> set[str]:
    """The names of files directly in ``shm`` that a process has mapped."""
    begin = f"{shm}/"
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").split("\n")
    except OSError:
        return set()
    # address perms offset dev inode path
    paths = (line.split(maxsplit=5)[5] for line in lines if begin in line)
    return {name for path in paths if (name := path.removeprefix(begin).removesuffix(" (deleted)")) and "/" not in name}


def _in_use(shm: Path) -> set[str]:
    used: set[str] = set()
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if entry.isdigit():
            used |= mapped_names(int(entry), shm)
    return used
