"""One rank of the benchmark: builds the state once, then saves and restores it by orders, engine by engine.

One of ``tunetool.launch.asked_ranks``; the parent makes, drops from the page
cache and removes the directories, and reads the drives' counters between the orders. Times are of the monotonic clock,
which all processes of a node share.
"""

from __future__ import annotations

import functools
import gc
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tunetool.bench.checkpoint import stamps, states, training
from tunetool.bench.checkpoint.engines import ENGINES, tensors
from tunetool.bench.checkpoint.engines.base import Context, Done, Engine, State
from tunetool.bench.checkpoint.footprint import Footprint, footprint, reset_peaks, trim

_PINNED_TRIAL = 64 * 2**20


@dataclass
class Rank:
    """The state of one rank between orders."""

    rank: int
    world: int
    device: str = "cpu"
    state: State = field(default_factory=dict)
    like: State = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    control: Any = None
    """A separate group for barriers, so that they cannot mix with an engine's collectives."""
    pinned_in_resident: bool = True
    kept: dict[str, int] = field(default_factory=dict)
    """Host memory that an engine kept after its first save: buffers, a process, a copy of the state."""
    loop: training.Loop | None = None
    saves: int = 0
    """Number of the last save, which the state carries."""

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute one order. Returns the answer."""
        return {
            "hello": lambda _: {},
            "start": self.start,
            "place": self.place,
            "save": self.save,
            "load": self.load,
            "calibrate": self.calibrate,
            "train": self.train,
            "close": self.close,
            "end": self.finish,
        }[order["do"]](order)

    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Groups, the state, and blank tensors of its shape."""
        wanted = order["device"]
        cuda = torch.cuda.is_available() if wanted == "auto" else wanted == "cuda"
        if cuda and torch.cuda.device_count() < self.world:
            raise RuntimeError(f"{self.world} ranks need as many GPUs; torch sees {torch.cuda.device_count()}")
        self.device = "cuda" if cuda else "cpu"
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        self.control = dist.new_group(backend="gloo")
        shape = states.shape(order["model"], order["state_bytes"], self.world, order.get("tensors"))
        self.state = tensors.build(shape, self.device, self.rank, self.world, order["seed"])
        self.like = tensors.blank(self.state)
        if cuda:
            self.pinned_in_resident = _pinned_in_resident()
        return {
            "device": self.device,
            "gpu": torch.cuda.get_device_name() if cuda else "",
            "torch": torch.__version__,
            "bytes": states.rank_bytes(shape, self.rank, self.world),
        }

    def place(self, order: dict[str, Any]) -> dict[str, Any]:
        """By engine: its remark, and why it cannot run in the directory (None if it can)."""
        context = Context(self.rank, self.world, self.device, Path(order["directory"]), order["bytes"])
        described: dict[str, dict[str, str | None]] = {}
        for name in order["engines"]:
            if missing := ENGINES[name].missing():
                described[name] = {"remark": "", "unavailable": missing}
                continue
            engine = self.engines.get(name) or ENGINES[name]()
            self.engines[name] = engine
            described[name] = {"remark": engine.remark, "unavailable": engine.unavailable(context)}
        return {"engines": described}

    def save(self, order: dict[str, Any]) -> dict[str, Any]:
        """Save once. As soon as ``save`` returns, the state is overwritten, as by an optimizer; later it is restored.

        With ``overwrite`` that is all of it, else a few bytes, which costs an asynchronous save next to no time.
        """
        engine = self.engines[order["engine"]]
        self.saves += 1
        stamps.mark(self.state, self.saves)
        gc.collect()
        self._synchronize()
        resettable = reset_peaks()
        before, pinned = footprint(), self._reset_pinned()
        dist.barrier(self.control)
        began = time.monotonic()
        pending = engine.save(self.state, Path(order["directory"]))
        # Copies on other streams may continue; only what the loop's own stream waits for is stall.
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        returned = time.monotonic()
        change = _turn_over if order.get("overwrite") else stamps.turn_over
        # A synchronous engine has nothing more to read.
        going = not isinstance(pending, Done)
        if going:
            change(self.state)
        pending.wait()
        ended = time.monotonic()
        after = footprint()
        if going:
            change(self.state)
        return {
            "began": began,
            "returned": returned,
            "ended": ended,
            "cpu_seconds": after.cpu_seconds - before.cpu_seconds,
            "peak_bytes": self._peak(engine.name, before, after, pinned) if resettable else None,
        }

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Restore once into blank tensors, and compare bit by bit outside of the time."""
        engine = self.engines[order["engine"]]
        for tensor in self.like.values():
            tensors.local(tensor).zero_()
        gc.collect()
        self._synchronize()
        before = footprint()
        dist.barrier(self.control)
        began = time.monotonic()
        loaded = engine.load(self.like, Path(order["directory"]))
        self._synchronize()
        ended = time.monotonic()
        spent = footprint().cpu_seconds - before.cpu_seconds
        different = tensors.equal(self.state, loaded)
        moment = stamps.moment(loaded, self.saves) if different else None
        return {
            "began": began,
            "ended": ended,
            "cpu_seconds": spent,
            "different": f"{different}: {moment}" if moment else different,
        }

    def calibrate(self, order: dict[str, Any]) -> dict[str, Any]:
        """Make the training loop of ``train``."""
        self.loop = training.calibrated(self.device, order["step_seconds"], lambda: dist.barrier(self.control))
        return {"step_seconds": self.loop.step_seconds}

    def train(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run training steps, with or without saves by an engine."""
        assert self.loop is not None  # noqa: S101  (calibrated before)
        engine = self.engines[order["engine"]] if order.get("engine") else None
        directories = [Path(text) for text in order["directories"]]
        gc.collect()
        return asdict(self.loop.run(self.state, engine, order["steps"], order["every"], directories))

    def close(self, order: dict[str, Any]) -> dict[str, Any]:
        """Release what an engine keeps."""
        engine = self.engines.pop(order["engine"], None)
        self.kept.pop(order["engine"], None)
        if engine is not None:
            engine.close()
        return {}

    def finish(self, order: dict[str, Any]) -> dict[str, Any]:
        """End in order, so that nothing stays in shared memory."""
        for engine in self.engines.values():
            engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return {}

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _peak(self, name: str, before: Footprint, after: Footprint, pinned: int) -> int | None:
        """Peak memory that the save takes, with what the engine keeps since its first one; None if unknown."""
        if after.peak_bytes is None:
            return None
        peak = max(0, after.peak_bytes - before.resident_bytes) + max(0, self._pinned("peak") - pinned)
        peak += self.kept.get(name, 0)
        if name not in self.kept:
            trim()
            self.kept[name] = max(0, footprint().resident_bytes - before.resident_bytes)
            self.kept[name] += max(0, self._pinned("current") - pinned)
        return peak

    def _reset_pinned(self) -> int:
        """Bytes that torch has pinned; resets their peak."""
        reset = getattr(torch.cuda, "reset_peak_host_memory_stats", None)
        if self.device == "cuda" and reset is not None:
            reset()
        return self._pinned("current")

    def _pinned(self, which: str) -> int:
        """Bytes that torch has pinned, if the kernel does not count them as resident; else 0."""
        if self.device != "cuda" or self.pinned_in_resident or not hasattr(torch.cuda, "host_memory_stats"):
            return 0
        return int(torch.cuda.host_memory_stats().get(f"allocated_bytes.{which}", 0))


def _turn_over(state: State) -> None:
    """Flip every bit of the state. A second call restores it."""
    for tensor in state.values():
        tensors.local(tensor).reshape(-1).view(torch.uint8).bitwise_not_()


def _pinned_in_resident() -> bool:
    """Whether memory that CUDA pins shows in VmRSS: that depends on the driver."""
    before = footprint().resident_bytes
    pinned = torch.empty(_PINNED_TRIAL, dtype=torch.uint8, pin_memory=True)
    pinned.fill_(1)
    return footprint().resident_bytes - before > _PINNED_TRIAL // 2


@functools.cache
def _this_rank() -> Rank:
    return Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Called by ``tunetool.measure.child_server``."""
    return _this_rank().answer(order)
