"""Exports a checkpoint's tensors as Hugging Face's files: safetensors, their index, and the model's small files."""

from __future__ import annotations

import collections
import concurrent.futures
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tunetool import regular_files
from tunetool.checkpoint import metadata, space
from tunetool.checkpoint.box_reader import BoxReader
from tunetool.checkpoint.export_plan import INDEX, NAMES_OF, File, Tensor, files_of, index_of
from tunetool.checkpoint.export_writer import FileWriter, memory
from tunetool.checkpoint.identity import look_at
from tunetool.checkpoint.metadata_pickle import SUMS
from tunetool.checkpoint.new_directory import building, need_new
from tunetool.checkpoint.os_errors import WRITING, naming_errors
from tunetool.checkpoint.renaming import Renaming, to_export
from tunetool.ctrl_c import uninterrupted, until_all_over, wait_briefly
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.worker import die_with_parent

if TYPE_CHECKING:
    from tunetool.measure.progress import MovingProgress

CONVERTED = ("float64", "float32", "bfloat16", "float16")
"""What a conversion is from. Other dtypes stay: a float8 has a scale elsewhere, an integer counts."""
_SMALL = (".json", ".jinja", ".txt", ".model")
_SMALL_BYTES = 256 << 20
_HINT = "look at the file system, then start again: nothing of this name was made"


@dataclass(frozen=True)
class Request:
    """``dtype``: of floating-point tensors in the files, None as saved. ``config``: a model's config.json, or the
    directory that has it. ``shard_bytes``: largest file, but for one tensor. ``processes``: that each write files."""

    step: Path
    out: Path
    renaming: Renaming = field(default_factory=Renaming)
    dtype: str | None = None
    shard_bytes: int = 5 * 10**9
    config: Path | None = None
    processes: int = 1


@dataclass(frozen=True)
class Export:
    """What is written, or would be. ``converted``: how many tensors, by the two dtypes in words; ``left_out``: what is
    not, by the reason; ``small_files``: copied from the configuration; ``memory``: bytes that it takes."""

    step: str
    out: str
    files: tuple[File, ...]
    converted: dict[str, int]
    left_out: dict[str, list[str]]
    small_files: dict[str, Path]
    has_sums: bool
    memory: int
    processes: int
    overflows: int = 0
    """Numbers that their new dtype cannot hold, and that are infinite in the files."""
    seconds: float = 0.0

    @property
    def tensors(self) -> list[Tensor]:
        """All that are written."""
        return [placed.tensor for file in self.files for placed in file.tensors]

    @property
    def bytes(self) -> int:
        """Of the files of tensors."""
        return sum(file.length for file in self.files)


def plan(request: Request) -> tuple[Export, BoxReader]:
    """What an export would write, with a reader of the step. Reads `.metadata` alone, and writes nothing.

    Raises ``UsageProblem`` if the call is wrong, ``CannotJudge`` if the metadata is damaged or there is no room.
    """
    need_new(request.out)
    if request.step.resolve() in request.out.resolve().parents:
        raise UsageProblem(f"`{request.out}` is in the step that is exported", "name a directory beside it")
    small_files = _small_files(request.config)
    reader = BoxReader(request.step)
    saved = {name: about for name, about in reader.entries.items() if isinstance(about, TensorStorageMetadata)}
    renamed = to_export(list(saved), request.renaming)
    left_out = renamed.left_out
    objects = [name for name in reader.entries if name not in saved]
    if objects:
        left_out["not a tensor"] = objects
    tensors, converted = [], collections.Counter[str]()
    for name, new in renamed.names.items():
        dtype = str(saved[name].properties.dtype).removeprefix("torch.")
        if dtype not in NAMES_OF:
            raise UsageProblem(
                f"`{name}` has dtype {dtype}, which safetensors does not have", "leave it out: null in `--names`"
            )
        reader.need_whole(name)
        to = request.dtype if request.dtype is not None and dtype in CONVERTED else dtype
        if to != dtype:
            converted[f"{dtype} -> {to}"] += 1
        tensors.append(Tensor(name, new, to, tuple(saved[name].size)))
    files = files_of(tensors, request.shard_bytes)
    processes = min(request.processes, len(files))
    export = Export(
        str(request.step),
        str(request.out),
        tuple(files),
        dict(converted),
        left_out,
        small_files,
        getattr(reader.described, SUMS, None) is not None,
        processes * memory(),
        processes,
    )
    space.need(request.out.parent, export.bytes, "the export")
    return export, reader


