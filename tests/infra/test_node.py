"""The state of a virtual node after site.yml and a reboot, checked from outside by testinfra (run by molecule/node)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from testinfra.host import Host

from tunetool.lab.guest import marker

pytestmark = pytest.mark.node

POINT = "/mnt/nvme_raid0"
MIB = 2**20


@pytest.fixture(scope="module")
def manifest(host: Host) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(host.file("/etc/tunetool/node.json").content_string)
    return document


def test_the_array_has_its_name_members_and_chunk(host: Host, manifest: dict[str, Any]) -> None:
    text = host.check_output("mdadm --detail --export /dev/md/nvme_raid0")
    fields = dict(line.split("=", 1) for line in text.splitlines())
    assert (fields["MD_LEVEL"], fields["MD_DEVICES"], fields["MD_UUID"]) == ("raid0", "8", manifest["array"]["uuid"])
    text = host.check_output(
        "cd /sys/block/$(basename $(readlink /dev/md/nvme_raid0))/md; cat array_state chunk_size;"
        " for slot in 0 1 2 3 4 5 6 7; do cat rd$slot/block/device/serial; done"
    )
    state, chunk, *serials = text.split()
    assert (state, chunk) == ("clean", str(MIB))
    assert serials == [f"LAB1NV{number}" for number in range(1, 9)]


def test_the_manifest_names_what_was_built(host: Host, manifest: dict[str, Any]) -> None:
    file = host.file("/etc/tunetool/node.json")
    assert (file.user, file.group, file.mode) == ("root", "root", 0o644)
    assert manifest["schema"] == "tunetool.manifest/1"
    assert [member["serial"] for member in manifest["array"]["members"]] == [f"LAB1NV{slot}" for slot in range(1, 9)]
    assert (manifest["array"]["name"], manifest["array"]["chunk_bytes"]) == ("nvme_raid0", MIB)
    assert manifest["filesystem"]["mount_point"] == POINT
    assert manifest["filesystem"]["uuid"] == host.check_output(f"findmnt -no UUID {POINT}")


def test_the_file_system_is_aligned_with_the_array(host: Host) -> None:
    geometry = host.check_output(f"xfs_info {POINT}")
    assert "sunit=256    swidth=2048 blks" in geometry
    assert "sunit=64 blks" in geometry


def test_it_is_mounted_as_asked_and_at_every_boot(host: Host, manifest: dict[str, Any]) -> None:
    mount = host.mount_point(POINT)
    assert mount.exists
    assert mount.filesystem == "xfs"
    assert {"rw", "noatime", "logbsize=256k", "sunit=2048", "swidth=16384"} <= set(mount.options)
    lines = [line.split() for line in host.file("/etc/fstab").content_string.splitlines()]
    (line,) = [fields for fields in lines if len(fields) > 1 and fields[1] == POINT]
    assert line[0] == f"UUID={manifest['filesystem']['uuid']}"
    assert {"nofail", "noatime"} <= set(line[3].split(","))
    assert any(option.startswith("x-systemd.device-timeout=") for option in line[3].split(","))


def test_the_unit_for_a_late_volume_waits_and_did_not_run(host: Host, manifest: dict[str, Any]) -> None:
    unit = "tunetool-late-volume.service"
    show = f"systemctl show --value {unit} --property"
    assert host.check_output(f"{show}=ConditionResult; {show}=ExecMainStartTimestampMonotonic") == "no\n0"
    device = f"$(systemd-escape --path --suffix=device /dev/disk/by-uuid/{manifest['filesystem']['uuid']})"
    assert host.check_output(f"systemctl show --value --property=Wants {device}") == unit


def test_the_array_is_assembled_by_name_at_every_boot(host: Host, manifest: dict[str, Any]) -> None:
    text = host.file("/etc/mdadm/mdadm.conf").content_string
    arrays = [line for line in text.splitlines() if line.startswith("ARRAY")]
    assert len(arrays) == 1
    assert arrays[0].startswith("ARRAY /dev/md/nvme_raid0 ")
    assert f"UUID={manifest['array']['uuid']}" in arrays[0]


def test_everybody_may_write_below_the_volume_only(host: Host) -> None:
    offload = host.file(f"{POINT}/deepspeed_offload")
    assert (offload.user, offload.mode) == ("root", 0o1777)
    assert host.file(POINT).mode & 0o022 == 0


def test_memory(host: Host) -> None:
    pools = "/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
    assert [host.file(pools.format(node)).content_string for node in (0, 1)] == ["48\n", "16\n"]
    assert host.check_output("findmnt -bno SIZE /dev/shm") == str(512 * MIB)
    assert "huge=within_size" in host.mount_point("/dev/shm").options
    assert host.check_output("ulimit -l") == "unlimited"
    assert host.check_output("systemctl show --property=DefaultLimitMEMLOCK") == "DefaultLimitMEMLOCK=infinity"


def test_io_settings_hold_after_a_reboot(host: Host, manifest: dict[str, Any]) -> None:
    text = host.check_output(
        "cd /sys/block; for drive in nvme?n1; do cat $drive/device/serial $drive/queue/nr_requests; done"
    )
    words = text.split()
    requests = dict(zip(words[::2], words[1::2], strict=True))
    assert {requests.pop(f"LAB1NV{number}") for number in range(1, 9)} == {"128"}
    # The drive that is not a member keeps its settings.
    assert list(requests) == ["LAB1SYS"]
    assert requests["LAB1SYS"] != "128"
    schedulers = host.check_output("cd /sys/block; for drive in nvme?n1; do cat $drive/queue/scheduler; done")
    assert schedulers.count("[mq-deadline]") == 8
    assert host.check_output("cat /sys/block/$(basename $(readlink /dev/md/nvme_raid0))/queue/read_ahead_kb") == "4096"
    assert "[madvise]" in host.file("/sys/kernel/mm/transparent_hugepage/enabled").content_string
    limits = host.check_output(
        "sysctl -n vm.dirty_background_bytes vm.dirty_background_ratio vm.dirty_bytes vm.dirty_ratio"
    )
    assert limits.split() == [str(64 * MIB), "0", "0", "25"]
    # The inventory sets this too, but a virtual node has none.
    assert "cpu_governor" not in manifest["tuning"]


def test_the_weekly_trim_reaches_the_volume(host: Host) -> None:
    assert host.check_output("systemctl is-enabled fstrim.timer; systemctl is-active fstrim.timer") == "enabled\nactive"
    # The service of the timer reads /etc/fstab.
    host.check_output("systemctl start fstrim.service")
    log = host.check_output("journalctl --unit=fstrim.service --output=cat --no-pager")
    assert f"{POINT}: " in log
    assert "trimmed on /dev/md" in log


def test_the_drive_that_is_not_ours_is_as_it_was(host: Host) -> None:
    assert host.mount_point("/srv/system").device == "/dev/nvme0n1"
    digest = host.check_output("sha256sum < /srv/system/MARKER").split()[0]
    assert digest == hashlib.sha256(marker("LAB1SYS")).hexdigest()


def test_nothing_failed_at_the_boot(host: Host) -> None:
    assert host.check_output("systemctl --failed --no-legend") == ""


def test_one_screen_and_its_recording_show_what_was_built(host: Host) -> None:
    done = host.run("cd /tmp && tunetool inspect --json seen.json && tunetool inspect --capture kept.json")
    assert done.rc == 0, done.stdout + done.stderr
    again = host.run("tunetool inspect --root /tmp/kept.json --json /tmp/again.json; rm /tmp/kept.json")
    seen, later = (json.loads(host.file(f"/tmp/{name}.json").content_string) for name in ("seen", "again"))
    members = [drive for drive in seen["drives"] if drive["use"] == "nvme_raid0"]
    assert [drive["serial"] for drive in members] == [f"LAB1NV{slot}" for slot in range(1, 9)]
    assert {drive["health"]["status"] for drive in members} == {"ok"}
    assert seen["arrays"][0]["members"] == [f"LAB1NV{slot}" for slot in range(1, 9)]
    assert [volume["aligned"] for volume in seen["filesystems"] if volume["mount_point"] == POINT] == [True]
    assert seen["memory"]["hugepages"] == [
        {"size_kib": 2048, "count": 48, "free": 48, "numa_node": 0},
        {"size_kib": 2048, "count": 16, "free": 16, "numa_node": 1},
    ]
    assert (seen["memory"]["shm"], seen["memory"]["memlock"]) == (512 * MIB, "unlimited")
    assert "container" not in seen["host"]
    assert seen["gds"]["mode"] == "off"
    assert seen["findings"] == []
    assert again.rc == 0, again.stderr
    for document in (seen, later):
        document["memory"].pop("available")
        document.pop("source")
        # The first look was written to a file before the second was taken.
        assert [volume.pop("free_bytes") > 0 for volume in document["filesystems"] if volume["mount_point"] == "/"] == [
            True
        ]
    assert later == seen


def test_the_node_judges_itself(host: Host) -> None:
    done = host.run("tunetool verify --level config --runs-dir /tmp/runs --json -")
    assert done.rc == 0, done.stdout + done.stderr
    record = json.loads(done.stdout)
    assert record["verdict"]["status"] == "pass"
    # The node has no GPU, and the inventory asks for no training environment.
    others = {check["id"]: check["status"] for check in record["checks"] if check["status"] != "pass"}
    assert others == {"gds.mode": "skip", "training.environment": "skip"}
    by_id = {check["id"]: check["found"] for check in record["checks"]}
    for session in ("login", "service"):
        assert by_id[f"memory.memlock.{session}"] == "locked, limit unlimited"
