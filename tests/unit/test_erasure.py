"""An erased drive holds no data, loses its label last, and is refused while nothing is changed where it cannot be erased."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders import nvme_drive
from programs import need_program
from skips import no_loops
from tunetool.node.common.commands import CommandError, run
from tunetool.node.machine import nvme_admin, nvme_erase
from tunetool.node.machine.drives import Drive
from tunetool.node.machine.nvme_admin import NotOffered, Silent
from tunetool.node.machine.nvme_erase import FORMAT, SANITIZE, SanitizeStatus
from tunetool.node.removal import erasure
from tunetool.node.removal.erasure import CRYPTO, DISCARD, NONE, Way

MIB = 2**20
SIZE = 64 * MIB
RUNNING, ENDED, FAILED = (
    SanitizeStatus(True, False, False),
    SanitizeStatus(False, False, True),
    SanitizeStatus(False, True, False),
)


def identity(**fields: int) -> bytes:
    """Identify Controller with these fields, by the offsets of the specification."""
    data = bytearray(4096)
    data[4:24] = b"S1".ljust(20)
    struct.pack_into("<H", data, 256, fields.get("oacs", 0))
    struct.pack_into("<I", data, 328, fields.get("sanicap", 0))
    data[524] = fields.get("fna", 0)
    return bytes(data)


@pytest.mark.parametrize(
    ("fields", "others", "way"),
    [
        ({"oacs": 2, "fna": 4}, [], FORMAT),
        ({"oacs": 2, "fna": 4, "sanicap": 1}, [], FORMAT),
        ({"oacs": 2, "fna": 7}, [], FORMAT),
        ({"oacs": 2, "fna": 4, "sanicap": 1}, [2], FORMAT),
        ({"oacs": 2, "sanicap": 1}, [], SANITIZE),
        ({"fna": 4, "sanicap": 3}, [], SANITIZE),
        ({"oacs": 2, "fna": 5}, [2, 3], "its other namespaces would be erased too: 2, 3"),
        ({"oacs": 2, "fna": 6, "sanicap": 1}, [2], "its other namespaces would be erased too: 2"),
        ({"sanicap": 1}, [2], "its other namespaces would be erased too: 2"),
        ({"oacs": 2, "fna": 3, "sanicap": 6}, [], "neither by Format NVM nor by Sanitize"),
        ({"fna": 4}, [], "neither by Format NVM nor by Sanitize"),
    ],
)
def test_a_controllers_own_words_choose_the_way(fields: dict[str, int], others: list[int], way: str) -> None:
    controller = nvme_erase.parse_controller(identity(**fields))
    assert controller.serial == "S1"
    if way in (FORMAT, SANITIZE):
        assert nvme_erase.choose_crypto(controller, others) == way
    else:
        with pytest.raises(NotOffered, match=way):
            nvme_erase.choose_crypto(controller, others)


@pytest.mark.parametrize(
    ("flbas", "dps", "dword10"),
    [(0, 0, 2 << 9), (0x13, 0, 3 | 1 << 4 | 2 << 9), (0x21, 0x0A, 1 | 2 << 5 | 1 << 8 | 2 << 9 | 1 << 12)],
)
def test_a_format_keeps_blocks_metadata_and_protection(flbas: int, dps: int, dword10: int) -> None:
    namespace = bytearray(4096)
    namespace[25], namespace[26], namespace[29] = 63, flbas, dps
    assert nvme_erase.format_dword10(bytes(namespace)) == dword10


def test_logs_and_lists_are_read_by_the_specification() -> None:
    assert nvme_erase.parse_namespaces(struct.pack("<3I", 1, 7, 0).ljust(4096, b"\0")) == (1, 7)
    assert nvme_erase.parse_sanitize(struct.pack("<HH", 0x8000, 2).ljust(512, b"\0")) == RUNNING
    # Bits above the state: passes of an overwrite, and that all is deallocated.
    assert not nvme_erase.parse_sanitize(struct.pack("<HH", 0xFFFF, 0x104).ljust(512, b"\0")).failed
    assert nvme_erase.parse_sanitize(struct.pack("<HH", 0xFFFF, 3).ljust(512, b"\0")).failed
    for feature, byte in ((0, None), (1, 0), (2, 0xFF), (9, 0)):
        assert nvme_erase.parse_reads_as(bytes(33) + bytes([feature]) + bytes(4062)) == byte
    with pytest.raises(ValueError, match="not 4096"):
        nvme_erase.parse_controller(b"")


def test_a_command_may_take_longer_than_the_kernel_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr("fcntl.ioctl", lambda handle, number, command, mutate: sent.append(bytes(command)))
    monkeypatch.setattr(nvme_admin, "raise_for_status", lambda status: None)
    nvme_admin.order(3, 0x80, 7, 0x400, 600_000)
    # struct nvme_admin_cmd: opcode, namespace, dword 10, time-out.
    at = [struct.unpack_from("<I", sent[0], offset)[0] for offset in (4, 40, 64)]
    assert (sent[0][0], at) == (0x80, [7, 0x400, 600_000])


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """A loop device full of data in the place of the NVMe drive `S1`."""
    if no_loops():
        pytest.skip("needs root and loop devices")
    need_program("losetup")
    image = tmp_path / "image"
    image.write_bytes(os.urandom(MIB) * (SIZE // MIB))
    path = run(["losetup", "--find", "--show", str(image)]).stdout.strip()
    yield nvme_drive(1, name=Path(path).name)
    run(["losetup", "--detach", path])


def data(drive: Drive) -> bytes:
    return bytes(Path(drive.path).read_bytes())


def test_a_discard_leaves_nothing_and_the_label_goes_last(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[int, int]] = []
    real = erasure.discard

    def noted(handle: int, start: int, length: int) -> None:
        order.append((start, length))
        real(handle, start, length)

    monkeypatch.setattr(erasure, "discard", noted)
    assert erasure.erase([Way(drive, DISCARD, 0)]) == []
    assert data(drive).count(0) == SIZE
    assert order == [(MIB, SIZE - 2 * MIB), (SIZE - MIB, MIB), (0, SIZE)]


def test_a_drive_that_breaks_its_promise_keeps_its_label(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    before = data(drive)
    monkeypatch.setattr(erasure, "discard", lambda *_: None)
    with pytest.raises(CommandError, match=r"drive `S1` .* still holds data at byte \d+ after a discard\. hint: "):
        erasure.erase([Way(drive, DISCARD, 0)])
    assert data(drive) == before
    (doubt,) = erasure.erase([Way(drive, DISCARD)])
    assert doubt.endswith("does not say what discarded blocks read as: 256 of 256 sampled blocks hold data")


def test_a_drive_in_use_is_not_erased(drive: Drive) -> None:
    before = data(drive)
    handle = os.open(drive.path, os.O_RDONLY | os.O_EXCL)
    with pytest.raises(CommandError, match=r"drive `S1` .* is not erased: Device or resource busy\. hint: "):
        erasure.erase([Way(drive, DISCARD, 0)])
    os.close(handle)
    assert data(drive) == before


def test_a_format_that_changes_nothing_is_no_erasure(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    before = data(drive)
    monkeypatch.setattr(nvme_erase, "format_crypto", lambda name: None)
    with pytest.raises(CommandError, match=r"says that it is erased, and byte \d+ reads as before"):
        erasure.erase([Way(drive, FORMAT)])
    assert data(drive) == before

    def refuse(name: str) -> None:
        raise Silent("NVMe status 0x4002")

    monkeypatch.setattr(nvme_erase, "format_crypto", refuse)
    with pytest.raises(CommandError, match="is not erased: NVMe status 0x4002"):
        erasure.erase([Way(drive, FORMAT)])


def test_what_another_key_shows_does_not_stay(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    def another_key(name: str) -> None:
        path = Path("/dev", name)
        with path.open("r+b") as stream:
            stream.write(bytes(255 - byte for byte in path.read_bytes()))

    monkeypatch.setattr(nvme_erase, "format_crypto", another_key)
    assert erasure.erase([Way(drive, FORMAT)]) == []
    assert data(drive).count(0) == SIZE
    # A member of an array that nobody wrote to: its label is the evidence.
    with Path(drive.path).open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"label" * 100)
    assert erasure.erase([Way(drive, FORMAT)]) == []
    (doubt,) = erasure.erase([Way(drive, FORMAT)])
    assert doubt.endswith("no sampled block held data before")


def test_a_sanitize_is_waited_for_and_its_failure_told(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [RUNNING, RUNNING, ENDED]
    began: list[tuple[str, str]] = []
    monkeypatch.setattr(erasure, "wait_for", lambda ask, *_: next(filter(None, (ask() for _ in range(4)))))
    monkeypatch.setattr(nvme_erase, "sanitize_status", lambda controller: states.pop(0))

    def begin(controller: str, serial: str) -> None:
        began.append((controller, serial))
        Path(drive.path).write_bytes(bytes(SIZE))

    monkeypatch.setattr(nvme_erase, "sanitize_crypto", begin)
    assert erasure.erase([Way(drive, SANITIZE)]) == []
    assert (began, states) == ([(drive.controller, "S1")], [])
    states.append(FAILED)
    with pytest.raises(CommandError, match="says that its sanitize operation failed"):
        erasure.erase([Way(drive, SANITIZE)])
    # One that an earlier run began is waited for, too, and nothing else is.
    states[:] = [RUNNING, RUNNING, ENDED]
    monkeypatch.setattr(erasure, "read_drives", lambda: [drive])
    for wish in (NONE, DISCARD):
        erasure.await_sanitizing(wish, ["S1"])
    assert len(states) == 3
    erasure.await_sanitizing(CRYPTO, ["S1"])
    assert states == []


def test_a_sanitize_is_of_the_drive_that_was_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvme_erase, "opened", lambda path: (tmp_path / "none").open("w"))
    monkeypatch.setattr(nvme_erase, "ask", lambda *_: identity())
    sent: list[tuple[int, ...]] = []
    monkeypatch.setattr(nvme_erase, "order", lambda handle, *words: sent.append(words))
    with pytest.raises(Silent, match="`nvme1` is the controller of `S1` by now"):
        nvme_erase.sanitize_crypto("nvme1", "S2")
    assert sent == []
    nvme_erase.sanitize_crypto("nvme1", "S1:eui.0025")
    assert sent == [(0x84, 0, 4, 0)]


def test_a_drive_that_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    drives = [nvme_drive(1), nvme_drive(2)]

    def ask(controller: str, name: str) -> str:
        if name == drives[1].name:
            raise NotOffered("its controller offers neither")
        return FORMAT

    monkeypatch.setattr(nvme_erase, "ask_crypto", ask)
    ways, (problem,) = erasure.decide(drives, CRYPTO)
    assert [(way.drive.serial, str(way)) for way in ways] == [("S1", "cryptographic erase by Format NVM")]
    assert problem.startswith(
        "drive `S2` (nvme2n1) cannot be erased by `teardown_erase: crypto`: its controller offers"
    )
    assert "hint: nothing was changed; make a plan with `teardown_erase: discard`, or" in problem
    monkeypatch.setattr(erasure, "read_int", lambda path: 0)
    ways, (problem, _) = erasure.decide(drives, DISCARD)
    assert (ways, "it takes no discards" in problem) == ([], True)
    monkeypatch.setattr(erasure, "read_int", lambda path: 2**41)
    monkeypatch.setattr(nvme_erase, "ask_reads_as", lambda name: 0 if name == drives[0].name else None)
    ways, problems = erasure.decide(drives, DISCARD)
    assert [str(way) for way in ways] == [
        "discard; discarded blocks read as bytes 0x00",
        "discard; it does not say what discarded blocks read as",
    ]
    assert problems == []
    assert erasure.decide(drives, NONE) == ([], [])