def _small_files(config: Path | None) -> dict[str, Path]:
    """By their new names."""
    if config is None:
        return {}
    found = {"config.json": config}
    if config.is_dir():
        found = {
            path.name: path
            for path in sorted(config.iterdir())
            if path.suffix in _SMALL and path.is_file() and not path.name.endswith(".index.json")
        }
    path = found.get("config.json")
    if path is None:
        raise UsageProblem(
            f"`{config}` has no `config.json`", "name a model's config.json, or the directory that has it"
        )
    try:
        is_config = isinstance(regular_files.read_json(path), dict)
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "name a model's config.json") from None
    except ValueError:
        is_config = False
    if not is_config:
        raise UsageProblem(f"`{path}` is not a model's config.json", "it is an object of JSON")
    return found


def run(request: Request, progress: MovingProgress) -> Export:
    """Export. ``request.out`` appears once it is whole and durable, and not at all if anything fails.

    Raises as ``plan`` does, and ``CannotJudge`` for a tensor that is damaged or changes meanwhile.
    """
    began = time.monotonic()
    export, reader = plan(request)
    named = metadata.files_of(reader.described) | {metadata.NAME}
    before = look_at(request.step, named)
    with building(request.out) as hidden:
        with progress.moving(f"export {request.step}", export.bytes) as tick:
            overflows = _write_files(export, request.step, hidden, reader.described, tick)
        with naming_errors(hidden, _HINT, WRITING):
            for name, path in export.small_files.items():
                _put(hidden / name, regular_files.read_bytes(path, _SMALL_BYTES))
            if len(export.files) > 1:
                _put(hidden / INDEX, json.dumps(index_of(export.files), indent=2).encode() + b"\n")
        if look_at(request.step, named) != before:
            raise CannotJudge(
                f"`{request.step}` was written to while it was exported", "export again when nobody writes to it"
            )
    return Export(**{**vars(export), "overflows": overflows, "seconds": time.monotonic() - began})


def _put(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _write_files(export: Export, step: Path, hidden: Path, described: Any, tick: Callable[[int], None]) -> int:
    """Returns the numbers that became infinite."""
    done = 0
    if export.processes == 1:
        writer = FileWriter(step, hidden, described)

        def advance(count: int) -> bool:
            nonlocal done
            done += count
            tick(done)
            return True

        writer.write(export.files, advance)
        return writer.overflows
    # Nothing of this process goes to another: its threads would not.
    context = multiprocessing.get_context("spawn")
    written, stopping = context.Value("q", 0), context.RawValue("b", 0)
    pool = concurrent.futures.ProcessPoolExecutor(  # noqa: TID251  (its calls are below, none interrupted)
        export.processes,
        mp_context=context,
        initializer=_begin,
        initargs=(os.getpid(), step, hidden, written, stopping),
    )

    futures: list[Any] = []

    def begin() -> None:
        # Ctrl-C goes to all processes of a terminal: this one tells the others, which inherit that it waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            futures.extend(pool.submit(_write_one, file) for file in export.files)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        uninterrupted(begin)
        waiting: set[Any] = set(futures)
        while waiting:
            over, waiting = wait_briefly(waiting)
            tick(uninterrupted(lambda: written.value))
            for future in over:
                future.result()
        return sum(future.result() for future in futures)
    except concurrent.futures.process.BrokenProcessPool:
        raise CannotJudge(
            "a process of the export was ended from outside", "look at `dmesg | tail` for a lack of memory"
        ) from None
    finally:
        # None is cancelled: where a process is ended from outside, such a future is never over.
        stopping.value = 1
        until_all_over(futures)  # until one more Ctrl-C
        uninterrupted(pool.shutdown)


_WRITE: list[Callable[[File], int]] = []
"""In a process of a pool: what writes a file."""


def _begin(parent: int, step: Path, hidden: Path, written: Any, stopping: Any) -> None:
    die_with_parent()
    if os.getppid() != parent:  # it was killed before the kernel knew
        os._exit(1)
    _WRITE.append(partial(_write_here, FileWriter(step, hidden), written, stopping))


def _write_here(writer: FileWriter, written: Any, stopping: Any, file: File) -> int:
    if stopping.value:
        return 0

    def advance(count: int) -> bool:
        with written.get_lock():
            written.value += count
        return not stopping.value

    before = writer.overflows
    writer.write([file], advance)
    return writer.overflows - before


def _write_one(file: File) -> int:
    return _WRITE[0](file)
