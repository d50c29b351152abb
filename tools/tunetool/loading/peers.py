"""The processes of the other ranks of a group, and how fast their GPUs reach each other."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tunetool.errors import CannotJudge

_LOOK_SECONDS = 0.05
"""Between two looks whether the other ranks live."""
_LONGEST_PAUSE = 0.002


class Gone(CannotJudge):
    """Another rank has ended: nothing can be agreed with the group any more."""


class _Peer(NamedTuple):
    """What a rank tells the others: a number for its machine and its process numbers' space, its process, and the two
    halves of its GPU's UUID."""

    place: int
    process: int
    gpu_high: int
    gpu_low: int


class Peers:
    """All ranks of a group, this one among them. Making it is a collective operation."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        mine = torch.tensor(_this(device), dtype=torch.int64, device=device)
        told = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(told, mine, group=group)
        ranks = [_Peer(*each.tolist()) for each in told]
        here = ranks[dist.get_rank(group)]
        self._gpus = tuple((rank.gpu_high, rank.gpu_low) for rank in ranks)
        self.on_one_machine = all(rank.place == here.place for rank in ranks)
        self._lives = select.poll()
        self._ranks: dict[int, int] = {}
        """The rank of each process that is watched, by its file descriptor."""
        for number, rank in enumerate(ranks):
            if rank.place == here.place and rank.process != here.process:
                # A process that ended before this has taken part in the exchange, so its number is not another's yet.
                # Python may be built without it; then nobody watches, and the group's own time limit ends the wait.
                with contextlib.suppress(OSError, AttributeError):
                    handle = os.pidfd_open(rank.process)
                    self._ranks[handle] = number
                    self._lives.register(handle, select.POLLIN)

    def close(self) -> None:
        """Watch the other processes no longer."""
        while self._ranks:
            os.close(self._ranks.popitem()[0])

    def sharing_pays(self, in_memory: bool) -> bool:
        """Whether each rank shall read a share. Drives are read once in any case. What is in memory is read by every
        rank alone where the GPUs reach each other no faster than they reach the memory."""
        if not in_memory or not self.on_one_machine:
            return True
        return self._device.type == "cuda" and linked(self._gpus)

    def order(self, work: Any) -> None:
        """Let the current stream wait until ``work`` is complete; without a GPU, wait. Raises as ``finish``."""
        try:
            work.wait()
        except RuntimeError as error:
            self._look(2.0)
            first = (str(error).splitlines() or [type(error).__name__])[0]
            hint = "see the output of the other ranks"
            raise CannotJudge(f"the ranks of `group` cannot reach each other: {first}", hint) from error

    def finish(self, works: Sequence[Any], device: torch.device | None = None) -> None:
        """Wait until ``works`` are complete, for this thread and for the current stream of ``device`` (None: of the
        device on which the ranks agree).

        Raises ``Gone`` where a rank has ended, which would never take part, and ``CannotJudge`` where the ranks cannot
        reach each other.
        """
        for work in works:
            self.order(work)
        device = device or self._device
        if device.type != "cuda":
            return
        complete = torch.cuda.current_stream(device).record_event()
        looked, pause = time.monotonic(), 0.00002
        while not complete.query():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            if time.monotonic() - looked > _LOOK_SECONDS:
                try:
                    self._look(0)
                except Gone:
                    # Its kernels on this GPU would wait for that rank for ever, and with them the end of this process.
                    with contextlib.suppress(Exception):
                        self._group.abort()
                    raise
                looked = time.monotonic()

    def _look(self, seconds: float) -> None:
        """Raises ``Gone`` where another rank has ended, or ends within so many seconds."""
        for handle, _ in self._lives.poll(seconds * 1000):
            hint = "see the end of that rank's output"
            raise Gone(f"rank {self._ranks[handle]} of `group` ended while it loaded", hint)


def _this(device: torch.device) -> _Peer:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    space = Path("/proc/self/ns/pid").readlink()
    gpu = bytes(16)
    if device.type == "cuda":
        gpu = bytes.fromhex(str(torch.cuda.get_device_properties(device).uuid).replace("-", ""))
    high, low = (int.from_bytes(half, "big", signed=True) for half in (gpu[:8], gpu[8:]))
    return _Peer(zlib.crc32(f"{boot} {space}".encode()), os.getpid(), high, low)


@functools.cache
def linked(gpus: tuple[tuple[int, int], ...]) -> bool:
    """Whether NVLink connects each pair of ``gpus``, given by the halves of their UUIDs, as NVML tells; False where
    there is no NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if nvml.nvmlInit_v2():
        return False
    try:
        handles = [_handle(nvml, gpu) for gpu in dict.fromkeys(gpus)]
        return None not in handles and all(
            _is_pair_linked(nvml, one, other) for one in handles for other in handles if one is not other
        )
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, gpu: tuple[int, int]) -> Any:
    digits = b"".join(half.to_bytes(8, "big", signed=True) for half in gpu).hex()
    uuid = "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    handle = ctypes.c_void_p()
    return None if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) else handle


_THROUGH_NVLINK = 2
"""NVML_P2P_CAPS_INDEX_NVLINK of nvml.h; the answer is 0 where it works."""


def _is_pair_linked(nvml: Any, one: Any, other: Any) -> bool:
    status = ctypes.c_int(-1)
    failed = nvml.nvmlDeviceGetP2PStatus(one, other, _THROUGH_NVLINK, ctypes.byref(status))
    return not failed and status.value == 0
