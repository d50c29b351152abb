"""To which addresses direct I/O reads: reads decide, whatever the kernel declares."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunetool.errors import CannotJudge
from tunetool.measure import direct_addresses
from tunetool.measure.direct_addresses import addresses, declared
from tunetool.node.machine.block_stack import BlockStack, Leaf

MEMBERS = tuple(Leaf(f"nvme{number}n1", "nvme", None, True, ()) for number in range(2))
ARRAY = BlockStack("/x", None, "xfs", "md127", "9:127", "md RAID0", MEMBERS, redundant=False, in_memory=False)


def says(root: Path, name: str, mask: int) -> None:
    queue = root / "sys/class/block" / name / "queue"
    queue.mkdir(parents=True, exist_ok=True)
    (queue / "dma_alignment").write_text(f"{mask}\n")


def a_drive(monkeypatch: pytest.MonkeyPatch, reads: Callable[[int], bool], silent: bool = False) -> None:
    """A file system whose direct reads reach only addresses that ``reads`` allows: others are errors, or old bytes."""

    def preadv(handle: int, places: list[memoryview], position: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(places[0]))
        if reads(address):
            places[0][:] = os.pread(handle, len(places[0]), position)
        elif not silent:
            raise OSError(errno.EINVAL, "Invalid argument")
        return len(places[0])

    real = fcntl.fcntl

    def control(handle: int, command: int, value: Any = 0) -> Any:
        return real(handle, command, value & ~os.O_DIRECT if command == fcntl.F_SETFL else value)

    monkeypatch.setattr(direct_addresses.os, "preadv", preadv)
    monkeypatch.setattr(direct_addresses.fcntl, "fcntl", control)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("needed", [4, 8, 64, 512, 4096])
def test_what_reads_bring_decides(needed: int, silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_drive(monkeypatch, lambda address: address % needed == 0, silent)
    # An array whose members take any address, and which itself says nothing or something else.
    for name in ("nvme0n1", "nvme1n1"):
        says(tmp_path, name, 3)
    reached = addresses(tmp_path, ARRAY, str(tmp_path))
    assert reached.alignment == needed
    assert f"`{tmp_path}` reads to multiples of {needed} bytes" in reached.why
    assert [path.name for path in tmp_path.iterdir()] == ["sys"], "nothing stays behind"


def test_the_device_whose_alignment_it_is_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_drive(monkeypatch, lambda address: address % 512 == 0)
    for name, mask in (("md127", 511), ("nvme0n1", 3), ("nvme1n1", 3)):
        says(tmp_path, name, mask)
    assert declared(ARRAY, str(tmp_path)) == {"md127": 512, "nvme0n1": 4, "nvme1n1": 4}
    assert "which `md127` asks for" in addresses(tmp_path, ARRAY, str(tmp_path)).why


def test_a_partition_has_the_queue_of_its_drive(tmp_path: Path) -> None:
    says(tmp_path, "nvme0n1", 3)
    (tmp_path / "sys/class/block/nvme0n1/nvme0n1p1").mkdir()
    (tmp_path / "sys/class/block/nvme0n1p1").symlink_to(tmp_path / "sys/class/block/nvme0n1/nvme0n1p1")
    stack = BlockStack("/x", None, "ext4", "nvme0n1p1", "1:1", "nvme", MEMBERS[:1], redundant=False, in_memory=False)
    assert declared(stack, str(tmp_path)) == {"nvme0n1p1": 4, "nvme0n1": 4}


def test_without_direct_io_a_sector_is_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_drive(monkeypatch, lambda address: False)
    reached = addresses(tmp_path, ARRAY, str(tmp_path))
    assert (reached.alignment, reached.why) == (512, f"`{tmp_path}` has no direct I/O: a sector is assumed")


def test_a_directory_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="nothing` cannot be written"):
        addresses(tmp_path / "nothing", ARRAY)


def test_a_real_disk_has_an_answer_that_reads_confirm(tmp_path: Path) -> None:
    first, second = addresses(tmp_path, ARRAY), addresses(tmp_path, ARRAY)
    assert first == second
    assert first.alignment in {2**power for power in range(2, 13)}
