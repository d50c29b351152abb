"""Faults during staging: a copy is either complete or absent, and the error names the fault."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from calls import TUNETOOL, call
from judged import interrupted
from staged import Quiet, beside, evict, failed, stage, verify, view
from tunetool import record as records
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.stage.destination import find_destination, only_one
from tunetool.stage.ends import Source
from tunetool.stage.moving import BLOCK_BYTES, Plan, move
from tunetool.stage.tree import Entry
from waiting import PATIENCE, stopped, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "sub").mkdir(parents=True)
    for number in range(30):
        (root / f"sub/{number}").write_bytes(bytes([number]) * (20000 + number))
    return root


def vanish(source: Path) -> str:
    (source / "sub/7").unlink()
    return "/sub/7` vanished while it was staged"


def grow(source: Path) -> str:
    with (source / "sub/7").open("ab") as stream:
        stream.write(b"more")
    return "/sub/7` changed while it was read"


def turn(source: Path) -> str:
    (source / "sub/7").write_bytes(b"z" * 20007)
    return "/sub/7` changed while it was read"


def turn_unseen(source: Path) -> str:
    """Write other bytes of the same length, with the time of the old ones."""
    was = (source / "sub/7").stat()
    with (source / "sub/7").open("r+b") as stream:
        stream.write(b"z" * 20007)
    os.utime(source / "sub/7", ns=(was.st_atime_ns, was.st_mtime_ns))
    return "/sub/7` changed while it was read"


def swap_unseen(source: Path) -> str:
    """Replace the file with another one of the same name, length and time."""
    was, new = (source / "sub/7").stat(), source.parent / "new"
    new.write_bytes(b"z" * 20007)
    os.utime(new, ns=(was.st_atime_ns, was.st_mtime_ns))
    new.replace(source / "sub/7")
    return "/sub/7` changed while it was read"


def one_more(source: Path) -> str:
    (source / "sub/new").touch()
    return "` changed while it was staged"


@pytest.mark.parametrize("harm", [vanish, grow, turn, turn_unseen, swap_unseen, one_more])
@pytest.mark.parametrize("before", [False, True])
def test_a_source_at_work_is_no_copy(source: Path, tmp_path: Path, harm: Callable[[Path], str], before: bool) -> None:
    destination, old = tmp_path / "copy", {}
    if before:
        stage(source, destination, tmp_path / "runs")
        old = view(destination)
        (source / "sub/0").write_bytes(b"another")
    said = []
    result = stage(source, destination, tmp_path / "runs", Quiet(lambda: said.append(harm(source))), replace=True)
    assert said[0] in failed(result)
    assert destination.exists() == before
    assert beside(destination) == ([".copy.tunetool-stage.json"] if before else [])
    if before:
        # The tree that was to be replaced is complete and still recognised.
        assert view(destination) == old
        assert evict(destination, tmp_path / "runs").code == ExitCode.OK


@pytest.mark.parametrize("times", ["new", "kept"])
def test_a_file_that_changes_in_the_middle_of_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: str
) -> None:
    """Change the file after its first block was read: half of each version would be a copy of neither."""
    source, destination = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    large = source / "large"
    large.write_bytes(b"1" * (2 * BLOCK_BYTES + 1))
    was, reads, fill = large.stat(), list[int](), Source.fill

    def between_blocks(self: Source, buffer: memoryview, offset: int, count: int) -> int:
        reads.append(offset)
        if len(reads) == 2:
            with large.open("r+b") as stream:
                stream.write(b"2" * (2 * BLOCK_BYTES + 1))
            if times == "kept":
                os.utime(large, ns=(was.st_atime_ns, was.st_mtime_ns))
        return fill(self, buffer, offset, count)

    # A copy cannot be stopped between two blocks from outside.
    monkeypatch.setattr(Source, "fill", between_blocks)
    assert "` changed while it was " in failed(stage(source, destination, tmp_path / "runs", threads=1))
    assert len(reads) == 3
    assert not destination.exists()
    assert beside(destination) == []


def test_a_drive_that_does_not_read(tmp_path: Path) -> None:
    # Nothing is mapped at address 0: the kernel's own answer is EIO.
    entry = Entry("x", "file", 4096, 0, 0o644, "", "/proc/self/mem")
    with pytest.raises(CannotJudge, match=f"`/proc/self/mem` cannot be read: {os.strerror(errno.EIO)}"):
        move([entry], Plan(None, "xxh3_64", 2), lambda _: None)


def test_a_write_that_fails(source: Path, tmp_path: Path) -> None:
    (source / "large").write_bytes(b"x" * 3_000_000)
    limit = (2_000_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done = call(
        *TUNETOOL,
        "stage",
        str(source),
        str(tmp_path / "copy"),
        "--runs-dir",
        str(tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 3
    assert f"`large` cannot be written in `{tmp_path}`: {os.strerror(errno.EFBIG)}" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "ERROR"
    assert not (tmp_path / "copy").exists()
    assert beside(tmp_path / "copy") == []


def in_a_namespace(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``script`` by a shell that may mount."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "sh", "-ec", script, "sh", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=ROOT)


needs_namespaces = pytest.mark.skipif(
    subprocess.run(
        ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount", "true"],
        capture_output=True,
        check=False,
    ).returncode
    != 0,
    reason="this user may not make a mount namespace",
)


@needs_namespaces
def test_too_small_a_memory_file_system_is_told_before(source: Path, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    script = """
        mount -t tmpfs -o size=512k none "$1/shm"
        code=0; "$2" -m tunetool stage "$1/source" "$1/shm/copy" --runs-dir "$1/runs" || code=$?
        ls -A "$1/shm"; exit $code
    """
    done = in_a_namespace(script, tmp_path, sys.executable)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert re.search(r"^error: 622\.6 kB are needed, `.*/shm` has 52\d\.?\d* kB; the .*\nhint: ", done.stderr)


@needs_namespaces
def test_a_memory_file_system_that_fills_up_meanwhile(source: Path, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    program = textwrap.dedent("""
        import sys
        sys.path.insert(0, "tests")
        from pathlib import Path
        from staged import Quiet, failed, stage
        base = Path(sys.argv[1])
        fill = lambda: (base / "shm/other").write_bytes(b"x" * 700_000)
        print(failed(stage(base / "source", base / "shm/copy", base / "runs", Quiet(fill))))
        print(sorted(path.name for path in (base / "shm").iterdir()))
    """)
    script = 'mount -t tmpfs -o size=1m none "$1/shm"; exec "$2" -c "$3" "$1"'
    done = in_a_namespace(script, tmp_path, sys.executable, program)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[0].startswith(f"`{tmp_path}/shm` is full (No space left on device)")
    assert lines[1] == "['other']"


STOPPED = """
import signal, sys
sys.path.insert(0, "tests")
from pathlib import Path
import stops
from tunetool.cli.main import main
place, sys.argv[1:] = Path(sys.argv[1]), sys.argv[2:]
stops.install(place, place / "log", "open /.copy.tunetool-stage-*/large", signal.SIGSTOP)
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(tmp_path: Path, number: int) -> None:
    (tmp_path / "source").mkdir()
    # A hole of a gigabyte: its checksum takes a second.
    with (tmp_path / "source/large").open("wb") as stream:
        stream.truncate(2**30)
    command = [sys.executable, "-c", STOPPED, str(tmp_path), "stage", str(tmp_path / "source"), str(tmp_path / "copy")]
    command += ["--checksum", "sha256", "--threads", "1", "--runs-dir", str(tmp_path / "runs")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        until(lambda: stopped(process.pid), "the copy to begin", process)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        assert said.startswith("copies 1.074 GB")
        assert process.wait(timeout=PATIENCE) == 130
        assert process.stderr.read().splitlines()[-1] == "interrupted"
    assert not (tmp_path / "copy").exists()
    assert beside(tmp_path / "copy") == []
    interrupted(tmp_path / "runs")


KILLER = """
import json, os, shutil, signal, sys
sys.path.insert(0, "tests")
from pathlib import Path
import stops
from staged import beside, stage, view
from tunetool.stage import destination as place
base, shm = Path(sys.argv[1]), Path(sys.argv[2])
copy, runs, log = shm / "copy", base / "runs", base / "log"
whole = {name: view(base / name) for name in ("old", "new")}
exchange = place.exchange

def killed(replace, at):
    log.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        note = stops.install(shm, log, at)
        # A call of the C library, which Python does not see.
        place.exchange = lambda one, other: (note("exchange", str(other)), exchange(one, other))[1]
        try:
            stage(base / "new", copy, runs, replace=replace, threads=1)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stops.points(log)

def begin(replace):
    if copy.exists():
        shutil.rmtree(copy)
    if replace:
        stage(base / "old", copy, runs)

tally = {}
for replace, decides in ((False, "rename /copy"), (True, "exchange /copy")):
    begin(replace)
    status, points = killed(replace, None)
    assert status == 0
    assert points.count(decides) == 1, points
    for at in stops.telling(points):
        begin(replace)
        status, done = killed(replace, at)
        assert status == -signal.SIGKILL, points[at]
        expected = "new" if decides in done[:-1] else "old" if replace else None
        found = view(copy) if copy.exists() else None
        assert found == whole.get(expected), (points[at], expected)
        tally[str(expected)] = tally.get(str(expected), 0) + 1
        stage(base / "new", copy, runs, replace=replace)
        assert view(copy) == whole["new"], points[at]
        assert beside(copy) == [f".{copy.name}.tunetool-stage.json"], beside(copy)
print(json.dumps(tally))
"""


def test_killed_at_any_point_there_is_no_half_copy(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        for number in range(60):
            (tmp_path / name / str(number)).write_bytes(name.encode() * (number * 200))
        with (tmp_path / name / "large").open("wb") as stream:
            stream.truncate(6 * 2**20)
            stream.write(name.encode())
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK) or shutil.disk_usage(shm).free < 2**29:
        shm = tmp_path
    folder = Path(tempfile.mkdtemp(prefix="tunetool-test-", dir=shm))
    try:
        done = call(sys.executable, "-c", KILLER, str(tmp_path), str(folder), cwd=ROOT)
        assert done.returncode == 0, done.stderr
        # It was killed before, at and after the deciding rename.
        assert json.loads(done.stdout).keys() == {"None", "old", "new"}, done.stdout
    finally:
        shutil.rmtree(folder)


def test_a_killed_rename_is_carried_out(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "copy"
    stage(source, destination, tmp_path / "runs")
    # Killed after the manifest was written, before the tree had its name.
    destination.rename(tmp_path / ".copy.tunetool-stage-0123456789ab")
    (tmp_path / ".copy.tunetool-gone-0123456789ab").mkdir()
    assert stage(source, destination, tmp_path / "runs").record.measurements == []
    assert beside(destination) == [".copy.tunetool-stage.json"]
    # But never over files that somebody else put there in the meantime.
    destination.rename(tmp_path / ".copy.tunetool-stage-0123456789ab")
    destination.mkdir()
    (destination / "mine").touch()
    with pytest.raises(Exception, match="was not staged by tunetool"):
        stage(source, destination, tmp_path / "runs")
    assert sorted(path.name for path in destination.iterdir()) == ["mine"]


@pytest.mark.parametrize("manifest", ["{", '{"schema": "tunetool.stage/9"}'], ids=["damaged", "of another version"])
def test_killed_between_two_renames_one_tree_is_left(source: Path, tmp_path: Path, manifest: str) -> None:
    destination = tmp_path / "copy"
    stage(source, destination, tmp_path / "runs")
    old = view(destination)
    # As on NFS, which exchanges no names: the old tree gave up its name, the new one has not got it.
    destination.rename(tmp_path / ".copy.tunetool-gone-0123456789ab")
    (tmp_path / ".copy.tunetool-stage-0123456789ab").mkdir()
    (tmp_path / ".copy.tunetool-stage.json").write_text(manifest)
    with pytest.raises(UsageProblem, match=r"`.*copy` exists and is not that copy: `.*` (is damaged|has schema)"):
        stage(source, destination, tmp_path / "runs")
    assert view(destination) == old
    assert beside(destination) == [".copy.tunetool-stage.json"]
    assert stage(source, destination, tmp_path / "runs", replace=True).code == ExitCode.OK
    assert verify(destination, tmp_path / "runs").code == ExitCode.OK
    assert beside(destination) == [".copy.tunetool-stage.json"]


either_end = pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])


