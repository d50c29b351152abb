"""Recordings of machines: everything that the readers of machines read, as one JSON document or as a tree.

``tunetool inspect --capture`` writes it and ``--root`` reads it. Alone it runs on any machine with a Python:
``ssh node python3 - < plugins/module_utils/machine/recording.py > node.json``, so it imports nothing of its own
package. Links stay links. It reads no environment, no log, no address of a network card and no content of a device.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
from typing import Any, Callable, Iterable, Mapping

SCHEMA_NAME = "tunetool.recording/1"
BESIDE = "tunetool-recording.json"
"""In a tree, the file with facts that are in no file of the machine: the note, the health of its drives."""

FILES = (
    "/etc/cufile.json",
    "/etc/os-release",
    "/etc/tunetool/node.json",
    "/proc/1/cgroup",
    "/proc/cpuinfo",
    "/proc/driver/nvidia/gpus/*/information",
    "/proc/driver/nvidia/version",
    "/proc/meminfo",
    "/proc/self/limits",
    "/proc/self/mountinfo",
    "/proc/swaps",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/kernel/osrelease",
    # All but stat_refresh, which acts when it is read.
    "/proc/sys/vm/*[!h]",
    "/run/systemd/container",
    "/sys/block/dm-*/holders/*/dev",
    "/sys/block/md*/dev",
    "/sys/block/md*/holders/*/dev",
    "/sys/block/md*/md*p*/dev",
    "/sys/block/md*/md*p*/holders/*/dev",
    "/sys/block/md*/md*p*/partition",
    "/sys/block/md*/md/array_state",
    "/sys/block/md*/md/chunk_size",
    "/sys/block/md*/md/layout",
    "/sys/block/md*/md/level",
    "/sys/block/md*/md/raid_disks",
    "/sys/block/md*/md/rd*/block/dev",
    "/sys/block/md*/md/rd*/state",
    "/sys/block/md*/md/sync_*",
    "/sys/block/md*/queue/*",
    "/sys/block/md*/size",
    "/sys/block/md*/slaves/*/dev",
    "/sys/block/md*/stat",
    "/sys/block/nvme*/dev",
    "/sys/block/nvme*/device/address",
    "/sys/block/nvme*/device/device/*_link_*",
    "/sys/block/nvme*/device/firmware_rev",
    "/sys/block/nvme*/device/model",
    "/sys/block/nvme*/device/numa_node",
    "/sys/block/nvme*/device/nvme[0-9]*/address",
    "/sys/block/nvme*/device/nvme[0-9]*/device/*_link_*",
    "/sys/block/nvme*/device/nvme[0-9]*/firmware_rev",
    "/sys/block/nvme*/device/nvme[0-9]*/model",
    "/sys/block/nvme*/device/nvme[0-9]*/numa_node",
    "/sys/block/nvme*/device/nvme[0-9]*/serial",
    "/sys/block/nvme*/device/nvme[0-9]*/subsysnqn",
    "/sys/block/nvme*/device/nvme[0-9]*/transport",
    "/sys/block/nvme*/device/serial",
    "/sys/block/nvme*/device/subsysnqn",
    "/sys/block/nvme*/device/transport",
    "/sys/block/nvme*/holders/*/dev",
    "/sys/block/nvme*/integrity/*",
    "/sys/block/nvme*/metadata_bytes",
    "/sys/block/nvme*/nvme*p*/dev",
    "/sys/block/nvme*/nvme*p*/holders/*/dev",
    "/sys/block/nvme*/nsid",
    "/sys/block/nvme*/nvme*p*/partition",
    "/sys/block/nvme*/queue/*",
    "/sys/block/nvme*/size",
    "/sys/block/nvme*/stat",
    "/sys/block/nvme*/wwid",
    "/sys/block/[svx]*d*/device/model",
    "/sys/block/[svx]*d*/device/vendor",
    "/sys/block/[svx]*d*/size",
    "/sys/bus/pci/devices/*/*_link_*",
    "/sys/bus/pci/devices/*/class",
    "/sys/bus/pci/devices/*/device",
    "/sys/bus/pci/devices/*/numa_node",
    "/sys/bus/pci/devices/*/vendor",
    "/sys/class/block/[svx]*d*/dev",
    "/sys/class/block/dm-*/dev",
    "/sys/class/block/loop*/dev",
    "/sys/class/block/md*/dev",
    "/sys/class/block/nvme*/dev",
    "/sys/class/dmi/id/product_name",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/dev/block/*/dev",
    "/sys/dev/block/*/dm/uuid",
    "/sys/dev/block/*/loop/backing_file",
    "/sys/dev/block/*/partition",
    "/sys/dev/block/*/slaves/*/dev",
    "/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor",
    "/sys/devices/system/cpu/cpu[0-9]*/power/pm_qos_resume_latency_us",
    "/sys/devices/system/cpu/cpuidle/current_driver",
    "/sys/devices/system/cpu/online",
    "/sys/devices/system/cpu/smt/control",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/devices/system/node/node*/hugepages/*/[nf]r*_hugepages",
    "/sys/fs/bcachefs/*/dev-*/block/dev",
    "/sys/fs/btrfs/*/devices/*/dev",
    "/sys/fs/cgroup/memory.high",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/kernel/mm/hugepages/*/[nf]r*_hugepages",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/sys/module/nvme/parameters/poll_queues",
    "/sys/module/nvme_core/parameters/multipath",
    "/sys/module/pcie_aspm/parameters/policy",
    "/usr/lib/os-release",
    "/usr/local/cuda/gds/cufile.json",
    "/usr/local/cuda/version.json",
)

PRESENT = (
    "/.dockerenv",
    "/dev/nvidia*",
    "/dev/nvme*",
    "/proc/driver/nvidia-fs/version",
    "/run/.containerenv",
    "/run/udev/data",
    "/sys/bus/pci/devices/*/infiniband/*",
    "/sys/bus/pci/devices/*/net/*",
    "/sys/class/nvme/*",
)
"""Paths of which only the existence is recorded, as empty files and directories; never opened."""

LINKS = (
    "/dev/disk/by-id/md-*",
    "/dev/disk/by-id/nvme-*",
    "/dev/disk/by-uuid/*",
)

_FILE_LIMIT = 64 * 1024
_TOTAL_LIMIT = 16 * 2**20

_PLAIN_OPTION = re.compile(r"^(?:[a-z_0-9]+|size=\d+k|pagesize=\w+|mode=\d+|huge=[a-z_]+)$")


def _without_secrets(text: str) -> str:
    """mountinfo without addresses, users and lists of directories of network and overlay mounts."""
    lines = []
    # Not `splitlines`: a mount point may hold a form feed or U+2028.
    for full in text.rstrip("\n").split("\n"):
        line = full
        left, separator, right = full.partition(" - ")
        after = right.split()
        if separator and len(left.split()) >= 6 and left.split()[2].startswith("0:") and len(after) >= 2:
            options = [
                option for option in (after[2] if len(after) > 2 else "rw").split(",") if _PLAIN_OPTION.match(option)
            ]
            fields = left.split()
            line = " ".join([*fields[:6], "-", after[0], after[0], ",".join(options) or "rw"])
        lines.append(line + "\n")
    return "".join(lines)


def _one_a_socket(text: str) -> str:
    """cpuinfo without its hundreds of repetitions."""
    kept: dict[str, str] = {}
    for block in text.split("\n\n"):
        match = re.search(r"^physical id\s*:\s*(\d+)", block, re.MULTILINE)
        lines = [line for line in block.splitlines() if re.match(r"(processor|model name|physical id|flags)\s*:", line)]
        if lines:
            kept.setdefault(match.group(1) if match else "", "\n".join(lines) + "\n")
    return "\n".join(kept.values())


def _model_alone(text: str) -> str:
    """The facts of a GPU without its UUID."""
    return "".join(line + "\n" for line in text.splitlines() if line.startswith("Model:"))


_CLEANED: Mapping[str, Callable[[str], str]] = {
    "/proc/self/mountinfo": _without_secrets,
    "/proc/cpuinfo": _one_a_socket,
    "/information": _model_alone,
}
"""Functions that clean a file's text, by the end of its path."""


