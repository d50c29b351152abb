"""The functions of ranks in children of ``forks.py``, which imports this module once before it forks."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import changing
import seeded
import torch
import torch._dynamo  # DTensor imports it at its first use, and every child would repeat that
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from failing_ranks import save_own  # noqa: F401  forks.py calls it by name
from loading_ranks import load_shared, memory_of_loading  # noqa: F401  forks.py calls them by name
from returning import begin_saves  # noqa: F401  forks.py calls it by name
from saver_ranks import save_steps  # noqa: F401  forks.py calls it by name
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tunetool.checkpoint import compiled
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.writer import DirectWriter


def save_state(
    rank: int, world: int, path: str, meet: str, seed: int, megabytes: float, settings: dict[str, Any]
) -> float:
    """Every rank holds the whole state and saves its share. Returns the seconds of the save."""
    if world > 1:
        _joined(rank, world, meet)
    state = seeded.state(seed, megabytes)
    planner = DirectSavePlanner(split_above=2**20)
    began = time.monotonic()
    dcp.save(state, storage_writer=DirectWriter(path, **settings), planner=planner)
    seconds = time.monotonic() - began
    if world > 1:
        dist.destroy_process_group()
    return seconds


def memory_of_a_load(rank: int, world: int, path: str, seed: int, megabytes: float, settings: dict[str, Any]) -> int:
    """Bytes by which a load made this process larger, when the tensors were allocated before it."""
    target = seeded.blank(seeded.state(seed, megabytes))
    # This tensor cannot be read in place, so that all of its bytes go through the buffers.
    target["model"]["large"] = torch.zeros(*target["model"]["large"].shape, dtype=torch.int16)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak, VmHWM
    before = _status("VmRSS")
    dcp.load(target, storage_reader=DirectReader(path, **settings), no_dist=True)
    assert target["step"] == seed
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def _whole(seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(1007, 130, generator=made),  # 1007: no number of ranks divides it
        "columns": torch.randn(130, 1030, generator=made).bfloat16(),
        "few": torch.randn(3, 5, generator=made),  # fewer rows than ranks
        "same": torch.randn(300, 7, generator=made),
    }


PLACES = {"rows": Shard(0), "columns": Shard(1), "few": Shard(0), "same": Replicate()}


def _cut(tensor: torch.Tensor, placement: Any, rank: int, world: int) -> torch.Tensor:
    if not isinstance(placement, Shard):
        return tensor.clone()
    chunks = tensor.chunk(world, dim=placement.dim)
    return chunks[rank].contiguous() if rank < len(chunks) else tensor.narrow(placement.dim, 0, 0).contiguous()


def _sharded(whole: dict[str, torch.Tensor], rank: int, world: int, blank: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    made: dict[str, Any] = {}
    for name, tensor in whole.items():
        part = _cut(tensor, PLACES[name], rank, world)
        part = torch.zeros_like(part) if blank else part
        made[name] = DTensor.from_local(
            part, mesh, [PLACES[name]], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return made


def _joined(rank: int, world: int, meet: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)


def save_shards(rank: int, world: int, path: str, meet: str, seed: int, writer: str) -> None:
    _joined(rank, world, meet)
    state = {"model": _sharded(_whole(seed), rank, world, blank=False), "step": seed}
    if writer.startswith("torch"):
        # It cuts what all ranks hold, which then looks like shards.
        planner = DirectSavePlanner(split_above=2_000) if writer == "torch's, planned" else None
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=planner)
    else:
        # torch's own planner does not say who holds what.
        planner = None if writer == "unplanned" else DirectSavePlanner(split_above=100_000)
        dcp.save(state, storage_writer=DirectWriter(path, checksums=True), planner=planner)
    dist.destroy_process_group()


def load_shards(rank: int, world: int, path: str, meet: str, seed: int) -> dict[str, Any]:
    """Names of this rank's tensors that came back changed, and of those that were read only partly. ``path`` may hold the
    number of the rank: `{rank}`."""
    _joined(rank, world, meet)
    whole = _whole(seed)
    state = {"model": _sharded(whole, rank, world, blank=True), "step": None}
    reader = DirectReader(path.format(rank=rank), threads=3, buffer_bytes=65536)
    dcp.load(state, storage_reader=reader)
    wrong = [
        name
        for name, tensor in whole.items()
        if not torch.equal(state["model"][name].to_local(), _cut(tensor, PLACES[name], rank, world))
    ]
    dist.destroy_process_group()
    return {"wrong": wrong, "step": state["step"], "unverified": sorted(set(reader.unverified))}


def keep_what_saves_return(rank: int, world: int, path: str, meet: str) -> None:
    """Save twice, and pickle what each save returns into files."""
    _joined(rank, world, meet)
    state = {f"own{rank}": torch.full((7, 10), 1.0), "same": torch.zeros(100, 13), "step": 5}
    for step in range(2):
        returned = dcp.save(state, storage_writer=DirectWriter(Path(path) / "step"), planner=DirectSavePlanner())
        (Path(path) / f"{step}-{rank}.pickle").write_bytes(pickle.dumps(returned))
    dist.destroy_process_group()


def save_cached(rank: int, world: int, path: str, meet: str, planner: str) -> None:
    """Save five times into a new directory and then again in place, with planners that cache."""
    _joined(rank, world, meet)
    made: Any = DefaultSavePlanner if planner == "torch" else DirectSavePlanner
    for step in range(5):
        rows = 9 if rank == 1 and step >= 2 else 7
        state = {
            f"own{rank}": torch.full((rows, 1000), 100.0 * step + rank),
            "same": torch.full((1000, 130), 100.0 * step),
        }
        for name in (f"step_{step}", "same"):
            settings = {} if planner == "torch" else {"split_above": 100_000}
            writer = DirectWriter(Path(path) / name)
            dcp.save(state, storage_writer=writer, planner=made(enable_plan_caching=True, **settings))
    dist.destroy_process_group()


def save_held_by_more(rank: int, world: int, path: str, meet: str) -> None:
    """Save three times with planners that cache; from the second on, the last rank holds what the others held alone."""
    _joined(rank, world, meet)
    for step in range(3):
        state = {f"own{rank}": torch.full((5,), 1.0 + rank)}
        if step or rank < world - 1:
            state["same"] = torch.full((100,), 1.0 + step)
        writer = DirectWriter(Path(path) / f"step_{step}")
        dcp.save(state, storage_writer=writer, planner=DirectSavePlanner(enable_plan_caching=True))
    dist.destroy_process_group()


def save_changing(
    rank: int,
    world: int,
    path: str,
    meet: str,
    steps: list[changing.Tensors],
    how: str,
    caching: bool = False,
    code: str = "",
) -> int:
    """Every step into a directory of its own and into one for all. A tensor that keeps its shape keeps its memory too in
    every second step. ``code``: the compiled code. Returns the number of copies that began before their plan."""
    _joined(rank, world, meet)
    if code:
        library = compiled.load_library(Path(code))
        vars(compiled).update(library=lambda: library)
    ahead = 0
    mesh, tensors = init_device_mesh("cpu", (world,)), dict[Any, torch.Tensor]()
    for step, described in enumerate(steps):
        state: dict[str, Any] = {"step": step}
        for name, of in described.items():
            place = {"shard0": Shard(0), "shard1": Shard(1), "replicate": Replicate()}.get(of["place"])
            name = f"{name}{rank}" if of["place"] == "own" else name  # noqa: PLW2901  (the rank's own)
            value = changing.whole(name, step, of["shape"], of["dtype"])
            local = _cut(value, place, rank, world)
            kind = (name, str(of), tuple(local.shape))
            if kind in tensors and step % 2:
                tensors[kind].copy_(local)
            else:
                tensors[kind] = local.clone()
            state[name] = tensors[kind]
            if place is not None:
                state[name] = DTensor.from_local(
                    tensors[kind], mesh, [place], run_check=False, shape=value.shape, stride=value.stride()
                )
        for name in (f"step_{step}", "same"):
            writer = DirectWriter(Path(path) / name, threads=2)
            planner = DirectSavePlanner(split_above=20_000, enable_plan_caching=caching)
            if how == "sync":
                dcp.save(state, storage_writer=writer, planner=planner)
            else:
                future = dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=writer.stager())
                for tensor in tensors.values():
                    tensor.neg_()
                future.result()
                for tensor in tensors.values():
                    tensor.neg_()
                ahead += writer.last is not None and writer.last.ahead
    dist.destroy_process_group()
    return ahead
