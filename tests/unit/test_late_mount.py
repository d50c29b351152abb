"""A volume that appears after the boot: the unit's files, what it starts, and the check that it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from machines import RECORDED
from programs import need_program
from systemd_units import applied, complaints, left, refuses_another
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.check_result import Check
from tunetool.node.volume.late_mount import SCRIPT, UNIT, changes, check_boot, files
from tunetool.node.volume.unit_dropins import device_unit, escape

MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
FILESYSTEM = MANIFEST["filesystem"]
POINT, UUID = FILESYSTEM["mount_point"], FILESYSTEM["uuid"]
MOUNT = "mnt-nvme_raid0.mount"
UNIT_PATH = f"/etc/systemd/system/{UNIT}"
LINK_PATH = f"/etc/systemd/system/{device_unit(UUID)}.wants/{UNIT}"


def converge(root: Path, wanted: dict[str, str]) -> list[str]:
    return applied(changes(wanted, str(root)), root)


def test_files_come_and_go(tmp_path: Path) -> None:
    assert converge(tmp_path, {}) == []
    assert converge(tmp_path, files(POINT, UUID)) == sorted([UNIT_PATH, LINK_PATH])
    assert (tmp_path / LINK_PATH[1:]).resolve() == tmp_path / UNIT_PATH[1:]
    assert converge(tmp_path, files(POINT, UUID)) == []
    assert converge(tmp_path, {}) == sorted([UNIT_PATH, LINK_PATH])
    assert left(tmp_path) == set()
    assert not (tmp_path / LINK_PATH[1:]).parent.exists()


def test_another_volume_leaves_nothing_of_the_first_behind(tmp_path: Path) -> None:
    converge(tmp_path, files(POINT, UUID))
    after = files("/mnt/a b%", "0-1")
    converge(tmp_path, after)
    assert left(tmp_path) == set(after)
    text = (tmp_path / UNIT_PATH[1:]).read_text()
    assert "ConditionPathIsMountPoint=!/mnt/a b%%\n" in text
    assert UUID not in text


def test_a_unit_of_our_name_that_is_not_ours_stays(tmp_path: Path) -> None:
    path = tmp_path / UNIT_PATH[1:]
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/null")
    refuses_another(changes, files(POINT, UUID), tmp_path)


def test_only_the_device_starts_the_unit_and_nothing_waits() -> None:
    lines = files(POINT, UUID)[UNIT_PATH].splitlines()
    assert f"After={MOUNT}" in lines
    assert f"WantedBy={device_unit(UUID)}" in lines
    assert not [line for line in lines if line.startswith(("Before=", "RequiredBy=", "Requires="))]


def test_systemd_accepts_the_files(tmp_path: Path) -> None:
    need_program("systemd-analyze")
    point = "/mnt/a-b %c"
    converge(tmp_path, files(point, UUID))
    units = tmp_path / "etc/systemd/system"
    mount = escape(point) + ".mount"
    (units / mount).write_text(f"[Mount]\nWhat=/dev/x\nWhere={point.replace('%', '%%')}\n")
    assert not complaints(units, [UNIT, mount, device_unit(UUID)], "tunetool", "mnt")


SYSTEMCTL = """#!{python} -IS
import json, sys
units = json.load(open({state!r}))
verb, words = sys.argv[1], [word for word in sys.argv[2:] if word != "--"]
names = [word for word in words if not word.startswith("--")]
if verb == "show":
    (properties,) = [word.partition("=")[2].split(",") for word in words if word.startswith("--property=")]
    defaults = {{"ActiveEnterTimestampMonotonic": "0"}}
    blocks = [[str(units.get(name, {{}}).get(each, defaults.get(each, ""))) for each in properties] for name in names]
    print("\\n\\n".join("\\n".join(value for value in block if value) for block in blocks))
elif verb == "is-active":
    sys.exit(0 if units.get(names[0], {{}}).get("active") else 3)
elif verb == "start":
    with open({log!r}, "a") as log:
        print(*sys.argv[2:], file=log)
    sys.exit(1 if any(units.get(name, {{}}).get("fails") for name in names) else 0)