class _Walk:
    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.files: dict[str, str] = {}
        self.links: dict[str, str] = {}
        self.directories: set[str] = set()
        self.total = 0

    def matches(self, pattern: str) -> Iterable[str]:
        return [path[len(self.root) :] for path in sorted(glob.glob(self.root + pattern))]

    def real(self, path: str, last: bool = True) -> str | None:
        """Resolve ``path`` inside the root; record every link on the way, and the last one if asked for."""
        done, parts, hops = "", path.strip("/").split("/"), 0
        while parts:
            location = done + "/" + parts.pop(0)
            if os.path.islink(self.root + location) and not location.startswith("/proc/"):
                target = os.readlink(self.root + location)
                target = os.path.relpath(target, done or "/") if target.startswith("/") else target
                self.links[location] = target
                hops += 1
                if hops > 40 or (not parts and not last):
                    return None
                joined = os.path.normpath(os.path.join(done or "/", target))
                done, parts = "", joined.strip("/").split("/") + parts
                continue
            done = location
        return done

    def file(self, path: str) -> None:
        location = self.real(path)
        if location is None or location in self.files or not os.path.isfile(self.root + location):
            return
        try:
            with open(self.root + location, encoding="utf-8", errors="replace") as stream:
                text = stream.read(_FILE_LIMIT if not location.endswith("/cpuinfo") else 2**23)
        except OSError:
            return
        for end, clean in _CLEANED.items():
            text = clean(text) if location.endswith(end) else text
        self.total += len(text)
        if self.total > _TOTAL_LIMIT:
            raise ValueError("a recording of more than %d bytes" % _TOTAL_LIMIT)
        self.files[location] = text

    def present(self, path: str) -> None:
        location = self.real(path)
        if location is None or location in self.files:
            return
        if os.path.isdir(self.root + location):
            self.directories.add(location)
        elif os.path.exists(self.root + location):
            self.files[location] = ""


