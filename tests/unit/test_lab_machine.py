"""The QEMU command line, the recipe of the image and the scripts for the guest: text in, text out."""

from __future__ import annotations

import configparser
import hashlib
import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from calls import call
from tunetool.lab import faults, guest, quiesce, recipe
from tunetool.lab.machine import Boot, Drive, Machine

MACHINE = Machine(
    name="tunetool-lab-node1",
    memory=2 * 2**30,
    accel="tcg",
    ports=11,
    disk=Path("/lab/node1/disk.qcow2"),
    disk_format="qcow2",
    ssh_port=2201,
    qmp_socket=Path("/run/lab/node1.qmp"),
    pid_file=Path("/lab/node1/qemu.pid"),
    serial_log=Path("/lab/node1/serial.log"),
)
DRIVES = tuple(
    Drive(serial, Path(f"/lab/node1/drives/{serial}.img"), 4 * 2**30, port)
    for port, serial in enumerate(["LAB1SYS", "LAB1NV1", "LAB1NV2"])
)
DRIVE_USE = quiesce.DriveUse(
    arrays=("md127",),
    names=("it's mine",),
    mounts=(quiesce.Mount("0-1", "xfs", "rw,noatime", "/mnt/a b"),),
    swaps=(("/dev/nvme3n1", "0-2"),),
)
BOOT = Boot(Path("/b/vmlinuz"), Path("/b/initrd.img"), "root=/dev/vda quiet")


def values(arguments: list[str], option: str) -> list[str]:
    return [after for before, after in itertools.pairwise(arguments) if before == option]


def devices(arguments: list[str], driver: str) -> list[dict[str, object]]:
    documents = [json.loads(value) for value in values(arguments, "-device") if value.startswith("{")]
    return [device for device in documents if device["driver"] == driver]


def test_a_restored_machine_waits_and_resets_into_its_loader():
    arguments = replace(MACHINE, boot=Boot(Path("/b/grub")), restored=True, drives=()).arguments()
    assert arguments[-3:] == ["-S", "-incoming", "defer"]
    assert values(arguments, "-kernel") == ["/b/grub"]
    assert "-append" not in arguments
    assert "-initrd" not in arguments
    assert devices(arguments, "nvme") == []
    assert len(devices(arguments, "pcie-root-port")) == 11


def test_a_boot_names_kernel_initramfs_and_command_line():
    arguments = replace(MACHINE, boot=BOOT).arguments()
    assert values(arguments, "-kernel") == ["/b/vmlinuz"]
    assert values(arguments, "-initrd") == ["/b/initrd.img"]
    assert values(arguments, "-append") == ["root=/dev/vda quiet"]
    assert "-incoming" not in arguments


def test_each_drive_has_a_port_in_the_order_of_slots():
    arguments = replace(MACHINE, boot=BOOT, drives=DRIVES).arguments()
    drives = devices(arguments, "nvme")
    assert [(device["serial"], device["bus"]) for device in drives] == [
        ("LAB1SYS", "rp0"),
        ("LAB1NV1", "rp1"),
        ("LAB1NV2", "rp2"),
    ]
    backends = {json.loads(value)["node-name"]: json.loads(value) for value in values(arguments, "-blockdev")}
    for device, drive in zip(drives, DRIVES, strict=True):
        assert backends[device["drive"]]["file"]["filename"] == str(drive.path)


BAD = replace(DRIVES[1], bad_sectors=True)


def test_a_drive_that_goes_bad_is_as_one_booted_bad():
    arguments = replace(MACHINE, boot=BOOT, drives=(DRIVES[0], BAD)).arguments()
    (_, whole, booted) = (json.loads(value) for value in values(arguments, "-blockdev"))
    assert whole["file"]["driver"] == "file"
    layer, reopened = DRIVES[1].going_bad()
    assert layer["image"] == DRIVES[1].blockdev()["file"]["node-name"] == booted["file"]["image"]["node-name"]
    assert {**booted["file"], "image": layer["image"]} == layer
    assert {**booted, "file": layer["node-name"]} == reopened
    assert booted["file"]["driver"] == "blkdebug"


@pytest.mark.parametrize("size", [64 * 2**20, 4 * 2**30, 4 * 2**40])
def test_bad_sectors_are_scattered_and_fit_into_one_argument(size: int):
    bad = replace(BAD, size=size)
    sectors = bad.bad_sector_numbers()
    assert 7 <= len(sectors) <= 512
    assert sectors == sorted(set(sectors))
    assert min(sectors) > 8 * 2**20 // 512
    assert max(sectors) < size // 512
    assert all(sector % 8 for sector in sectors)
    rules = bad.going_bad()[0]["inject-error"]
    assert [(rule["sector"], rule["iotype"]) for rule in rules] == [
        (s, way) for s in sectors for way in ("read", "write")
    ]
    # Linux takes no longer argument (MAX_ARG_STRLEN).
    assert len(json.dumps(bad.blockdev())) < 128 * 1024


def test_every_root_port_has_a_slot_of_its_own_below_the_chipset():
    ports = devices(replace(MACHINE, ports=27).arguments(), "pcie-root-port")
    slots = [int(str(port["addr"]), 16) for port in ports]
    assert len(set(slots)) == 27
    assert min(slots) > 3
    assert max(slots) < 0x1F