else:
    sys.exit(9)
"""


@dataclass
class Systemd:
    """The answers of systemctl, and what it was asked to start."""

    directory: Path
    units: dict[str, dict[str, Any]] = field(default_factory=dict)

    def came(self) -> tuple[int, str, list[str]]:
        """The exit status and output of the unit's program, and what it starts, call by call."""
        log = self.directory / "log"
        log.touch()
        (self.directory / "state").write_text(json.dumps(self.units))
        program = SYSTEMCTL.format(python=sys.executable, state=str(self.directory / "state"), log=str(log))
        (self.directory / "systemctl").write_text(program)
        (self.directory / "systemctl").chmod(0o755)
        done = subprocess.run(
            ["sh", "-fc", " ".join(SCRIPT), "sh", MOUNT],
            env={"PATH": f"{self.directory}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout, log.read_text().splitlines()


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    """A node whose boot gave up on the volume, on a service that is switched on, and on one behind that."""
    return Systemd(
        tmp_path,
        {
            "multi-user.target": {"active": True},
            MOUNT: {"WantedBy": "local-fs.target", "RequiredBy": "slurmd.service off.service"},
            "slurmd.service": {"WantedBy": "multi-user.target", "RequiredBy": "epilog\\x2da.service"},
            "off.service": {},
            "epilog\\x2da.service": {"WantedBy": "multi-user.target", "RequiredBy": "slurmd.service"},
        },
    )


def test_the_volume_is_mounted_and_what_wanted_it_started(systemd: Systemd) -> None:
    code, text, started = systemd.came()
    assert code == 0
    assert started == [f"-- {MOUNT}", "--no-block -- slurmd.service epilog\\x2da.service"]
    assert text == f"{MOUNT} came late and is mounted; starting: slurmd.service epilog\\x2da.service\n"


def test_a_boot_that_still_runs_wants_its_services_too(systemd: Systemd) -> None:
    systemd.units["multi-user.target"] = {"active": False, "Job": 2}
    assert systemd.came()[2][1:] == ["--no-block -- slurmd.service epilog\\x2da.service"]
    systemd.directory.joinpath("log").unlink()
    systemd.units["multi-user.target"] = {"active": False}
    assert systemd.came()[2] == [f"-- {MOUNT}"]


def test_what_was_unmounted_in_this_boot_stays_unmounted(systemd: Systemd) -> None:
    systemd.units[MOUNT]["ActiveEnterTimestampMonotonic"] = 31000000
    assert systemd.came() == (0, "", [])


def test_without_the_mount_nothing_is_started_and_the_unit_fails(systemd: Systemd) -> None:
    systemd.units[MOUNT]["fails"] = True
    code, text, started = systemd.came()
    assert (code, text, started) == (1, "", [f"-- {MOUNT}"])


@pytest.fixture
def booting(tmp_path: Path) -> Path:
    """A tree with what a boot reads."""
    converge(tmp_path, files(POINT, UUID))
    (tmp_path / "etc/fstab").write_text(f"UUID=1 / ext4 defaults 0 1\nUUID={UUID} {POINT}/ xfs nofail 0 0\n")
    return tmp_path


def boot_check(root: Path) -> Check:
    (check,) = [check for check in run_checks(MANIFEST, str(root)) if check.id == "filesystem.boot"]
    assert check == check_boot(FILESYSTEM, str(root))
    return check


def test_a_volume_that_a_boot_mounts_passes(booting: Path) -> None:
    assert boot_check(booting).status == "pass"


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        ("etc/fstab", lambda text: text.replace(f"UUID={UUID}", "LABEL=other"), "/etc/fstab has `LABEL=other` for"),
        ("etc/fstab", lambda text: text.replace(POINT, "/other"), f"/etc/fstab has no line for `{POINT}`"),
        ("etc/fstab", lambda text: text.replace("nofail 0 0", "nofail no 0"), "has no line for"),
        (UNIT_PATH[1:], lambda text: text.replace("After=", "#"), "another text in it"),
        (UNIT_PATH[1:], lambda text: "[Unit]\n", "is not tunetool's"),
        (UNIT_PATH[1:], None, "missing"),
        (LINK_PATH[1:], None, f"{LINK_PATH[1:]}`: missing"),
    ],
)
def test_a_volume_that_a_boot_would_not_mount_fails(booting: Path, path: str, change: Any, words: str) -> None:
    target = booting / path
    if change:
        target.write_text(change(target.read_text()))
    else:
        target.unlink()
    check = boot_check(booting)
    assert (check.status, check.remedy) == ("fail", "run `tunetool provision`")
    assert words in check.found