def replaced_in_vain(
    source: Path,
    runs: Path,
    destination: Path,
    error: BaseException,
    fail_there: Callable[[pytest.MonkeyPatch], object],
) -> None:
    """A copy is to be replaced; what ``fail_there`` has patched raises ``error``, and the old tree is there as before."""
    stage(source, destination, runs)
    old = view(destination)
    (source / "sub/0").write_bytes(b"another")
    with pytest.MonkeyPatch.context() as patch:
        fail_there(patch)
        if isinstance(error, OSError):
            assert "Input/output error" in failed(stage(source, destination, runs, replace=True))
        else:
            with pytest.raises(type(error)):
                stage(source, destination, runs, replace=True)
    assert view(destination) == old
    assert beside(destination) == [f".{destination.name}.tunetool-stage.json"]
    assert verify(destination, runs).code == ExitCode.OK


@either_end
def test_the_second_of_two_renames_fails(source: Path, tmp_path: Path, error: BaseException) -> None:
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.startswith(".copy.tunetool-stage-"):
            raise error
        return rename(path, target)

    def fail_there(patch: pytest.MonkeyPatch) -> None:
        patch.setattr("tunetool.stage.destination.exchange", lambda first, second: False)
        patch.setattr(Path, "rename", fail)

    replaced_in_vain(source, tmp_path / "runs", tmp_path / "copy", error, fail_there)