@pytest.mark.parametrize(("accel", "cpu"), [("tcg", "Nehalem,+pdpe1gb"), ("kvm", "host")])
def test_the_cpu_follows_the_acceleration(accel: str, cpu: str):
    arguments = replace(MACHINE, accel=accel).arguments()
    assert values(arguments, "-cpu") == [cpu]
    assert values(arguments, "-accel")[0].startswith(accel)


def test_each_processor_has_a_numa_node_with_its_memory():
    arguments = replace(MACHINE, memory=2049 * 2**20).arguments()
    assert values(arguments, "-numa") == ["node,nodeid=0,cpus=0,memdev=ram0", "node,nodeid=1,cpus=1,memdev=ram1"]
    assert values(arguments, "-object") == [
        "memory-backend-ram,id=ram0,size=1025M",
        "memory-backend-ram,id=ram1,size=1024M",
    ]


def test_slots_are_of_both_numa_nodes_where_it_is_asked_for():
    assert devices(MACHINE.arguments(), "pxb-pcie") == []
    arguments = replace(MACHINE, numa=True).arguments()
    bridges = devices(arguments, "pxb-pcie")
    assert [(bridge["id"], bridge["numa_node"]) for bridge in bridges] == [("numa0", 0), ("numa1", 1)]
    ports = devices(arguments, "pcie-root-port")
    assert [port["id"] for port in ports] == [port["id"] for port in devices(MACHINE.arguments(), "pcie-root-port")]
    assert [port["bus"] for port in ports[:4]] == ["numa0", "numa1", "numa0", "numa1"]
    assert len({(port["bus"], port["addr"]) for port in ports}) == len(ports)


def test_only_loopback_leads_in_and_the_terminal_is_not_shared():
    arguments = MACHINE.arguments()
    assert values(arguments, "-netdev")[0] == "user,id=net,hostfwd=tcp:127.0.0.1:2201-:22"
    assert "-daemonize" in arguments
    assert not [argument for argument in arguments if "stdio" in argument]


def test_a_link_joins_nodes_over_loopback_and_changes_no_other():
    alone = MACHINE.arguments()
    joined = replace(MACHINE, link="239.1.2.3:20001").arguments()
    assert values(joined, "-netdev")[1] == "socket,id=link,mcast=239.1.2.3:20001,localaddr=127.0.0.1"
    # A snapshot restores only into the same devices.
    assert values(alone, "-device") == values(joined, "-device")
    assert [card for card in values(alone, "-device") if "netdev=link" in card]


def test_an_offline_node_is_led_to_by_ssh_and_has_no_way_out():
    way_in = values(replace(MACHINE, offline=True).arguments(), "-netdev")[0].split(",")
    assert {"restrict=on", "hostfwd=tcp:127.0.0.1:2201-:22"} <= set(way_in)


def test_every_node_keeps_its_own_address_on_the_link():
    scripts = [guest.prepare(f"node{index}", index, ["LAB1SYS"], 0) for index in (1, 10)]
    for script, address, hardware in zip(
        scripts, ("10.0.3.1", "10.0.3.10"), ("52:54:00:1a:be:01", "52:54:00:1a:be:0a"), strict=True
    ):
        assert f"ip address replace {address}/24 dev eth1" in script
        assert f"ip link set dev eth1 address {hardware} up" in script
        written = call(
            "sh", "-c", next(line for line in script.splitlines() if "20-lab-link" in line).split(" > ")[0], check=True
        ).stdout
        network = configparser.ConfigParser()
        network.read_string(written)
        assert network["Link"]["MACAddress"] == hardware
        assert network["Network"]["Address"] == f"{address}/24"


def test_a_node_without_a_network_asks_no_nameserver():
    asks, asks_not = (guest.prepare("node1", 1, ["LAB1SYS"], 0, offline=offline) for offline in (False, True))
    assert "/etc/resolv.conf" not in asks
    assert ": > /etc/resolv.conf" in asks_not


def test_a_comma_in_a_path_does_not_end_an_option():
    arguments = replace(MACHINE, qmp_socket=Path("/run/a,b/q")).arguments()
    assert any("path=/run/a,,b/q," in argument for argument in arguments)


def test_the_image_key_changes_with_the_system_and_not_by_itself():
    assert recipe.fingerprint("debian12") == recipe.fingerprint("debian12")
    assert recipe.fingerprint("debian12") != recipe.fingerprint("debian13")


def test_the_recipe_has_what_the_roles_install():
    assert {"mdadm", "grub2-common", "xfsprogs", "nvme-cli", "fio", "rsync", "python3-apt"} <= set(recipe.PACKAGES)


def test_the_marker_follows_from_the_serial_alone():
    first = guest.marker("LAB1SYS")
    assert len(first) == guest.MARKER_BYTES
    assert first == guest.marker("LAB1SYS")
    assert hashlib.sha256(first).digest() != hashlib.sha256(guest.marker("LAB2SYS")).digest()


@pytest.mark.parametrize(
    "script",
    [
        recipe.FINISH_SCRIPT,
        guest.SETTLE,
        guest.prepare("node1", 1, ["LAB1SYS", "LAB1NV1"], 1.7e9),
        guest.prepare("node1", 1, ["LAB1SYS"], 1.7e9, offline=True),
        guest.wait_for_drives(8),
        *(script("LAB1NV3") for script in faults.GUEST_SCRIPTS.values()),
        quiesce.LOOK,
        quiesce.take_down(DRIVE_USE),
        quiesce.bring_back(DRIVE_USE),
    ],
)
def test_every_script_is_valid_shell(script: str):
    done = subprocess.run(["sh", "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
