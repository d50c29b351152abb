"""Write docs/machines/*.json: made-up recordings of machines, which match what is published about them.

``--check`` ends with 1 where a file is not what this would write. docs/machines/README.md names the sources.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunetool.node.gds.facts import GdsFacts
from tunetool.node.machine.drive_health import Health
from tunetool.node.machine.recording import SCHEMA_NAME

PLACE = Path(__file__).resolve().parents[2] / "docs/machines"
GEN4, GEN5 = "16.0 GT/s PCIe", "32.0 GT/s PCIe"
MIB = 2**20


class Machine:
    """A recording in the making."""

    def __init__(self, name: str, note: str) -> None:
        self.name = name
        self.files: dict[str, str] = {"/proc/sys/kernel/hostname": name + "\n"}
        self.links: dict[str, str] = {}
        self.directories: list[str] = []
        self.note = f"made to match the published layout of {note}; nobody recorded it (docs/machines/README.md)"
        self.health: dict[str, Any] = {}
        self.numbers = 0

    def put(self, base: str, **files: object) -> None:
        for name, value in files.items():
            self.files[f"{base}/{name}"] = f"{value}\n"

    def link(self, path: str, target: str) -> None:
        self.links[path] = os.path.relpath(target, Path(path).parent)

    def pci(self, *chain: str, kind: int, vendor: int, device: int, numa: int, speed: str | None, width: int) -> str:
        """The function at the end of ``chain``: a root complex, ports, itself. Its link runs as fast as it can."""
        base = "/sys/devices/" + "/".join(chain)
        self.put(base, **{"class": f"{kind:#08x}", "vendor": f"{vendor:#06x}", "device": f"{device:#06x}"})
        self.put(base, numa_node=numa)
        speeds = {"current_link_speed": speed or "Unknown", "max_link_speed": speed or "Unknown"}
        self.put(base, current_link_width=width, max_link_width=width, **speeds)
        self.link(f"/sys/bus/pci/devices/{chain[-1]}", base)
        return base

    def port(self, *chain: str, numa: int, speed: str | None = GEN5, width: int = 16) -> None:
        self.pci(*chain, kind=0x060400, vendor=0x8086, device=0x352A, numa=numa, speed=speed, width=width)

    def gpu(self, *chain: str, device: int, model: str, numa: int) -> None:
        self.pci(*chain, kind=0x030200, vendor=0x10DE, device=device, numa=numa, speed=GEN5, width=16)
        self.put(f"/proc/driver/nvidia/gpus/{chain[-1]}", information=f"Model: \t\t {model}")
        self.files[f"/dev/nvidia{sum(path.startswith('/dev/nvidia') for path in self.files)}"] = ""

    def nic(self, *chain: str, vendor: int, device: int, kind: int, name: str, numa: int) -> None:
        base = self.pci(*chain, kind=kind, vendor=vendor, device=device, numa=numa, speed=GEN5, width=16)
        self.directories.append(f"{base}/infiniband/{name}")

    def drive(
        self, *chain: str, number: int, model: str, firmware: str, serial: str, size: int, numa: int, speed: str | None,
        ids: tuple[int, int], temperature: int | None = 36,
    ) -> str:  # fmt: skip
        """The directory of its namespace."""
        width = 4 if speed else 0
        base = self.pci(*chain, kind=0x010802, vendor=ids[0], device=ids[1], numa=numa, speed=speed, width=width)
        controller, namespace = f"nvme{number}", f"nvme{number}n1"
        at = f"{base}/nvme/{controller}"
        self.put(
            at, address=chain[-1], firmware_rev=firmware, model=f"{model:40}", numa_node=numa, serial=f"{serial:20}"
        )
        self.put(at, transport="pcie")
        self.link(f"{at}/device", base)
        self.link(f"/sys/class/nvme/{controller}", at)
        block = self.block(f"{at}/{namespace}", namespace, size)
        self.link(f"{block}/device", at)
        self.put(block, metadata_bytes=0)
        self.files[f"/dev/{controller}"] = self.files[f"/dev/{namespace}"] = ""
        self.link(f"/dev/disk/by-id/nvme-{model.replace(' ', '_')}_{serial}", f"/dev/{namespace}")
        if temperature is not None:
            self.health[controller] = asdict(
                Health(0, temperature, 100, 10, 1 + number % 3, 0, 0, 0, 0, warning_temperature=77)
            )
        return block

    def block(self, base: str, name: str, size: int) -> str:
        number = f"{259 if name.startswith('nvme') else 9}:{self.numbers}"
        self.numbers += 1
        self.put(base, dev=number, size=size // 512)
        self.put(f"{base}/queue", iostats=1, logical_block_size=512)
        self.link(f"/sys/block/{name}" if "p" not in name[4:] else f"/sys/class/block/{name}", base)
        self.link(f"/sys/class/block/{name}", base)
        self.link(f"/sys/dev/block/{number}", base)
        return base

    def partition(self, disk: str, index: int, size: int) -> str:
        name = f"{disk.rsplit('/', 1)[1]}p{index}"
        base = self.block(f"{disk}/{name}", name, size)
        self.put(base, partition=index)
        return base

    def array(self, device: str, name: str, level: str, chunk: int, members: list[str], uuid: str) -> str:
        base = f"/sys/devices/virtual/block/{device}"
        self.block(base, device, 0)
        self.put(f"{base}/md", level=level, chunk_size=chunk, raid_disks=len(members), array_state="clean")
        for slot, member in enumerate(members):
            kernel_name = member.rsplit("/", 1)[1]
            self.link(f"{base}/slaves/{kernel_name}", member)
            self.link(f"{member}/holders/{device}", base)
            self.link(f"{base}/md/rd{slot}", f"{base}/md/dev-{kernel_name}")
            self.link(f"{base}/md/dev-{kernel_name}/block", member)
        self.link(f"/dev/disk/by-id/md-uuid-{uuid}", f"/dev/{device}")
        self.link(f"/dev/disk/by-id/md-name-{self.name}:{name}", f"/dev/{device}")
        return self.files[f"{base}/dev"].strip()

    def host(
        self, machine: tuple[str, str], cpu: str, kernel: str, distribution: str, flags: str, numa: list[str]
    ) -> None:
        self.put("/sys/class/dmi/id", sys_vendor=machine[0], product_name=machine[1])
        self.put("/proc/sys/kernel", osrelease=kernel)
        blocks = [
            f"processor\t: {socket}\nphysical id\t: {socket}\nmodel name\t: {cpu}\nflags\t\t: {flags}\n"
            for socket in range(len(numa))
        ]
        self.files["/proc/cpuinfo"] = "\n".join(blocks)
        self.files["/etc/os-release"] = distribution
        count = sum(
            int(low_high.split("-")[1]) - int(low_high.split("-")[0]) + 1
            for part in numa
            for low_high in part.split(",")
        )
        self.put("/sys/devices/system/cpu", online=f"0-{count - 1}")
        for node, cpus in enumerate(numa):
            self.put(f"/sys/devices/system/node/node{node}", cpulist=cpus)
        self.directories += ["/run/udev/data"]

    def memory(self, total: int, available: int, pages_a_node: int, nodes: int, memlock: str) -> None:
        self.files["/proc/meminfo"] = f"MemTotal:       {total // 1024} kB\nMemAvailable:   {available // 1024} kB\n"
        for size, count in ((2048, pages_a_node), (1048576, 0)):
            pool = f"hugepages/hugepages-{size}kB"
            self.put(f"/sys/kernel/mm/{pool}", nr_hugepages=count * nodes, free_hugepages=count * nodes)
            for node in range(nodes):
                directory = f"/sys/devices/system/node/node{node}/{pool}"
                self.put(directory, nr_hugepages=count, free_hugepages=count)
        head = "Limit                     Soft Limit           Hard Limit           Units     \n"
        self.files["/proc/self/limits"] = f"{head}Max locked memory         {memlock:20} {memlock:20} bytes     \n"

    def mounts(self, *lines: str) -> None:
        always = [
            "22 28 0:20 / /sys rw,nosuid,nodev,noexec,relatime - sysfs sysfs rw",
            "23 28 0:21 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw",
        ]
        self.files["/proc/self/mountinfo"] = "".join(line + "\n" for line in [*always, *lines])
        self.files["/proc/swaps"] = "Filename\tType\tSize\tUsed\tPriority\n"

    def document(self, gds: GdsFacts) -> str:
        document = {
            "schema": SCHEMA_NAME,
            "note": self.note,
            "files": self.files,
            "links": self.links,
            "directories": sorted(self.directories),
            "health": self.health or None,
            # Only what is not as by default: a new fact leaves the files as they are.
            "gds_facts": {name: value for name, value in asdict(gds).items() if value != getattr(GdsFacts(), name)},
        }
        return json.dumps(document, indent=0, sort_keys=True) + "\n"


def ubuntu(version: str, name: str) -> str:
    return f'PRETTY_NAME="{name}"\nNAME="Ubuntu"\nVERSION_ID="{version}"\nID=ubuntu\nID_LIKE=debian\n'


def driver(machine: Machine, version: str) -> None:
    text = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build  (made)\n"
    machine.files["/proc/driver/nvidia/version"] = text


def h100() -> str:
    """A DGX H100 after `site.yml`: RAID1 of the M.2 pair for the system, RAID0 and XFS over the eight data drives."""
    machine = Machine("h100-made", "an eight-drive H100 node")
    kernel = "5.15.0-1063-nvidia"
    machine.host(
        ("NVIDIA", "DGXH100"), "Intel(R) Xeon(R) Platinum 8480C", kernel, ubuntu("22.04", "Ubuntu 22.04.4 LTS"),
        "fpu sse2 avx512f", ["0-55,112-167", "56-111,168-223"],
    )  # fmt: skip
    machine.memory(2 * 2**40, 1_948 * 2**30, 2048, 2, "unlimited")
    driver(machine, "550.90.12")
    for index, bus in enumerate((0x18, 0x40, 0x4F, 0x5E, 0x9A, 0xC0, 0xCE, 0xDC)):
        numa, top = index // 4, f"pci0000:{bus - 3:02x}"
        up = (top, f"0000:{bus - 3:02x}:01.0", f"0000:{bus - 2:02x}:00.0")
        machine.port(*up[:2], numa=numa)
        machine.port(*up, numa=numa)
        below = [(*up, f"0000:{bus - 1:02x}:{slot:02x}.0") for slot in (0, 2)]
        for port in below:
            machine.port(*port, numa=numa)
        name = f"mlx5_{(0, 3, 4, 5, 6, 9, 10, 11)[index]}"
        nic = f"0000:{bus:02x}:00.0"
        machine.nic(*below[0], nic, vendor=0x15B3, device=0x1021, kind=0x020700, name=name, numa=numa)
        machine.gpu(*below[1], f"0000:{bus + 3:02x}:00.0", device=0x2330, model="NVIDIA H100 80GB HBM3", numa=numa)
    system: list[str] = []
    data: list[str] = []
    # nvme0 and nvme1 are the M.2 pair here; on another boot they need not be.
    for number in range(10):
        small = number < 2
        numa, position = (0, number) if small else divmod(number - 2, 4)
        bus = 0x02 if small else (0x26, 0xA6)[numa]
        above = (f"pci0000:{bus:02x}", f"0000:{bus:02x}:{2 * position + 1:02x}.0")
        machine.port(*above, numa=numa, speed=GEN4 if small else GEN5, width=4)
        block = machine.drive(
            *above, f"0000:{bus + 1 + position:02x}:00.0", number=number,
            model="SAMSUNG MZ1L21T9HCLS-00A07" if small else "SAMSUNG MZWLO3T8HCLS-00A07",
            firmware="GDC7502Q" if small else "OPPA3B5Q", serial=f"MADE{'M2' if small else 'U2'}{number:02d}",
            size=1_920_383_410_176 if small else 3_840_755_982_336, numa=numa, speed=GEN4 if small else GEN5,
            ids=(0x144D, 0xA80A if small else 0xA826), temperature=33 + number % 5,
        )  # fmt: skip
        (system if small else data).append(block)
    halves = [machine.partition(disk, 2, 1_919_000_000_000) for disk in system]
    top = machine.array("md0", "0", "raid1", 0, halves, "1a2b3c4d:00000000:00000000:000000a0")
    scratch = machine.array("md127", "nvme_raid0", "raid0", MIB, data, "1a2b3c4d:00000000:00000000:000000a7")
    machine.mounts(
        f"28 1 {top} / / rw,relatime - ext4 /dev/md0 rw,errors=remount-ro",
        f"30 28 0:25 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size={2**40 // 1024}k",
        f"31 28 {scratch} / /mnt/nvme_raid0 rw,noatime - xfs /dev/md127 "
        "rw,attr2,inode64,logbufs=8,logbsize=256k,sunit=2048,swidth=16384,noquota",
    )
    machine.files["/proc/driver/nvidia-fs/version"] = machine.files["/dev/nvidia-fs0"] = ""
    return machine.document(
        GdsFacts(
            kernel=kernel, architecture="x86_64", distribution="ubuntu 22.04", driver="550.90.12", driver_open=True,
            gpus=tuple(f"0000:{bus + 3:02x}:00.0" for bus in (0x18, 0x40, 0x4F, 0x5E, 0x9A, 0xC0, 0xCE, 0xDC)),
            libcufile="1.9.1", cuda="12.4.1", nvfs_loaded=True, nvfs_version="2.20.6", nvfs_installed=True,
            nvfs_source="2.20.6", nvfs_built_for="550.90.12", nvfs_devices=True, nvme_patched=True,
            nvme_patched_on_disk=True, nvme_registered=True, nvme_multipath=False, mount_point="/mnt/nvme_raid0",
            fs_type="xfs", fs_options=("rw", "noatime"), device="md127", md_levels=("raid0",),
            drives=tuple(f"nvme{number}n1" for number in range(2, 10)), iommu="off", acs=(), p2pdma_kernel=False,
            p2pdma_device=False, p2pdma_driver=False, udev=True, md_members_in_udev=True,
            md_rule="/etc/udev/rules.d/63-md-raid-arrays.rules", md_rule_lists_members=True,
            config_path="/etc/cufile.json", config_valid=True, config_p2pdma=False, config_compat=True,
        )
    )  # fmt: skip


def h200() -> str:
    """A p5en.48xlarge as it starts: nothing built, nvme0n1 is the root volume."""
    machine = Machine("h200-cloud-made", "an H200 cloud node")
    kernel = "6.8.0-1029-aws"
    machine.host(
        ("Amazon EC2", "p5en.48xlarge"), "Intel(R) Xeon(R) Platinum 8488C", kernel,
        ubuntu("24.04", "Ubuntu 24.04.2 LTS"),
        "fpu sse2 avx512f hypervisor", ["0-47,96-143", "48-95,144-191"],
    )  # fmt: skip
    machine.memory(2 * 2**40, 2_010 * 2**30, 0, 2, "8388608")
    driver(machine, "570.133.20")
    root = machine.drive(
        "pci0000:00", "0000:00:04.0", number=0, model="Amazon Elastic Block Store", firmware="2.0", serial="vol0made00",
        size=200 * 2**30, numa=0, speed=None, ids=(0x1D0F, 0x8061), temperature=None,
    )  # fmt: skip
    top = machine.partition(root, 1, 199 * 2**30)
    gpus = []
    for index in range(8):
        numa, bus = index // 4, 0x50 + 0x10 * index
        up = (f"pci0000:{bus - 2:02x}", f"0000:{bus - 2:02x}:01.0", f"0000:{bus - 1:02x}:00.0")
        machine.port(*up[:2], numa=numa)
        machine.port(*up, numa=numa)
        ports = [(*up, f"0000:{bus:02x}:{slot:02x}.0") for slot in range(4)]
        for port in ports[:3]:
            machine.port(*port, numa=numa)
        machine.port(*ports[3], numa=numa, speed=None, width=0)
        ends = [f"0000:{bus + 1 + slot:02x}:00.0" for slot in range(4)]
        machine.gpu(*ports[0], ends[0], device=0x2335, model="NVIDIA H200", numa=numa)
        gpus.append(ends[0])
        for slot in (1, 2):
            name = f"rdmap{bus + 1 + slot}s0"
            end = ends[slot]
            machine.nic(*ports[slot], end, vendor=0x1D0F, device=0xEFA3, kind=0x020000, name=name, numa=numa)
        machine.drive(
            *ports[3], ends[3], number=index + 1, model="Amazon EC2 NVMe Instance Storage", firmware="0",
            serial=f"AWSMADE{index:02d}", size=3_840_000_000_000, numa=numa, speed=None, ids=(0x1D0F, 0xCD01),
            temperature=None,
        )  # fmt: skip
    number = machine.files[f"{top}/dev"].strip()
    machine.mounts(
        f"28 1 {number} / / rw,relatime - ext4 /dev/nvme0n1p1 rw,discard,errors=remount-ro",
        f"30 28 0:25 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,size={2**40 // 1024}k",
    )
    return machine.document(
        GdsFacts(
            kernel=kernel, architecture="x86_64", distribution="ubuntu 24.04", driver="570.133.20", driver_open=True,
            gpus=tuple(gpus), libcufile="1.13.1", cuda="12.8.1", iommu="off", acs=(), p2pdma_kernel=True,
            p2pdma_driver=False, nvme_patched=False, nvme_multipath=False, udev=True, config_compat=True,
        )
    )  # fmt: skip


MADE = {"h100-made.json": h100, "h200-cloud-made.json": h200}


def main() -> int:
    stale = [name for name, make in MADE.items() if not same(PLACE / name, make())]
    if "--check" in sys.argv:
        for name in stale:
            print(f"error: `docs/machines/{name}` is out of date\nhint: run tools/dev/made_trees.py", file=sys.stderr)
        return 1 if stale else 0
    for name, make in MADE.items():
        PLACE.mkdir(exist_ok=True)
        (PLACE / name).write_text(make())
    return 0


def same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
