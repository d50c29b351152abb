"""A node of the tests' cluster: ``cluster_node.py node`` becomes one, ``enter PID GROUPS -- ARGV`` enters one.

Run by path, with the standard library alone. A node is namespaces of its own (mounts, network, host name, processes,
IPC) whose root is the machine's, with the cluster's programs over it and its own writes in memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "net": 0x40000000, "pid": 0x20000000}
"""CLONE_NEW*, by the namespace's name under /proc/PID/ns."""
_PR_SET_PDEATHSIG = 1
_OWN = ("/dev/shm", "/tmp", "/run")
"""Directories in the node's own memory, which neither other nodes nor the machine see."""


def _call(done: int, what: str) -> None:
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _die_with_parent(number: int = signal.SIGKILL) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def node(spec: dict[str, object]) -> int:
    """Become the node's keeper: one line of JSON when it is up, then wait until its first process ends.

    SIGTERM, which the end of the test is as well, ends the node.
    """
    _die_with_parent(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _call(_LIBC.unshare(sum(_NEW.values())), "unshare")
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        _die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.close(ready)
        try:
            _lay_out(spec)
            os.write(say, b"+")
        except (OSError, subprocess.CalledProcessError) as error:
            os.write(say, str(error).encode())
            os._exit(1)
        os.close(say)
        _reap()
    os.close(say)
    groups = [Path(group) for group in list(spec["groups"])]  # type: ignore[call-overload]
    for group in groups:
        (group / "cgroup.procs").write_text(str(child))
    with os.fdopen(ready, "rb") as stream:
        said = stream.read()
    print(json.dumps({"pid": child} if said == b"+" else {"error": said.decode()}), flush=True)
    if said == b"+":
        signal.sigwait({signal.SIGTERM})
    # When the first process of a PID namespace ends, the kernel ends all others before that one can be waited for.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for group in groups:
        _remove(group)
    return 0


def _remove(group: Path) -> None:
    for _ in range(30_000):
        try:
            group.rmdir()
            return
        except OSError:  # processes that had entered from outside are just ending
            time.sleep(0.02)


def _lay_out(spec: dict[str, object]) -> None:
    """The node's mounts and files, in its own mount namespace."""
    work, name = Path(str(spec["work"])), str(spec["name"])
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "-o", "mode=0755", name, str(work))
    root = work / "root"
    for folder in ("work", "root"):
        (work / folder).mkdir()
    # Copied, since a layer may not lie inside another one, and the cache is a part of the machine's root.
    subprocess.run(["cp", "-a", str(spec["layer"]), f"{work}/upper"], check=True)
    _mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={work}/upper,workdir={work}/work", name, str(root))
    _mount("-t", "proc", "proc", f"{root}/proc")
    _mount("-t", "sysfs", "sysfs", f"{root}/sys")
    _mount("--rbind", "/sys/fs/cgroup", f"{root}/sys/fs/cgroup")
    _mount("--bind", "/dev", f"{root}/dev")
    _mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=0620", "devpts", f"{root}/dev/pts")
    for mount_point in _OWN:
        _mount(
            "-t", "tmpfs", "-o", f"mode={'0755' if mount_point == '/run' else '1777'}", "tmpfs", f"{root}{mount_point}"
        )
    for path, writable in dict(spec["binds"]).items():  # type: ignore[call-overload]
        inside = Path(f"{root}{path}")
        inside.mkdir(parents=True, exist_ok=True)
        _mount("--bind", path, str(inside))
        if not writable:
            _mount("-o", "remount,bind,ro", str(inside))
    for path, (text, mode) in dict(spec["files"]).items():  # type: ignore[call-overload]
        inside = Path(f"{root}{path}")
        inside.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if inside.parent.name == ".ssh" else 0o755)
        inside.unlink(missing_ok=True)
        inside.touch(mode=mode)
        inside.write_text(text)
    for path, target in dict(spec["links"]).items():  # type: ignore[call-overload]
        inside = Path(f"{root}{path}")
        inside.unlink(missing_ok=True)
        inside.symlink_to(target)
    socket.sethostname(name)
    (root / "mnt").mkdir(exist_ok=True)
    subprocess.run(["pivot_root", str(root), f"{root}/mnt"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/mnt"], check=True)


def _reap() -> None:
    """The first process of a PID namespace: it adopts orphans, and must reap them so that no zombies remain."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


def enter(pid: int, groups: list[str], argv: list[str]) -> int:
    """Run ``argv`` in the node, pass signals on to it, and end as it ends."""
    _die_with_parent()
    # Blocked, and taken one by one: a handler of Python's would not run for a signal that comes just before a call waits.
    passed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    for group in groups:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    spaces = [(os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), flag) for name, flag in _NEW.items()]
    # The mount namespace comes last: it hides the files of the others, which are open already.
    for descriptor, flag in spaces:
        _call(_LIBC.setns(descriptor, flag), "setns")
        os.close(descriptor)
    child = os.fork()
    if child == 0:
        _die_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
    while True:
        number = signal.sigwait({*passed_on, signal.SIGCHLD})
        if number in passed_on:
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1] == "node":
        sys.exit(node(json.load(sys.stdin)))
    cut = sys.argv.index("--")
    sys.exit(enter(int(sys.argv[2]), sys.argv[3:cut], sys.argv[cut + 1 :]))
