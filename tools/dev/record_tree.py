"""Record what the readers of machines read, as one JSON document: run it on the machine, keep its output as a test's.

``tunetool lab ssh node1 -- python3 - < tools/dev/record_tree.py > tests/data/machines/built.json``

Links are kept as links. Standard library only; tests/machines.py lays the document out as a tree again.
"""

from __future__ import annotations

import glob
import json
import os

GLOBS = [
    "/proc/self/mountinfo",
    "/proc/self/limits",
    "/proc/swaps",
    "/proc/meminfo",
    "/proc/sys/kernel/osrelease",
    "/sys/block/nvme*/dev",
    "/sys/block/nvme*/size",
    "/sys/block/nvme*/stat",
    "/sys/block/nvme*/metadata_bytes",
    "/sys/block/nvme*/queue/logical_block_size",
    "/sys/block/nvme*/queue/iostats",
    "/sys/block/nvme*/integrity/*",
    "/sys/block/nvme*/nvme*p*/partition",
    "/sys/block/nvme*/nvme*p*/dev",
    "/sys/block/nvme*/holders/*/dev",
    "/sys/block/nvme*/device/transport",
    "/sys/block/nvme*/device/serial",
    "/sys/block/nvme*/device/model",
    "/sys/block/nvme*/device/firmware_rev",
    "/sys/block/nvme*/device/address",
    "/sys/block/nvme*/device/numa_node",
    "/sys/block/nvme*/device/device/*_link_*",
    "/sys/bus/pci/devices/*/max_link_*",
    "/sys/block/md*/dev",
    "/sys/block/md*/stat",
    "/sys/block/md*/size",
    "/sys/block/md*/queue/iostats",
    "/sys/block/md*/slaves/*/dev",
    "/sys/block/md*/md/array_state",
    "/sys/block/md*/md/level",
    "/sys/block/md*/md/chunk_size",
    "/sys/block/md*/md/raid_disks",
    "/sys/block/md*/md/rd*/block/dev",
    "/sys/block/md*/md/rd*/state",
    "/sys/class/block/nvme*/dev",
    "/sys/class/block/md*/dev",
    "/sys/dev/block/*/dev",
    "/sys/kernel/mm/hugepages/*/nr_hugepages",
    "/dev/disk/by-id/*",
    "/dev/disk/by-uuid/*",
]


def record(path: str, files: dict[str, str], links: dict[str, str]) -> None:
    """Walk the path part by part, so that every link on the way is kept too."""
    done = ""
    for part in path.strip("/").split("/"):
        done = done + "/" + part
        if os.path.islink(done):
            links[done] = os.readlink(done)
            if done.startswith("/dev/disk/"):
                return
            done = os.path.realpath(done)
    if os.path.isfile(done):
        with open(done, encoding="utf-8", errors="replace") as stream:
            try:
                files[done] = stream.read()
            except OSError:
                return


def main() -> None:
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    for pattern in GLOBS:
        for path in sorted(glob.glob(pattern)):
            record(path, files, links)
    # /proc/self is this very process: keep it under the name that readers use.
    kept = {path.replace("/proc/%d/" % os.getpid(), "/proc/self/"): text for path, text in files.items()}
    links = {path: target for path, target in links.items() if not path.startswith("/proc")}
    print(json.dumps({"files": kept, "links": links}, indent=1, sort_keys=True))


main()
