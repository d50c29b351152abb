"""To which addresses of memory direct I/O in a directory really reads: found by reads whose bytes are compared.

The kernel's `queue/dma_alignment` decides nothing by itself: what is mounted may ask for more than its drives do (md
has its own value), older kernels do not say, and an address that is refused is an error that DeepSpeed does not see.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.node.common.files import read_int
from tunetool.node.machine.block_stack import BlockStack

SECTOR = 512
FINEST = 4
"""Bytes. A gradient's element in fp32: none lies between two of these."""
LENGTH = 2**20
_ROOM = LENGTH + 4096


@dataclass(frozen=True)
class Addresses:
    """The alignment in bytes that direct I/O needs of an address, and whose it is, in words."""

    alignment: int
    why: str


def addresses(directory: Path, stack: BlockStack, root: str = "") -> Addresses:
    """Read a file of 1 MiB in ``directory`` to addresses of ever smaller alignment, as long as the bytes are right.

    A file system without direct I/O keeps to sectors. Raises ``CannotJudge`` where nothing can be written.
    """
    try:
        with _file(directory) as handle:
            finest = _finest(handle)
    except OSError as error:
        raise CannotJudge(
            f"`{directory}` cannot be written: {error.strerror}", "`--target` takes a directory with 1 MiB of space"
        ) from None
    where = f"`{directory}`"
    if finest is None:
        return Addresses(SECTOR, f"{where} has no direct I/O: a sector is assumed")
    owners = [name for name, needed in declared(stack, root).items() if needed == finest]
    asked = f", which {_listed(owners)} asks for" if owners and finest > FINEST else ""
    return Addresses(finest, f"direct I/O in {where} reads to multiples of {finest} bytes{asked}, as a read showed")


def declared(stack: BlockStack, root: str = "") -> dict[str, int]:
    """What the kernel says of each device in bytes, what is mounted first: `queue/dma_alignment` and one."""
    names = [name for name in (stack.device, *(leaf.name for leaf in stack.leaves)) if name is not None]
    masks = {}
    for name in dict.fromkeys(names):
        # A partition has no queue; its drive has.
        drive = Path(f"{root}/sys/class/block/{name}").resolve()
        for folder in (drive, drive.parent):
            mask = read_int(f"{folder}/queue/dma_alignment")
            if mask is not None:
                masks[name] = mask + 1
                break
    return masks


def _finest(handle: int) -> int | None:
    """The smallest power of two, 4 or more, at which reads bring the right bytes; None without direct I/O."""
    pattern = os.urandom(4096) * (LENGTH // 4096)
    if os.pwrite(handle, pattern, 0) != LENGTH:
        raise OSError(0, "a write was cut short")
    os.fsync(handle)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return None
    finest = None
    with mmap.mmap(-1, _ROOM) as memory:
        alignment = 4096
        while alignment >= FINEST and all(
            _arrives(handle, memory, offset, pattern) for offset in {alignment % 4096, 3 * alignment % 4096}
        ):
            finest = alignment
            alignment //= 2
    return finest


def _arrives(handle: int, memory: mmap.mmap, offset: int, pattern: bytes) -> bool:
    """Whether a direct read to this place in ``memory``, which held other bytes, brings ``pattern``."""
    memory[:] = bytes(_ROOM)
    with memoryview(memory) as view, view[offset : offset + LENGTH] as place:
        try:
            return os.preadv(handle, [place], 0) == LENGTH and place == pattern
        except OSError:
            return False


@contextlib.contextmanager
def _file(directory: Path) -> Iterator[int]:
    """A file without a name, or one that loses its name at once: nothing stays behind."""
    try:
        handle = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        handle, name = tempfile.mkstemp(dir=directory, prefix=".tunetool-addresses.")
        Path(name).unlink()
    try:
        yield handle
    finally:
        os.close(handle)


def _listed(names: list[str]) -> str:
    first = " and ".join(f"`{name}`" for name in names[:2])
    return f"{first} and {len(names) - 2} more" if len(names) > 2 else first
