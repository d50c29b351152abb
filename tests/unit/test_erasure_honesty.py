"""What an erasure says of drives that lie, fail or belong to somebody else."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tunetool.node.common.commands import CommandError
from tunetool.node.machine import nvme_admin
from tunetool.node.machine.drives import Drive, Link
from tunetool.node.removal import erasure

_MIB = 2**20
_SIZE = 8 * _MIB
_IDENTIFY, _FORMAT, _SANITIZE, _LOG = 0x06, 0x80, 0x84, 0x02


def _drive(path: Path, serial: str = "S1") -> Drive:
    """A drive whose blocks are in a file, which is its controller too."""
    name = os.path.relpath(path, "/dev")
    return Drive(name, serial, "M", "1", _SIZE, 512, 0, "pcie", None, None, None, Link(), controller=name)


@dataclass
class _Firmware:
    """Answers admin commands by the layouts of the specification."""

    path: Path
    serial: str = "S1"
    keeps: bool = False
    """Whether its blocks survive an erasure that it acknowledges."""
    noise: bool = False
    """Whether old data reads as noise with another key, and discards are ignored."""
    states: list[int] = field(default_factory=lambda: [2, 1])
    """What the log says, one after the other; the last one stays."""
    orders: list[tuple[int, int]] = field(default_factory=list)

    def ioctl(self, handle: int, request: int, command: object = 0, mutate: bool = True) -> int:
        del handle, mutate
        if request == nvme_admin.NVME_IOCTL_ID:
            return 1
        assert isinstance(command, bytearray)
        opcode, _, _, _, _, _, _, address, _, length, dword10 = struct.unpack_from("=BBHIIIQQIII", command)
        answer = bytearray(length)
        if opcode == _IDENTIFY and dword10 == 1:
            answer[4:24] = self.serial.encode().ljust(20)
            struct.pack_into("<I", answer, 328, 1)
        elif opcode == _IDENTIFY and dword10 == 2:
            struct.pack_into("<I", answer, 0, 1)
        elif opcode == _LOG:
            struct.pack_into("<HH", answer, 0, 0xFFFF, self.states[0])
            self.states = self.states[1:] or self.states
        elif opcode in (_FORMAT, _SANITIZE):
            self.orders.append((opcode, dword10))
            if not self.keeps:
                self.path.write_bytes(os.urandom(_SIZE) if self.noise else bytes(_SIZE))
        if length:
            ctypes.memmove(address, bytes(answer), length)
        return 0


@pytest.fixture
def firmware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Firmware:
    """A drive with a label and little else."""
    path = tmp_path / "drive"
    data = bytearray(_SIZE)
    data[4096:8192] = b"label".ljust(4096, b"x")
    path.write_bytes(data)
    made = _Firmware(path)
    monkeypatch.setattr(fcntl, "ioctl", made.ioctl)
    return made


def _discards(monkeypatch: pytest.MonkeyPatch, honest: bool) -> None:
    def discard(handle: int, start: int, length: int) -> None:
        if honest:
            buffer = mmap.mmap(-1, length)
            os.pwrite(handle, buffer, start)

    monkeypatch.setattr(erasure, "discard", discard)


def test_a_drive_with_little_on_it_that_ignores_discards_is_not_called_erased(
    firmware: _Firmware, monkeypatch: pytest.MonkeyPatch
) -> None:
    _discards(monkeypatch, honest=False)

    with pytest.raises(CommandError, match="still holds data at byte 4096 after a discard"):
        erasure.erase([erasure.Way(_drive(firmware.path), erasure.DISCARD, 0)])


def test_one_that_discards_is_erased(firmware: _Firmware, monkeypatch: pytest.MonkeyPatch) -> None:
    _discards(monkeypatch, honest=True)

    assert erasure.erase([erasure.Way(_drive(firmware.path), erasure.DISCARD, 0)]) == []
    assert not any(firmware.path.read_bytes())
