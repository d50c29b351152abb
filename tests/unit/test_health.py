"""Drives' health: the log, the permission to read it, and the judgement of each answer.

The recorded log is an emulated drive's; sick drives are made from it by hand, after the specification's offsets. The
ports above the drives in the recorded machines have the speed and width that the virtual node shows, added by hand.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from machines import RECORDED, lay_out
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.check_result import Check
from tunetool.node.machine import drive_health, nvme_admin
from tunetool.node.machine.drive_health import Health, parse_health
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.nvme_admin import NotOffered, Refused, Silent

RAW = json.loads((RECORDED.parent / "nvme/qemu.json").read_text())
LOG, IDENTITY = bytes.fromhex(RAW["smart"]), bytes.fromhex(RAW["identify"])
GOOD = Health(0, 40, 100, 10, 3, 0, 0, 0, 0, 70)
MANIFEST = json.loads((RECORDED / "built-manifest.json").read_text())
PORT = "sys/devices/pci0000:00/0000:00:08.0"  # above LAB1NV4


def test_a_recorded_log_is_read() -> None:
    assert parse_health(LOG, IDENTITY) == Health(0, 50, 0, 0, 0, 0, 0, 0, 0, 70)
    assert parse_health(LOG).warning_temperature is None


def test_every_field_stands_where_the_specification_puts_it() -> None:
    log = bytearray(LOG)
    log[0] = 0b101
    log[1:3] = (273 + 71).to_bytes(2, "little")
    log[3:6] = bytes([4, 10, 131])
    log[160:176] = (2**64 + 5).to_bytes(16, "little")
    struct.pack_into("<II", log, 192, 7, 2)
    struct.pack_into("<II", log, 216, 30, 1)
    assert parse_health(bytes(log), IDENTITY) == Health(5, 71, 4, 10, 131, 2**64 + 5, 7, 2, 31, 70)


@pytest.mark.parametrize("size", [0, 511, 513])
def test_another_length_is_no_log(size: int) -> None:
    with pytest.raises(ValueError, match="512"):
        parse_health(bytes(size))


def test_the_command_is_the_kernel_s() -> None:
    # struct nvme_admin_cmd is 72 bytes; strace shows this number for `nvme smart-log`.
    assert nvme_admin.NVME_IOCTL_ADMIN_CMD == 0xC0484E41
    command = nvme_admin.encode_command(2, 0xFFFFFFFF, 0x1122334455667788, 512, drive_health.health_log_dword10(512))
    assert len(command) == 72
    assert struct.unpack_from("=I", command, 4)[0] == 0xFFFFFFFF
    assert struct.unpack_from("=Q", command, 24)[0] == 0x1122334455667788
    assert struct.unpack_from("=II", command, 36) == (512, 0x007F0002)
    # Without a time-out: the kernel would reset the controller after it.
    assert struct.unpack_from("=I", command, 64)[0] == 0


def answers(root: Path, **sick: Health) -> dict[str, Check]:
    """The drives' checks, each drive well unless ``sick`` names its serial."""
    serials = {drive.controller: drive.serial for drive in read_drives(str(root))}

    def reader(controller: str) -> Health:
        assert serials[controller] != "LAB1SYS", "that drive is not ours to judge"
        return sick.get(serials[controller], GOOD)

    checks = run_checks(MANIFEST, str(root), health=reader)
    return {check.id: check for check in checks if check.id in drive_health.HEALTH_CHECKS}


@pytest.fixture
def built(tmp_path: Path) -> Path:
    return lay_out("built", tmp_path)


def test_well_drives_pass(built: Path) -> None:
    checks = answers(built)
    assert tuple(checks) == drive_health.HEALTH_CHECKS
    assert {check.status for check in checks.values()} == {"pass"}
    assert checks["drives.thermal"].found == "at most 40 C"
    assert checks["drives.wear"].found == "at most 3 % used"


@pytest.mark.parametrize(
    ("identity", "sick", "words"),
    [
        (
            "drives.critical_warning",
            replace(GOOD, critical_warning=0x0C),
            "the media have become unreliable, the media",
        ),
        ("drives.critical_warning", replace(GOOD, critical_warning=0x80), "bit 7"),
        ("drives.media_errors", replace(GOOD, media_errors=1), "1 errors"),
        ("drives.thermal", replace(GOOD, temperature=70), "70 C, warning at 70 C"),
        ("drives.thermal", replace(GOOD, temperature=66, critical_warning=2, warning_temperature=None), "66 C, and it"),
        ("drives.wear", replace(GOOD, used_percent=100), "100 % used"),
        ("drives.spare", replace(GOOD, spare_percent=9), "9 % left, threshold 10 %"),
    ],
)
def test_each_illness_is_named_with_its_drive(built: Path, identity: str, sick: Health, words: str) -> None:
    checks = answers(built, LAB1NV4=sick)
    assert checks[identity].status == "fail"
    assert checks[identity].found.startswith(f"`LAB1NV4`: {words}")
    assert checks[identity].remedy
    others = {check.id for check in checks.values() if check.status != "pass"} - {identity}
    assert others <= {"drives.critical_warning"}


@pytest.mark.parametrize(
    "well",
    [
        replace(GOOD, temperature=69),
        replace(GOOD, temperature=90, warning_temperature=None),
        replace(GOOD, used_percent=99),
        replace(GOOD, spare_percent=10),
        replace(GOOD, spare_percent=0, spare_threshold_percent=0),
        replace(GOOD, warning_minutes=5, throttled_count=9),
    ],
)
def test_what_is_still_well(built: Path, well: Health) -> None:
    assert {check.status for check in answers(built, LAB1NV4=well).values()} == {"pass"}


