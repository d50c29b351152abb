"""What a node would boot: kernel, initramfs and command line, read from its own file system without mounting."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from tunetool.errors import CannotJudge
from tunetool.lab.machine import Boot
from tunetool.lab.programs import find

_LINK = re.compile(r'^Fast link dest: "(?P<target>.*)"$', re.MULTILINE)
_SECONDS = 300.0
_REPAIRED = (0, 1, 2)
"""e2fsck's exit statuses for a file system that is sound now."""


def read_boot(overlay: Path, target: Path) -> Boot:
    """Copy the kernel that ``/vmlinuz`` and the initramfs that ``/initrd.img`` point at out of ``overlay``.

    The disk is read as a copy, whose journal is replayed: after a power loss the files are what the node
    itself will find, and the node still gets its own disk as it was.
    """
    target.mkdir(exist_ok=True)
    with TemporaryDirectory(prefix=".disk-", dir=target.parent) as work:
        raw = Path(work) / "root.img"
        _run(["qemu-img", "convert", "-q", "-f", "qcow2", "-O", "raw", str(overlay), str(raw)])
        _run([find("e2fsck") or "e2fsck", "-f", "-y", str(raw)], _REPAIRED)
        boot = Boot(target / "vmlinuz", target / "initrd.img", "")
        _dump(raw, "/vmlinuz", boot.kernel)
        _dump(raw, "/initrd.img", boot.initrd)
        _dump(raw, "/etc/kernel/cmdline", target / "cmdline")
    return Boot(boot.kernel, boot.initrd, (target / "cmdline").read_text().strip())


def _dump(raw: Path, name: str, target: Path) -> None:
    target.unlink(missing_ok=True)
    debugfs = find("debugfs") or "debugfs"
    # `dump` does not follow a link.
    shown = _run([debugfs, "-R", f"stat {name}", str(raw)])
    link = _LINK.search(shown)
    source = "/" + link["target"].lstrip("/") if link else name
    _run([debugfs, "-R", f"dump {source} {target}", str(raw)])
    if not target.exists() or target.stat().st_size == 0:
        raise CannotJudge(f"the node's disk has no `{name}`: it would not boot", "tunetool lab reset NODE")


def _run(command: list[str], accepted: tuple[int, ...] = (0,)) -> str:
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if result.returncode not in accepted:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        raise CannotJudge(f"`{Path(command[0]).name}`: {lines[-1]}", "is the file system full?")
    return result.stdout
