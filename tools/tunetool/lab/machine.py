"""The virtual machine as a QEMU argument list. Pure: nothing here starts anything or looks at the machine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

CPUS = 2
SPARE_PORTS = 2
"""Root ports beyond the drives that a node starts with: a replacement can arrive before the old one leaves."""

# Nehalem is the plainest CPU that boots Debian: under TCG it is half again as fast as `max`. pdpe1gb is what a
# node needs to show 1 GiB huge pages.
_TCG = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "Nehalem,+pdpe1gb"]
_KVM = ["-accel", "kvm", "-cpu", "host"]

LINK_HARDWARE = "52:54:00:1a:be:"
"""The first five bytes of each node's hardware address on the link between the nodes; the last is the node's number."""

# The first root port; 0x1f is the chipset's own.
_FIRST_SLOT = 4
_PLAIN_BLOCK = 512
_BAD_EVERY = 8 * 2**20
_MOST_BAD = 512
"""Each bad sector takes two rules of QEMU's, and all of a drive's rules are one argument of its command line."""
_EIO = 5


@dataclass(frozen=True)
class Drive:
    """One NVMe drive: a sparse raw file behind a controller with a serial number of its own."""

    serial: str
    path: Path
    size: int
    port: int
    block: int = 512
    """Logical block in bytes."""
    says: str | None = None
    """The serial that the drive shows, if it is not its own."""
    bad_sectors: bool = False
    """True if some of its sectors can be neither read nor written."""

    @property
    def shown_serial(self) -> str:
        """The serial that the node reads."""
        return self.serial if self.says is None else self.says

    @property
    def device_id(self) -> str:
        """QEMU's id of the controller."""
        return f"nvme-{self.serial}"

    @property
    def node_name(self) -> str:
        """QEMU's name of the file behind the drive."""
        return f"file-{self.serial}"

    @property
    def bad_node_name(self) -> str:
        """QEMU's name of the layer that simulates bad sectors."""
        return f"bad-{self.serial}"

    def blockdev(self) -> dict[str, object]:
        """The back end, for ``-blockdev`` and ``blockdev-add`` alike."""
        disk: dict[str, object] = {
            "driver": "file",
            "node-name": self._disk_name,
            "filename": str(self.path),
            "discard": "unmap",
        }
        return self._raw({**self._bad_layer(), "image": disk} if self.bad_sectors else disk)

    def going_bad(self) -> tuple[dict[str, object], dict[str, object]]:
        """For an attached drive: the layer to add, and the back end to reopen with it."""
        return {**self._bad_layer(), "image": self._disk_name}, self._raw(self.bad_node_name)

    def bad_sector_numbers(self) -> list[int]:
        """Numbers of the bad sectors of 512 bytes, spread over the drive except for its first 8 MiB with the labels."""
        spacing = max(_BAD_EVERY, self.size // _MOST_BAD)
        # At odd offsets, which hold neither a header of a file system nor the edge of a stripe.
        return [(start + 5 * spacing // 8) // 512 + 3 for start in range(spacing, self.size - spacing + 1, spacing)]

    @property
    def _disk_name(self) -> str:
        return f"disk-{self.serial}"

    def _raw(self, file: object) -> dict[str, object]:
        return {
            "driver": "raw",
            "node-name": self.node_name,
            "discard": "unmap",
            "cache": {"no-flush": True},
            "file": file,
        }

    def _bad_layer(self) -> dict[str, object]:
        rules = [
            {"event": "none", "iotype": direction, "errno": _EIO, "sector": sector}
            for sector in self.bad_sector_numbers()
            for direction in ("read", "write")
        ]
        return {"driver": "blkdebug", "node-name": self.bad_node_name, "inject-error": rules}

    def device(self) -> dict[str, object]:
        """The controller, for ``-device`` and ``device_add`` alike."""
        odd: dict[str, object] = {}
        if self.block != _PLAIN_BLOCK:
            odd.update(logical_block_size=self.block, physical_block_size=self.block)
        if self.says:
            # QEMU makes a drive's NQN from its serial, and Linux rejects the second drive with the same NQN. Drives pad
            # their serials with blanks, so one more changes the NQN alone.
            odd.update(serial=self.says + " ")
        return {
            "driver": "nvme",
            "id": self.device_id,
            "serial": self.shown_serial,
            "drive": self.node_name,
            "bus": f"rp{self.port}",
            **odd,
        }


@dataclass(frozen=True)
class Boot:
    """What QEMU starts itself: a kernel, or the boot loader, which finds kernel and command line on the disk."""

    kernel: Path
    initrd: Path | None = None
    cmdline: str | None = None

    def arguments(self) -> list[str]:
        """The arguments for QEMU's command line."""
        result = ["-kernel", str(self.kernel)]
        result += ["-initrd", str(self.initrd)] if self.initrd else []
        return result + (["-append", self.cmdline] if self.cmdline is not None else [])


@dataclass(frozen=True)
class Machine:
    """The arguments of QEMU. A restored node needs the same as its snapshot, drives excepted."""

    name: str
    memory: int
    accel: str
    ports: int
    disk: Path
    disk_format: str
    ssh_port: int
    qmp_socket: Path
    pid_file: Path
    serial_log: Path
    link: str = ""
    """Multicast group and port on the loopback address that join the nodes of a lab; empty: this node is alone."""
    offline: bool = False
    """No way out: only ssh leads in, and the link to the other nodes stays."""
    numa: bool = False
    """The slots of drives are those of both NUMA nodes by turns; else of neither."""
    boot: Boot | None = None
    """What QEMU boots at power-on and at every reset."""
    restored: bool = False
    """Wait for a snapshot instead of powering on."""
    drives: tuple[Drive, ...] = field(default=())

    def arguments(self) -> list[str]:
        """The command line after the program's name."""
        result = ["-name", self.name, "-machine", "q35", *(_KVM if self.accel == "kvm" else _TCG)]
        result += ["-smp", f"{CPUS},sockets={CPUS}", "-m", f"{self.memory // 2**20}M"]
        for node in range(CPUS):
            # A NUMA node for each processor, as a GPU server has them, with an equal part of the memory.
            part = self.memory // 2**20 // CPUS + (self.memory // 2**20 % CPUS if node == 0 else 0)
            result += ["-object", f"memory-backend-ram,id=ram{node},size={part}M"]
            result += ["-numa", f"node,nodeid={node},cpus={node},memdev=ram{node}"]
        result += ["-nodefaults", "-no-user-config", "-display", "none", "-rtc", "base=utc"]
        result += ["-daemonize", "-pidfile", str(self.pid_file)]
        result += ["-chardev", f"socket,id=qmp,path={_quoted(self.qmp_socket)},server=on,wait=off"]
        result += ["-mon", "chardev=qmp,mode=control"]
        result += ["-chardev", f"file,id=serial,path={_quoted(self.serial_log)},append=on"]
        result += ["-serial", "chardev:serial"]
        result += _json("-blockdev", self._root())
        result += ["-device", "virtio-blk-pci,drive=root,addr=0x2"]
        way_out = ",restrict=on" if self.offline else ""
        result += ["-netdev", f"user,id=net{way_out},hostfwd=tcp:127.0.0.1:{self.ssh_port}-:22"]
        # The second card is always there: a snapshot restores only into the same machine.
        joined = f"socket,id=link,mcast={self.link},localaddr=127.0.0.1" if self.link else "hubport,id=link,hubid=0"
        result += ["-netdev", joined]
        result += ["-device", "virtio-net-pci,netdev=net,addr=0x3.0x0,multifunction=on,romfile="]
        result += ["-device", "virtio-net-pci,netdev=link,addr=0x3.0x1,romfile="]
        result += ["-device", "virtio-rng-pci,addr=0x1"]
        for node in range(CPUS) if self.numa else ():
            result += _json("-device", _host_bridge(node))
        for port in range(self.ports):
            slot = _root_port(port)
            if self.numa:
                # The bridges begin to count on their own buses.
                slot.update(bus=_host_bridge(port % CPUS)["id"], addr=f"{port // CPUS:#x}")
            result += _json("-device", slot)
        for drive in self.drives:
            result += _json("-blockdev", drive.blockdev()) + _json("-device", drive.device())
        result += self.boot.arguments() if self.boot else []
        return [*result, "-S", "-incoming", "defer"] if self.restored else result

    def _root(self) -> dict[str, object]:
        # Flushes are dropped: a node is thrown away, never recovered from the build machine's own crash.
        return {
            "driver": self.disk_format,
            "node-name": "root",
            "discard": "unmap",
            "cache": {"no-flush": True},
            "file": {"driver": "file", "filename": str(self.disk), "discard": "unmap"},
        }


def _host_bridge(node: int) -> dict[str, object]:
    # A root of its own for each NUMA node, which the firmware's tables name; the bus numbers lie far apart.
    return {
        "driver": "pxb-pcie",
        "id": f"numa{node}",
        "bus": "pcie.0",
        "bus_nr": 64 * (node + 1),
        "numa_node": node,
        "addr": f"{_FIRST_SLOT + node:#x}",
    }


def _root_port(index: int) -> dict[str, object]:
    # A Gen4 x4 slot, as a data-center NVMe drive sits in.
    return {
        "driver": "pcie-root-port",
        "id": f"rp{index}",
        "bus": "pcie.0",
        "chassis": index + 1,
        "slot": index + 1,
        "addr": f"{_FIRST_SLOT + index:#x}",
        "x-speed": "16",
        "x-width": "4",
        "io-reserve": 0,
    }


def _json(option: str, value: dict[str, object]) -> list[str]:
    return [option, json.dumps(value)]


def _quoted(path: Path) -> str:
    # QEMU's own escape for a comma inside an option.
    return str(path).replace(",", ",,")
