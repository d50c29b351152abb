"""Initramfs images as mkinitramfs and dracut make them: several cpio archives, the last one compressed."""

from __future__ import annotations

import bz2
import gzip
import lzma
import subprocess
from collections.abc import Mapping

MODE = 0o100644


def entry(name: str, data: bytes, inode: int = 1, mode: int = MODE, links: int = 1) -> bytes:
    """One member of a cpio archive of the form newc (kernel: buffer-format.rst)."""
    raw = name.encode("utf-8", "surrogateescape") + b"\0"
    fields = (inode, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(raw), 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + raw
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def archive(files: Mapping[str, bytes]) -> bytes:
    """A whole archive, sorted by name and padded to 512 bytes as GNU cpio does it."""
    body = b"".join(entry(name, files[name], number) for number, name in enumerate(sorted(files), start=1))
    body += entry("TRAILER!!!", b"")
    return body + b"\0" * (-len(body) % 512)


def packed(data: bytes, form: str) -> bytes:
    """Compressed as by ``COMPRESS=form``."""
    library = {
        "none": bytes,
        "gzip": gzip.compress,
        "bzip2": bz2.compress,
        "xz": lambda plain: lzma.compress(plain, check=lzma.CHECK_CRC32),
        "lzma": lambda plain: lzma.compress(plain, format=lzma.FORMAT_ALONE),
    }
    if form in library:
        return library[form](data)
    argv = {"zstd": ["zstd", "-q", "-c"], "lz4": ["lz4", "-l", "-c"], "lzop": ["lzop", "-c"]}[form]
    return subprocess.run(argv, input=data, stdout=subprocess.PIPE, check=True).stdout


MICROCODE = archive({"kernel/x86/microcode/GenuineIntel.bin": bytes(range(256)) * 40})


def image(conf: str | None, form: str = "gzip", early: bytes = MICROCODE, program: bool = True) -> bytes:
    """An image with this mdadm.conf (None: without the file), and with mdadm if ``program``."""
    files = {"conf/arch.conf": b"DPKG_ARCH=amd64\n", "init": b"#!/bin/sh\n", "usr/lib/x.ko": b"\x7fELF" * 5000}
    if conf is not None:
        files["etc/mdadm/mdadm.conf"] = conf.encode("utf-8", "surrogateescape")
    if program:
        files["usr/sbin/mdadm"] = b"\x7fELF"
    return early + packed(archive({"./" + name: data for name, data in files.items()}), form)
