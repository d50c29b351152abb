"""The checks of huge pages, /dev/shm and locked memory.

The limit of this session proves little: root passes every limit, and the session began before the limit was set. So a
child becomes an ordinary user in the two ways in which jobs do, through PAM as a login, and as a service of systemd,
and locks memory there.
"""

from __future__ import annotations

import json
import os
import pwd
import re
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check, judged
from ..common.commands import CommandError, run
from ..common.files import read_text
from ..machine.memory import (
    SHMEM_ENABLED,
    HugePages,
    memlock_limit,
    read_hugepages,
    shm_bytes,
    shm_huge,
    shm_mode,
    shm_read_only,
    tmpfs_policies,
)
from ..units import format_size_binary

HUGEPAGES, SHM, SHM_HUGE, MEMLOCK = "memory.hugepages", "memory.shm", "memory.shm_huge", "memory.memlock"
_NO_JOB_WRITES = "%s: no job can write there"
USER_ID = 65534
DEFAULT_LIMIT = 8 * 2**20
"""The kernel's default limit: locking less proves nothing. systemd may give its logins an eighth of the RAM."""
LOCK_BYTES = DEFAULT_LIMIT + 64 * 2**20
LOGIN, SERVICE, SESSION = "login", "service", "session"
LOCKS = tuple(MEMLOCK + "." + kind for kind in (LOGIN, SERVICE, SESSION))
_SECONDS = 60
_PYTHONS = ("/usr/bin/python3", "/usr/libexec/platform-python")
# The limit before PAM sets one, so that root's own limit cannot be inherited.
_STARVED = ["prlimit", "--memlock=65536:65536"]

# An anonymous mapping, locked as cuFile and DeepSpeed lock theirs, and what the kernel then counts as locked.
_CHILD = r"""
import ctypes, json, mmap, os, re, resource, sys
size = int(sys.argv[1])
area = mmap.mmap(-1, size)
libc = ctypes.CDLL(None, use_errno=True)
place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(area)))
failed = libc.mlock(place, ctypes.c_size_t(size))
status = open("/proc/self/status").read()
print(json.dumps({
    "uid": os.getuid(),
    "can_pass_limits": int(re.search(r"CapEff:\s*(\w+)", status)[1], 16) >> 14 & 1,
    "limit": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    "locked": int(re.search(r"VmLck:\s*(\d+)", status)[1]) * 1024,
    "error": os.strerror(ctypes.get_errno()) if failed else "",
}))
"""


def check_hugepages(wanted: Sequence[Mapping[str, Any]], root: str = "/") -> list[Check]:
    """One for each pool that was asked for."""
    checks = []
    for entry in wanted:
        pool = HugePages(entry["size_kib"], entry["count"], entry["numa_node"])
        count = read_hugepages(pool, root)
        where = "" if pool.numa_node is None else " on NUMA node %d" % pool.numa_node
        checks.append(
            judged(
                HUGEPAGES,
                count is not None and count >= pool.count,
                "%d pages of %s%s" % (pool.count, format_size_binary(pool.size_kib * 1024), where),
                "%s pages" % count,
                "memory is fragmented or taken: reboot the node, then run `tunetool provision` again",
            )
        )
    return checks


def check_shm(wanted: int, root: str = "/") -> Check:
    """Its size in bytes, and that jobs may write there."""
    size, mode = shm_bytes(root), shm_mode(root)
    found = format_size_binary(size) if size is not None else "no tmpfs at /dev/shm"
    holds, remedy = size is not None and size >= wanted, "run `mount -o remount /dev/shm`"
    # That remount mends the size too.
    if size is not None and shm_read_only(root):
        holds, found, remedy = False, _NO_JOB_WRITES % "mounted read-only", "run `mount -o remount,rw /dev/shm`"
    elif holds and mode is not None and mode & 0o003 != 0o003:
        holds, found, remedy = False, _NO_JOB_WRITES % ("mode %04o" % mode), "run `chmod 1777 /dev/shm`"
    return judged(SHM, holds, format_size_binary(wanted), found, remedy)


def check_shm_huge(wanted: str, root: str = "/") -> Check:
    """Its mount's option ``huge``, and that the kernel does not overrule it."""
    live, (_, override) = shm_huge(root), tmpfs_policies(root)
    denied = override == "deny" and wanted != "never"
    found = "no tmpfs at /dev/shm" if live is None else "huge=%s" % live
    return judged(
        SHM_HUGE,
        live == wanted and not denied,
        "huge=%s" % wanted,
        found + (", and the kernel denies it" if denied else ""),
        "write `never` to `/%s`" % SHMEM_ENABLED if denied else "run `mount -o remount /dev/shm`",
    )


def check_memlock(wanted: str, root: str = "/") -> Check:
    """This session's limit. ``wanted`` is ``unlimited`` or KiB."""
    limit = memlock_limit(root)
    expected = "unlimited" if wanted == "unlimited" else format_size_binary(int(wanted) * 1024)
    if limit is None:
        return Check(MEMLOCK, UNKNOWN, expected, "no limit shown", "is /proc mounted?")
    enough = limit == "unlimited" or (wanted != "unlimited" and int(limit) >= int(wanted) * 1024)
    return judged(
        MEMLOCK,
        enough,
        expected,
        "unlimited" if limit == "unlimited" else format_size_binary(int(limit)),
        "log in again, or restart the service: limits reach new sessions only",
    )


