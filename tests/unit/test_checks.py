"""The configuration checks on recorded machines: one as built, and one whose drive was pulled under its mount."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import ARRAY_CURES, RECORDED, lay_out
from tunetool.node.array.md_arrays import read_arrays
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common import manifest as manifests
from tunetool.node.common.check_result import Check
from tunetool.node.machine import memory
from tunetool.node.machine.drive_health import Health
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.hardware_hash import hardware_hash
from tunetool.node.machine.mounts import mount_at, read_mounts
from tunetool.node.memory.memory_checks import Attempt
from tunetool.node.tuning.deepspeed_aio import TunedError, choose, facts_of, render

MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
HEALTHY = Health(0, 40, 100, 10, 3, 0, 0, 0, 0, 70)
POINT = MANIFEST["filesystem"]["mount_point"]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    root = lay_out("built", tmp_path)
    (root / MANIFEST["offload_dir"].lstrip("/")).mkdir(parents=True)
    return root


def failed(checks: list[Check]) -> dict[str, Check]:
    return {check.id: check for check in checks if check.status != "pass"}


def edit(root: Path, path: str, change: Callable[[str], str]) -> None:
    target = root / path
    target.write_text(change(target.read_text()))


def without_line(word: str) -> Callable[[str], str]:
    return lambda text: "".join(line + "\n" for line in text.splitlines() if word not in line)


def test_drives_are_read_with_their_users(built: Path) -> None:
    drives = {drive.serial: drive for drive in read_drives(str(built))}
    assert len(drives) == 9
    assert drives["LAB1SYS"].name == "nvme0n1"
    assert drives["LAB1SYS"].uses == ("mounted at `/srv/system`",)
    data = drives["LAB1NV3"]
    assert data.uses == ("member of `md127`", f"mounted at `{POINT}` (through md127)")
    assert data.arrays == ("md127",)
    assert data.by_id == "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_LAB1NV3"
    assert (data.size_bytes, data.lba_bytes, data.metadata_bytes, data.transport) == (2**32, 512, 0, "pcie")
    assert data.numa_node is None
    assert data.link.current_width is not None


def test_the_array_is_read_without_mdadm(built: Path) -> None:
    (array,) = read_arrays(str(built))
    assert array.uuid == MANIFEST["array"]["uuid"]
    assert (array.name, array.level, array.chunk_bytes, array.state) == ("nvme_raid0", "raid0", 2**20, "clean")
    assert len([member for member in array.members if member]) == 8


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("91 {volume} 0:77 / {path} rw - tmpfs tmpfs rw", "a mount of `tmpfs` lies there"),
        (
            "91 {volume} {device} /deepspeed_offload {path} ro - xfs /dev/md127 rw",
            "a mount of directory `/deepspeed_offload` of `/dev/md127` lies there, read-only",
        ),
        (
            "91 {volume} {device} /x {path} rw - xfs /dev/md127 rw",
            "a mount of directory `/x` of `/dev/md127` lies there",
        ),
        ("91 {volume} {device} / {path} rw - xfs /dev/md127 rw", "a mount of `/dev/md127` lies there"),
    ],
)
def test_a_mount_over_the_offload_directory_fails(built: Path, line: str, found: str) -> None:
    """Jobs would fill the node's memory, could not write, or would not find what others wrote."""
    mount = mount_at(POINT, read_mounts(str(built)))
    assert mount is not None
    text = line.format(volume=mount.number, device=mount.device_number, path=MANIFEST["offload_dir"])
    edit(built, "proc/self/mountinfo", lambda before: before + text + "\n")
    check = failed(run_checks(MANIFEST, str(built), health=lambda controller: HEALTHY))["offload.directory"]
    assert (check.status, check.found) == ("fail", found)


def test_the_offload_directory_mounted_over_itself_is_the_same(built: Path) -> None:
    """As a container's or a unit's bind mount with options of its own."""
    text = f"91 216 9:127 /deepspeed_offload {MANIFEST['offload_dir']} rw,nodev - xfs /dev/md127 rw\n"
    edit(built, "proc/self/mountinfo", lambda before: before + text)
    assert "offload.directory" not in failed(run_checks(MANIFEST, str(built)))


