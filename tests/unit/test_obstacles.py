"""A node that is not built yet: everything that would stop its build is named before the first write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_drift import FS_UUID, MANIFEST, POINT, Node, node, wishes, write

from machines import RECORDED, lay_out
from tunetool.node.array.md_arrays import read_arrays
from tunetool.node.audit.before_changes import obstacles
from tunetool.node.common.commands import NotInstalled
from tunetool.node.common.io_settings import ARGUMENTS as TUNING
from tunetool.node.machine import file_system
from tunetool.node.volume import apply as volume_apply
from tunetool.node.volume import mount_point

SERIALS = [f"LAB1NV{number}" for number in range(1, 9)]
__all__ = ["node"]
"""A fixture of another file is one here too once it has its name here."""


def asked(**changes: Any) -> dict[str, Any]:
    tuning = {name: changes.pop(name, "") for name in TUNING}
    memory = {"hugepages": changes.pop("hugepages", []), "memlock": changes.pop("memlock", "")}
    gds = changes.pop("gds", None)
    both = wishes(**{"services": [], "shm_size": "", **memory, **changes})
    both["filesystem"]["chunk_bytes"] = changes.get("chunk_bytes", 2**20)
    return {**both, "tuning": tuning, "gds": gds}


@pytest.fixture
def blank(tmp_path: Path) -> Path:
    root = lay_out("blank", tmp_path)
    write(root, "etc/fstab", "UUID=1 / ext4 defaults 0 1\n")
    return root


def found(root: Path, **changes: Any) -> list[str]:
    return obstacles(POINT, asked(**changes), SERIALS, None, str(root))


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()}


def test_a_blank_node_has_none(blank: Path) -> None:
    assert found(blank) == []


def test_all_of_them_are_named_at_once_and_nothing_is_written(blank: Path) -> None:
    point = blank / POINT.lstrip("/")
    point.mkdir(parents=True)
    (point / "results.csv").touch()
    write(blank, "etc/fstab", f"UUID=1 / ext4 defaults 0 1\nLABEL=theirs {POINT}/ ext4 nofail 0 0\n")
    write(blank, "etc/systemd/system/slurmd.service.d/60-tunetool-scratch.conf", "[Unit]\n")
    write(blank, "etc/udev/rules.d/60-tunetool-io.rules", "# somebody's\n")
    before = snapshot(blank)
    said = found(
        blank,
        services=["slurmd.service"],
        offload_owner="nobody-of-that-name",
        hugepages=[{"size": "2MiB", "count": 10**9, "numa_node": None}],
        shm_size="900TiB",
        scheduler="elevator",
        fstrim_timer="enabled",
    )
    for words in (
        f"/etc/fstab line 2 mounts `LABEL=theirs` at `{POINT}`. hint: ",
        f"`{POINT}` is not mounted and holds 1 entry: `results.csv`, which the mount would hide. hint: ",
        "slurmd.service.d/60-tunetool-scratch.conf` is not tunetool's. hint: ",
        "nobody-of-that-name",
        "huge pages would take",
        "is more than the node's RAM",
        "there is no `fstrim.timer` here. hint: ",
    ):
        assert [words in line for line in said].count(True) == 1, (words, said)
    assert len(said) == 7
    assert all(". hint: " in line for line in said)
    assert snapshot(blank) == before


def test_a_file_or_another_mount_at_the_mount_point_is_one(blank: Path) -> None:
    point = blank / POINT.lstrip("/")
    point.parent.mkdir(parents=True)
    point.write_text("")
    (line,) = found(blank)
    assert line.startswith(f"`{POINT}` is not a directory. hint: ")
    point.unlink()
    mounts = blank / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text() + f"99 1 8:1 / {POINT} rw - ext4 /dev/sda1 rw\n")
    (line,) = found(blank)
    assert line.startswith(f"`{POINT}` is already a mount of `/dev/sda1`. hint: ")


def test_values_that_come_without_the_first_check_are_judged(blank: Path) -> None:
    in_root, label, pages = found(
        blank, label="thirteenchars", mount_point="/", hugepages=[{"size": "2MiB", "count": -5}]
    )
    assert "`/` is not usable" in in_root
    assert "thirteenchars" in label
    assert "count: -5}: a count below zero" in pages


def test_the_line_of_a_volume_that_is_made_again_is_ours(blank: Path) -> None:
    write(blank, "etc/tunetool/node.json", json.dumps(MANIFEST))
    before = "UUID=1 / ext4 defaults 0 1\n"
    write(blank, "etc/fstab", f"{before}UUID={FS_UUID} {POINT} xfs noatime,nofail 0 0\n")
    assert found(blank, new_array=True) == []
    # Without its manifest nobody knows that, so both go before the array is made.
    volume_apply.forget_volume(str(blank))
    assert (blank / "etc/fstab").read_text() == before
    assert not (blank / "etc/tunetool/node.json").exists()
    write(blank, "etc/fstab", f"{before}UUID={FS_UUID} {POINT} xfs noatime,nofail 0 0\n")
    assert [f"mounts `UUID={FS_UUID}`" in line for line in found(blank)] == [True]


def test_a_plan_knows_the_mount_point_alone(blank: Path) -> None:
    point = blank / POINT.lstrip("/")
    point.mkdir(parents=True)
    (point / "results.csv").touch()
    (line,) = obstacles(POINT, {}, SERIALS, None, str(blank))
    assert "which the mount would hide" in line
    assert obstacles("", {}, SERIALS, None, str(blank)) == []


def test_adopting_a_mounted_array_leaves_its_fstab_line_alone(node: Node) -> None:
    write(node.root, "etc/fstab", f"LABEL=theirs {POINT} xfs defaults 0 0\n")
    (node.root / "etc/tunetool/node.json").unlink()
    (array,) = read_arrays(str(node.root))
    assert obstacles(POINT, {}, SERIALS, array, str(node.root)) == []


def unfinished(node: Node) -> list[str]:
    """The obstacles of a node whose run was ended after `mdadm --create`, before its manifest was written."""
    (node.root / "etc/tunetool/node.json").unlink(missing_ok=True)
    (array,) = read_arrays(str(node.root))
    return obstacles(POINT, asked(), SERIALS, array, str(node.root))


def test_a_run_that_was_ended_after_the_array_was_made_goes_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unfinished(node) == []

    def lacks(argv: list[str], **_: object) -> None:
        raise NotInstalled(f"`{argv[0]}` is not installed")

    # Role node_packages installs it later.
    monkeypatch.setattr(volume_apply, "run", lacks)
    monkeypatch.setattr(file_system, "run", lacks)
    assert unfinished(node) == []


def test_an_array_that_holds_something_else_is_an_obstacle(node: Node) -> None:
    node.signatures = [type(node.signatures[0])("md127", "ext4", None, "11")]
    write(node.root, "etc/fstab", "")
    (line,) = unfinished(node)
    assert line.startswith("array `nvme_raid0` holds ext4 UUID 11. hint: ")


def test_one_move_of_the_mount_is_one_difference(node: Node) -> None:
    node.edit("proc/self/mountinfo", f" {POINT} ", " /mnt/elsewhere ")
    (node.root / "dev/md127").write_bytes(b"XFSB".ljust(512, b"\0"))
    left = [difference for difference in node.look() if difference.name == "mount"]
    assert [(difference.expected, difference.found, difference.mended) for difference in left] == [
        (f"`{POINT}`", "`/mnt/elsewhere`", False)
    ]


def test_a_mount_over_the_parent_is_one_difference(node: Node) -> None:
    with (node.root / "proc/self/mountinfo").open("a") as mounts:
        mounts.write("900 27 0:77 / /mnt rw - tmpfs t rw\n")
    (node.root / "dev/md127").write_bytes(b"XFSB".ljust(512, b"\0"))
    (left,) = [difference for difference in node.look() if difference.name == "mount"]
    assert (left.mended, left.found) == (False, "hidden by a mount of `t` at `/mnt`")


def test_a_directory_over_the_mount_point_is_one_difference(node: Node) -> None:
    with (node.root / "proc/self/mountinfo").open("a") as mounts:
        mounts.write(f"900 216 9:127 /sub {POINT} rw - xfs /dev/md127 rw\n")
    (node.root / "dev/md127").write_bytes(b"XFSB".ljust(512, b"\0"))
    (left,) = [difference for difference in node.look() if difference.name == "mount"]
    assert (left.mended, left.found) == (False, "a mount of directory `/sub` of `/dev/md127`")
    assert left.hint == f"`umount {POINT}` first"


def test_files_in_the_mounts_place_are_one_difference(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (node.root / "proc/self/mountinfo").read_text().splitlines(keepends=True)
    (node.root / "proc/self/mountinfo").write_text("".join(line for line in lines if POINT not in line))
    (node.root / "dev/md127").write_bytes(b"XFSB".ljust(512, b"\0"))
    monkeypatch.setattr(mount_point, "look", lambda path: node.bare)
    (left,) = [difference for difference in node.look() if difference.name == "mount"]
    assert (left.mended, "`deepspeed_offload` in its place" in left.found) == (False, True)


GPU = "sys/devices/pci0000:16/0000:16:01.0/0000:1b:00.0"


@pytest.fixture
def blank_with_gpu(blank: Path) -> Path:
    """The blank machine with a GPU, its open driver, and a kernel that has the hooks for nvidia-fs."""
    recorded = json.loads((RECORDED / "gpu.json").read_text())["files"]
    names = ("/proc/cmdline", "/proc/driver/", "/proc/kallsyms", "/proc/sys/kernel/", "/sys/module/", "/usr/local/")
    for path, text in recorded.items():
        if path.startswith(names):
            write(blank, path.lstrip("/"), text)
    write(blank, f"{GPU}/class", "0x030200\n")
    write(blank, f"{GPU}/vendor", "0x10de\n")
    (blank / "sys/bus/pci/devices/0000:1b:00.0").symlink_to(f"../../../../{GPU}")
    write(blank, "run/udev/data/c1:3", "V:1\n")
    return blank


def gds(mode: str, packages: Sequence[str] = ("nvidia-gds",), **cufile: Any) -> dict[str, Any]:
    return {"mode": mode, "packages": list(packages), "cufile": cufile}


@pytest.mark.parametrize("mode", ["auto", "nvidia-fs", "compat", "off"])
def test_a_path_that_the_node_will_have_is_none(mode: str, blank_with_gpu: Path) -> None:
    before = snapshot(blank_with_gpu)
    assert found(blank_with_gpu, gds=gds(mode)) == []
    assert snapshot(blank_with_gpu) == before


@pytest.mark.parametrize("mode", ["nvidia-fs", "p2pdma", "compat"])
def test_a_required_path_on_a_node_without_a_gpu_is_one(mode: str, blank: Path) -> None:
    (line,) = found(blank, gds=gds(mode))
    assert line.startswith(f"`gpudirect_storage_mode: {mode}` is not possible here: no NVIDIA GPU on the PCI bus")
    assert ". hint: " in line
    assert found(blank, gds=gds("auto")) == []
    assert found(blank, gds=gds("off")) == []


def test_a_required_path_that_the_machine_lacks_is_one(blank_with_gpu: Path) -> None:
    (line,) = found(blank_with_gpu, gds=gds("p2pdma"))
    assert "through md" in line
    # What the role installs is no obstacle: whether a repository has it is not known yet.
    (line,) = found(blank_with_gpu, gds=gds("nvidia-fs", packages=()))
    assert "nvidia-fs is not installed" in line
    write(
        blank_with_gpu,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n",
    )
    (line,) = found(blank_with_gpu, gds=gds("nvidia-fs"))
    assert "proprietary kernel module" in line
    assert found(blank_with_gpu, gds=gds("compat")) == []


def test_settings_that_this_libcufile_ignores_are_among_them(blank_with_gpu: Path) -> None:
    newer = {"block": {"raid": {"use_pci_p2pdma": True}}}
    (line,) = found(blank_with_gpu, gds=gds("auto", **newer))
    assert "needs libcufile 1.16, this is 1.15, which ignores it. hint: " in line
    assert found(blank_with_gpu, gds=gds("off", **newer)) == []
    both = found(blank_with_gpu, gds=gds("p2pdma", **newer), offload_owner="nobody-of-that-name")
    assert len(both) == 3


def test_what_would_stop_a_build_is_named_before_the_removal(node: Node) -> None:
    """A replacement removes the volume first: by then it would be too late to say that it cannot be built again."""

    def after_removal(**changes: Any) -> list[str]:
        return obstacles(POINT, asked(**changes), SERIALS, None, str(node.root), removed=True)

    assert after_removal() == []
    assert after_removal(label="another", mount_options=["noatime"]) == [], "it is made anew"
    (line,) = after_removal(offload_owner="nobody-has-this")
    assert "name not found: 'nobody-has-this'. hint: make the user or group first" in line
    (line,) = after_removal(hugepages=[{"size": "1GiB", "count": 10**6, "numa_node": None}])
    assert "huge pages would take" in line
    lines = after_removal(scheduler="nothing-like-it")
    assert lines
    assert all("nothing-like-it" in line for line in lines)