def test_the_unit_of_another_volume_fails(booting: Path) -> None:
    other = booting / f"etc/systemd/system/{device_unit('0-1')}.wants/{UNIT}"
    other.parent.mkdir()
    other.symlink_to("../" + UNIT)
    assert "no unit for another volume: `" in boot_check(booting).found


LINE = f"UUID={UUID} {POINT}/ xfs nofail 0 0"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (LINE.replace("xfs", "ext4"), f"/etc/fstab has type `ext4` for `{POINT}`, not `xfs`"),
        (LINE.replace("nofail", "ro,nofail"), f"/etc/fstab has `ro` for `{POINT}`"),
        (LINE.replace("nofail", "rw,ro"), "has `ro` for"),
    ],
)
def test_a_line_that_mounts_the_volume_in_another_way_fails(booting: Path, line: str, words: str) -> None:
    (booting / "etc/fstab").write_text(line + "\n")
    check = boot_check(booting)
    assert (check.status, check.remedy) == ("fail", "run `tunetool provision`")
    assert words in check.found


@pytest.mark.parametrize("line", [LINE.replace("xfs", "auto"), LINE.replace("nofail", "ro,rw,noauto,auto")])
def test_a_line_that_mounts_the_volume_all_the_same_passes(booting: Path, line: str) -> None:
    (booting / "etc/fstab").write_text(line + "\n")
    assert boot_check(booting).status == "pass"


def test_a_line_that_a_boot_passes_over_needs_another(booting: Path) -> None:
    """The unit for a late volume starts with the device, so it mounts this one; without it nothing does."""
    (booting / "etc/fstab").write_text(LINE.replace("nofail", "noauto") + "\n")
    assert boot_check(booting).status == "pass"
    (booting / UNIT_PATH[1:]).unlink()
    assert f"/etc/fstab has `noauto` for `{POINT}`" in boot_check(booting).found
    (booting / "etc/fstab").write_text(LINE.replace("nofail", "noauto,x-systemd.automount") + "\n")
    assert "noauto" not in boot_check(booting).found


@pytest.mark.parametrize(
    "target", ["/dev/null", "../../../dev/null", None], ids=["link", "relative link", "empty file"]
)
@pytest.mark.parametrize(("directory", "option"), [("etc/systemd/system", ""), ("run/systemd/system", "--runtime ")])
def test_a_masked_mount_fails(booting: Path, directory: str, option: str, target: str | None) -> None:
    unit = booting / directory / MOUNT
    unit.parent.mkdir(parents=True, exist_ok=True)
    if target is None:
        unit.touch()
    else:
        unit.symlink_to(target)
    check = boot_check(booting)
    assert (check.status, check.found) == ("fail", f"`/{directory}/{MOUNT}` masks the mount")
    assert check.remedy == f"run `systemctl unmask {option}{MOUNT}`"
    (booting / "etc/fstab").write_text("")
    assert boot_check(booting).remedy == f"run `systemctl unmask {option}{MOUNT}`, then `tunetool provision`"


def test_a_mask_beneath_an_administrators_unit_counts_not(booting: Path) -> None:
    for directory, text in (("etc", "[Mount]\n"), ("run", "")):
        (booting / directory / "systemd/system").mkdir(parents=True, exist_ok=True)
        (booting / directory / "systemd/system" / MOUNT).write_text(text)
    assert boot_check(booting).status == "pass"