@pytest.mark.parametrize("beneath", [True, False], ids=["over the volume", "in its place"])
def test_a_directory_mounted_at_the_mount_point_is_no_volume(built: Path, beneath: bool) -> None:
    """Source, type, number and options are all those of the volume; what jobs find there is not."""
    (line,) = [each for each in (built / "proc/self/mountinfo").read_text().splitlines() if f" {POINT} " in each]
    bound = line.replace("216 27", "300 216" if beneath else "216 27").replace(
        "9:127 / ", "9:127 /deepspeed_offload/x "
    )
    edit(built, "proc/self/mountinfo", lambda text: text.replace(line, f"{line}\n{bound}" if beneath else bound))
    check = failed(run_checks(MANIFEST, str(built)))["filesystem.mounted"]
    assert check.status == "fail"
    assert check.found == "xfs from `/dev/md127`, but only its directory `/deepspeed_offload/x`"
    assert check.remedy == f"run `umount {POINT}`" + ("" if beneath else f", then `mount {POINT}`")


def test_a_node_as_built_passes_every_check(built: Path) -> None:
    checks = run_checks(MANIFEST, str(built), health=lambda controller: HEALTHY)
    assert {name: check.status for name, check in failed(checks).items()} == {
        "array.initramfs": "skip",  # a recorded node has no images
        "filesystem.answers": "skip",  # nor a volume to ask
        "filesystem.boot": "skip",  # nor a fstab
        "gds.mode": "skip",
        "training.environment": "skip",
    }
    assert {check.id for check in checks} >= {
        "array.assembled",
        "array.members",
        "array.state",
        "filesystem.mounted",
        "filesystem.options",
        "filesystem.geometry",
        "filesystem.writable",
        "memory.hugepages",
        "memory.shm",
        "memory.memlock",
        "offload.directory",
        "node.reboot",
        "drives.critical_warning",
        "drives.media_errors",
        "drives.thermal",
        "drives.wear",
        "drives.spare",
        "drives.link",
    }


SHMEM_ENABLED = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


@pytest.mark.parametrize(
    ("wanted", "live", "enabled", "status", "found"),
    [
        ("within_size", "within_size", "never", "pass", "huge=within_size"),
        ("within_size", "never", "never", "fail", "huge=never"),
        ("never", "never", "deny", "pass", "huge=never"),
        ("never", "always", "never", "fail", "huge=always"),
        ("within_size", "within_size", "deny", "fail", "huge=within_size, and the kernel denies it"),
        ("within_size", None, "never", "fail", "no tmpfs at /dev/shm"),
    ],
)
def test_the_huge_pages_of_dev_shm_are_as_they_were_set(
    built: Path, wanted: str, live: str | None, enabled: str, status: str, found: str
) -> None:
    words = " ".join(f"[{word}]" if word == enabled else word for word in ("within_size", "never", "deny", "force"))
    (built / SHMEM_ENABLED).parent.mkdir(parents=True, exist_ok=True)
    (built / SHMEM_ENABLED).write_text(words + "\n")
    if live is None:
        edit(built, "proc/self/mountinfo", without_line("/dev/shm"))
    elif live != "never":
        edit(built, "proc/self/mountinfo", lambda text: text.replace("size=524288k", f"size=524288k,huge={live}"))
    manifest = dict(MANIFEST, memory=dict(MANIFEST["memory"], shm_huge=wanted))
    checks = {check.id: check for check in run_checks(manifest, str(built))}
    assert (checks["memory.shm_huge"].status, checks["memory.shm_huge"].found) == (status, found)
    assert bool(checks["memory.shm_huge"].remedy) == (status == "fail")
    # Manifests of earlier versions say nothing of it.
    assert "memory.shm_huge" not in {check.id for check in run_checks(MANIFEST, str(built))}


def test_a_read_only_dev_shm_fails(built: Path) -> None:
    edit(built, "proc/self/mountinfo", lambda text: re.sub(r"(/dev/shm) rw,", r"\1 ro,", text))
    check = failed(run_checks(MANIFEST, str(built)))["memory.shm"]
    assert (check.status, check.found) == ("fail", "mounted read-only: no job can write there")
    assert check.remedy == "run `mount -o remount,rw /dev/shm`"