def _memory_limit(root: str) -> int | None:
    """Bytes that the tightest control group around this process allows, as ``memory_left.memory_limit`` reads them."""
    limits = []
    for line in _text(root + "/proc/self/cgroup").splitlines():
        controllers, _, name = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        group = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
        names = ["memory.limit_in_bytes"] if controllers else ["memory.max", "memory.high"]
        for part in ["", *(part for part in name.split("/") if part not in ("", ".."))]:
            group = group + "/" + part if part else group
            limits += [_text("%s%s/%s" % (root, group, file)).strip() for file in names]
    numbers = [int(text) for text in limits if re.fullmatch("[0-9]{1,19}", text)]
    return min(numbers) if numbers else None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(_FILE_LIMIT)
    except OSError:
        return ""


def record(root: str = "/") -> dict[str, Any]:
    """Record the machine under ``root``."""
    walk = _Walk(root)
    for pattern in FILES:
        for path in walk.matches(pattern):
            walk.file(path)
    for pattern in PRESENT:
        for path in walk.matches(pattern):
            walk.present(path)
    for pattern in LINKS:
        for path in walk.matches(pattern):
            walk.real(path, last=False)
    limit = _memory_limit(walk.root)
    if limit is not None:
        # In the place of all groups around this process, whose names are their owner's.
        walk.files["/sys/fs/cgroup/memory.max"] = "%d\n" % limit
    # /proc/self is this process: record it under the name that readers use.
    own_directory = "/proc/%d/" % os.getpid()
    files = {path.replace(own_directory, "/proc/self/"): text for path, text in walk.files.items()}
    return {
        "schema": SCHEMA_NAME,
        "files": files,
        "links": walk.links,
        "directories": sorted(walk.directories),
    }