@either_end
def test_a_name_that_cannot_be_given_leaves_the_old_tree_known(
    source: Path, tmp_path: Path, error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    def fail_there(patch: pytest.MonkeyPatch) -> None:
        # Between the manifest and the rename, where no fault of the storage can be placed from outside.
        patch.setattr("tunetool.stage.build.put", fail)

    replaced_in_vain(source, tmp_path / "runs", tmp_path / "copy", error, fail_there)


def test_a_lock_file_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = find_destination(str(tmp_path / "copy"))
    really, others = fcntl.flock, list[int]()

    def flock(handle: int, operation: int) -> None:
        # Between our opening the file and our locking it, its holder leaves and somebody else comes.
        if not others:
            destination.lock.unlink()
            others.append(os.open(destination.lock, os.O_RDWR | os.O_CREAT))
            really(others[0], fcntl.LOCK_EX)
        really(handle, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(CannotJudge, match="is being staged by"), only_one(destination, wait=False, say=print):
        pass
    os.close(others[0])
    with only_one(destination, wait=False, say=print):
        pass
    assert beside(destination.path) == []


def test_another_users_lock_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    destination = find_destination(str(tmp_path / "copy"))
    destination.lock.touch()
    os.chown(destination.lock, 65534, 65534)
    with pytest.raises(UsageProblem) as refused, only_one(destination, wait=True, say=print):
        pass
    assert "it is a file of user `nobody`" in refused.value.message
    assert f"rm {destination.lock}" in refused.value.hint


def test_without_an_exchange_of_names_it_is_two_renames(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on NFS: renameat2 with RENAME_EXCHANGE answers EINVAL there.
    monkeypatch.setattr("tunetool.stage.destination.exchange", lambda first, second: False)
    destination = tmp_path / "copy"
    stage(source, destination, tmp_path / "runs")
    (source / "sub/0").write_bytes(b"another")
    stage(source, destination, tmp_path / "runs", replace=True)
    assert view(destination) == view(source)
    assert beside(destination) == [".copy.tunetool-stage.json"]


def test_a_record_without_its_directory_is_kept_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, runs, elsewhere = tmp_path / "source", tmp_path / "runs", tmp_path / "elsewhere"
    for directory in (source, runs, elsewhere):
        directory.mkdir()
    (source / "data").write_bytes(b"x" * 4096)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))

    def replace_runs() -> None:
        runs.rmdir()
        runs.touch()

    progress = Quiet(replace_runs)
    result = stage(source, tmp_path / "copy", runs, progress)
    assert result.code == 0
    assert result.path is not None
    assert result.path.is_relative_to(elsewhere)
    assert result.record is not None
    assert records.read(result.path).id == result.record.id
    assert progress.lines[-1] == (
        f"`{runs}` could not keep the record: File exists. It is in `{result.path.parent}`: move it there"
    )

    # Where nothing keeps it, the first reason is told, and nothing is left.
    monkeypatch.setattr("tempfile.tempdir", str(runs))
    runs.unlink()
    runs.mkdir()
    with pytest.raises(FileExistsError, match="runs"):
        stage(source, tmp_path / "second", runs, Quiet(replace_runs))