@pytest.mark.parametrize(("mode", "passes"), [(0o1777, True), (0o777, True), (0o755, False), (0o1770, False)])
def test_a_dev_shm_that_lets_no_job_write_fails(
    built: Path, monkeypatch: pytest.MonkeyPatch, mode: int, passes: bool
) -> None:
    (built / "dev/shm").mkdir(parents=True, exist_ok=True)
    (built / "dev/shm").chmod(mode)
    # Of whoever laid out a recorded node.
    assert "memory.shm" not in failed(run_checks(MANIFEST, str(built)))
    monkeypatch.setattr(memory, "_of_this_machine", lambda root: True)
    assert memory.shm_mode(str(built)) == mode
    check = {check.id: check for check in run_checks(MANIFEST, str(built))}["memory.shm"]
    if passes:
        assert check.status == "pass"
    else:
        assert (check.status, check.found) == ("fail", f"mode {mode:04o}: no job can write there")
        assert check.remedy == "run `chmod 1777 /dev/shm`"


def test_a_lost_drive_is_named_although_md_still_says_clean(tmp_path: Path) -> None:
    root = lay_out("lost-drive", tmp_path)
    (array,) = read_arrays(str(root))
    assert array.state == "clean"
    check = failed(run_checks(MANIFEST, str(root)))["array.members"]
    assert check.status == "fail"
    assert check.found == "7 of 8 members; missing `LAB1NV3`"
    assert check.remedy


def of_level(root: Path, level: str) -> dict[str, Any]:
    """The recorded array made of this level, with the manifest that says so."""
    base = root / "sys/devices/virtual/block/md127/md"
    (base / "level").write_text(level + "\n")
    (base / "sync_action").write_text("idle\n")
    return {**MANIFEST, "array": {**MANIFEST["array"], "level": level}}


@pytest.mark.parametrize("level", ["raid1", "raid10"])
def test_a_redundant_array_without_a_drive_says_that_it_serves(tmp_path: Path, level: str) -> None:
    root = lay_out("lost-drive", tmp_path)
    checks = failed(run_checks(of_level(root, level), str(root)))
    check = checks["array.members"]
    assert (check.status, check.found) == ("fail", "degraded, still serves: 7 of 8 members; missing `LAB1NV3`")
    assert "replace_drive" in check.remedy
    assert "the loss of that one too takes the data" in check.remedy
    assert "array.redundancy" not in checks


def test_a_rebuild_is_told_by_drive_percent_and_minutes(built: Path) -> None:
    manifest = of_level(built, "raid10")
    base = built / "sys/devices/virtual/block/md127/md"
    checks = {check.id: check for check in run_checks(manifest, str(built))}
    assert (checks["array.redundancy"].status, checks["array.redundancy"].found) == ("pass", "in sync")
    assert "array.redundancy" not in {check.id for check in run_checks(MANIFEST, str(built))}
    for name, text in (("sync_action", "resync"), ("sync_completed", "1 / 4"), ("sync_speed", "10")):
        (base / name).write_text(text + "\n")
    assert "array.redundancy" not in failed(run_checks(manifest, str(built)))
    (base / "sync_action").write_text("recover\n")
    (base / "rd2/state").write_text("spare\n")
    check = failed(run_checks(manifest, str(built)))["array.redundancy"]
    assert check.found == "degraded, still serves: the rebuild onto `LAB1NV3` is at 25.0 %, about 1 min left"


LINKS = "dev/disk/by-uuid"
FS_UUID = MANIFEST["filesystem"]["uuid"]


@pytest.mark.parametrize("taken", [False, True], ids=["gone", "taken by another device"])
def test_a_volume_that_udev_links_no_more_is_not_another_one(built: Path, taken: bool) -> None:
    """To unmount it would end the jobs, and no mount by UUID would bring it back."""
    (built / LINKS / FS_UUID).unlink()
    if taken:
        (built / LINKS / FS_UUID).symlink_to("../../loop0")
    checks = failed(run_checks(MANIFEST, str(built)))
    assert checks["filesystem.mounted"].status == "unknown"
    assert checks["filesystem.mounted"].found == "xfs from `/dev/md127`; udev keeps no link of its UUID to it"
    assert checks["filesystem.mounted"].remedy == "run `udevadm trigger --settle /dev/md127`"
    assert checks["offload.directory"].found == "not looked at: its file system may be another one"
    assert checks["offload.directory"].remedy == "see `filesystem.mounted`"
    # What udev notes of the array itself needs no link.
    noted = built / "run/udev/data/b9:127"
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text(f"S:disk/by-id/x\nE:ID_FS_UUID={FS_UUID}\nE:ID_FS_UUID_ENC=x\n")
    checks = failed(run_checks(MANIFEST, str(built)))
    assert not {"filesystem.mounted", "offload.directory"} & set(checks)
    noted.write_text("E:ID_FS_UUID=0-1\n")
    check = failed(run_checks(MANIFEST, str(built)))["filesystem.mounted"]
    assert (check.status, check.found) == ("fail", "xfs from `/dev/md127`, another file system")


