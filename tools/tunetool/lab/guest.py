"""The scripts that run inside a node. Pure: text in, text out, one ssh round trip each (1 to 2 s under TCG)."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence

from tunetool.lab import recipe
from tunetool.lab.machine import LINK_HARDWARE

MARKER_BYTES = 64 * 1024

# Fills the page cache that the snapshot keeps: a restored node then answers its first Ansible task warm.
SETTLE = """\
systemctl is-system-running --wait >/dev/null 2>&1 || true
python3 -c 'import json, subprocess, platform, zipfile, tempfile, shutil, selectors, apt'
mdadm --version >/dev/null 2>&1
sync
"""


def marker(serial: str) -> bytes:
    """The contents of ``MARKER`` on the ninth drive: looks random, follows from the serial."""
    lines: list[str] = []
    state = serial.encode()
    while len(lines) * 65 < MARKER_BYTES:
        state = hashlib.sha256(state).digest()
        lines.append(state.hex() + "\n")
    return "".join(lines).encode()[:MARKER_BYTES]


def link_address(index: int) -> str:
    """The address of a node on the link between the nodes."""
    return f"10.0.3.{index}"


def prepare(name: str, index: int, serials: Sequence[str], now: float, *, offline: bool = False) -> str:
    """Give a restored or booted node its identity and wait until it sees its drives and its ninth is mounted.

    Prints the device of the first of ``serials``, the system drive.
    """
    quoted_name = shlex.quote(name)
    machine_id = hashlib.sha256(f"tunetool-lab-{name}-{index}".encode()).hexdigest()[:32]
    return f"""\
date -u -s @{now:.0f} >/dev/null
echo {quoted_name} > /proc/sys/kernel/hostname
echo {quoted_name} > /etc/hostname
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' {quoted_name} > /etc/hosts
echo {machine_id} > /etc/machine-id
{_join(index)}
{_NO_NAMESERVER if offline else ""}
{_FIND}
tries=0
for serial in {" ".join(shlex.quote(serial) for serial in serials)}; do
    until find_drive "$serial" >/dev/null; do
        tries=$((tries + 1))
        [ "$tries" -lt 150 ] || {{ echo "drive $serial does not appear" >&2; exit 1; }}
        sleep 0.1
    done
done
until mountpoint -q {recipe.SYSTEM_MOUNT}; do
    tries=$((tries + 1))
    [ "$tries" -lt 300 ] || {{ echo "{recipe.SYSTEM_MOUNT} is not mounted" >&2; exit 1; }}
    sleep 0.1
done
{_UDEV_IDLE}
{_DRIVES_ANSWER}
find_drive {shlex.quote(serials[0])}
"""


# Else every look-up of a name waits ten seconds for an answer that cannot come.
_NO_NAMESERVER = ": > /etc/resolv.conf"


def _join(index: int) -> str:
    """Put the node on the link to the others, now and at every boot. All come from one snapshot, with one address."""
    hardware, address = f"{LINK_HARDWARE}{index:02x}", f"{link_address(index)}/24"
    network = (
        f"[Match]\\nName=eth1\\n\\n[Link]\\nMACAddress={hardware}\\n\\n[Network]\\nAddress={address}\\n"
        "LinkLocalAddressing=no\\nIPv6AcceptRA=no\\n"
    )
    return (
        f"printf '{network}' > /etc/systemd/network/20-lab-link.network\n"
        f"ip link set dev eth1 address {hardware} up\n"
        f"ip address replace {address} dev eth1"
    )


def remove_devices(addresses: Sequence[str]) -> str:
    """Let the node's drivers go of PCI devices, and the machine answer what they asked of it last."""
    paths = " ".join(shlex.quote(f"/sys/bus/pci/devices/{address}/remove") for address in addresses)
    return f'for remove in {paths}; do [ ! -e "$remove" ] || echo 1 > "$remove"; done; sleep 0.2'


def wait_for_drives(count: int) -> str:
    """Wait until the node has ``count`` NVMe drives."""
    return f"""\
tries=0
while :; do
    found=0
    # A path of a drive with several (nvme9c9n1) is listed too and has no device node.
    for block in /sys/block/nvme*n*; do
        [ -b "/dev/${{block##*/}}" ] && found=$((found + 1))
    done
    [ "$found" -ne {count} ] || break
    tries=$((tries + 1))
    [ "$tries" -lt 300 ] || {{ echo "$found drives instead of {count}" >&2; exit 1; }}
    sleep 0.1
done
{_UDEV_IDLE}
"""


# One line names the processes of udev that hang, each with the kernel function in which it waits.
_UDEV_IDLE = """\
udevadm settle --timeout=30 || {
    hanging=$(ps -e -o stat,wchan:24,args | grep -E '[u]dev|[m]dadm|[b]lkid' | tr -s ' ' | tr '\\n' ';')
    echo "udev is still at work: $hanging" >&2
    exit 1
}"""

# A drive has a queue for each CPU. If a restore lost the interrupts of one, the kernel finds its answers by polling,
# 30 s after each request.
_DRIVES_ANSWER = """\
for cpu in /sys/devices/system/cpu/cpu[0-9]*; do
    blockdev --flushbufs /dev/nvme*n1
    timeout 25 taskset -c "${cpu##*cpu}" head -q -c 4096 /dev/nvme*n1 >/dev/null || {
        echo "drives do not answer ${cpu##*/}: $(dmesg | grep -i nvme | tail -n 2 | tr '\\n' ';')" >&2
        exit 1
    }
done"""

# Only shell built-ins: a fork costs 10 ms and more under TCG. The serial is padded with spaces, which `read` drops.
_FIND = """\
find_drive() {
    for directory in /sys/class/nvme/nvme*; do
        [ -r "$directory/serial" ] || continue
        read -r found < "$directory/serial" || true
        [ "$found" = "$1" ] || continue
        for block in "$directory"/nvme*n*; do
            [ -e "$block" ] && [ -b "/dev/${block##*/}" ] && { echo "/dev/${block##*/}"; return 0; }
        done
    done
    return 1
}"""


def on_drive(serial: str, script: str) -> str:
    """``script`` with ``$drive`` set to the device of the drive with this serial."""
    return (
        f"{_FIND}\ndrive=$(find_drive {shlex.quote(serial)}) || "
        f"{{ echo 'drive {serial} is not there' >&2; exit 1; }}\n{script}"
    )
