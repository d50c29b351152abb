#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: huge pages, /dev/shm and locked memory, now and after every boot."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_memory
short_description: Huge pages, the size of /dev/shm and the limit on locked memory
version_added: "0.1.0"
description:
  - Sets each of the three now and makes it last. What is not asked for is left alone.
options:
  hugepages:
    description: Pools of huge pages. They take RAM from everyone else, whether used or not.
    type: list
    elements: dict
    default: []
    suboptions:
      size:
        description: Page size, such as V(2MiB).
        type: str
        default: 2MiB
      count:
        description: Number of pages.
        type: int
        required: true
      numa_node:
        description: NUMA node; all of them when left out.
        type: int
  hugepages_max_share:
    description: Refuse pools that together take more than this share of the RAM, in percent.
    type: int
    default: 50
  shm_size:
    description: Size of /dev/shm, such as V(512GiB) or V(50%); empty leaves it alone.
    type: str
    default: ""
  memlock:
    description: Limit on locked memory, V(unlimited) or a size; empty leaves it alone.
    type: str
    default: ""
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Says what would be done without doing it.
    support: full
  diff_mode:
    description: Shows files and live values before and after.
    support: full
"""

EXAMPLES = r"""
- name: Give jobs their memory
  tunetool.node.host_memory:
    hugepages:
      - {size: 2MiB, count: 4096}
    shm_size: 50%
    memlock: unlimited
"""

RETURN = r"""
memory:
  description: What was asked for, as the manifest holds it.
  returned: success
  type: dict
hugepages_bytes:
  description: RAM that the pools take.
  returned: success
  type: int