def test_another_file_system_on_the_array_fails(built: Path) -> None:
    (built / LINKS / FS_UUID).rename(built / LINKS / "0-1")
    checks = {check.id: check for check in run_checks(MANIFEST, str(built))}
    check = checks["filesystem.mounted"]
    assert (check.status, check.found) == ("fail", "xfs from `/dev/md127`, another file system")
    # Its options and geometry are not the volume's, and a cure for them would be for a good one.
    assert {checks[f"filesystem.{what}"].status for what in ("options", "geometry")} == {"skip"}


def test_without_udev_nothing_says_which_file_system_it_is(built: Path) -> None:
    shutil.rmtree(built / LINKS)
    check = failed(run_checks(MANIFEST, str(built)))["filesystem.mounted"]
    assert (check.status, check.remedy) == (
        "unknown",
        "run this where udev keeps /dev, such as outside the container",
    )


OVER_ITS_PARENT = "900 27 0:77 / /mnt rw - tmpfs t rw\n"


@pytest.mark.parametrize(
    ("path", "change", "identity", "word"),
    [
        ("sys/devices/virtual/block/md127/md/array_state", lambda text: "broken\n", "array.state", "broken"),
        ("sys/devices/virtual/block/md127/md/array_state", lambda text: "clear\n", "array.state", "clear"),
        ("sys/devices/virtual/block/md127/md/array_state", lambda text: "readonly\n", "array.state", "readonly"),
        ("sys/devices/virtual/block/md127/md/array_state", lambda text: "suspended\n", "array.state", "suspended"),
        ("sys/devices/virtual/block/md127/md/array_state", lambda text: "", "array.state", "state"),
        ("sys/devices/virtual/block/md127/md/chunk_size", lambda text: "524288\n", "array.chunk", "512 KiB"),
        ("proc/self/mountinfo", without_line(POINT), "filesystem.mounted", "not a mount point"),
        ("proc/self/mountinfo", lambda text: text.replace("9:127 /", "254:1 /"), "filesystem.mounted", "another"),
        ("proc/self/mountinfo", lambda text: text + OVER_ITS_PARENT, "filesystem.mounted", "`t` at `/mnt` hides"),
        ("proc/self/mountinfo", lambda text: text.replace("noatime", "relatime"), "filesystem.options", "noatime"),
        (
            "proc/self/mountinfo",
            lambda text: text.replace(f"{POINT} rw,", f"{POINT} ro,"),
            "filesystem.writable",
            "mounted read-only",
        ),
        (
            "proc/self/mountinfo",
            lambda text: re.sub(rf"({POINT} .* - xfs \S+ )rw,", r"\1ro,", text),
            "filesystem.writable",
            "mounted read-only",
        ),
        ("proc/self/mountinfo", lambda text: text.replace("sunit=2048", "sunit=1024"), "filesystem.geometry", "512"),
        ("proc/self/mountinfo", lambda text: text.replace("size=524288k", "size=1024k"), "memory.shm", "1 MiB"),
        (
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
            lambda text: "3\n",
            "memory.hugepages",
            "3 pages",
        ),
    ],
)
def test_each_difference_is_found_by_name(
    built: Path, path: str, change: Callable[[str], str], identity: str, word: str
) -> None:
    edit(built, path, change)
    check = failed(run_checks(MANIFEST, str(built)))[identity]
    assert check.status == "fail"
    assert word in check.found
    assert check.remedy


@pytest.mark.parametrize(
    ("old", "new", "found", "remedy"),
    [
        ("xfs /dev/md127 rw,", "rw,sync,", "added `sync`", f"run `mount -o remount,async {POINT}`"),
        (f"{POINT} rw,", "rw,noexec,", "added `noexec`", f"run `mount -o remount,exec {POINT}`"),
        ("xfs /dev/md127 rw,", "rw,dirsync,", "added `dirsync`", f"unmount and mount `{POINT}`"),
        (
            "noatime",
            "sync",
            "missing `noatime`; added `sync`",
            f"run `tunetool provision`, or unmount and mount `{POINT}`",
        ),
    ],
)
def test_an_option_that_was_added_and_hurts_fails(built: Path, old: str, new: str, found: str, remedy: str) -> None:
    """Synchronous writes are fifty times slower, and no program of a staged environment starts."""
    edit(built, "proc/self/mountinfo", lambda text: text.replace(old, old.replace("rw,", new) if "rw," in old else new))
    check = failed(run_checks(MANIFEST, str(built)))["filesystem.options"]
    assert (check.status, check.found, check.remedy) == ("fail", found, remedy)
    asked = [*MANIFEST["filesystem"]["mount_options"], "sync", "noexec", "dirsync"]
    manifest = dict(MANIFEST, filesystem=dict(MANIFEST["filesystem"], mount_options=asked))
    assert "added" not in failed(run_checks(manifest, str(built)))["filesystem.options"].found


