"""Sources that somebody works on while they are copied, and sources that the user may not read.

A copy is held at a chosen point of its work, where the test changes the source; what it finds depends on the point alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from staged import Quiet, beside, evict, failed, stage, verify, view
from tunetool.errors import ExitCode, TunetoolError
from tunetool.stage import build
from tunetool.stage.moving import BLOCK_BYTES
from tunetool.stage.pieces import PIECE_BYTES

NOBODY = 65534
SIZES = {"small": 20_000, "large": 2 * BLOCK_BYTES + 4096, "pieces": PIECE_BYTES + BLOCK_BYTES}


def other_bytes(path: Path) -> bytes:
    return b"2" * min(path.stat().st_size, BLOCK_BYTES)


def overwrite(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(other_bytes(path))


def overwrite_under_the_old_time(path: Path) -> None:
    was = path.stat()
    overwrite(path)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def replace_under_the_old_time(path: Path) -> None:
    was, new = path.stat(), path.with_name("new")
    shutil.copyfile(path, new)
    overwrite(new)
    new.chmod(was.st_mode)
    os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    new.replace(path)


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"more")


def cut_short(path: Path) -> None:
    os.truncate(path, 100)


def make_empty_and_as_long_again(path: Path) -> None:
    """What `open(path, "w")` does at first: a reader in the middle finds zeros."""
    was = path.stat()
    os.truncate(path, 0)
    os.truncate(path, was.st_size)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def remove(path: Path) -> None:
    path.unlink()


def make_a_link(path: Path) -> None:
    path.rename(path.with_name("file"))
    path.symlink_to("file")


def rename_its_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("other"))


def add_another(path: Path) -> None:
    path.with_name("another").touch()


def change_its_mode(path: Path) -> None:
    path.chmod(0o600)


HARMS: list[Callable[[Path], None]] = [
    overwrite,
    overwrite_under_the_old_time,
    replace_under_the_old_time,
    append,
    cut_short,
    make_empty_and_as_long_again,
    remove,
    make_a_link,
    rename_its_directory,
    add_another,
    change_its_mode,
]


def hold(monkeypatch: pytest.MonkeyPatch, file: Path, offset: int, act: Callable[[], None]) -> list[int]:
    """Call ``act`` before the first read of ``file`` at ``offset``; returns the offsets of all reads, as they come."""
    reads: list[int] = []
    preadv = os.preadv

    def held(handle: int, buffers: list[memoryview], at: int) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink() == file:
            reads.append(at)
            if reads.count(offset) == 1 and at == offset:
                act()
        return preadv(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", held)
    return reads


@pytest.fixture(params=["small", "large"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The first file of a source, of one of the sizes."""
    folder = tmp_path / "source/sub"
    folder.mkdir(parents=True)
    (folder / "z").write_bytes(b"z" * 1000)
    with (folder / request.param).open("wb") as stream:
        stream.write(b"1" * min(SIZES[request.param], 3 * BLOCK_BYTES))
        stream.truncate(SIZES[request.param])
    return Path(folder / request.param)


def copied_to(tmp_path: Path) -> str:
    """Stage the source with one thread; the reason why there is no copy."""
    reason = failed(stage(tmp_path / "source", tmp_path / "copy", tmp_path / "runs", threads=1, replace=True))
    assert f"`{tmp_path}/source" in reason
    assert any(word in reason for word in ("changed while it was", "vanished while it was staged")), reason
    return reason


