"""Saves states on a GPU and restores them, in a process of its own: one that has used a GPU can start no others by fork.

    gpu_states.py (computes | changes | pinned | damaged) DIRECTORY [refuses] [checksums]

``refuses``: the driver refuses copies by address and the code for sums, so that torch copies and the CPU sums.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tunetool.checkpoint import (
    DirectReader,
    DirectSavePlanner,
    DirectWriter,
    compiled,
    filling,
    gpu_sums,
    host_buffers,
    metadata,
)

GPU = torch.device("cuda")


def state(seed: int) -> dict[str, Any]:
    """Tensors of many sizes and dtypes, in C order and not, at the start of their memory and within it."""
    made = torch.Generator(device=GPU).manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randint(-100, 100, shape, generator=made, device=GPU).to(dtype)

    small = {f"small.{number}": tensor(number % 7, 5) for number in range(700)}
    kinds = {str(dtype): tensor(333, 3, dtype=dtype) for dtype in (torch.bfloat16, torch.int8, torch.bool, torch.int64)}
    within = {
        "within": tensor(40, 40)[3:9],
        "turned": tensor(600, 700).t(),
        "negative": tensor(9, 9, dtype=torch.complex64).conj().imag,
    }
    large = {f"large.{number}": tensor(3_000_001 + number) for number in range(3)}
    return {"model": {**small, **kinds, **within, **large, "host": torch.arange(1000.0)}}


def assert_came_back(path: Path, expected: dict[str, Any]) -> None:
    blank = {"model": {name: torch.full_like(value, 1) for name, value in expected["model"].items()}}
    dcp.load(blank, storage_reader=DirectReader(path), no_dist=True)
    for name, value in expected["model"].items():
        assert torch.equal(blank["model"][name], value), name


def busy() -> None:
    """Work that keeps the GPU busy for longer than a save takes to begin."""
    matrix = torch.randn(8192, 8192, device=GPU)
    for _ in range(20):
        matrix = matrix @ matrix / 100


def step(saved: dict[str, Any]) -> None:
    """Other values, which the GPU still computes when this returns."""
    busy()
    for value in saved["model"].values():
        value.copy_(value.logical_not() if value.dtype == torch.bool else value + 1)


def computes(path: Path, checksums: bool) -> None:
    """A state that the GPU still computes is saved as it becomes."""
    saved = state(1)
    for _ in range(3):
        step(saved)
        writer = DirectWriter(path, checksums=checksums, buffer_bytes=1 << 20, threads=4)
        dcp.save(saved, storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)
        assert_came_back(path, saved)


def changes(path: Path, checksums: bool) -> None:
    """A state that changes as soon as the loop goes on is saved as it was, also where the copy begins before the plan."""
    saved = state(2)
    for number in range(5):
        step(saved)
        expected = {"model": {name: value.clone() for name, value in saved["model"].items()}}
        writer = DirectWriter(path / f"{number}", checksums=checksums)
        future = dcp.async_save(
            saved, storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager(), no_dist=True
        )
        for value in saved["model"].values():
            value.zero_()
        future.result()
        assert_came_back(path / f"{number}", expected)
        assert writer.last is not None
        assert writer.last.ahead == (number > 1 and compiled.library() is not None and filling.driver() is not None)


def pinned(path: Path, checksums: bool) -> None:
    """The metadata says whether a tensor is pinned, also where only that has changed."""
    for now in (False, True):
        saved = {"m": {"a": torch.ones(9, pin_memory=now)}}
        writer = DirectWriter(path, checksums=checksums)
        dcp.save(saved, storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)
        described: Any = metadata.read(path).state_dict_metadata["m.a"]
        assert described.properties.pin_memory is now


def damaged(path: Path, checksums: bool) -> None:
    """The sums are those that a CPU makes, and a flipped bit anywhere is found on the way to the GPU and to the host."""
    saved = {"model": {**state(3)["model"], **{f"odd.{size}": within(size) for size in SIZES}}}
    writer = DirectWriter(path, checksums=checksums)
    dcp.save(saved, storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)
    assert_came_back(path, saved)
    on_host = {"model": {name: torch.zeros_like(value, device="cpu") for name, value in saved["model"].items()}}
    dcp.load(on_host, storage_reader=DirectReader(path), no_dist=True)
    draw = random.Random(3)
    for name in draw.sample(sorted(saved["model"]), 40):
        raw = on_host["model"][name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        if not raw:
            continue
        ((index, at),) = [each for each in metadata.read(path).storage_data.items() if each[0].fqn == f"model.{name}"]
        with (path / at.relative_path).open("r+b", buffering=0) as stream:
            item = os.pread(stream.fileno(), at.length, at.offset)
            place = at.offset + item.index(raw) + draw.randrange(len(raw))
            (byte,) = os.pread(stream.fileno(), 1, place)
            os.pwrite(stream.fileno(), bytes([byte ^ 1 << draw.randrange(8)]), place)
            for device in (GPU, "cpu"):
                blank = {"model": {name: torch.zeros_like(saved["model"][name], device=device)}}
                said = "nothing"
                try:
                    dcp.load(blank, storage_reader=DirectReader(path), no_dist=True)
                except CheckpointException as error:
                    said = str(error)
                assert f"`{index.fqn}` is damaged" in said, (said, device)
            os.pwrite(stream.fileno(), bytes([byte]), place)


SIZES = (1, 240, 241, 255, 1023, 1024, 1025, 65537, 262143, 262144, 524287, 524288, 524289, 3_000_017)


def within(size: int) -> torch.Tensor:
    """``size`` bytes that begin at an odd address."""
    return torch.randint(0, 256, (size + 3,), dtype=torch.uint8, device=GPU)[3:]


def main() -> None:
    warnings.simplefilter("ignore")
    what, path, *how = sys.argv[1:]
    if "refuses" in how:
        vars(host_buffers).update(_driver=lambda: (lambda *_: 1, lambda *_: 1))
        vars(filling).update(driver=lambda: None)
        vars(gpu_sums).update(_function=lambda device: None)
    else:
        assert host_buffers._driver() is not None
    {"computes": computes, "changes": changes, "pinned": pinned, "damaged": damaged}[what](
        Path(path), "checksums" in how
    )


if __name__ == "__main__":
    main()