def test_an_option_that_was_added_and_does_no_harm_passes(built: Path) -> None:
    edit(built, "proc/self/mountinfo", lambda text: text.replace(f"{POINT} rw,", f"{POINT} rw,nosuid,nodev,"))
    assert "filesystem.options" not in failed(run_checks(MANIFEST, str(built)))


@pytest.mark.parametrize(("state", "cure"), ARRAY_CURES.items())
def test_each_state_of_the_array_has_its_cure(built: Path, state: str, cure: str) -> None:
    edit(built, "sys/devices/virtual/block/md127/md/array_state", lambda text: state + "\n")
    check = failed(run_checks(MANIFEST, str(built)))["array.state"]
    assert cure in check.remedy
    assert "\n" not in check.remedy


def test_a_bare_mount_point_says_whether_it_can_be_written(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(built, "proc/self/mountinfo", without_line(POINT))
    assert "lands on the root" in failed(run_checks(MANIFEST, str(built)))["filesystem.mounted"].found
    monkeypatch.setattr(
        "tunetool.node.volume.built_volume.is_immutable", lambda path: path == str(built / POINT.lstrip("/"))
    )
    assert "it is immutable" in failed(run_checks(MANIFEST, str(built)))["filesystem.mounted"].found


def test_an_array_that_is_gone_says_which_drives_are(built: Path) -> None:
    for link in (built / "dev/disk/by-id").glob("md-*"):
        link.unlink()
    stranger = json.loads(json.dumps(MANIFEST).replace("LAB1NV3", "GONE"))
    check = failed(run_checks(stranger, str(built)))["array.assembled"]
    # A scheduler's reason shows what was found, and no remedy.
    assert (check.found, check.remedy) == ("not assembled; missing `GONE`", "reseat or replace the missing drives")


def test_a_swapped_drive_is_named(built: Path) -> None:
    stranger = json.loads(json.dumps(MANIFEST).replace("LAB1NV3", "OLD"))
    check = failed(run_checks(stranger, str(built)))["array.members"]
    assert check.found == "7 of 8 members; missing `OLD`; unknown `LAB1NV3`"


def test_a_pending_reboot_is_no_pass(built: Path) -> None:
    assert failed(run_checks(dict(MANIFEST, reboot_required=True), str(built)))["node.reboot"].status == "fail"


def test_locked_memory_is_asked_for_only_where_a_limit_was_set(built: Path) -> None:
    asked: list[tuple[str, int]] = []

    def locker(kind: str, size: int) -> Attempt:
        asked.append((kind, size))
        return Attempt(65534, False, -1, size)

    checks = {check.id: check for check in run_checks(MANIFEST, str(built), locker=locker)}
    kind = "login" if os.geteuid() == 0 else "session"
    assert checks["memory.memlock." + kind].status == "pass"
    assert asked == [(kind, 72 * 2**20)]
    quiet = dict(MANIFEST, memory=dict(MANIFEST["memory"], memlock=None))
    assert not [check for check in run_checks(quiet, str(built), locker=locker) if "memlock" in check.id]


def test_an_empty_machine_raises_nothing(tmp_path: Path) -> None:
    assert read_drives(str(tmp_path)) == []
    assert {check.status for check in run_checks(MANIFEST, str(tmp_path))} >= {"fail"}


def test_the_manifest_is_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    with pytest.raises(FileNotFoundError):
        manifests.load(str(path))
    manifests.write(MANIFEST, str(path))
    assert manifests.load(str(path)) == MANIFEST
    assert path.stat().st_mode & 0o777 == 0o644
    for text in ("", "{", "[]", '{"schema": "tunetool.manifest/9"}', '{"schema": "tunetool.manifest/1"}'):
        path.write_text(text)
        with pytest.raises(manifests.ManifestError) as caught:
            manifests.load(str(path))
        assert caught.value.hint
    with pytest.raises(manifests.ManifestError):
        manifests.write({"schema": "tunetool.manifest/1"}, str(path))


@pytest.mark.parametrize(
    ("text", "newer"),
    [
        ('{"schema": "tunetool.manifest/3", "array": 1}', True),
        ('{"schema": "tunetool.manifest/2"}', False),
        ('{"schema": "tunetool.manifest/10"}', True),
        ('{"schema": "tunetool.manifest/1"}', False),
        ('{"schema": "tunetool.manifest/0"}', False),
        ('{"schema": "tunetool.record/2"}', False),
        ('{"schema": 2}', False),
        ("[]", False),
        ("\xff{", False),
    ],
)
def test_only_what_a_newer_version_wrote_is_left_alone(tmp_path: Path, text: str, newer: bool) -> None:
    path = tmp_path / "node.json"
    manifests.refuse_newer(str(path))
    path.write_bytes(text.encode("latin-1"))
    if newer:
        with pytest.raises(manifests.ManifestError, match=r"newer than this version's `tunetool\.manifest/2`"):
            manifests.refuse_newer(str(path))
    else:
        manifests.refuse_newer(str(path))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


@given(
    st.sampled_from(leaves(MANIFEST)),
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 5), st.floats(-1, 1), st.text(max_size=3), st.just([]), st.just({})
    ),
)
def test_our_validator_agrees_with_the_standards(keys: tuple[Any, ...], value: Any) -> None:
    document = json.loads(json.dumps(MANIFEST))
    parent = document
    for key in keys[:-1]:
        parent = parent[key]
    parent[keys[-1]] = value
    standard = list(jsonschema.Draft202012Validator(manifests.SCHEMA).iter_errors(document))
    # JSON Schema counts 1.0 as an integer; tunetool never writes such a value and need not read one.
    if not (isinstance(value, float) and value.is_integer()):
        assert bool(manifests.validate(document)) == bool(standard)