def test_heat_of_the_past_is_told(built: Path) -> None:
    message = answers(built, LAB1NV4=replace(GOOD, warning_minutes=5, throttled_count=9))["drives.thermal"].found
    assert message == "at most 40 C; `LAB1NV4` in its life: too hot for 5 min, throttled 9 times"


def test_who_may_not_ask_is_told_so(built: Path) -> None:
    def refuse(controller: str) -> Health:
        raise Refused("only root may ask the drives")

    checks = [
        check for check in run_checks(MANIFEST, str(built), health=refuse) if check.id in drive_health.HEALTH_CHECKS
    ]
    assert {(check.status, check.found) for check in checks if check.id != drive_health.LINK} == {
        ("skip", "only root may ask the drives")
    }


def test_a_silent_drive_is_unknown_and_hides_no_sick_one(built: Path) -> None:
    names = {drive.controller: drive.serial for drive in read_drives(str(built))}

    def reader(controller: str) -> Health:
        if names[controller] == "LAB1NV2":
            raise Silent("controller state `resetting`")
        return replace(GOOD, media_errors=3) if names[controller] == "LAB1NV5" else GOOD

    checks = {check.id: check for check in run_checks(MANIFEST, str(built), health=reader)}
    assert checks["drives.wear"].status == "unknown"
    assert checks["drives.wear"].found == "no answer from `LAB1NV2`: controller state `resetting`"
    assert checks["drives.media_errors"].status == "fail"


@pytest.mark.parametrize(
    ("status", "error"), [(0x4002, NotOffered), (0x109, NotOffered), (0x2001, NotOffered), (0x6, Silent)]
)
def test_what_a_drive_does_not_have_is_no_silence(status: int, error: type[Exception]) -> None:
    nvme_admin.raise_for_status(0)
    with pytest.raises(error, match="NVMe status"):
        nvme_admin.raise_for_status(status)


def test_drives_without_a_log_are_skipped_and_named(built: Path) -> None:
    names = {drive.controller: drive.serial for drive in read_drives(str(built))}

    def status(*without: str) -> tuple[str, str]:
        def reader(controller: str) -> Health:
            if not without or names[controller] in without:
                raise NotOffered("NVMe status 0x2")
            return GOOD

        checks = {check.id: check for check in run_checks(MANIFEST, str(built), health=reader)}
        return checks["drives.wear"].status, checks["drives.wear"].found

    assert status()[0] == "skip"
    assert status("LAB1NV2") == ("pass", "at most 3 % used; no health log from `LAB1NV2`")


def test_a_recorded_machine_s_drives_are_never_asked_here(built: Path) -> None:
    checks = {check.id: check for check in run_checks(MANIFEST, str(built))}
    assert checks["drives.wear"].status == "skip"


def test_permission_is_asked_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(nvme_admin.os, "open", refuse)
    with pytest.raises(Refused, match="root"):
        drive_health.read_health("nvme99")


def test_a_controller_that_is_not_there_is_silent() -> None:
    with pytest.raises(Silent, match="No such file"):
        drive_health.read_health("nvme99")


@pytest.mark.parametrize(
    ("drive", "slot", "runs", "status"),
    [
        (("32.0 GT/s PCIe", "4"), ("32.0 GT/s PCIe", "4"), ("32.0 GT/s PCIe", "4"), "pass"),
        (("32.0 GT/s PCIe", "4"), ("16.0 GT/s PCIe", "4"), ("16.0 GT/s PCIe", "4"), "pass"),
        (("16.0 GT/s PCIe", "4"), ("32.0 GT/s PCIe", "16"), ("16.0 GT/s PCIe", "4"), "pass"),
        (("32.0 GT/s PCIe", "4"), ("32.0 GT/s PCIe", "4"), ("16.0 GT/s PCIe", "4"), "fail"),
        (("32.0 GT/s PCIe", "4"), ("32.0 GT/s PCIe", "4"), ("32.0 GT/s PCIe", "2"), "fail"),
        (("32.0 GT/s PCIe", "4"), ("Unknown", "255"), ("8.0 GT/s PCIe", "4"), "fail"),
        (("Unknown", "0"), ("32.0 GT/s PCIe", "4"), ("8.0 GT/s PCIe", "4"), "pass"),
    ],
)
def test_a_link_is_held_to_what_drive_and_slot_both_allow(
    built: Path, drive: tuple[str, str], slot: tuple[str, str], runs: tuple[str, str], status: str
) -> None:
    for device, prefix, values in (
        (PORT, "max", slot),
        (f"{PORT}/0000:05:00.0", "max", drive),
        (f"{PORT}/0000:05:00.0", "current", runs),
    ):
        for name, value in zip(("speed", "width"), values, strict=True):
            (built / device / f"{prefix}_link_{name}").write_text(value + "\n")
    check = answers(built)["drives.link"]
    assert check.status == status
    if status == "fail":
        assert check.found.startswith(
            f"`LAB1NV4` at 0000:05:00.0: {runs[0].split('.')[0]} GT/s x{runs[1]} of 32 GT/s x4"
        )


def test_no_drive_is_no_judgement(tmp_path: Path) -> None:
    checks = [check for check in run_checks(MANIFEST, str(tmp_path)) if check.id in drive_health.HEALTH_CHECKS]
    assert {check.status for check in checks} == {"skip"}
