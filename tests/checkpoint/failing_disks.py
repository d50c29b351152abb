"""File systems of tests that fill up, fail, hang or vanish."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import DefaultSavePlanner

from programs import need_program

# linux/loop.h: the size of struct loop_info64, and where its lo_sizelimit lies.
LOOP_SET_STATUS64, LOOP_GET_STATUS64, LOOP_INFO64, SIZE_LIMIT = 0x4C04, 0x4C05, 232, 32
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Meanwhile(DefaultSavePlanner):
    """Calls a function just before a save reads the tensors, after all of its checks."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act: Callable[[], None] | None = act

    def resolve_data(self, write_item: Any) -> Any:
        if self.act is not None:
            self.act, act = None, self.act
            act()
        return super().resolve_data(write_item)


@contextlib.contextmanager
def mounted(mount_point: Path, *how: str) -> Iterator[Path]:
    mount_point.mkdir()
    try:
        run("mount", *how, str(mount_point))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no file system can be mounted here: {error.stderr}")
    try:
        yield mount_point
    finally:
        # A write that failed may still be in progress.
        run("umount", "--lazy", str(mount_point))


@contextlib.contextmanager
def loop(image: Path, features: str = "^has_journal") -> Iterator[tuple[str, Callable[[int], None]]]:
    """A device of 64 MB with a file system, and a function after which every access beyond a size fails.

    What lies there stays, and with size 0 the device is whole again.
    """
    with image.open("wb") as stream:
        stream.truncate(64 * 2**20)
    need_program("mkfs.ext4", "losetup")
    run("mkfs.ext4", "-q", "-O", features, str(image))
    try:
        device = run("losetup", "--find", "--show", str(image))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device here: {error}")

    def fail(beyond: int) -> None:
        with Path(device).open("rb") as stream:
            status = fcntl.ioctl(stream, LOOP_GET_STATUS64, bytes(LOOP_INFO64))
            status = status[:SIZE_LIMIT] + struct.pack("=Q", beyond) + status[SIZE_LIMIT + 8 :]
            fcntl.ioctl(stream, LOOP_SET_STATUS64, status)

    try:
        yield device, fail
    finally:
        run("losetup", "--detach", device)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb") as stream, contextlib.suppress(OSError):
        while True:
            os.write(stream.fileno(), bytes(2**16))


def shut_down(disk: Path, device: str) -> None:
    """What a file system does whose device is gone: every access is an error, until it is mounted again."""
    handle = os.open(disk, os.O_RDONLY)
    try:
        # FS_IOC_SHUTDOWN of ext4, without its log.
        fcntl.ioctl(handle, 0x8004587D, struct.pack("I", 2))
    finally:
        os.close(handle)


@contextlib.contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Every write to the file system waits meanwhile, as for a drive that does not answer."""
    handle = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(handle, 0xC0045877, 0)  # FIFREEZE
        try:
            yield
        finally:
            fcntl.ioctl(handle, 0xC0045878, 0)  # FITHAW
    finally:
        os.close(handle)