@dataclass(frozen=True)
class Attempt:
    """The result of one child process."""

    uid: int
    can_pass_limits: bool
    """Whether it has CAP_IPC_LOCK, with which success proves nothing."""
    limit: int
    """Its soft limit in bytes; negative: unlimited."""
    locked: int
    error: str = ""


Locker = Callable[[str, int], Attempt]
"""Locks a number of bytes in a session of a kind. Raises ``CommandError``."""


def lock_memory(kind: str, size: int) -> Attempt:
    """The user id of the child."""
    child = child_command(size)
    if kind == LOGIN:
        child = [*_STARVED, "runuser", "-u", _user_name(), "--", *child]
    elif kind == SERVICE:
        child = ["systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--uid=%d" % USER_ID, *child]
    return parse_attempt(run(child, timeout=_SECONDS).stdout)


def child_command(size: int) -> list[str]:
    """The command that locks memory."""
    return [_python(), "-I", "-S", "-c", _CHILD, str(size)]


def parse_attempt(text: str) -> Attempt:
    """The last line of the child's output; a login may print others before."""
    lines = text.strip().splitlines()
    try:
        attempt: dict[str, Any] = json.loads(lines[-1])
        return Attempt(
            attempt["uid"], bool(attempt["can_pass_limits"]), attempt["limit"], attempt["locked"], str(attempt["error"])
        )
    except (IndexError, ValueError, KeyError, TypeError, RecursionError):
        raise CommandError("the child that locks memory said `%s`" % (lines[-1] if lines else "nothing")) from None


def _python() -> str:
    # Our own interpreter may be in a directory that an ordinary user cannot enter.
    return next((path for path in _PYTHONS if os.path.exists(path)), "python3")


def _user_name() -> str:
    try:
        return pwd.getpwuid(USER_ID).pw_name
    except KeyError:
        raise CommandError("there is no user %d (nobody)" % USER_ID) from None


def kinds(is_root: bool, root: str = "/") -> list[str]:
    """The kinds of sessions that can be tried."""
    if not is_root:
        return [SESSION]
    return [LOGIN, SERVICE] if os.path.isdir(os.path.join(root, "run/systemd/system")) else [LOGIN]


def bytes_to_lock(wanted: str, root: str = "/") -> int:
    """Bytes to lock: more than the default limit, at most what is asked for and a quarter of the free memory."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", read_text(os.path.join(root, "proc/meminfo")) or "", re.MULTILINE)
    free = int(match.group(1)) * 1024 // 4 if match else LOCK_BYTES
    asked = LOCK_BYTES if wanted == "unlimited" else int(wanted) * 1024
    page = os.sysconf("SC_PAGE_SIZE")
    return min(LOCK_BYTES, asked, free) // page * page


def lock_checks(wanted: str, tried: Sequence[str], locker: Locker = lock_memory, root: str = "/") -> list[Check]:
    """One check for each kind of session. ``wanted`` is ``unlimited`` or KiB, as the manifest holds it."""
    size = bytes_to_lock(wanted, root)
    return [_judge(kind, wanted, size, locker) for kind in tried]


_REMEDIES: Mapping[str, str] = {
    LOGIN: "look for a later line in /etc/security/limits.d and for `pam_limits` in /etc/pam.d/runuser and sshd",
    SERVICE: "look at `systemctl show --property=DefaultLimitMEMLOCK` and at later files in /etc/systemd/system.conf.d",
    SESSION: "log in again: limits reach new sessions only",
}


def _judge(kind: str, wanted: str, size: int, locker: Locker) -> Check:
    name = MEMLOCK + "." + kind
    who = {LOGIN: "an ordinary user's login", SERVICE: "an ordinary user's service", SESSION: "this session"}[kind]
    asked = "unlimited" if wanted == "unlimited" else format_size_binary(int(wanted) * 1024)
    expected = "limit %s, and %s locked by %s" % (asked, format_size_binary(size), who)
    if wanted == "unlimited" and size <= DEFAULT_LIMIT:
        return Check(name, UNKNOWN, expected, "too little memory is free to try more", "end a job, then try again")
    if size == 0:
        return Check(name, SKIP, "nothing to lock", "nothing")
    try:
        attempt = locker(kind, size)
    except CommandError as error:
        return Check(name, UNKNOWN, expected, "not tried: %s" % error, _REMEDIES[kind])
    limit = "unlimited" if attempt.limit < 0 else format_size_binary(attempt.limit)
    if attempt.uid == 0 or attempt.can_pass_limits:
        return Check(name, UNKNOWN, expected, "the child kept root's rights", _REMEDIES[kind])
    enough = attempt.limit < 0 or (wanted != "unlimited" and attempt.limit >= int(wanted) * 1024)
    if attempt.locked >= size and not attempt.error and enough:
        return Check(name, PASS, expected, "locked, limit %s" % limit)
    what = "locked" if attempt.locked >= size else "locked nothing (%s)" % (attempt.error or "no error")
    return Check(name, FAIL, expected, "%s, limit %s" % (what, limit), _REMEDIES[kind])