@pytest.mark.parametrize("harm", HARMS)
def test_a_change_between_opening_a_file_and_its_first_byte(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    held: list[str] = []
    hold(monkeypatch, file, 0, lambda: held.append("held") or harm(file))
    copied_to(tmp_path)
    assert held == ["held"]
    assert not (tmp_path / "copy").exists()
    assert beside(tmp_path / "copy") == []


@pytest.mark.parametrize(
    ("harm", "file"),
    [
        *((harm, "large") for harm in HARMS),
        *((harm, "pieces") for harm in (overwrite_under_the_old_time, replace_under_the_old_time, remove)),
    ],
    indirect=["file"],
)
def test_a_change_in_the_middle_of_a_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    """Half of each version would be a copy of neither."""
    middle = PIECE_BYTES if file.name == "pieces" else BLOCK_BYTES
    reads = hold(monkeypatch, file, middle, lambda: harm(file))
    copied_to(tmp_path)
    assert middle in reads
    assert reads.index(middle) > 0, "something of it was read before"
    assert not (tmp_path / "copy").exists()
    assert beside(tmp_path / "copy") == []


@pytest.mark.parametrize("harm", HARMS)
def test_a_change_after_all_was_read(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    """The copy is one of the source as it was; but what is staged is said to be what the source holds."""
    stage(tmp_path / "source", tmp_path / "copy", tmp_path / "runs")
    old = view(tmp_path / "copy")
    append(tmp_path / "source/sub/z")
    move = build.move

    def moved(*arguments: object) -> object:
        result = move(*arguments)  # type: ignore[arg-type]
        harm(file)
        return result

    monkeypatch.setattr(build, "move", moved)
    copied_to(tmp_path)
    # The tree that was to be replaced is complete and still recognised.
    assert view(tmp_path / "copy") == old
    assert beside(tmp_path / "copy") == [".copy.tunetool-stage.json"]
    assert evict(tmp_path / "copy", tmp_path / "runs").code == ExitCode.OK


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that an ordinary user can reach, unlike ``tmp_path``."""
    made = Path(tempfile.mkdtemp(prefix="tunetool-test-"))
    (made / "source/sub").mkdir(parents=True)
    for number in range(3):
        (made / f"source/sub/{number}").write_bytes(b"x" * 100)
    for path in (made, *made.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
    yield made
    shutil.rmtree(made)


def as_an_ordinary_user(act: Callable[[], str]) -> str:
    """What ``act`` returns in a process that is not root's; what it raises in lines."""
    import xxhash  # noqa: F401  (the child may not be able to reach it)

    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            try:
                text = act()
            except TunetoolError as error:
                text = f"{type(error).__name__}: {error.message}; {error.hint}"
            except BaseException:
                text = traceback.format_exc()
            os.write(send, text.encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as stream:
        text = stream.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def staged(folder: Path, progress: Quiet | None = None, **more: object) -> str:
    result = stage(folder / "source", folder / "copy", folder / "runs", progress, **more)
    return "copied" if result.code == ExitCode.OK else failed(result)


def test_a_file_that_an_ordinary_user_may_not_read(folder: Path) -> None:
    file = folder / "source/sub/1"
    file.chmod(0)
    said = as_an_ordinary_user(lambda: staged(folder))
    assert said == f"UsageProblem: `{folder}/source/sub/1` may not be read; run as a user who may read it"
    assert (beside(folder / "copy"), (folder / "copy").exists()) == ([], False)
    # The same where there is an older copy.
    file.chmod(0o644)
    assert as_an_ordinary_user(lambda: staged(folder)) == "copied"
    old = view(folder / "copy")
    file.chmod(0)
    assert "the source changed after it was staged" in as_an_ordinary_user(lambda: staged(folder))
    said = as_an_ordinary_user(lambda: staged(folder, replace=True))
    assert said == f"UsageProblem: `{folder}/source/sub/1` may not be read; run as a user who may read it"
    assert view(folder / "copy") == old
    assert beside(folder / "copy") == [".copy.tunetool-stage.json"]


def test_a_directory_that_an_ordinary_user_may_not_list(folder: Path) -> None:
    (folder / "source/sub").chmod(0o311)
    said = as_an_ordinary_user(lambda: staged(folder))
    assert said == f"UsageProblem: `{folder}/source/sub` may not be read; run as a user who may read it"
    (folder / "source/sub").chmod(0o644)
    said = as_an_ordinary_user(lambda: staged(folder))
    assert said.startswith(f"UsageProblem: `{folder}/source/sub/")
    assert said.endswith("` may not be read; run as a user who may read it")
    (folder / "source/sub").chmod(0o755)
    assert as_an_ordinary_user(lambda: staged(folder)) == "copied"


def test_a_link_to_what_an_ordinary_user_may_not_reach(folder: Path) -> None:
    (folder / "closed").mkdir()
    (folder / "closed/blob").write_bytes(b"y")
    (folder / "source/blob").symlink_to("../closed/blob")
    (folder / "closed").chmod(0)
    if os.geteuid() == 0:
        os.chown(folder / "closed", NOBODY, NOBODY)
    said = as_an_ordinary_user(lambda: staged(folder))
    assert said == (
        f"UsageProblem: `{folder}/source/blob` leads to something that may not be read; run as a user who may read it"
    )


def test_a_file_that_may_no_longer_be_read_when_its_turn_comes(folder: Path) -> None:
    close = Quiet(lambda: (folder / "source/sub/1").chmod(0))
    said = as_an_ordinary_user(lambda: staged(folder, close))
    assert said == f"`{folder}/source/sub/1` may not be read; run as a user who may read it"
    assert (beside(folder / "copy"), (folder / "copy").exists()) == ([], False)


def test_a_copy_that_an_ordinary_user_may_not_read(folder: Path) -> None:
    """A copy is its owner's: another user can neither verify nor remove what its modes close."""
    (folder / "source/sub/1").chmod(0o600)
    assert as_an_ordinary_user(lambda: staged(folder)) == "copied"
    (folder / "copy/sub/1").chmod(0)
    said = as_an_ordinary_user(lambda: failed(verify(folder / "copy", folder / "runs")))
    assert said == f"`{folder}/copy/sub/1` may not be read; run as a user who may read it"


def test_a_place_where_an_ordinary_user_may_not_write(folder: Path) -> None:
    (folder / "closed").mkdir()
    (folder / "closed").chmod(0o555)

    def act() -> str:
        return failed(stage(folder / "source", folder / "closed/copy", folder / "runs"))

    assert as_an_ordinary_user(act) == (
        f"UsageProblem: `{folder}/closed` cannot be written: Permission denied; choose a DST that you may write"
    )
