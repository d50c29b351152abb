"""Staging: the result at DST for everything that may be there, and for every kind of SRC."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from staged import Quiet, beside, evict, stage, verify, view
from tunetool import record as records
from tunetool.cli.stage import command
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.node.machine.memory import memory_left, memory_limit
from tunetool.report.table import table_console
from tunetool.stage.destination import find_destination, only_one
from tunetool.stage.ends import Tally
from tunetool.stage.moving import Moved, cpu_times
from tunetool.stage.outcome import binds
from tunetool.stage.remote import is_remote, nanoseconds
from tunetool.stage.room import limits, refuse_too_big
from waiting import PATIENCE, until

MB = 2**20
ODD = os.fsdecode(b"\xff\n name")
"""A name that is not UTF-8 and has a line break."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Small files, one that ends in the middle of a sector, an empty one, links, odd names, times and modes."""
    root = tmp_path / "source"
    (root / "images/deep").mkdir(parents=True)
    (root / "empty").mkdir()
    for number in range(20):
        (root / f"images/{number}.jpg").write_bytes(os.urandom(3000 + number))
    (root / "crooked.bin").write_bytes(os.urandom(2 * MB + 777))
    (root / "nothing").touch()
    (root / "images/deep/up.jpg").symlink_to("../3.jpg")
    (root / "absolute").symlink_to(root / "images")
    (root / ODD).symlink_to("images")
    (root / "images/0.jpg").chmod(0o640)
    (root / "empty").chmod(0o555)
    os.utime(root / "images/0.jpg", ns=(10**18, 10**18 + 123456789))
    os.utime(root / "empty", ns=(10**18, 10**18))
    return root


@pytest.fixture
def model(source: Path) -> Path:
    """The same with a file of three pieces, mostly holes, with something at both sides of the cuts."""
    with (source / "model.safetensors").open("wb") as stream:
        for at in (0, 64 * MB - 5000, 100 * MB, 128 * MB - 3):
            stream.seek(at)
            stream.write(os.urandom(10000))
    return source


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tunetool", "stage", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False)


def test_the_copy_is_the_source(model: Path, tmp_path: Path, runs: Path) -> None:
    source = model
    destination = tmp_path / "copy"
    result = stage(source, destination, runs)
    assert result.code == ExitCode.OK
    assert view(destination) == view(source)
    assert (destination / "images/deep/up.jpg").readlink() == Path("../3.jpg")
    assert (destination / "absolute").readlink() == Path("images"), "an absolute link would lead back to the source"
    for name in ("images/0.jpg", "empty", "model.safetensors", ""):
        there, here = (source / name).stat(), (destination / name).stat()
        assert (there.st_mode, there.st_mtime_ns) == (here.st_mode, here.st_mtime_ns), name
    assert beside(destination) == [".copy.tunetool-stage.json"]
    figure = result.record.measurements[0]
    files = [path for path in source.rglob("*") if path.is_file() and not path.is_symlink()]
    assert figure.parameters["bytes"] == sum(path.stat().st_size for path in files)
    assert figure.parameters["binds"] in ("cpu", "source", "destination")
    assert records.read(result.path).kind == "stage"


def test_a_second_time_nothing_is_copied(source: Path, tmp_path: Path, runs: Path) -> None:
    destination = tmp_path / "copy"
    stage(source, destination, runs)
    before = destination.stat().st_ino
    result = stage(source, destination, runs)
    assert (result.code, result.record.measurements) == (ExitCode.OK, [])
    assert destination.stat().st_ino == before
    # A directory's time is not a reason: a program that makes and removes a file changes it.
    (source / "images/t").touch()
    (source / "images/t").unlink()
    assert stage(source, destination, runs).record.measurements == []


@pytest.mark.parametrize("kind", ["xxh3_64", "sha256"])
def test_the_manifest_holds_what_other_programs_compute(model: Path, tmp_path: Path, runs: Path, kind: str) -> None:
    source = model
    stage(source, tmp_path / "copy", runs, checksum=kind)
    document = json.loads((tmp_path / ".copy.tunetool-stage.json").read_bytes())
    digests = {row["path"]: row["digests"] for row in document["entries"] if row["kind"] == "file"}
    assert (document["checksum"], len(digests)) == (kind, 23)
    for name, kept in digests.items():
        data = (source / name).read_bytes()
        step = document["piece_bytes"] or max(len(data), 1)
        made = xxhash.xxh3_64 if kind == "xxh3_64" else hashlib.sha256
        assert kept == [made(data[at : at + step]).hexdigest() for at in range(0, max(len(data), 1), step)], name
    assert len(digests["model.safetensors"]) == (3 if kind == "xxh3_64" else 1)


