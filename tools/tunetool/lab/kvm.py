"""Whether KVM really works: /dev/kvm can exist and be useless, as it is under nested virtualisation."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tunetool.lab.process import QEMU, qemu_version
from tunetool.node.common.files import replace_file

PROBE_SECONDS = 6.0
DEVICE = Path("/dev/kvm")

_MACHINE = "-machine q35 -accel kvm -cpu host -m 256M -nodefaults -no-user-config -display none -no-reboot"
_PROBE_ARGUMENTS = [*_MACHINE.split(), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"]


def accelerator(kernel: Path, cache: Path, say: Callable[[str], None]) -> str:
    """``kvm`` if a kernel boots under it, else ``tcg``. The answer is cached per host kernel and QEMU version."""
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        if DEVICE.exists():
            say(f"{DEVICE} is closed to you (group kvm?): nodes will be several times slower")
        return "tcg"
    remembered = cache / "kvm.json"
    key = hashlib.sha256("\0".join([platform.node(), platform.release(), qemu_version()]).encode()).hexdigest()
    try:
        known = json.loads(remembered.read_text())
        if known["key"] == key and known["accel"] in ("kvm", "tcg"):
            return str(known["accel"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    accel = "kvm" if _boots(kernel) else "tcg"
    replace_file(str(remembered), json.dumps({"key": key, "accel": accel}) + "\n", sync=False)
    return accel


def _boots(kernel: Path) -> bool:
    # A first line on the serial console proves that the guest ran through decompression, where nested KVM hangs.
    with tempfile.TemporaryDirectory(prefix="tunetool-kvm-") as directory:
        serial = Path(directory) / "serial"
        process = subprocess.Popen(
            [QEMU, *_PROBE_ARGUMENTS, "-serial", f"file:{serial}", "-kernel", str(kernel)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + PROBE_SECONDS
            while time.monotonic() < deadline and process.poll() is None:
                if serial.exists() and b"Linux version" in serial.read_bytes():
                    return True
                time.sleep(0.1)
            return serial.exists() and b"Linux version" in serial.read_bytes()
        finally:
            process.kill()
            process.wait()
