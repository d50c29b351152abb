"""`tunetool inspect` on recorded, synthetic and broken machines: the screen, the JSON, recordings, findings."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calls import imported_by
from machines import RECORDED, lay_out, lay_out_drives, lay_out_numa
from tunetool.cli.main import cli
from tunetool.inspect import model
from tunetool.inspect.capture import capture
from tunetool.inspect.collect import disks
from tunetool.inspect.source import Source
from tunetool.node.common import manifest as manifests
from tunetool.node.machine import recording
from tunetool.node.machine.drives import read_drives
from tunetool.report.inspection import disk_words

ROOT = Path(__file__).parents[2]
H100 = ROOT / "docs/machines/h100-made.json"
H200 = ROOT / "docs/machines/h200-cloud-made.json"
CONTAINER = "27 1 0:50 / / rw - overlay overlay rw\n29 27 0:24 / /dev/shm rw - tmpfs shm rw,size=65536k\n"
LIMITS = "Max locked memory         65536                65536                bytes     \n"


def run(*arguments: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["inspect", *map(str, arguments)], standalone_mode=False)
    if code:
        assert getattr(done.exception, "exit_code", None) == code, done.output
        return str(done.exception)
    assert done.exception is None, done.exception
    assert done.return_value == 0
    return done.stdout


def seen(root: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run("--root", root, "--json", "-"))
    return document


def findings_of(root: Path) -> dict[str, dict[str, str]]:
    return {finding["id"]: finding for finding in seen(root)["findings"]}


def laid_out(document: Path, folder: Path) -> Path:
    recording.lay_out(json.loads(document.read_text()), str(folder))
    return folder


def of_drive(root: Path, name: str) -> Path:
    """The PCI function of a drive."""
    return (root / "sys/block" / name / "device/device").resolve()


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_whole_of_an_h100_node_is_on_one_screen() -> None:
    text = run("--root", H100)
    lines = text.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 120
    assert "made to match" in lines[1]
    for words in (
        r"nvme9n1 +MADEU209 +SAMSUNG \S+ +OPPA3B5Q +3\.84 TB +512 +37 C +1 % +ok +Gen5 x4 +1 +nvme_raid0",
        r"pci0000:26  nvme2n1, nvme3n1, nvme4n1, nvme5n1 +each Gen5 x4 +15\.8",
        r"md127 `nvme_raid0`: raid0, 8 of 8 drives, chunk 1 MiB, clean",
        r"/mnt/nvme_raid0: xfs on md RAID0 \(8 x nvme\), stripe 1 MiB x 8, aligned with the array",
        r"8 x NVIDIA H100 80GB HBM3, Gen5 x16; NVIDIA driver 550\.90\.12, open kernel module",
        r"gds +nvidia-fs: ",
        r"drives +126\.0 GB/s  8 drives of Gen5 x4 +<- binds",
        r"findings +none",
    ):
        assert re.search(words, text), words
    assert "\x1b" not in text


def test_json_says_the_same_and_fits_its_schema(tmp_path: Path) -> None:
    text = run("--root", H100, "--json", tmp_path / "out.json")
    assert text == run("--root", H100)
    document = json.loads((tmp_path / "out.json").read_text())
    assert document == seen(H100)
    jsonschema.validate(document, model.json_schema())
    assert model.Inspection.model_validate(document).ceilings[0].value == pytest.approx(126.03e9, rel=1e-4)
    assert [ceiling["id"] for ceiling in document["ceilings"]] == ["drives", "links", "gpu", "gpus"]
    tree = next(root for root in document["pcie"] if root["address"] == "pci0000:15")
    (switch,) = tree["children"]
    assert [child["kind"] for child in switch["children"]] == ["nic", "gpu"]


def block(root: Path, name: str) -> Path:
    return (root / "sys/class/block" / name).resolve()


def test_drives_with_partitions_are_not_free(tmp_path: Path) -> None:
    """As those of an imported ZFS pool, of which the mount names the pool alone."""
    root = laid_out(H200, tmp_path)
    with (root / "proc/self/mountinfo").open("a") as stream:
        stream.write("60 28 0:45 / /tank rw,relatime - zfs tank rw,xattr,noacl\n")
    for number in range(1, 9):
        for part, sectors in ((1, 7499980800), (9, 16384)):
            partition = block(root, f"nvme{number}n1") / f"nvme{number}n1p{part}"
            partition.mkdir()
            (partition / "partition").write_text(f"{part}\n")
            (partition / "size").write_text(f"{sectors}\n")
    shown = seen(root)
    assert [drive["use"] for drive in shown["drives"]] == ["/"] + ["has partitions"] * 8
    assert not any(drive["data"] for drive in shown["drives"])
    found = findings_of(root)
    assert "volume" not in found
    assert found["drives.occupied"]["found"] == (
        "8 drives are not blank or in use: `AWSMADE00` (nvme1n1) has partitions nvme1n1p1, nvme1n1p9; "
        "`AWSMADE01` (nvme2n1) has partitions nvme2n1p1, nvme2n1p9; and 6 more"
    )


@pytest.mark.parametrize(
    ("entry", "kind", "source"),
    [
        ("sys/fs/btrfs/7c1f/devices/{}", "btrfs", "/dev/nvme1n1"),
        ("sys/fs/bcachefs/7c1f/dev-{}/block", "bcachefs", "/dev/nvme1n1:/dev/nvme2n1"),
    ],
)
def test_every_member_of_a_mounted_pool_is_in_use(tmp_path: Path, entry: str, kind: str, source: str) -> None:
    root = laid_out(H200, tmp_path / "node")
    with (root / "proc/self/mountinfo").open("a") as stream:
        stream.write(f"60 28 0:45 / /pool rw,relatime - {kind} {source} rw\n")
    for name in ("nvme1n1", "nvme2n1", "nvme3n1"):
        link = root / entry.format(name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(block(root, name), link.parent))
    recorded = tmp_path / "recorded.json"
    capture(Source(str(root)), recorded, hide_names=False)
    for place in (root, recorded):
        uses = [drive["use"] for drive in seen(place)["drives"]]
        # A recording has no names of network and anonymous mounts, and so no mount point of the pool.
        assert all(use in ("/pool", f"in a mounted {kind}") for use in uses[1:4]), uses
        assert uses[4:] == ["free"] * 5
    by_name = {drive.name: drive for drive in read_drives(str(root))}
    assert f"in a mounted {kind} `7c1f`" in by_name["nvme3n1"].claims


def test_a_cloud_node_before_it_is_built() -> None:
    shown = seen(H200)
    assert [drive["use"] for drive in shown["drives"]] == ["/"] + ["free"] * 8
    assert [drive["data"] for drive in shown["drives"]] == [False] + [True] * 8
    assert shown["host"]["virtual"]
    assert shown["gds"]["mode"] == "compat"
    # No link is visible: no ceiling is invented, and none is named as the limit.
    assert "value" not in shown["ceilings"][0]
    assert not any(ceiling["binds"] for ceiling in shown["ceilings"])
    assert "8 free drives of 3.84 TB" in findings_of(H200)["volume"]["found"]
    text = run("--root", H200, "--gds")
    assert "nvidia_fs.installed" in text
    assert "do: " in text
    assert "compat: nothing in the way  <- the path that I/O takes now" in text


@pytest.mark.parametrize("how", ["directory", "file"])
@pytest.mark.parametrize("machine", ["built", "blank", "lost-drive", "h100"])
def test_a_recording_shows_the_same_screen(machine: str, how: str, tmp_path: Path) -> None:
    root = laid_out(H100, tmp_path / "one") if machine == "h100" else lay_out(machine, tmp_path / "one")
    for name in ("mdadm.conf", "unrelated"):
        put(root, f"etc/{name}", "password=hunter2\n")
    kept = tmp_path / ("two.json" if how == "file" else "two")
    assert "serial numbers are in it" in run("--root", root, "--capture", kept)
    assert run("--root", kept) == run("--root", root)
    assert run("--root", kept, "--gds") == run("--root", root, "--gds")
    if how == "directory":
        assert not (kept / "etc/unrelated").exists()


def test_a_loop_device_shows_the_same_from_its_recording(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path / "one")
    number, loop = "7:77", root / "sys/devices/virtual/block/loop77"
    put(loop, "dev", number + "\n")
    put(loop, "loop/backing_file", "/mnt/nvme_raid0/image\n")
    for link in (f"sys/dev/block/{number}", "sys/class/block/loop77"):
        (root / link).symlink_to(os.path.relpath(loop, (root / link).parent))
    mounts = root / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text() + f"99 1 {number} / /mnt/image rw,noatime - xfs /dev/loop77 rw\n")
    run("--root", root, "--capture", tmp_path / "two")
    assert "/mnt/image: xfs on loop device on md RAID0" in run("--root", root)
    assert run("--root", tmp_path / "two") == run("--root", root)


def test_this_machine_shows_the_same_from_its_recording(tmp_path: Path) -> None:
    changing = re.compile(r"[0-9.]+ [KMGT]iB available")
    for attempt in range(20):  # others mount and unmount on this machine, too
        before = changing.sub("", run())
        run("--capture", tmp_path / f"here{attempt}")
        later = run("--root", tmp_path / f"here{attempt}")
        if changing.sub("", run()) == before:
            break
    assert changing.sub("", later) == before
    assert seen(tmp_path / f"here{attempt}")["source"] == "recording"


def test_settings_that_affect_speed_are_in_json_and_recording(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path / "one")
    for name in ("nvme1n1", "nvme2n1"):
        put(root, f"sys/block/{name}/queue/scheduler", "mq-deadline kyber [none]\n")
    put(root, "sys/block/nvme3n1/queue/scheduler", "[mq-deadline] none\n")
    put(root, "sys/block/nvme0n1/queue/scheduler", "[bfq] none\n")  # no data drive
    put(root, "sys/block/md127/queue/read_ahead_kb", "4096\n")
    put(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    put(root, "sys/devices/system/cpu/smt/control", "on\n")
    put(root, "proc/sys/vm/dirty_bytes", "0\n")
    put(root, "proc/sys/vm/dirty_ratio", "20\n")
    put(root, "usr/local/cuda/version.json", '{"cuda": {"version": "12.8.1"}}')
    put(root, "etc/tunetool/node.json", (RECORDED / "built-manifest.json").read_text())
    shown = seen(root)
    assert {each["name"]: each["values"] for each in shown["settings"]} == {
        "scheduler": {"mq-deadline": 1, "none": 2},
        "read_ahead": {"4096": 1},
        "transparent_hugepages": {"madvise": 1},
        "dirty": {"20%": 1},
        "smt": {"on": 1},
    }
    assert shown["cuda"] == "12.8.1"
    assert shown["manifest"]["schema"] == "tunetool.manifest/1"
    run("--root", root, "--capture", tmp_path / "two.json")
    again = seen(tmp_path / "two.json")
    assert {name: again[name] for name in ("settings", "cuda", "manifest")} == {
        name: shown[name] for name in ("settings", "cuda", "manifest")
    }


@pytest.mark.parametrize("text", ["", "x", "[]", '{"cuda": 1}'])
def test_a_broken_version_of_cuda_is_none(text: str, tmp_path: Path) -> None:
    root = lay_out("built", tmp_path / "one")
    put(root, "usr/local/cuda/version.json", text)
    assert "cuda" not in seen(root)


def test_free_space_is_in_json_and_recording(tmp_path: Path) -> None:
    run("--capture", tmp_path / "here.json")
    now, later = json.loads(run("--json", "-")), seen(tmp_path / "here.json")
    for here, replayed in zip(now["filesystems"], later["filesystems"], strict=True):
        assert here["size_bytes"] == replayed["size_bytes"]
        assert 0 <= replayed["free_bytes"] <= replayed["size_bytes"]


def test_an_anonymous_recording_differs_in_names_alone(tmp_path: Path) -> None:
    run("--root", H100, "--capture", tmp_path / "hidden.json", "--anonymous")
    assert "MADEU2" not in (tmp_path / "hidden.json").read_text()
    hidden, plain = seen(tmp_path / "hidden.json"), seen(H100)
    assert hidden["host"]["name"] == "node"
    assert len({drive["serial"] for drive in hidden["drives"]}) == 10
    for document in (hidden, plain):
        del document["host"]["name"]
        for each in [*document["drives"], *document["arrays"]]:
            each.pop("serial", None)
            each.pop("members", None)
    assert hidden == plain


@pytest.mark.parametrize("exists", [True, False])
def test_an_interrupted_capture_leaves_nothing(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = tmp_path / "half"
    if exists:
        destination.mkdir()
    written = 0

    def interrupted(*_arguments: Any, **_named: Any) -> None:
        nonlocal written
        written += 1
        if written > 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(recording.os, "symlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        capture(Source(str(lay_out_before(tmp_path, monkeypatch))), destination, hide_names=False)
    assert list(destination.iterdir()) == [] if exists else not destination.exists()


def lay_out_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as real:
        real.setattr(recording.os, "symlink", REAL_SYMLINK)
        return lay_out("built", tmp_path / "whole")


REAL_SYMLINK = os.symlink


def test_a_downgraded_link_is_found_with_its_cure(tmp_path: Path) -> None:
    root = laid_out(H100, tmp_path)
    put(of_drive(root, "nvme5n1"), "current_link_speed", "8.0 GT/s PCIe\n")
    put(of_drive(root, "nvme6n1"), "current_link_width", "2\n")
    findings = [finding for finding in seen(root)["findings"] if finding["id"] == "drive.link"]
    assert ["MADEU205" in findings[0]["found"], "MADEU206" in findings[1]["found"]] == [True, True]
    assert "Gen3 x4 where Gen5 x4 is possible (3.9 of 15.8 GB/s)" in findings[0]["found"]
    assert "Gen5 x2 where Gen5 x4 is possible" in findings[1]["found"]
    assert "reseat" in findings[0]["remedy"]
    text = run("--root", root)
    assert re.search(r"MADEU205 .* Gen3 x4 of Gen5 x4", text)
    drives = seen(root)["ceilings"][0]
    assert drives["value"] == pytest.approx((6 * 15.754 + 3.938 + 7.877) * 1e9, rel=1e-3)


def test_a_shared_link_that_binds_is_named(tmp_path: Path) -> None:
    """Four drives behind one port of x4, as behind a cheap switch."""
    root = laid_out(H100, tmp_path)
    top = root / "sys/devices/pci0000:26"
    switch = top / "0000:26:00.0"
    switch.mkdir()
    for port in [each for each in top.iterdir() if each != switch]:
        port.rename(switch / port.name)
    for link in root.glob("sys/**/*"):
        if link.is_symlink() and "pci0000:26/" in (target := str(link.readlink())):
            link.unlink()
            link.symlink_to(target.replace("pci0000:26/", "pci0000:26/0000:26:00.0/"))
    for name, text in {
        "class": "0x060400",
        "vendor": "0x8086",
        "device": "0x352a",
        "numa_node": "0",
        "current_link_speed": "16.0 GT/s PCIe",
        "current_link_width": "8",
    }.items():
        put(switch, name, text + "\n")
    (root / "sys/bus/pci/devices/0000:26:00.0").symlink_to("../../../devices/pci0000:26/0000:26:00.0")
    shown = seen(root)
    links = next(each for each in shown["ceilings"] if each["id"] == "links")
    assert links["binds"]
    assert links["value"] == pytest.approx((15.754 + 4 * 15.754) * 1e9, rel=1e-3)
    assert "4 drives need 63.0 GB/s of `0000:26:00.0` (Gen4 x8)" in links["of"]
    assert "spread the drives" in findings_of(root)["pcie.shared"]["remedy"]
    assert "switch 0000:26:00.0" in run("--root", root)


def test_a_port_that_is_narrower_than_its_device_is_what_counts(tmp_path: Path) -> None:
    root = laid_out(H100, tmp_path)
    put(of_drive(root, "nvme2n1").parent, "current_link_width", "1\n")
    node = next(each for each in seen(root)["pcie"] if each["address"] == "pci0000:26")
    drive = next(each for each in node["children"] if each["label"] == "nvme2n1")
    assert drive["bandwidth"] == pytest.approx(3.938e9, rel=1e-3)
    assert "a port above is narrower" in run("--root", root)


def test_health_and_unequal_drives_are_findings(tmp_path: Path) -> None:
    root = laid_out(H100, tmp_path)
    beside = json.loads((root / recording.BESIDE).read_text())
    beside["health"]["nvme4"]["media_errors"] = 3
    beside["health"]["nvme7"]["temperature"] = 80
    (root / recording.BESIDE).write_text(json.dumps(beside))
    put(of_drive(root, "nvme3n1") / "nvme/nvme3", "firmware_rev", "OLD\n")
    put(root, "sys/block/nvme8n1/queue/logical_block_size", "4096\n")
    findings = findings_of(root)
    assert "MADEU204" in findings["drives.media_errors"]["found"]
    assert "MADEU207" in findings["drives.thermal"]["found"]
    assert "OLD on `MADEU203`" in findings["drives.firmware"]["found"]
    assert "4096 B on `MADEU208`" in findings["drives.lba"]["found"]
    status = {drive["serial"]: drive["health"]["status"] for drive in seen(root)["drives"]}
    assert (status["MADEU204"], status["MADEU207"], status["MADEU202"]) == ("failing", "warning", "ok")


def test_a_lost_drive_and_a_misaligned_file_system(tmp_path: Path) -> None:
    root = lay_out("lost-drive", tmp_path / "lost")
    assert "1 of 8 members missing" in findings_of(root)["array.state"]["found"]
    assert "7 of 8 drives" in run("--root", root)
    root = lay_out("built", tmp_path / "built")
    mounts = root / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text().replace("sunit=2048,swidth=16384", "sunit=1024,swidth=8192"))
    finding = findings_of(root)["filesystem.alignment"]
    assert "stripe unit 512 KiB, width 4 MiB" in finding["found"]
    assert "tunetool.node.teardown" in finding["remedy"]
    assert "NOT ALIGNED" in run("--root", root)
    mounts.write_text("".join(line + "\n" for line in mounts.read_text().splitlines() if "nvme_raid0" not in line))
    assert "is not mounted" in findings_of(root)["array.mount"]["found"]


def test_the_manifest_tells_what_is_pending(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path)
    manifest = json.loads((ROOT / "tests/data/machines/built-manifest.json").read_text())
    put(root, "etc/tunetool/node.json", json.dumps({**manifest, "reboot_required": True}))
    assert "node.reboot" in findings_of(root)
    put(root, "etc/tunetool/node.json", "{")
    assert "node.reboot" not in findings_of(root)


def test_a_node_with_several_volumes_shows_each(tmp_path: Path) -> None:
    put(tmp_path, "etc/tunetool/node.json", "")
    manifests.write(lay_out_drives(tmp_path), str(tmp_path / "etc/tunetool/node.json"))
    shown = seen(tmp_path)
    built = {drive["serial"]: drive["use"] for drive in shown["drives"] if drive["data"]}
    assert built == {f"LAB1NV{at + 1}": f"drive{at}" for at in range(8)}
    assert shown["ceilings"][0]["of"] == "8 drives of Gen1 x1"
    assert shown["findings"] == []
    recorded = tmp_path / "recorded.json"
    run("--root", tmp_path, "--capture", recorded)
    assert seen(recorded)["drives"] == shown["drives"]
    volumes = json.loads(recorded.read_text())["gds_facts"]["others"]
    assert [each["mount_point"] for each in volumes] == [f"/mnt/nvme_raid0/drive{at}" for at in range(1, 8)]
    mounted = tmp_path / "proc/self/mountinfo"
    kept = [row for row in mounted.read_text().splitlines() if not re.search("/drive[35] ", row)]
    put(tmp_path, "proc/self/mountinfo", "\n".join(kept) + "\n")
    assert findings_of(tmp_path)["filesystem.mounted"]["found"] == (
        "`/mnt/nvme_raid0/drive3`, `/mnt/nvme_raid0/drive5` were built on this node, but are not mounted"
    )


def test_a_drive_away_from_its_numa_array_is_a_finding(tmp_path: Path) -> None:
    put(tmp_path, "etc/tunetool/node.json", "")
    manifests.write(lay_out_numa(tmp_path), str(tmp_path / "etc/tunetool/node.json"))
    shown = seen(tmp_path)
    built = {drive["serial"]: drive["use"] for drive in shown["drives"] if drive["data"]}
    assert built == {f"LAB1NV{at + 1}": f"nvme_raid0_numa{at % 2}" for at in range(8)}
    assert shown["findings"] == []
    (node,) = tmp_path.glob("sys/devices/pci*/**/nvme/nvme3/numa_node")
    node.write_text("1\n")
    finding = findings_of(tmp_path)["array.numa"]
    assert finding["found"] == (
        "volume `numa0`: all drives on the NUMA node of its name expected, found `LAB1NV3` on 1"
    )
    assert "nothing is rebuilt" in finding["remedy"]


def test_a_key_that_cufile_ignores_is_a_finding(tmp_path: Path) -> None:
    root = laid_out(H100, tmp_path)
    put(root, "etc/cufile.json", '{\n  "use_pci_p2pdma": true\n}\n')
    finding = findings_of(root)["gds.config"]
    assert "`/etc/cufile.json` line 2" in finding["found"]
    assert "use_pci_p2pdma" in finding["found"]
    assert "use_pci_p2pdma" in run("--root", root, "--gds")


def container(root: Path) -> Path:
    laid_out(H100, root)
    for path in root.glob("dev/nv*"):
        path.unlink()
    shutil.rmtree(root / "run/udev")
    put(root, "proc/self/mountinfo", CONTAINER)
    put(root, "proc/self/limits", LIMITS)
    put(root, ".dockerenv", "")
    return root


def test_a_container_is_told_what_it_was_not_given(tmp_path: Path) -> None:
    root = container(tmp_path)
    findings = findings_of(root)
    expected = {
        "container.memlock": "--ulimit memlock=-1",
        "container.shm": "--shm-size=",
        "container.volume": "-v /mnt/nvme_raid0:/mnt/nvme_raid0",
        "container.drives": "--device=/dev/nvme0",
        "container.gpus": "--gpus all",
        "container.udev": "-v /run/udev:/run/udev:ro",
        "container.nvidia-fs": "NVIDIA_GDS=enabled",
    }
    assert {name for name in findings if name.startswith("container.")} == set(expected)
    for identity, option in expected.items():
        assert option in findings[identity]["remedy"]
        assert "Kubernetes: " in findings[identity]["remedy"]
    assert "emptyDir" in findings["container.shm"]["remedy"]
    assert "in a container: docker (/.dockerenv)" in run("--root", root)
    # Advice for hosts does not apply in a container.
    assert not {"memory.memlock", "memory.shm", "array.mount"} & set(findings)
    shutil.rmtree(root / "sys/block")
    assert "container.sys" not in findings_of(root)
    shutil.rmtree(root / "sys")
    assert "container.sys" in findings_of(root)


def test_a_container_with_everything_has_nothing_to_say(tmp_path: Path) -> None:
    root = container(tmp_path)
    document = json.loads(H100.read_text())
    number = next(text.strip() for path, text in document["files"].items() if path.endswith("md127/dev"))
    put(
        root,
        "proc/self/mountinfo",
        "27 1 0:50 / / rw - overlay overlay rw\n29 27 0:24 / /dev/shm rw - tmpfs shm rw,size=67108864k\n"
        f"31 27 {number} /job1 /data rw,noatime - xfs /dev/md127 rw,sunit=2048,swidth=16384\n",
    )
    put(root, "proc/self/limits", LIMITS.replace("65536", "unlimited"))
    for name in ("nvme0", "nvidia0", "nvidia-fs0"):
        put(root, f"dev/{name}", "")
    (root / "run/udev/data").mkdir(parents=True)
    assert findings_of(root) == {}
    assert "/data: xfs on md RAID0 (8 x nvme)" in run("--root", root)


@pytest.mark.parametrize(
    ("optimal", "kib", "asked", "costly"),
    [
        (8 * 2**20, 16384, None, False),
        (8 * 2**20, 65536, None, True),
        (8 * 2**20, 65536, 2**26, False),
        (8 * 2**20, 65536, 2**22, True),
        (0, 128, None, False),
        (0, 8192, None, True),
    ],
)
def test_a_read_ahead_above_the_kernel_s_own_is_named(
    tmp_path: Path, optimal: int, kib: int, asked: int | None, costly: bool
) -> None:
    root = laid_out(H100, tmp_path)
    assert "read_ahead" not in findings_of(root), "a recording without it"
    queue = root / "sys/block/md127/queue"
    put(queue, "optimal_io_size", f"{optimal}\n")
    put(queue, "read_ahead_kb", f"{kib}\n")
    if asked is not None:
        manifest = json.loads((RECORDED / "built-manifest.json").read_text())
        manifest["tuning"] = {"read_ahead_bytes": asked}
        put(root, "etc/tunetool/node.json", json.dumps(manifest))
    finding = findings_of(root).get("read_ahead")
    assert (finding is not None) == costly
    if finding:
        assert "(md127) reads " in finding["found"]
        assert f"`echo {max(2 * optimal // 1024, 128)} > /sys/block/md127/queue/read_ahead_kb`" in finding["remedy"]


def test_pages_of_dev_shm_are_shown_and_4_kib_are_a_finding(tmp_path: Path) -> None:
    root = laid_out(H100, tmp_path / "node")
    # A kernel without huge pages for a tmpfs: nothing to say, and nothing to do.
    assert "shm_huge" not in seen(root)["memory"]
    assert "memory.shm_huge" not in findings_of(root)
    put(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
    assert "/dev/shm 1 TiB (huge pages: never);" in run("--root", root)
    assert "host_memory" in findings_of(root)["memory.shm_huge"]["remedy"]
    mountinfo = (root / "proc/self/mountinfo").read_text()
    put(root, "proc/self/mountinfo", mountinfo.replace("tmpfs tmpfs rw,size=", "tmpfs tmpfs rw,huge=within_size,size="))
    assert "/dev/shm 1 TiB (huge pages: within_size);" in run("--root", root)
    assert "memory.shm_huge" not in findings_of(root)


def test_a_container_has_the_huge_pages_of_its_own_mount(tmp_path: Path) -> None:
    root = container(tmp_path)
    put(root, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
    finding = findings_of(root)["container.shm_huge"]
    assert "--ipc=host" in finding["remedy"]
    assert "emptyDir" in finding["remedy"]
    assert "memory.shm_huge" not in findings_of(root)
    put(root, "proc/self/mountinfo", CONTAINER.replace("rw,size", "rw,huge=within_size,size"))
    assert "container.shm_huge" not in findings_of(root)


@pytest.mark.parametrize(
    ("files", "runtime"),
    [
        ({"run/systemd/container": "podman\n"}, "podman"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope\n"}, "kubernetes"),
        ({"proc/1/cgroup": "0::/docker/0123\n"}, "docker"),
        ({}, "unknown"),
    ],
)
def test_containers_are_told_by_what_their_runtime_left(files: dict[str, str], runtime: str, tmp_path: Path) -> None:
    put(tmp_path, "proc/self/mountinfo", "27 1 0:50 / / rw - overlay overlay rw\n")
    for path, text in files.items():
        put(tmp_path, path, text)
    assert seen(tmp_path)["host"]["container"] == runtime


def test_a_machine_made_from_an_image_is_no_container(tmp_path: Path) -> None:
    """Its root is a whole disk, although there is a /.dockerenv."""
    put(tmp_path, "proc/self/mountinfo", "27 1 254:0 / / rw - ext4 /dev/vda rw\n")
    put(tmp_path, ".dockerenv", "")
    put(tmp_path, "run/systemd/container", "docker\n")
    assert "container" not in seen(tmp_path)["host"]
    # systemd-nspawn and LXC may give a whole volume as root; their /run is of this boot.
    with (tmp_path / "proc/self/mountinfo").open("a") as mounts:
        mounts.write("28 27 0:25 / /run rw - tmpfs tmpfs rw\n")
    assert seen(tmp_path)["host"]["container"] == "docker"


def test_a_machine_with_nothing_at_all(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    text = run("--root", tmp_path)
    for words in ("(no name)", "no NVMe drive", "no NVIDIA GPU", "array       none", "off: no NVIDIA GPU"):
        assert words in text
    assert seen(tmp_path)["ceilings"] == []


def test_a_gpu_without_a_driver_and_one_that_idles(tmp_path: Path) -> None:
    root = laid_out(H100, tmp_path)
    for path in (root / "sys/bus/pci/devices").iterdir():
        if path.name in ("0000:1b:00.0", "0000:43:00.0"):
            name, text = ("speed", "2.5 GT/s PCIe") if path.name.startswith("0000:1b") else ("width", "8")
            put(path.resolve(), f"current_link_{name}", text + "\n")
    idle, narrow = [finding for finding in seen(root)["findings"] if finding["id"] == "gpu.link"]
    assert "under load" in idle["remedy"]
    assert "reseat" in narrow["remedy"]
    shutil.rmtree(root / "proc/driver")
    assert "open NVIDIA kernel module" in findings_of(root)["gpu.driver"]["remedy"]
    assert "6 x NVIDIA H100 SXM5 80GB" in run("--root", root)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    data=st.data(),
    text=st.one_of(st.text(max_size=40), st.sampled_from(["", "-1", "255", "nan", "9" * 400, "Unknown", "0x"])),
)
def test_no_value_in_any_file_stops_it(data: st.DataObject, text: str, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    if not root.exists():
        laid_out(H100, root)
    names = sorted(path for path in json.loads(H100.read_text())["files"] if not path.startswith("/dev/"))
    path = root / data.draw(st.sampled_from(names)).lstrip("/")
    before = path.read_bytes()
    try:
        path.write_text(text, errors="replace")
        run("--root", root)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["nr_hugepages", "nvme0n1/size"])
def test_a_number_that_no_float_holds_is_none(name: str, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    laid_out(H100, root)
    files = [path for path in json.loads(H100.read_text())["files"] if path.endswith("/" + name)]
    for path in files:
        (root / path.lstrip("/")).write_text("9" * 400)
    assert files
    run("--root", root)


def test_it_is_quick_because_it_imports_nothing_heavy() -> None:
    done, imported = imported_by("inspect")
    assert done.returncode == 0, done.stderr
    assert imported & {"torch", "deepspeed", "jinja2", "ansible_runner"} == set()


def test_a_virtual_disk_has_a_line_with_what_is_mounted_of_it(tmp_path: Path) -> None:
    disk = tmp_path / "sys/devices/pci0000:00/virtio1/block/vda"
    for path, text in (("size", "536870912"), ("dev", "254:0"), ("device/vendor", "0x1af4")):
        put(disk, path, text + "\n")
    for path, text in (("size", "1024"), ("dev", "254:1"), ("partition", "1")):
        put(disk / "vda1", path, text + "\n")
    for link in ("sys/block/vda", "sys/class/block/vda", "sys/dev/block/254:0"):
        (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / link).symlink_to(disk)
    for link in ("sys/class/block/vda1", "sys/dev/block/254:1"):
        (tmp_path / link).symlink_to(disk / "vda1")
    put(tmp_path, "sys/block/sda/size", "1000000\n")
    put(tmp_path, "sys/block/sda/device/model", "PERC H755\n")
    put(tmp_path, "sys/block/loop0/size", "99\n")
    shown = [disk_words(each) for each in disks({"vda1": "/"}, str(tmp_path))]
    assert shown == [
        "sda: PERC H755, 0.512 GB, not mounted",
        "vda: virtio disk, 275 GB, mounted at /; no link to read a ceiling from: only a measurement counts",
    ]