def anonymous(document: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the host's name, serial numbers and IPv4 addresses replaced, consistently."""
    serials = {text.strip() for path, text in document["files"].items() if re.search(r"/nvme\d+/serial$", path)}
    names = {serial: "SERIAL%02d" % index for index, serial in enumerate(sorted(serials - {""}), start=1)}
    host = str(document["files"].get("/proc/sys/kernel/hostname", "")).strip()

    def clean(text: str) -> str:
        for serial in sorted(names, key=len, reverse=True):
            text = re.sub(r"(?<![A-Za-z0-9])%s(?![A-Za-z0-9])" % re.escape(serial), names[serial], text)
        text = re.sub(r"md-name-%s:" % re.escape(host), "md-name-node:", text) if host else text
        return re.sub(r"\b(?:\d{1,3}\.){3}\d{1,3}\b", "192.0.2.1", text)

    # They hold the serial in their own way; only which of them are equal matters.
    own = {path: text for path, text in document["files"].items() if re.search(r"/(?:wwid|subsysnqn)$", path)}
    numbers = {text: number for number, text in enumerate(sorted(set(own.values())), start=1)}

    def numbered(path: str, text: str) -> str:
        if path.endswith("/wwid"):
            kind = "nvme." if text.startswith("nvme.") else "eui."
            return "%s%016x\n" % (kind, numbers[text])
        return "nqn.2014-08.org.nvmexpress:%d\n" % numbers[text]

    def coded(path: str) -> bool:
        # Those names contain the serial in hexadecimal, or an equivalent number.
        return bool(re.search(r"/by-id/nvme-(?:eui|nvme|uuid)\.", path))

    copy: dict[str, Any] = json.loads(json.dumps(dict(document)))
    copy["files"] = {
        path: numbered(path, text) if path in own else _keeping_versions(path, text, clean)
        for path, text in copy["files"].items()
    }
    if host:
        copy["files"]["/proc/sys/kernel/hostname"] = "node\n"
    copy["links"] = {clean(path): target for path, target in copy["links"].items() if not coded(path)}
    return copy


def _keeping_versions(path: str, text: str, clean: Callable[[str], str]) -> str:
    # A driver's version looks like an address.
    return text if path.startswith("/proc/driver/") or path.endswith("os-release") else clean(text)


def lay_out(document: Mapping[str, Any], directory: str) -> None:
    """Write the document as a tree under ``directory``. Raises ``ValueError`` for a path that leads out of it."""
    for path in document.get("directories", ()):
        os.makedirs(_inside(directory, path), exist_ok=True)
    for path, text in document["files"].items():
        location = _inside(directory, path)
        os.makedirs(os.path.dirname(location), exist_ok=True)
        with open(location, "w", encoding="utf-8") as stream:
            stream.write(text)
    links = []
    for path, target in document["links"].items():
        location = _inside(directory, path)
        _within(directory, os.path.join(os.path.dirname(location), target), path)
        os.makedirs(os.path.dirname(location), exist_ok=True)
        if not os.path.lexists(location):
            os.symlink(target, location)
            links.append((location, path))
    for location, path in links:
        # A later link may have changed the target of an earlier one.
        _within(directory, location, path)
    beside = {key: value for key, value in document.items() if key not in ("files", "links", "directories")}
    with open(os.path.join(directory, BESIDE), "w", encoding="utf-8") as stream:
        json.dump(beside, stream, indent=1, sort_keys=True)
        stream.write("\n")


def _inside(directory: str, path: str) -> str:
    parts = path.split("/")
    if not path.startswith("/") or ".." in parts or not parts[-1]:
        raise ValueError("`%s` leads out of the recording" % path)
    return os.path.join(directory, path.lstrip("/"))


def _within(directory: str, location: str, path: str) -> None:
    real, top = os.path.realpath(location), os.path.realpath(directory)
    if not (real + "/").startswith(top + "/"):
        raise ValueError("`%s` leads out of the recording" % path)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(record(), indent=1, sort_keys=True) + "\n")
