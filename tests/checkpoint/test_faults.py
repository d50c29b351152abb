"""Storage fails during a save: the error names cause and file, and the previous checkpoint stays complete."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeded
import torch.distributed.checkpoint as dcp
from failing_disks import Meanwhile, fill, loop, mounted, needs_root, run, shut_down
from torch.distributed.checkpoint import CheckpointException

from tunetool.checkpoint import metadata
from tunetool.checkpoint import writer as writer_module
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.writer import DirectWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MEGABYTES = 8


class Written(DirectWriter):
    """Calls a function once all data files are written and synced, just before the save becomes the checkpoint."""

    act: Callable[[], None] = staticmethod(lambda: None)

    def finish(self, *arguments: Any, **named: Any) -> None:
        self.act()
        super().finish(*arguments, **named)


def nothing() -> None:
    """What a save that is let alone is disturbed by."""


def save(path: Path, seed: int, act: Callable[[], None] = nothing, *, written: bool = False) -> None:
    """``act`` comes before the first tensor is written, or, if ``written``, after the last."""
    writer = Written(path, threads=2, buffer_bytes=2**20)
    if written:
        writer.act = act
    dcp.save(seeded.state(seed, MEGABYTES), storage_writer=writer, planner=Meanwhile(nothing if written else act))


def refused(path: Path, act: Callable[[], None], *, written: bool = False) -> str:
    with pytest.raises(CheckpointException) as caught:
        save(path, 2, act, written=written)
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


moments = pytest.mark.parametrize("written", [False, True], ids=["before the data", "before the commit"])


@needs_root
@moments
def test_a_disk_that_fails_while_it_is_written(tmp_path: Path, written: bool) -> None:
    """It answers nothing any more, and later it is back, as after a loose cable."""
    with loop(tmp_path / "image", "has_journal") as (device, fail):
        with mounted(tmp_path / "disk", device) as disk:
            path = disk / "step"
            save(path, 1)
            run("sync", "--file-system", str(disk))
            message = refused(path, lambda: fail(4096), written=written)
            assert "Input/output error" in message
            assert str(path) in message
        fail(0)
        with mounted(tmp_path / "again", device) as disk:
            path = disk / "step"
            assert holds(path, 1)
            save(path, 3)
            assert holds(path, 3)
            assert only_the_checkpoint(path)


@needs_root
def test_a_disk_that_fails_while_it_is_read(tmp_path: Path) -> None:
    with loop(tmp_path / "image") as (device, fail), mounted(tmp_path / "disk", device) as disk:
        path = disk / "step"
        fill_first = disk / "before"
        with fill_first.open("wb") as stream:
            stream.write(bytes(14 * 2**20))
            os.fsync(stream.fileno())
        save(path, 1)
        fail(12 * 2**20)
        with pytest.raises(CheckpointException) as caught:
            holds(path, 1)
        (failure,) = caught.value.failures.values()
        assert "Input/output error" in str(failure[0])
        assert "/step/__0_" in str(failure[0])


@moments
def test_the_directory_is_renamed_during_a_save(tmp_path: Path, written: bool) -> None:
    path, away = tmp_path / "step", tmp_path / "away"
    save(path, 1)
    message = refused(path, lambda: path.rename(away) and None, written=written)
    assert f"`{path}` {'was renamed, replaced or removed' if written else 'cannot be written'}" in message
    # The previous checkpoint is where it was moved, and nothing of the save is with it, nor its lock.
    assert only_the_checkpoint(away)
    assert holds(away, 1)
    assert not path.exists()
    save(path, 3)
    assert holds(path, 3)


@pytest.mark.filterwarnings("ignore:.*process group")
def test_the_directory_is_renamed_during_an_asynchronous_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, away = tmp_path / "step", tmp_path / "away"
    save(path, 1)
    sync = writer_module.fsync_directory

    def rename_first(directory: Path) -> None:
        path.rename(away)
        sync(directory)

    monkeypatch.setattr(writer_module, "fsync_directory", rename_first)
    writer = DirectWriter(path)
    saving = dcp.async_save(
        seeded.state(2, MEGABYTES), storage_writer=writer, planner=DirectSavePlanner(), async_stager=writer.stager()
    )
    with pytest.raises(CheckpointException) as caught:
        saving.result()
    (failure,) = caught.value.failures.values()
    assert f"`{path}` cannot be written: No such file or directory" in str(failure[0])
    assert "\n" not in str(failure[0])
    assert only_the_checkpoint(away)
    assert holds(away, 1)


@moments
def test_another_checkpoint_takes_the_directory_during_a_save(tmp_path: Path, written: bool) -> None:
    path, away, other = tmp_path / "step", tmp_path / "away", tmp_path / "other"
    save(path, 1)
    save(other, 4)

    def swap() -> None:
        path.rename(away)
        other.rename(path)

    message = refused(path, swap, written=written)
    assert f"`{path}` was renamed, replaced or removed" in message
    for place, seed in ((away, 1), (path, 4)):
        assert only_the_checkpoint(place)
        assert holds(place, seed)


def test_the_directory_is_removed_during_a_save(tmp_path: Path) -> None:
    path = tmp_path / "step"
    message = refused(path, lambda: shutil.rmtree(path), written=True)
    assert f"`{path}` was renamed, replaced or removed" in message
    assert not path.exists()


def turn_read_only(disk: Path, device: str) -> None:
    """What `errors=remount-ro` does at the first error."""
    Path(f"/sys/fs/ext4/{Path(device).name}/trigger_fs_error").write_text("a test\n")
    with pytest.raises(OSError, match="Read-only file system"):
        (disk / "probe").touch()


@needs_root
@moments
@pytest.mark.parametrize(
    ("fail", "words"),
    [(shut_down, "Input/output error"), (turn_read_only, "Read-only file system")],
    ids=["shut down", "read-only"],
)
def test_a_file_system_that_fails_during_a_save(
    tmp_path: Path, fail: Callable[[Path, str], None], words: str, written: bool
) -> None:
    with (
        loop(tmp_path / "image") as (device, _),
        mounted(tmp_path / "disk", "-o", "errors=remount-ro", device) as disk,
    ):
        path = disk / "step"
        save(path, 1)
        run("sync", "--file-system", str(disk))
        message = refused(path, lambda: fail(disk, device), written=written)
        assert words in message
        assert f"{path}/" in message
        run("umount", str(disk))
        # 1: errors were corrected.
        assert subprocess.run(["e2fsck", "-fy", device], capture_output=True, check=False).returncode in (0, 1)
        run("mount", device, str(disk))
        assert holds(path, 1)
        # What the failed save left is swept by the next.
        save(path, 3)
        assert only_the_checkpoint(path)
        assert holds(path, 3)


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
