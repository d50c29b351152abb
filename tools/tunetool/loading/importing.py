"""Imports safetensors files into a step that ``dcp.load`` and ``DirectReader`` read, with checksums.

The files are mapped, not read into memory: the writer copies from their pages, a buffer at a time.
"""

from __future__ import annotations

import collections
import math
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from tunetool.checkpoint import DirectSavePlanner, DirectWriter, space
from tunetool.checkpoint.box_reader import overflows
from tunetool.checkpoint.exporting import CONVERTED
from tunetool.checkpoint.new_directory import need_new
from tunetool.checkpoint.raw_bytes import ITEM_SIZES
from tunetool.checkpoint.renaming import Renaming, to_import
from tunetool.errors import CannotJudge
from tunetool.loading.safetensors_files import Listing, list_tensors
from tunetool.node.units import format_size
from tunetool.regular_files import open_regular

if TYPE_CHECKING:
    from tunetool.measure.progress import Progress


@dataclass(frozen=True)
class ImportRequest:
    """``source``: a .safetensors file, an index, or a directory. ``dtype``: of floating-point tensors, None as they
    are."""

    source: Path
    step: Path
    renaming: Renaming = field(default_factory=Renaming)
    dtype: str | None = None


@dataclass(frozen=True)
class Import:
    """What is written, or would be. ``names``: in the step, by those in the files; ``bytes``: of the tensors.
    ``memory``: bytes of tensors that are converted, which are in memory until all is written."""

    source: str
    step: str
    names: dict[str, str]
    bytes: int
    converted: dict[str, int]
    left_out: dict[str, list[str]]
    memory: int
    overflows: int = 0
    seconds: float = 0.0


def plan(request: ImportRequest) -> tuple[Import, Listing]:
    """What an import would write. Reads the files' headers alone, and writes nothing.

    Raises ``UsageProblem`` if the call is wrong, ``CannotJudge`` if there is no room on the storage or in memory.
    """
    need_new(request.step)
    listing = list_tensors(request.source)
    renamed = to_import(list(listing.tensors), request.renaming)
    total = memory = 0
    converted = collections.Counter[str]()
    for name in renamed.names:
        stored = listing.tensors[name]
        to = _dtype_of(stored.dtype, request.dtype)
        size = math.prod(stored.shape) * ITEM_SIZES[to]
        total += size
        if to != stored.dtype:
            converted[f"{stored.dtype} -> {to}"] += 1
            memory += size
    space.need(request.step.parent, total, "the import")
    if memory > space.host_memory_left():
        raise CannotJudge(
            f"`--dtype {request.dtype}` needs {format_size(memory)} of memory, more than there is",
            "import without it, and convert with `tunetool checkpoint export --dtype`",
        )
    done = Import(
        str(request.source), str(request.step), renamed.names, total, dict(converted), renamed.left_out, memory
    )
    return done, listing


def _dtype_of(stored: str, asked: str | None) -> str:
    return asked if asked is not None and stored in CONVERTED else stored


def run(request: ImportRequest, progress: Progress) -> Import:
    """Import. ``request.step`` has no `.metadata`, so is no checkpoint, until it is whole; a failure removes it.

    Raises as ``plan`` does, and ``CannotJudge`` if the storage refuses or a file changes meanwhile.
    """
    began = time.monotonic()
    done, listing = plan(request)
    progress.say(f"import {format_size(done.bytes)} of {request.source}")
    try:
        request.step.mkdir()
    except OSError as error:
        raise CannotJudge(f"`{request.step}` cannot be made: {error.strerror}", "name another place") from None
    try:
        state, overflows = _state(done, listing, _mapped(listing), request.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            writer = DirectWriter(request.step, overwrite=False)
            dcp.save(state, storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)
        listing.check_unchanged()
    except BaseException as error:
        shutil.rmtree(request.step, ignore_errors=True)
        cause = next(iter(getattr(error, "failures", {}).values()), (None,))[0]
        raise cause if isinstance(cause, Exception) else error from None
    return Import(**{**vars(done), "overflows": overflows, "seconds": time.monotonic() - began})


def _mapped(listing: Listing) -> dict[str, mmap.mmap]:
    """The files. Each is unmapped with the last tensor in it."""
    maps = {}
    for name in listing.files:
        handle = open_regular(listing.directory / name)
        try:
            # A copy on write: torch takes no memory that cannot be written.
            maps[name] = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(handle)
    return maps


def _state(
    done: Import, listing: Listing, maps: Mapping[str, mmap.mmap], asked: str | None
) -> tuple[dict[str, Any], int]:
    """The tensors, and how many numbers became infinite."""
    state, infinite = {}, 0
    for old, new in done.names.items():
        stored = listing.tensors[old]
        dtype = getattr(torch, stored.dtype)
        if stored.length:
            count = stored.length
            raw = torch.frombuffer(maps[stored.file], dtype=torch.uint8, count=count, offset=stored.start)
            tensor = raw.view(dtype).view(stored.shape)
        else:
            tensor = torch.empty(stored.shape, dtype=dtype)
        to = _dtype_of(stored.dtype, asked)
        if to != stored.dtype:
            state[new] = tensor.to(getattr(torch, to))
            infinite += overflows(tensor, state[new])
        else:
            state[new] = tensor
    return state, infinite
