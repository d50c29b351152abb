"""Every row of `bench api`: what is called, and what DeepSpeed's documents say of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.measure.aio.build_ops import SHARED_RUNTIME

Group = Literal["call", "cast", "misuse"]

OLDEST = (0, 17, 1)
"""The first DeepSpeed with locked CPU tensors, file offsets and the byte cast (its announcement of the update)."""
VERSION = "api.version"


@dataclass(frozen=True)
class Row:
    """One check."""

    group: Group
    name: str
    expected: str
    remedy: str

    @property
    def id(self) -> str:
        """Of the check in the record."""
        return f"api.{self.group}.{self.name}"


_STORAGE = "do not move data by it here: see `dmesg | tail`, and `tunetool verify --require deepspeed`"
_VERSIONS = "another DeepSpeed behaves otherwise: report the versions in the record to its authors"
_CAST = "use tensor.view(torch.uint8) of contiguous memory"


def _call(name: str, expected: str, remedy: str = _VERSIONS) -> Row:
    return Row("call", name, expected, remedy)


def _moving(name: str, expected: str) -> Row:
    return Row("call", name, expected, _STORAGE)


def _misuse(name: str, expected: str, remedy: str) -> Row:
    return Row("misuse", name, expected, remedy)


ROWS: Sequence[Row] = (
    _call(
        "runtime",
        "the op takes its C++ runtime from libstdc++.so.6, as torch does, and has none of its own",
        f"compile it again by a compiler that links libstdc++.so.6: {SHARED_RUNTIME}",
    ),
    _call(
        "new-locked",
        "new_cpu_locked_tensor(1024, torch.Tensor()) gives torch.Size([1024]) of torch.float32 in locked memory",
        "raise RLIMIT_MEMLOCK: role `host_memory` does, or `ulimit -l unlimited`",
    ),
    _call("locked-dtypes", "a locked tensor has the dtype of the example, for every dtype"),
    _call("free-locked", "free_cpu_locked_tensor gives the memory back, once"),
    _call("is-pinned", "is_pinned knows a locked tensor from an ordinary one"),
    _call("getters", "the get_* methods give what the handle was made with, and its defaults"),
    _moving("read-write", "write and read move a whole file without threads"),
    _moving("sync", "sync_pwrite and sync_pread return 1, and the bytes are equal"),
    _moving("async", "async_pwrite and async_pread return 0, wait returns 1, and the bytes are equal"),
    _moving("pread-pwrite", "pread and pwrite do both, by their flags `validate` and `async`"),
    _moving("async-fd", "async_pwrite takes a descriptor in place of a name"),
    _moving("pending", "wait returns the number of operations that were pending, and all are done"),
    _moving("offset-write", "file_offset writes a part; the bytes around it stay"),
    _moving("offset-read", "file_offset reads a part, from the first byte to the last"),
    _moving("parallel", "intra_op_parallelism of 1, 2, 4 and 8 moves the same bytes"),
    _moving("flags", "single_submit and overlap_events change no byte"),
    _moving("two-handles", "two handles move two files at the same time"),
    _moving("not-locked", "a tensor that is not locked, contiguous or not, moves the right bytes"),
    _moving("gpu", "a tensor in GPU memory moves the right bytes through a buffer of the handle"),
    _moving("gds", "gds_handle moves GPU memory without host memory"),
    Row("cast", "alias", "a bf16 tensor and its bytes share memory: += 1 makes zeros 128, 63, 128, 63 ...", _CAST),
    Row("cast", "dtypes", "the bytes of a tensor of any dtype, written and read back, are that tensor", _CAST),
    Row("cast", "gpu", "the same in GPU memory", _CAST),
    Row("cast", "refused", "a tensor whose bytes are not one piece of memory is refused", "call .contiguous() first"),
    Row("cast", "deepspeed", "cast_to_byte_tensor of the op `utils` gives the same bytes", _CAST),
    _misuse("short-file", "a read past the end of the file is refused", "compare the size of the file first"),
    _misuse("missing-file", "a read of a file that is not there is refused", "compare what the call returns"),
    _misuse("missing-directory", "a write into a directory that is not there is refused", "make the directory first"),
    _misuse(
        "unaligned-offset",
        "a file_offset that is no multiple of the sector is refused, or moves the right bytes",
        "use offsets that are multiples of the drive's sector",
    ),
    _misuse(
        "unaligned-size",
        "a size that is no multiple of the sector is refused, or moves the right bytes",
        "use sizes that are multiples of get_alignment(), and write the rest with another program",
    ),
    _misuse(
        "unaligned-address",
        "a view that begins within a sector of locked memory is refused, or moves the right bytes",
        "cut locked tensors at multiples of the drive's sector",
    ),
    _misuse("indivisible", "a size that the threads cannot share equally is refused", "compare what the call returns"),
    _misuse(
        "strided-read",
        "a read into a strided view of locked memory is refused, or fills the view",
        "read into contiguous memory, and copy",
    ),
    _misuse("idle-wait", "wait without a pending operation is refused", "call wait once for each batch of async calls"),
    _misuse("free-twice", "a second free_cpu_locked_tensor is refused", "forget a tensor when you free it"),
    _misuse(
        "free-view",
        "free_cpu_locked_tensor of a part is refused",
        "free only what new_cpu_locked_tensor gave, and use none of its views afterwards",
    ),
    _misuse(
        "no-space",
        "a write that does not fit (here: RLIMIT_FSIZE) is refused",
        "look at the free space before, and at the size and blocks of the file after",
    ),
    _misuse(
        "cast-strided",
        "cast_to_byte_tensor of a strided tensor is refused",
        "use tensor.view(torch.uint8) after .contiguous()",
    ),
)
"""In their order: what a call promises, how a tensor becomes bytes, and what a wrong use does."""
