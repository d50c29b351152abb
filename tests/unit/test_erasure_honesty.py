"""What an erasure says of drives that lie, fail or belong to somebody else."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tunetool.node.common.commands import CommandError
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import held_drives, nvme_admin, nvme_erase
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


def test_a_drive_that_ignores_discards_is_not_called_erased(
    firmware: _Firmware, monkeypatch: pytest.MonkeyPatch
) -> None:
    _discards(monkeypatch, honest=False)

    with pytest.raises(CommandError, match="still holds data at byte 4096 after a discard"):
        erasure.erase([erasure.Way(_drive(firmware.path), erasure.DISCARD, 0)])


def test_one_that_discards_is_erased(firmware: _Firmware, monkeypatch: pytest.MonkeyPatch) -> None:
    _discards(monkeypatch, honest=True)

    assert erasure.erase([erasure.Way(_drive(firmware.path), erasure.DISCARD, 0)]) == []
    assert not any(firmware.path.read_bytes())


@pytest.mark.parametrize("state", [0, 3, 7], ids=["never", "failed", "reserved"])
def test_a_sanitize_that_the_log_does_not_call_completed_is_none(
    firmware: _Firmware, monkeypatch: pytest.MonkeyPatch, state: int
) -> None:
    _discards(monkeypatch, honest=True)
    firmware.states = [state]

    with pytest.raises(CommandError, match="is not erased"):
        erasure.erase([erasure.Way(_drive(firmware.path), nvme_erase.SANITIZE)])


@pytest.mark.parametrize("state", [1, 4], ids=["completed", "completed and deallocated"])
def test_one_that_it_calls_completed_is_one(firmware: _Firmware, monkeypatch: pytest.MonkeyPatch, state: int) -> None:
    _discards(monkeypatch, honest=True)
    firmware.states = [state]

    assert erasure.erase([erasure.Way(_drive(firmware.path), nvme_erase.SANITIZE)]) == []
    assert firmware.orders == [(_SANITIZE, 4)]


def test_after_a_failed_sanitize_the_plan_does_not_go_on(firmware: _Firmware, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one succeeds the drive refuses all reads, and so a rerun refuses the drive."""
    _discards(monkeypatch, honest=True)
    firmware.states = [3]

    with pytest.raises(CommandError) as caught:
        erasure.erase([erasure.Way(_drive(firmware.path), nvme_erase.SANITIZE)])
    assert "nvme sanitize" in str(caught.value)
    assert "same plan" not in str(caught.value)


@pytest.mark.parametrize("known_by", ["S12", "S12:eui.0025385b71b0a001", "S12@0000:00:05.0-n1"])
def test_a_serial_that_only_begins_alike_is_not_sanitized(firmware: _Firmware, known_by: str) -> None:
    firmware.serial = "S1"

    with pytest.raises(nvme_admin.Silent, match="is the controller of `S1` by now"):
        nvme_erase.sanitize_crypto(_drive(firmware.path).controller, known_by)
    assert firmware.orders == []


@pytest.mark.parametrize("known_by", ["S12", "S12:eui.0025385b71b0a001", "S12@0000:00:05.0-n1"])
def test_its_own_is(firmware: _Firmware, known_by: str) -> None:
    firmware.serial = "S12"

    nvme_erase.sanitize_crypto(_drive(firmware.path).controller, known_by)

    assert firmware.orders == [(_SANITIZE, 4)]