def change_content(copy: Path) -> str:
    with (copy / "crooked.bin").open("r+b") as stream:
        stream.seek(2 * MB)
        byte = stream.read(1)
        stream.seek(2 * MB)
        stream.write(bytes([byte[0] ^ 1]))
    return "`crooked.bin` does not have the xxh3_64"


def cut_short(copy: Path) -> str:
    os.truncate(copy / "images/7.jpg", 5)
    return "`images/7.jpg` has 5 bytes, not 3007"


def remove_one(copy: Path) -> str:
    (copy / "images/7.jpg").unlink()
    return "`images/7.jpg` is missing"


def add_one(copy: Path) -> str:
    (copy / "images/new").touch()
    return "`images/new` was added"


def turn_link(copy: Path) -> str:
    (copy / "absolute").unlink()
    (copy / "absolute").symlink_to("/etc")
    return "`absolute` leads to `/etc`"


@pytest.mark.parametrize("harm", [change_content, cut_short, remove_one, add_one, turn_link])
def test_verify_names_what_is_not_as_it_was_staged(source: Path, tmp_path: Path, runs: Path, harm: object) -> None:
    destination = tmp_path / "copy"
    stage(source, destination, runs)
    assert verify(destination, runs).code == ExitCode.OK
    said = harm(destination)
    result = verify(destination, runs)
    assert result.code == ExitCode.FALLS_SHORT
    assert any(reason.startswith(said) for reason in result.record.verdict.reasons)
    assert result.record.checks[0].remedy
    # A changed file is somebody's work: it neither counts as the copy nor is it removed without a request.
    for call in (lambda: evict(destination, runs), lambda: stage(source, destination, runs)):
        with pytest.raises(UsageProblem) as caught:
            call()
        assert str(destination) in caught.value.message
    assert stage(source, destination, runs, replace=True).code == ExitCode.OK
    assert verify(destination, runs).code == ExitCode.OK


def test_evict_leaves_nothing(source: Path, tmp_path: Path, runs: Path) -> None:
    destination = tmp_path / "copy"
    stage(source, destination, runs)
    assert evict(destination, runs).code == ExitCode.OK
    assert not destination.exists()
    assert beside(destination) == []
    with pytest.raises(UsageProblem, match="not a tree that tunetool staged"):
        evict(destination, runs)


