"""Directories in which others may write: what root writes there never goes through a link that somebody else made."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from doors import a_stage_manifest
from tunetool.checkpoint import pace
from tunetool.checkpoint.saver_lock import NAME, Lock
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.busy import device_lock, lock_directory
from tunetool.measure.rundir import run_directory, stale_directories
from tunetool.node.common.files import replace_file
from tunetool.stage import manifest as stage_manifests

NOBODY = 65534


class Shared:
    """A directory of mode 1777, a file that is no one's business, and links to it that an ordinary user made."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "shared"
        self.directory.mkdir()
        self.directory.chmod(0o1777)
        self.victim = folder / "victim"
        self.victim.write_text("precious")
        self.victim.chmod(0o600)
        self.before = self._seen()

    def link(self, name: str, target: Path | None = None) -> Path:
        path = self.directory / name
        path.symlink_to(target or self.victim)
        if os.geteuid() == 0:
            os.lchown(path, NOBODY, NOBODY)
        return path

    def untouched(self) -> bool:
        return self._seen() == self.before

    def _seen(self) -> tuple[object, ...]:
        status = self.victim.stat()
        return self.victim.read_text(), status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_a_link_in_a_files_place_is_replaced_and_not_followed(shared: Shared) -> None:
    path = shared.link("file")
    replace_file(str(path), "ours", follow=False)
    assert shared.untouched()
    assert (path.is_symlink(), path.read_text(), path.stat().st_uid) == (False, "ours", os.geteuid())
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_somebody_elses_file_gives_neither_owner_nor_mode(shared: Shared) -> None:
    path = shared.directory / "file"
    path.write_text("theirs")
    path.chmod(0o666)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    replace_file(str(path), "ours", follow=False)
    assert (path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (os.geteuid(), 0o644)


def test_the_manifest_of_a_staged_copy(shared: Shared, tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    sound.write_text(a_stage_manifest())
    manifest = stage_manifests.read(sound)
    assert manifest is not None
    path = shared.link(".copy.tunetool-stage.json")
    with pytest.raises(UsageProblem, match="cannot be read"):
        stage_manifests.read(path)
    stage_manifests.write(manifest, path)
    assert shared.untouched()
    assert stage_manifests.read(path) == manifest


def test_the_lock_of_a_save(shared: Shared) -> None:
    path = shared.link(NAME)
    with pytest.raises(CannotJudge, match="is a link"):
        Lock.take(shared.directory)
    assert shared.untouched()
    path.unlink()
    missing = shared.victim.with_name("missing")
    shared.link(NAME, missing)
    with pytest.raises(CannotJudge, match="is a link"):
        Lock.take(shared.directory)
    assert not missing.exists()


def test_the_flag_of_a_save(shared: Shared) -> None:
    missing = shared.victim.with_name("missing")
    shared.link(pace.FLAG, missing)
    with pace.saving(shared.directory):
        assert pace.savers(shared.directory) == []
    assert not missing.exists()


def test_the_directory_of_a_run(shared: Shared, tmp_path: Path) -> None:
    inside = tmp_path / "theirs"
    inside.mkdir()
    path = shared.link(".tunetool-" + "a" * 12, inside)
    with pytest.raises(UsageProblem), run_directory(shared.directory, "a" * 32):
        pass
    assert (path.is_symlink(), list(inside.iterdir())) == (True, [])
    assert stale_directories(shared.directory) == []


def test_the_lock_of_a_device(shared: Shared) -> None:
    shared.link("tunetool-8-0.lock")
    with pytest.raises(CannotJudge, match="cannot be locked"), device_lock("8:0", shared.directory):
        pass
    assert shared.untouched()


def test_a_directory_of_locks_that_somebody_else_made_first(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(shared.directory))
    directory = lock_directory({}, is_root=False)
    shared.link(directory.name, shared.victim.parent)
    with pytest.raises(CannotJudge, match="belongs to somebody else"), device_lock("8:0", directory):
        pass
    directory.unlink()
    with device_lock("8:0", directory):
        assert stat.S_ISDIR(directory.lstat().st_mode)