"""

import os  # noqa: E402  (Ansible wants the documentation first)
import re  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402

from ..module_utils.commands import CommandError, run  # noqa: E402
from ..module_utils.files import content, replace_file  # noqa: E402
from ..module_utils.fstab import FstabConflict, with_entry  # noqa: E402
from ..module_utils.lock import Locked, only_one  # noqa: E402
from ..module_utils.memory import (  # noqa: E402
    LIMITS_PATH,
    SYSTEMD_PATHS,
    TMPFILES_PATH,
    HugePages,
    hugepage_sizes,
    memory_total,
    read_hugepages,
    render_limits,
    render_systemd,
    render_tmpfiles,
    shm_bytes,
)
from ..module_utils.mounts import mount_at, read_mounts  # noqa: E402
from ..module_utils.refusal import Refusal  # noqa: E402
from ..module_utils.units import UnitError, format_size_binary, parse_size  # noqa: E402

PAGE = os.sysconf("SC_PAGE_SIZE")
FSTAB = "/etc/fstab"


class Job:
    """The three settings; collects the diff as it goes."""

    def __init__(self, module: AnsibleModule) -> None:
        self.wanted: dict[str, Any] = module.params
        self.check_mode: bool = module.check_mode
        self.diff: list[dict[str, str]] = []

    def note(self, what: str, before: str, after: str) -> bool:
        """Remember a difference; true when it must be acted on now."""
        if before == after:
            return False
        self.diff.append({"before_header": what, "after_header": what, "before": before, "after": after})
        return not self.check_mode

    def put(self, path: str, text: str) -> bool:
        """A file with exactly this text; true when it was written."""
        before = content(path)
        if self.note(path, before, text):
            replace_file(path, text)
            return True
        return False

    def hugepages(self) -> list[HugePages]:
        """Pools sized now through sysfs and at boot through tmpfiles.d."""
        pools = [
            HugePages(parse_size(entry["size"] or "2MiB") // 1024, entry["count"], entry["numa_node"])
            for entry in self.wanted["hugepages"]
        ]
        self._refuse_impossible(pools)
        if pools or os.path.exists(TMPFILES_PATH):
            self.put(TMPFILES_PATH, render_tmpfiles(pools))
        for pool in pools:
            found = read_hugepages(pool)
            if self.note(pool.path, "%s\n" % found, "%d\n" % pool.count):
                with open(pool.path, "w", encoding="ascii") as stream:
                    stream.write("%d" % pool.count)
                found = read_hugepages(pool)
                if found != pool.count:
                    raise Refusal(
                        "%d huge pages of %s asked for, the kernel found room for %s. hint: they are set for the next "
                        "boot; reboot while memory is whole, or ask for fewer"
                        % (pool.count, format_size_binary(pool.size_kib * 1024), found)
                    )
        return pools

    def _refuse_impossible(self, pools: list[HugePages]) -> None:
        offered = hugepage_sizes()
        for pool in pools:
            if pool.size_kib not in offered:
                sizes = ", ".join(format_size_binary(size * 1024) for size in offered) or "none"
                raise Refusal(
                    "huge pages of %s are not offered by this kernel (%s). hint: 1 GiB pages need "
                    "`hugepagesz=1G` on the kernel command line" % (format_size_binary(pool.size_kib * 1024), sizes)
                )
            if read_hugepages(pool) is None:
                raise Refusal("NUMA node %s does not exist here. hint: see `lscpu`" % pool.numa_node)
        asked, total, share = sum(p.bytes for p in pools), memory_total(), self.wanted["hugepages_max_share"]
        if asked * 100 > total * share:
            raise Refusal(
                "huge pages would take %s of %s RAM, more than %d %%. hint: ask for fewer, or raise "
                "`host_memory_hugepages_max_share`" % (format_size_binary(asked), format_size_binary(total), share)
            )

    def shm(self) -> int | None:
        """An fstab line for later boots, a remount for now. Returns the size in bytes."""
        text = self.wanted["shm_size"]
        if not text:
            return None
        size = shm_size_bytes(text)
        if mount_at("/dev/shm", read_mounts()) is None:
            raise Refusal("`/dev/shm` is not mounted. hint: look at the node first")
        before = content(FSTAB)
        after = with_entry(before, "tmpfs", "/dev/shm", "tmpfs", "nosuid,nodev,size=%d" % size, replace_any_spec=True)
        if self.note(FSTAB, before, after):
            replace_file(FSTAB, after)
            if os.path.isdir("/run/systemd/system"):
                run(["systemctl", "daemon-reload"])
        live = shm_bytes()
        if self.note("/dev/shm", "size %s\n" % live, "size %d\n" % size):
            run(["mount", "-o", "remount,size=%d" % size, "/dev/shm"])
            if shm_bytes() != size:
                raise Refusal("`/dev/shm` has %s bytes after its remount, %d asked for" % (shm_bytes(), size))
        return size

    def memlock(self) -> str | None:
        """limits.d for logins, DefaultLimitMEMLOCK for services. Returns it as limits.conf(5) writes it."""
        text = self.wanted["memlock"]
        if not text:
            return None
        value = "unlimited" if text == "unlimited" else str(parse_size(text) // 1024)
        self.put(LIMITS_PATH, render_limits(value))
        written = [self.put(path, render_systemd(value)) for path in SYSTEMD_PATHS]
        if any(written) and os.path.isdir("/run/systemd/system"):
            # A reload does not reread [Manager]; running services keep their limits until they restart.
            run(["systemctl", "daemon-reexec"])
        return value


def shm_size_bytes(text: str) -> int:
    """Bytes, whole pages, from a size or a share of the RAM."""
    share = re.match(r"^(\d{1,2})%$", text)
    if share and int(share.group(1)) > 0:
        size = memory_total() * int(share.group(1)) // 100
    elif share or text.endswith("%"):
        raise Refusal("`%s` is not a share of the RAM. hint: 1%% to 99%%" % text)
    else:
        size = parse_size(text)
    if size < PAGE:
        raise Refusal("`/dev/shm` cannot have %d bytes. hint: write `50%%` or `64GiB`" % size)
    return size // PAGE * PAGE


def main() -> None:
    """The three settings in turn."""
    module = AnsibleModule(
        argument_spec={
            "hugepages": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {
                    "size": {"type": "str", "default": "2MiB"},
                    "count": {"type": "int", "required": True},
                    "numa_node": {"type": "int"},
                },
            },
            "hugepages_max_share": {"type": "int", "default": 50},
            "shm_size": {"type": "str", "default": ""},
            "memlock": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    job = Job(module)
    try:
        with only_one():
            pools = job.hugepages()
            shm = job.shm()
            memlock = job.memlock()
    except UnitError as error:
        module.fail_json(msg="%s. hint: %s" % (error.message, error.hint), diff=job.diff)
    except (Refusal, CommandError, FstabConflict, Locked) as error:
        module.fail_json(msg=str(error), diff=job.diff)
    else:
        module.exit_json(
            changed=bool(job.diff),
            diff=job.diff,
            hugepages_bytes=sum(pool.bytes for pool in pools),
            memory={
                "hugepages": [
                    {"size_kib": pool.size_kib, "numa_node": pool.numa_node, "count": pool.count} for pool in pools
                ],
                "shm_bytes": shm,
                "memlock": memlock,
            },
        )


if __name__ == "__main__":
    main()