def test_evict_and_replace_know_their_own(source: Path, tmp_path: Path, runs: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("years")
    with pytest.raises(UsageProblem, match="not a tree that tunetool staged"):
        evict(theirs, runs)
    with pytest.raises(UsageProblem, match="was not staged by tunetool"):
        stage(source, theirs, runs)
    assert (theirs / "thesis").read_text() == "years"
    assert stage(source, theirs, runs, replace=True).code == ExitCode.OK
    assert view(theirs) == view(source)


def test_a_moved_tree_s_manifest_is_of_another_tree(source: Path, tmp_path: Path, runs: Path) -> None:
    destination = tmp_path / "copy"
    stage(source, destination, runs)
    destination.rename(tmp_path / "mine-now")
    destination.mkdir()
    (destination / "other").touch()
    with pytest.raises(UsageProblem, match="belongs to another tree"):
        evict(destination, runs)
    assert (destination / "other").exists()


def test_a_source_that_changed_is_another(source: Path, tmp_path: Path, runs: Path) -> None:
    destination = tmp_path / "copy"
    stage(source, destination, runs)
    (source / "images/3.jpg").write_bytes(b"other")
    with pytest.raises(UsageProblem, match="source changed after it was staged"):
        stage(source, destination, runs)
    assert stage(source, destination, runs, replace=True).code == ExitCode.OK
    assert (destination / "images/3.jpg").read_bytes() == b"other"
    assert beside(destination) == [".copy.tunetool-stage.json"]


def test_an_empty_destination_is_used(source: Path, tmp_path: Path, runs: Path) -> None:
    (tmp_path / "copy").mkdir()
    assert stage(source, tmp_path / "copy", runs).code == ExitCode.OK
    assert view(tmp_path / "copy") == view(source)


def test_links_out_of_the_tree_are_followed_as_in_a_hub_s_cache(tmp_path: Path, runs: Path) -> None:
    cache = tmp_path / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots/abc/sub").mkdir(parents=True)
    (cache / "blobs/aaaa").write_bytes(b"weights" * 1000)
    (cache / "snapshots/abc/model.safetensors").symlink_to("../../blobs/aaaa")
    (cache / "snapshots/abc/sub/dir").symlink_to("../../../blobs")
    stage(cache / "snapshots/abc", tmp_path / "copy", runs)
    copy = tmp_path / "copy"
    assert not (copy / "model.safetensors").is_symlink()
    assert not (copy / "sub/dir").is_symlink()
    assert view(copy) == view(cache / "snapshots/abc")


def socket_in(root: Path) -> str:
    here = Path.cwd()
    os.chdir(root)  # the address of a socket may be no longer than 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
    finally:
        os.chdir(here)
    return "/s` is a socket"


def pipe_in(root: Path) -> str:
    os.mkfifo(root / "p")
    return "/p` is a pipe"


def device_in(root: Path) -> str:
    (root / "d").symlink_to("/dev/null")
    return "/d` is a device"


def loop_in(root: Path) -> str:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    return "is a loop of links"


def way_up(root: Path) -> str:
    (root / "up").symlink_to(root.parent)
    return "leads back to"


def long_way_round(root: Path) -> str:
    (root.parent / "one").mkdir()
    (root.parent / "two").mkdir()
    (root.parent / "one/on").symlink_to(root.parent / "two")
    (root.parent / "two/on").symlink_to(root.parent / "one")
    (root / "out").symlink_to(root.parent / "one")
    return "leads back to"


def missing_blob(root: Path) -> str:
    (root / "shard").symlink_to("../../blobs/gone")
    return "leads to `../../blobs/gone`, which is not there"


def missing_beside_a_followed_directory(root: Path) -> str:
    (root.parent / "other").mkdir()
    (root / "other").symlink_to(root.parent / "other")
    # There is a `fine` beside the link, and none beside the directory that `..` is said of.
    (root / "lost").symlink_to("other/../fine")
    return "leads to `other/../fine`, which is not there"


@pytest.mark.parametrize(
    "spoil",
    [
        socket_in,
        pipe_in,
        device_in,
        loop_in,
        way_up,
        long_way_round,
        missing_blob,
        missing_beside_a_followed_directory,
    ],
)
def test_what_cannot_be_copied_is_named_before_anything_is(tmp_path: Path, runs: Path, spoil: object) -> None:
    root = tmp_path / "at/source"
    root.mkdir(parents=True)
    (root / "fine").touch()
    said = spoil(root)
    with pytest.raises(UsageProblem) as caught:
        stage(root, tmp_path / "copy", runs)
    assert said in caught.value.message.replace(str(root), "")
    assert caught.value.hint
    assert not (tmp_path / "copy").exists()
    assert beside(tmp_path / "copy") == []


def test_calls_that_are_wrong(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for arguments, said in [
        ((source, ""), "is empty"),
        (("--threads", 2, "verify", tmp_path / "copy"), "must be the first word"),
        ((source, "/proc"), "is a mount point"),
        ((source, tmp_path / "link"), "is a link"),
        ((source, tmp_path / "file"), "is not a directory"),
        ((source, tmp_path / "no/copy"), "does not exist"),
        ((tmp_path / "nowhere", tmp_path / "copy"), "does not exist"),
        ((tmp_path / "file", tmp_path / "copy"), "is not a directory"),
        ((source, source / "images/copy"), "lie inside each other"),
        ((source / "images", tmp_path), "lie inside each other"),
        ((source, "/"), "is the root directory"),
        ((source, tmp_path / "copy", "--limit", "x"), "needs an inventory"),
        ((source, "relative", "-i", tmp_path), "is not absolute"),
    ]:
        with pytest.raises(UsageProblem) as caught:
            command.main([*map(str, arguments), "--runs-dir", str(tmp_path / "runs")], standalone_mode=False)
        assert said in caught.value.message, arguments
    assert beside(tmp_path / "copy") == []


def test_from_the_command_line(source: Path, tmp_path: Path) -> None:
    common = ("--runs-dir", tmp_path / "runs")
    dry = cli(source, tmp_path / "copy", "--dry-run", *common)
    assert (dry.returncode, "copies 2.158 MB" in dry.stderr) == (0, True), dry.stderr
    assert not (tmp_path / "copy").exists()
    done = cli(source, tmp_path / "copy", "--json", "-", *common)
    record = records.parse(done.stdout, "stdout")
    assert (done.returncode, record.kind, record.target) == (0, "stage", str(tmp_path / "copy"))
    shown = cli("verify", tmp_path / "copy", *common)
    assert (shown.returncode, shown.stdout.splitlines()[-1]) == (0, "PASS")
    again = subprocess.run(
        [sys.executable, "-m", "tunetool", "report", "show", str(next((tmp_path / "runs").iterdir()))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "binds: " in again.stdout


def test_a_copy_waits_for_no_program_of_another_command(source: Path, tmp_path: Path) -> None:
    """The pages of benchmarks and the plays of a fleet take longer to import than a small copy takes."""
    program = (
        "import atexit, sys\n"
        "heavy = ('jinja2', 'numpy', 'torch', 'tunetool.fleet.playbook')\n"
        "light = ('tunetool.bench', 'tunetool.bench.registry')\n"
        "is_heavy = lambda name: name in heavy or name.startswith('tunetool.bench') and name not in light\n"
        "atexit.register(lambda: print(*filter(is_heavy, list(sys.modules)), file=sys.stderr))\n"
        "from tunetool.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, "stage", str(source), str(tmp_path / "copy"), "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "PASS"), done.stderr
    assert done.stderr.splitlines()[-1] == ""


def test_one_at_a_time(source: Path, tmp_path: Path, runs: Path) -> None:
    destination = tmp_path / "copy"
    with only_one(find_destination(str(destination)), wait=False, say=print):
        done = cli(source, destination, "--no-wait", "--runs-dir", runs)
        assert done.returncode == 3
        assert f"is being staged by process {os.getpid()} on {os.uname().nodename}" in done.stderr
        argv = [sys.executable, "-m", "tunetool", "stage", str(source), str(destination), "--runs-dir", str(runs)]
        waiting = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert waiting.stderr is not None
        assert f"waiting for process {os.getpid()}" in waiting.stderr.readline()
        assert not destination.exists()
    assert waiting.wait(timeout=PATIENCE) == 0
    waiting.stderr.close()
    assert view(destination) == view(source)


def test_ranks_that_all_stage_copy_once(source: Path, tmp_path: Path, runs: Path) -> None:
    argv = [sys.executable, "-m", "tunetool", "stage", str(source), str(tmp_path / "copy"), "--runs-dir", str(runs)]
    ranks = [subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(4)]
    assert [rank.wait(timeout=PATIENCE) for rank in ranks] == [0] * 4
    copies = [len(records.read(path).measurements) for path in runs.iterdir()]
    assert sorted(copies) == [0, 0, 0, 1]
    assert beside(tmp_path / "copy") == [".copy.tunetool-stage.json"]


def test_a_damaged_manifest_is_no_manifest(source: Path, tmp_path: Path, runs: Path) -> None:
    destination, manifest = tmp_path / "copy", tmp_path / ".copy.tunetool-stage.json"
    stage(source, destination, runs)
    good = manifest.read_text()
    for text in (good[:-200], good.replace("tunetool.stage/1", "tunetool.stage/9"), good.replace('"images"', '"../x"')):
        manifest.write_text(text)
        for call in (verify, evict):
            with pytest.raises(UsageProblem):
                call(destination, runs)
        with pytest.raises(UsageProblem, match="exists and is not that copy"):
            stage(source, destination, runs)
        assert destination.exists()
    assert stage(source, destination, runs, replace=True).code == ExitCode.OK


@pytest.mark.parametrize("name", ["plain", ODD, 'd\\u00e9j\\u00e0 "{"kind"', "déjà"])
def test_a_manifest_is_known_by_what_it_says(tmp_path: Path, runs: Path, name: str) -> None:
    source, destination, manifest = tmp_path / "source", tmp_path / "copy", tmp_path / ".copy.tunetool-stage.json"
    source.mkdir()
    (source / name).write_bytes(b"x")
    stage(source, destination, runs)
    good = manifest.read_text()
    assert len(good.splitlines()) == 3, "a line for each entry, after the head"
    document = json.loads(good)
    # In another order and with blanks it says the same.
    others = [json.dumps(document, indent=1), json.dumps(dict(reversed(document.items())))]
    for text in (good, *others):
        manifest.write_text(text)
        assert stage(source, destination, runs).record.measurements == [], text
    edits = [
        good.replace('"mode":', '"mode":1', 1),
        good.replace('"bytes":1', '"bytes":2'),
        others[0].replace('"mode": ', '"mode": 1', 1),
    ]
    edits.append(good.replace('"kind"', '"kind":"link","kind"', 1))
    # The checksum of the edited text, by somebody who knows how it is made: readers differ in which of two values counts.
    body = edits[-1].rpartition(',"sha256":"')[0]
    checksum = hashlib.sha256(f"{body}}}".replace("\n", "").encode()).hexdigest()
    edits.append(f'{body},"sha256":"{checksum}"}}\n')
    edits.append(json.dumps({key: value for key, value in document.items() if key != "sha256"}))
    for text in edits:
        assert text != good
        manifest.write_text(text)
        with pytest.raises(UsageProblem, match=r"exists and is not that copy: .* (was edited|is damaged)"):
            stage(source, destination, runs)


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n"}, (100 * 1024, "RAM")),
        (
            {
                "proc/self/cgroup": "0::/slurm/job7/step0\n",
                "sys/fs/cgroup/slurm/job7/memory.max": "60000",
                "sys/fs/cgroup/slurm/job7/memory.current": "50000",
                "sys/fs/cgroup/slurm/job7/memory.stat": "anon 9\ninactive_file 1000\nactive_file 500\nshmem 30000\n",
                "sys/fs/cgroup/slurm/job7/step0/memory.max": "max",
                "sys/fs/cgroup/slurm/job7/step0/memory.current": "50000",
            },
            (11500, "/sys/fs/cgroup/slurm/job7"),
        ),
        # Above `memory.high` a job is throttled, and what lies in a tmpfs cannot be freed.
        (
            {
                "proc/self/cgroup": "0::/slurm/job7/step0\n",
                "sys/fs/cgroup/slurm/job7/memory.max": "90000",
                "sys/fs/cgroup/slurm/job7/memory.high": "60000",
                "sys/fs/cgroup/slurm/job7/memory.current": "50000",
                "sys/fs/cgroup/slurm/job7/step0/memory.max": "70000",
                "sys/fs/cgroup/slurm/job7/step0/memory.high": "max",
                "sys/fs/cgroup/slurm/job7/step0/memory.current": "50000",
            },
            (10000, "/sys/fs/cgroup/slurm/job7"),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000",
            },
            (0, "/sys/fs/cgroup/memory"),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000",
            },
            (100 * 1024, "RAM"),
        ),
    ],
)
def test_memory_that_is_left(tmp_path: Path, files: dict[str, str], expected: tuple[int, str]) -> None:
    root = tree(tmp_path, {"proc/meminfo": "MemTotal: 999 kB\nMemAvailable: 100 kB\n", **files})
    assert memory_left(root) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        # In a container, and in a recording, which has no more.
        ({"sys/fs/cgroup/memory.max": "70000", "sys/fs/cgroup/memory.high": "60000"}, 60000),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        (
            {
                "proc/self/cgroup": "0::/slurm/job7/step0\n",
                "sys/fs/cgroup/slurm/memory.max": "90000",
                "sys/fs/cgroup/slurm/job7/memory.high": "80000",
                "sys/fs/cgroup/slurm/job7/step0/memory.max": "max",
            },
            80000,
        ),
    ],
)
def test_the_tightest_limit_around_is_the_limit(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert memory_limit(tree(tmp_path, files)) == expected


def test_memory_bounds_a_tmpfs_alone(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": "MemAvailable: 4 kB\n", "proc/self/cgroup": ""})
    assert min(limit.left for limit in limits(tmp_path, "tmpfs", root)) == 4096
    assert len(limits(tmp_path, "ext4", root)) == 1
    with pytest.raises(CannotJudge, match=r"8.192 kB are needed, the machine's RAM has 4.096 kB; `.*` has "):
        refuse_too_big(8192, 1, tmp_path, limits(tmp_path, "tmpfs", root), 0)
    with pytest.raises(CannotJudge) as caught:
        refuse_too_big(8192, 1, tmp_path, limits(tmp_path, "tmpfs", root), 5000)
    assert "evict" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("busy", "reading", "writing", "expected"),
    [(0.9, 9.0, 1.0, "cpu"), (0.3, 9.0, 1.0, "source"), (0.3, 1.0, 9.0, "destination")],
)
def test_what_binds(busy: float, reading: float, writing: float, expected: str) -> None:
    tally = Tally(bytes=1, reading=reading, writing=writing)
    assert binds(Moved([], tally, 10.0, 1.0, busy)) == expected


def test_how_busy_the_machine_is() -> None:
    before = cpu_times()

    def fifteen_ticks_of_work() -> tuple[float, float] | None:
        """Work and everything, once a busy loop has moved the kernel's count (a tick is 1/100 s)."""
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        work, everything = (after - first for after, first in zip(cpu_times(), before, strict=True))
        return (work, everything) if work >= 15 else None

    work, everything = until(fifteen_ticks_of_work, "CPU time that counts")
    assert work <= everything


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("s3:bucket/x", True),
        (":local:/data", True),
        ("gs_1.a:b", True),
        ("/data:x", False),
        ("./a:b", False),
        ("a/b:c", False),
    ],
)
def test_what_rclone_would_fetch(name: str, remote: bool) -> None:
    assert is_remote(name) is remote