def test_gpudirect_storages_path_is_held_against_the_manifest(built: Path) -> None:
    wanted = dict(MANIFEST, gds={"mode": "nvidia-fs", "reasons": []})
    check = failed(run_checks(wanted, str(built)))["gds.mode"]
    assert (check.status, check.expected) == ("fail", "nvidia-fs")
    assert check.found == "off: no NVIDIA GPU on the PCI bus (`gpu`)"
    assert check.remedy


def tuned_on(root: Path) -> dict[str, Any]:
    """The variable as `tunetool tune --store-vars` would have stored it for this machine."""
    block = {"block_size": 2**20, "queue_depth": 32, "intra_op_parallelism": 4}
    block |= {"single_submit": False, "overlap_events": True, "use_gds": False}
    return {hardware_hash(facts_of(POINT, str(root))): {"block": block, "mix": "read=1,write=1"}}


def test_a_tuned_block_is_chosen_by_the_hardware_and_checked(built: Path) -> None:
    choice = choose(tuned_on(built), POINT, str(built))
    assert choice is not None
    document = dict(MANIFEST, aio=choice)
    assert not manifests.validate(document)
    jsonschema.validate(document, manifests.SCHEMA)
    check = failed(run_checks(document, str(built)))["deepspeed.tuned"]
    assert (check.status, check.found) == ("fail", "the file is missing")
    file = built / "etc/tunetool/aio.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render(choice["block"]))
    assert "deepspeed.tuned" not in failed(run_checks(document, str(built)))
    edit(built, "etc/tunetool/aio.json", lambda text: text.replace("32", "8"))
    assert failed(run_checks(document, str(built)))["deepspeed.tuned"].found == "the file holds something else"
    file.write_text(render(choice["block"]))
    edit(built, "proc/meminfo", lambda text: text.replace("MemTotal:", "MemTotal: 9", 1))
    check = failed(run_checks(document, str(built)))["deepspeed.tuned"]
    assert check.found.startswith("tuned on other hardware: memory_bytes was ")
    assert choose(tuned_on(built), POINT, str(built)) is not None
    assert choose({"0" * 64: next(iter(tuned_on(built).values()))}, POINT, str(built)) is None


def test_a_block_that_deepspeed_would_misread_is_refused(built: Path) -> None:
    for change in ({"single_submit": "true"}, {"queue_depth": True}, {"num_threads": 4}):
        tuned = tuned_on(built)
        next(iter(tuned.values()))["block"].update(change)
        with pytest.raises(TunedError, match="tunetool_tuned"):
            choose(tuned, POINT, str(built))
