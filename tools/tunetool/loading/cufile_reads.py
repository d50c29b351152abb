"""Reads by kvikio and cuFile from drives into GPU memory, and cuFile's own count of which bytes went how."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tunetool.errors import CannotJudge
from tunetool.loading.sample_files import SampleFiles, Where
from tunetool.measure.gds import child
from tunetool.measure.gds.counters import Counts, Moved, describe, parse, proven, version_of

_MOST_OPEN = 128
"""Files that stay open between batches: cuFile registers each, which takes longer than to read a small sample."""
_PROBE_BYTES = 1 << 20
_HINT = "see cufile.log and `dmesg | tail`, or use `engine='threads'`"


class NoKvikio(Exception):
    """kvikio cannot be used here. As text: why, in one line."""


class _Pending(NamedTuple):
    """One read that kvikio carries out."""

    future: Any
    size: int
    where: Where


class CuFileJob:
    """A batch that kvikio fills."""

    def __init__(self, reads: CuFileReads, memory: Any, files: Sequence[Any]) -> None:
        self.memory = memory
        self.pending: collections.deque[_Pending] = collections.deque()
        self._reads = reads
        # kvikio closes a file that nothing refers to.
        self._files = files

    def wait(self) -> None:
        """Return when all bytes are there. Raises ``CannotJudge``; kvikio moves nothing into the memory then."""
        failed: CannotJudge | None = None
        while self.pending:
            one = self.pending[0]
            try:
                came = one.future.get()
            except Exception as error:
                failed = failed or _failed(one, _one_line(error))
            else:
                if came != one.size:
                    failed = failed or _failed(one, f"{came} bytes came: the file is cut short")
            # Not before: an interruption of `get` leaves it here, and the memory with it.
            self.pending.popleft()
        self._reads.ended(self)
        if failed is not None:
            raise failed
        if self._reads.stream is not None:
            # Whoever frees the memory has it used no earlier than the stream that uses the batch is through with it.
            self.memory.record_stream(torch.cuda.current_stream(self._reads.stream.device))

    def settle(self) -> None:
        """Give the batch up: return when nothing is read into it any more."""
        try:
            self.wait()
        except CannotJudge:
            return


class CuFileReads:
    """Fills GPU memory with samples of ``samples`` by kvikio, whose pool has ``threads`` threads meanwhile.

    A part of the first sample is read to try the way of the bytes. Where cuFile refuses the file, or its counters show
    that the bytes went through the host's memory, kvikio reads without cuFile, which then only copies once more. kvikio
    has one pool and one set of settings for the process; ``close`` puts them back. Raises ``NoKvikio``.
    """

    def __init__(self, samples: SampleFiles, device: torch.device, threads: int) -> None:
        try:
            import kvikio  # noqa: PLC0415  GPU nodes alone have it
            import kvikio.defaults  # noqa: PLC0415
        except (ImportError, OSError, RuntimeError) as error:
            raise NoKvikio(f"`kvikio` does not load: {_one_line(error)}") from None
        self._kvikio, self._size = kvikio, samples.sample_bytes
        self._open: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._unfinished: set[CuFileJob] = set()
        self._claimed = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Memory that is filled must be allocated on it: kvikio writes at once, and not in the order of any stream, so
        no queued work may still use what torch hands out."""
        self._before, self._uncounted = _start_counting()
        # Small reads too go by cuFile, or its counters would not have them.
        self._settings = kvikio.defaults.set(
            {
                "num_threads": threads,
                "auto_direct_io_read": True,
                "gds_threshold": 0,
                "compat_mode": kvikio.CompatMode.OFF,
            }
        )
        try:
            refused = self._refusal(samples, device)
            self.bounce = refused or self.bounced()
            """Why bytes go through the host's memory, or why nothing proves that they do not."""
            self.by_cufile = self.bounce is None or (refused is None and self._before is None)
            """Whether kvikio uses cuFile: also where nothing proves the way of the bytes."""
            if not self.by_cufile:
                kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON)
                self._open.clear()
        except BaseException:
            self.close()
            raise

    def submit(self, memory: Any, rows: Sequence[Where]) -> CuFileJob:
        """Begin to fill ``memory``, uint8, shape (rows x sample_bytes,), with these samples one after another."""
        # Those of the batch itself: of more files than stay open, one that is opened again would be closed too early.
        files = {path: self._file(path) for path in dict.fromkeys(row.path for row in rows)}
        job = CuFileJob(self, memory, [*files.values()])
        first = 0
        for last in range(1, len(rows) + 1):
            if last < len(rows) and rows[last] == Where(rows[last - 1].path, rows[last - 1].offset + self._size):
                continue
            self._ask(job, files[rows[first].path], memory[first * self._size : last * self._size], rows[first])
            first = last
        return job

    def ended(self, job: CuFileJob) -> None:
        """kvikio is through with this batch."""
        self._unfinished.discard(job)

    def moved(self) -> Moved | None:
        """What was asked of kvikio and what cuFile counted, its other users in this process included; None where its
        counters cannot be read."""
        if self._before is None:
            return None
        return Moved(self._claimed, _counts().since(self._before))

    def bounced(self) -> str | None:
        """Which bytes went through the host's memory by cuFile's counters, or why nothing says; None where none did."""
        moved = self.moved()
        if moved is None:
            return f"cuFile's counters, which prove the way of the bytes, cannot be read: {self._uncounted}"
        return None if proven("require", {"read": moved}, None).status == "pass" else describe("read", moved)

    def close(self) -> None:
        """Wait for reads that nobody waited for, close the files, and put kvikio's settings back."""
        for job in list(self._unfinished):
            job.settle()
        self._open.clear()
        self._settings.__exit__(None, None, None)

    def end(self) -> None:
        """As ``close``: what kvikio still writes into must not be freed."""
        self.close()

    def _refusal(self, samples: SampleFiles, device: torch.device) -> str | None:
        """Read a part of the first sample by cuFile; why that failed, None where it did not."""
        where, count = samples.where(0), min(samples.sample_bytes, _PROBE_BYTES)
        try:
            file = self._file(where.path)
            job = CuFileJob(self, torch.empty(count, dtype=torch.uint8, device=device), [file])
            self._ask(job, file, job.memory, where)
            job.wait()
        except CannotJudge as error:
            return error.message
        return None

    def _ask(self, job: CuFileJob, file: Any, target: Any, where: Where) -> None:
        """Ask kvikio for the bytes of ``file`` from ``where`` on, of which there are as many as ``target`` has."""
        # Kept until kvikio writes into its memory no more, whoever else drops it.
        self._unfinished.add(job)
        count = len(target)
        job.pending.append(_Pending(file.pread(target, count, where.offset), count, where))
        self._claimed += count

    def _file(self, path: str) -> Any:
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        try:
            self._open[path] = self._kvikio.CuFile(path, "r")
        except (OSError, RuntimeError) as error:
            raise CannotJudge(f"`{path}`: cuFile does not take it: {_one_line(error)}", _HINT) from None
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return self._open[path]


def _failed(one: _Pending, why: str) -> CannotJudge:
    return CannotJudge(f"`{one.where.path}`: reading {one.size} bytes at {one.where.offset} by kvikio: {why}", _HINT)


def _start_counting() -> tuple[Counts | None, str | None]:
    """cuFile's counts now, or why there are none. cuFile's driver must not be open yet."""
    try:
        return _counts(first=True), None
    except Exception as error:  # whatever the bindings raise: without a count there is no proof, and the caller says so
        return None, _one_line(error)


def _counts(first: bool = False) -> Counts:
    answer = child.count(first)
    return parse(bytes.fromhex(answer["stats"]), version_of(answer["version"]), "read")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
