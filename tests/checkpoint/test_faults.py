"""Storage fails during a save: the error names cause and file, and the previous checkpoint stays complete."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import seeded
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner

from programs import need_program
from tunetool.checkpoint import metadata
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.writer import DirectWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MEGABYTES = 8
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system: needs root")


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


def save(path: Path, seed: int, act: Callable[[], None] = lambda: None) -> None:
    writer = DirectWriter(path, threads=2, buffer_bytes=2**20)
    dcp.save(seeded.state(seed, MEGABYTES), storage_writer=writer, planner=Meanwhile(act))


def refused(path: Path, act: Callable[[], None]) -> str:
    with pytest.raises(CheckpointException) as caught:
        save(path, 2, act)
    (failure,) = caught.value.failures.values()
    message = str(failure[0])
    assert "\n" not in message
    return message


def holds(path: Path, seed: int) -> bool:
    loaded = seeded.blank(seeded.state(seed, MEGABYTES))
    dcp.load(loaded, storage_reader=DirectReader(path, threads=2))
    return seeded.difference(seeded.state(seed, MEGABYTES), loaded) is None


def only_the_checkpoint(path: Path) -> bool:
    return {file.name for file in path.iterdir()} == {".metadata", *metadata.files_of(metadata.read(path))}


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


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
def loop(image: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A device of 64 MB with a file system, and a function that removes most of the device under it."""
    with image.open("wb") as stream:
        stream.truncate(64 * 2**20)
    need_program("mkfs.ext4", "losetup")
    run("mkfs.ext4", "-q", "-O", "^has_journal", str(image))
    try:
        device = run("losetup", "--find", "--show", str(image))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device here: {error}")

    def fail() -> None:
        os.truncate(image, 12 * 2**20)
        run("losetup", "--set-capacity", device)

    try:
        yield device, fail
    finally:
        run("losetup", "--detach", device)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb") as stream, contextlib.suppress(OSError):
        while True:
            os.write(stream.fileno(), bytes(2**16))


@needs_root
def test_a_medium_that_fills_up_while_its_file_system_has_room(tmp_path: Path) -> None:
    """As with thin provisioning and quotas: no question before the write reveals the lack of space."""
    with (
        mounted(tmp_path / "thin", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as thin,
        loop(thin / "image") as (device, _),
        mounted(tmp_path / "disk", device) as disk,
    ):
        path = disk / "step"
        save(path, 1)
        run("sync", "--file-system", str(disk))
        message = refused(path, lambda: fill(thin))
        assert "No space left on device" in message
        assert str(path / "__0_") in message
        (thin / "filler").unlink()
        assert only_the_checkpoint(path)
        assert holds(path, 1)
        save(path, 3)
        assert holds(path, 3)


@needs_root
def test_space_is_asked_before_anything_is_written(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=12m", "tmpfs") as small:
        path = small / "step"
        save(path, 1)
        message = refused(path, lambda: None)
        assert f"`{path}` has " in message
        assert re.search(r"the save needs \d.* MB", message)
        assert only_the_checkpoint(path)
        assert holds(path, 1)


@needs_root
def test_a_disk_that_fails_while_it_is_written(tmp_path: Path) -> None:
    with loop(tmp_path / "image") as (device, fail), mounted(tmp_path / "disk", device) as disk:
        path = disk / "step"
        save(path, 1)
        kept = tmp_path / "kept"
        before = (path / ".metadata").read_bytes()
        shutil.copytree(path, kept)
        message = refused(path, fail)
        assert "Input/output error" in message
        # As much of it as the disk can still return.
        assert (path / ".metadata").read_bytes() == before
        assert holds(kept, 1)


@needs_root
def test_a_disk_that_fails_while_it_is_read(tmp_path: Path) -> None:
    with loop(tmp_path / "image") as (device, fail), mounted(tmp_path / "disk", device) as disk:
        path = disk / "step"
        fill_first = disk / "before"
        with fill_first.open("wb") as stream:
            stream.write(bytes(14 * 2**20))
            os.fsync(stream.fileno())
        save(path, 1)
        fail()
        with pytest.raises(CheckpointException) as caught:
            holds(path, 1)
        (failure,) = caught.value.failures.values()
        assert "Input/output error" in str(failure[0])
        assert "/step/__0_" in str(failure[0])


def test_a_limit_of_the_size_of_files(tmp_path: Path) -> None:
    path = tmp_path / "step"
    save(path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))

    # Python ignores SIGXFSZ, so that the write itself fails.
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    try:
        message = refused(path, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in message
    assert only_the_checkpoint(path)
    assert holds(path, 1)


def test_two_savers_at_once_on_one_path(tmp_path: Path) -> None:
    path = tmp_path / "step"
    errors: list[BaseException] = []

    def second() -> None:
        with pytest.raises(CheckpointException) as caught:
            save(path, 2)
        errors.extend(wrapped for wrapped, _ in caught.value.failures.values())

    def beside() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    save(path, 1, beside)
    assert "is being saved to by process" in str(errors[0])
    assert str(os.getpid()) in str(errors[0])
    assert holds(path, 1)
    assert only_the_checkpoint(path)