def test_only_drives_of_the_plan_are_waited_for(firmware: _Firmware, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spare that its owner sanitizes for hours neither holds up a plan nor fails it."""
    firmware.states = [2]
    foreign = replace(_drive(firmware.path), serial="SPARE")
    monkeypatch.setattr(erasure, "read_drives", lambda: [foreign])
    monkeypatch.setattr(erasure, "_SANITIZE_SECONDS", 0.1)

    erasure.await_sanitizing(erasure.CRYPTO, ["S1"])
    erasure.await_sanitizing(erasure.CRYPTO, [])
    with pytest.raises(CommandError, match="still sanitizes itself"):
        erasure.await_sanitizing(erasure.CRYPTO, ["SPARE"])


def test_a_late_refusal_says_what_is_true_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the unmount the volume is gone from fstab, and the health check too."""

    def cannot(controller: str, name: str) -> str:
        raise nvme_admin.NotOffered("no")

    monkeypatch.setattr(nvme_erase, "ask_crypto", cannot)
    drive = _drive(Path("/nowhere"))

    assert "hint: nothing was changed; " in erasure.decide([drive], erasure.CRYPTO)[1][0]
    assert "hint: nothing was wiped; " in erasure.decide([drive], erasure.CRYPTO, "nothing was wiped")[1][0]


@pytest.mark.parametrize(
    ("formats", "flbas", "index"),
    [(0, 0x60, 0x0000), (15, 0x65, 0x0005), (16, 0x20, 0x1000), (63, 0x7F, 0x301F)],
    ids=["one", "sixteen", "seventeen", "sixty-four"],
)
def test_the_upper_bits_of_the_format_count_only_beyond_sixteen(formats: int, flbas: int, index: int) -> None:
    identity = bytearray(4096)
    identity[25], identity[26] = formats, flbas

    assert nvme_erase.format_dword10(bytes(identity)) == index | 2 << 9


def test_noise_is_cleared_also_where_another_drive_fails(
    firmware: _Firmware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run takes a drive without a label for blank already, and nothing can be built on noise."""
    firmware.noise = True
    firmware.states = [1]
    _discards(monkeypatch, honest=False)
    absent = tmp_path / "absent"
    ways = [erasure.Way(_drive(path), nvme_erase.SANITIZE) for path in (absent, firmware.path)]

    with pytest.raises(CommandError, match="No such file"):
        erasure.erase(ways)

    data = firmware.path.read_bytes()
    assert not any(data[:_MIB])
    assert not any(data[-_MIB:])


def test_one_that_fails_does_not_keep_others_from_erasure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def erase_one(way: erasure.Way) -> None:
        if way.drive.serial == "S0":
            raise CommandError("it failed")
        begun.append(way.drive.serial)

    class OneByOne(ThreadPoolExecutor):
        """Threads that a busy node starts late."""

        def __init__(self, workers: int) -> None:
            del workers
            super().__init__(1)

    monkeypatch.setattr(erasure, "_erase", erase_one)
    monkeypatch.setattr(erasure, "ThreadPoolExecutor", OneByOne)
    serials = [f"S{number}" for number in range(64)]

    with pytest.raises(CommandError, match="it failed"):
        erasure.erase([erasure.Way(_drive(tmp_path, serial), erasure.DISCARD) for serial in serials])
    assert begun == serials[1:]


@pytest.mark.parametrize(("controller", "problem"), [("nvme3", None), ("nvme5", "is at controller `nvme5` by now")])
def test_a_drive_at_another_controller_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, controller: str, problem: str | None
) -> None:
    """A sanitize is the controller's, and where all drives of a cloud have one serial its name alone tells them apart."""
    (tmp_path / "drive").touch()
    looked_at = replace(_drive(tmp_path / "drive", "nvme_card@0000:00:05.0-n1"), controller="nvme3")
    monkeypatch.setattr(held_drives, "read_drives", lambda: [replace(looked_at, controller=controller)])

    with pytest.raises(Refusal, match=problem) if problem else contextlib.nullcontext(), held_drives.held([looked_at]):
        pass


def test_a_serial_ends_where_the_kernel_lets_it_end(firmware: _Firmware) -> None:
    """sysfs shows it up to the first zero byte."""
    firmware.serial = "S1\0rest"

    nvme_erase.sanitize_crypto(_drive(firmware.path).controller, "S1")

    assert firmware.orders == [(_SANITIZE, 4)]


def test_a_failure_hides_neither_another_nor_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run does not look at a drive again that has lost its label."""

    def erase_one(way: erasure.Way) -> str | None:
        if way.drive.serial in ("S1", "S3"):
            raise CommandError(f"{way.drive.serial} failed")
        return f"{way.drive.serial} holds data" if way.drive.serial == "S2" else None

    monkeypatch.setattr(erasure, "_erase", erase_one)

    with pytest.raises(CommandError) as caught:
        erasure.erase([erasure.Way(_drive(tmp_path, f"S{number}"), erasure.DISCARD) for number in range(4)])
    assert str(caught.value) == "S2 holds data; S1 failed; S3 failed"