@pytest.mark.parametrize(
    ("address", "said", "way"),
    [
        ("hf://Qwen/Qwen2.5-7B", "the Hugging Face Hub", "hf download"),
        ("https://models.example/qwen", "a web server", ":http,url="),
    ],
)
def test_an_address_that_is_no_remote_of_rclone_is_named(
    address: str, said: str, way: str, tmp_path: Path, runs: Path
) -> None:
    with pytest.raises(UsageProblem, match=said) as refused:
        stage(address, tmp_path / "copy", runs)
    assert way in str(refused.value.hint)


def test_times_as_rclone_writes_them() -> None:
    assert nanoseconds("2001-09-09T01:46:40Z") == 10**18
    assert nanoseconds("2001-09-09T03:46:40.123456789+02:00") == 10**18 + 123456789
    assert nanoseconds("2001-09-09T01:46:40.5Z") == 10**18 + 500000000


def test_a_remote_source(source: Path, tmp_path: Path, runs: Path) -> None:
    if shutil.which("rclone") is None:
        result = cli(f":local:{source}", tmp_path / "copy", "--runs-dir", runs)
        assert (result.returncode, "`rclone` is not installed" in result.stderr) == (3, True)
        return
    for link in ("absolute", "images/deep/up.jpg"):
        (source / link).unlink()
    (source / ODD).unlink()
    destination = tmp_path / "copy"
    result = stage(f":local:{source}", destination, runs)
    assert result.code == ExitCode.OK
    assert view(destination) == view(source)
    assert (destination / "images/0.jpg").stat().st_mtime_ns == 10**18 + 123456789
    assert stage(f":local:{source}", destination, runs).record.measurements == []
    assert verify(destination, runs).code == ExitCode.OK
    with pytest.raises(UsageProblem, match="cannot be listed"):
        stage(":local:/nowhere/at/all", tmp_path / "other", runs)


def test_progress_tells_what_where_and_how_much_room(source: Path, tmp_path: Path, runs: Path) -> None:
    progress = Quiet()
    stage(source, tmp_path / "copy", runs, progress)
    assert progress.lines[0].startswith(f"copies 2.158 MB in 22 files from `{source}` to `{tmp_path / 'copy'}` (")
    assert " has " in progress.lines[0]
    assert table_console().width == 100
