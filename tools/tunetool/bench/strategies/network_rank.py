"""One rank that measures the network between the ranks: ``-m tunetool.bench.strategies.network_rank --order JSON``.

Started by any launcher, as the ranks of a cell are laid out. Every collective is timed on each rank; the slowest rank's
time counts, since the step waits for it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tunetool.advise.communication import KINDS, Kind
from tunetool.bench.strategies.measuring_rank import MeasuringRank
from tunetool.bench.strategies.network import FILE, Order, RankFigures
from tunetool.launch import rank as launched
from tunetool.node.machine.memory import bytes_left
from tunetool.training.rank.recorder import leave_answer

SIZES = tuple(4**power << 10 for power in range(1, 10))
"""Bytes of the whole vector: 4 KiB to 256 MiB."""
QUEUED_BYTES, QUEUED = 4 << 10, 32
_FEWEST, _MOST = 3, 30
_WORK_SECONDS, _WORK_LAYERS, _WORK_ROWS, _WIDEST = 1.0, 4, 64, 4096


class Bench(MeasuringRank):
    """The measurements of one rank of the group."""

    def __init__(self, order: Order, local_rank: int) -> None:
        super().__init__(order.device, local_rank)
        self.order = order

    def run(self) -> RankFigures:
        """Join the group, measure the network and the computation, and leave."""
        began = time.monotonic()
        backend = "nccl" if self.cuda else "gloo"
        # NCCL gets its device, as from DeepSpeed; it then makes the communicator at once.
        dist.init_process_group(backend, **({"device_id": torch.device(self.device)} if self.cuda else {}))
        dist.all_reduce(torch.ones(1, device=self.device))
        self.synchronize()
        communicator = time.monotonic() - began
        points: dict[str, list[tuple[int, list[float]]]] = {}
        queued: list[float] = []
        latency: list[float] = []
        if dist.get_world_size() > 1:
            scalar = torch.ones(1, device=self.device)
            latency = self._timed(lambda: dist.all_reduce(scalar), _MOST, scalar)
            for kind in KINDS:
                points[kind] = self._points(kind)
            queued = self._queued()
        work = self._work()
        rank = dist.get_rank()
        result = RankFigures(
            rank=rank,
            host=socket.gethostname(),
            backend=backend,
            device=torch.cuda.get_device_name() if self.cuda else "cpu",
            work=work,
            memory_bytes=self._memory(),
            points=points,
            queued=queued,
            latency=latency,
            configuration=json.loads((Path(self.order.model) / "config.json").read_text()) if rank == 0 else None,
            communicator=communicator,
        )
        dist.barrier()
        dist.destroy_process_group()
        return result

    def _points(self, kind: Kind) -> list[tuple[int, list[float]]]:
        """Seconds by size, from small to large, while this collective's share of the time lasts; two sizes at least."""
        world = dist.get_world_size()
        budget = self.order.seconds / len(KINDS)
        began = time.monotonic()
        points: list[tuple[int, list[float]]] = []
        for size in SIZES:
            elements = -(-size // 4 // world) * world
            whole, part = (torch.zeros(count, device=self.device) for count in (elements, elements // world))

            def once(whole: Any = whole, part: Any = part) -> None:
                if kind == "all_reduce":
                    dist.all_reduce(whole)
                elif kind == "all_gather":
                    dist.all_gather_into_tensor(whole, part)
                else:
                    dist.reduce_scatter_tensor(part, whole)

            first = self._timed(once, 1, whole)[0]
            # The same on every rank: it is the slowest rank's time.
            runs = max(_FEWEST, min(_MOST, int(budget / len(SIZES) / max(first, 1e-6))))
            points.append((4 * elements, self._timed(once, runs, whole)))
            launched.beat()
            left = torch.tensor([budget - (time.monotonic() - began)], device=self.device)
            dist.all_reduce(left, op=dist.ReduceOp.MIN)
            # The next size takes four times as long.
            if len(points) > 1 and float(left.item()) < 4 * _FEWEST * median(points[-1][1]):
                break
        return points

    def _queued(self) -> list[float]:
        """Seconds for each of many small all-gathers that are started together."""
        world = dist.get_world_size()
        part = torch.ones(QUEUED_BYTES // 4 // world, device=self.device)
        wholes = [torch.empty(part.numel() * world, device=self.device) for _ in range(QUEUED)]

        def once() -> None:
            for work in [dist.all_gather_into_tensor(whole, part, async_op=True) for whole in wholes]:
                work.wait()

        return [seconds / QUEUED for seconds in self._timed(once, 5, part)]

    def _timed(self, once: Callable[[], object], runs: int, like: Any) -> list[float]:
        """Seconds of each run, the slowest rank's."""
        dist.barrier()
        taken = []
        for _ in range(runs):
            self.synchronize()
            began = time.perf_counter()
            once()
            self.synchronize()
            taken.append(time.perf_counter() - began)
        slowest = torch.tensor(taken, dtype=torch.float32, device=like.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return [float(seconds) for seconds in slowest.tolist()]

    def _work(self) -> list[float]:
        """Seconds of forward and backward of a small stack of layers, on all ranks at the same time."""
        width = min(self.order.hidden, _WIDEST)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_WORK_LAYERS)]
        stack = torch.nn.Sequential(*layers).to(self.device)
        rows = torch.randn(_WORK_ROWS, width, device=self.device)

        def once() -> float:
            self.synchronize()
            began = time.perf_counter()
            stack(rows).square().mean().backward()
            self.synchronize()
            return time.perf_counter() - began

        once()
        dist.barrier()
        taken: list[float] = []
        end = time.monotonic() + _WORK_SECONDS
        while time.monotonic() < end or len(taken) < _FEWEST:
            taken.append(once())
        return taken[-_MOST * 10 :]

    def _memory(self) -> int:
        if self.cuda:
            return int(torch.cuda.mem_get_info()[1])
        return bytes_left() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def main(arguments: Sequence[str]) -> int:
    """Measure as one rank; returns tunetool's exit status, with the reason in the rank's directory."""
    return leave_answer(lambda: Bench(Order(**json.loads(arguments[1])), int(os.environ["LOCAL_RANK"])).run(), FILE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
