"""DeepSpeed's FastFileWriter (FastPersist) under torch.save, with the torch in use and nothing patched.

The published gain needs a torch/serialization.py patched for one version: it hands over whole storages
(``save_torch_storage_object_list``). Without it torch.save copies every tensor of a GPU to pageable memory and hands
over bytes, which are copied twice more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tunetool.bench.checkpoint.engines.base import Context, Done, State
from tunetool.bench.checkpoint.engines.ranks import save_parts
from tunetool.bench.checkpoint.engines.torch_save import SUFFIX, load_parts
from tunetool.errors import CannotJudge
from tunetool.measure.aio import child, ops
from tunetool.measure.aio.driver import memlock
from tunetool.measure.worker import Missing
from tunetool.node.units import format_size_binary

BUFFER_BYTES = 64 * 2**20
"""DeepSpeed's default (checkpoint.writer.io_buffer_size), halved for the double buffer."""
BLOCK_BYTES, QUEUE_DEPTH, PARALLELISM = 2**20, 32, 4
OP = "async_io"
PUBLISHED = (
    "published: 0.69 -> 17.75 GB/s, 14.23 GB on 8 Gen4 drives, one run, no fsync, legacy torch.save, patched torch "
    "(DeepSpeedExamples deepnvme/model_checkpoint)"
)


class FastFile:
    """One file per rank, always a new one: this writer corrupts a file that exists, since it does not truncate and
    appends the unaligned end.
    """

    remark = PUBLISHED

    def __init__(self, zipped: bool) -> None:
        self.name = "deepspeed-fast-zip" if zipped else "deepspeed-fast-legacy"
        self._zipped = zipped
        self._handle: Any = None
        self._buffer: Any = None
        self._files: list[str] = []

    def unavailable(self, context: Context) -> str | None:
        """Why it cannot run: its ops are not built, or its buffer cannot be locked, which would kill the process."""
        del context
        try:
            installed = ops.probe(Path(sys.executable), os.environ)
            ops.need(installed, OP)
        except Missing as error:
            return f"{error.message}; {error.hint}"
        self._files = [str(installed.find(part)) for part in installed.parts(OP)]
        allowed = memlock()
        if allowed is not None and allowed < BUFFER_BYTES:
            return f"it locks {format_size_binary(BUFFER_BYTES)}, RLIMIT_MEMLOCK is {format_size_binary(allowed)}"
        return None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``. Raises ``CannotJudge`` for a file that is too short: the op below ignores I/O errors."""
        self._prepare()
        save_parts(state, directory, SUFFIX, self._write)
        return Done()

    def _prepare(self) -> None:
        if self._handle is None:
            make = child.load_all(self._files).aio_handle
            self._handle = make(BLOCK_BYTES, QUEUE_DEPTH, False, True, PARALLELISM)
            self._buffer = self._handle.new_cpu_locked_tensor(BUFFER_BYTES, torch.empty(0, dtype=torch.uint8))

    def _write(self, parts: State, path: Path) -> None:
        from deepspeed.io import FastFileWriterConfig, fast_file_writer

        # It asks for this op even where only a patched torch would use it, and would compile it now.
        fast_file_writer.UtilsBuilder = _NotBuilt
        writer = fast_file_writer.FastFileWriter(str(path), FastFileWriterConfig(self._handle, self._buffer))
        torch.save(parts, writer, _use_new_zipfile_serialization=self._zipped)
        writer.close()
        written, stored = writer._file_offset, path.stat().st_size
        if written != stored:
            raise CannotJudge(f"`{path}` has {stored} of {written} bytes", "is there space? look at `dmesg | tail`")

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        return load_parts(like, directory)

    def close(self) -> None:
        """Free the locked memory."""
        if self._handle is not None:
            self._handle.free_cpu_locked_tensor(self._buffer)
            self._handle = self._buffer = None


class _NotBuilt:
    """Replaces DeepSpeed's builder of the op `utils`."""

    def load(self) -> Any:
        """An op that raises the reason why it is missing."""
        return self

    def cast_to_byte_tensor(self, tensors: Any) -> Any:
        """Called only by a patched torch/serialization.py."""
        del tensors
        raise CannotJudge("torch is patched for FastPersist, which is not measured", "measure it with torch as it is")
