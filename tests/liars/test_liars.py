"""Fakes of storage: every case is a way to make storage look faster than it is. None may end with PASS.

Real processes, real fio, file systems on loop devices of this machine. What needs a node of its own (a drive that is
slow, dies or returns errors) is in tests/lab; what needs a fio that lies about itself is in tests/unit/test_verify.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import lied, undisturbed
from programs import need_program
from pythons import bare_python, has_deepspeed, python_that
from tunetool.record import parse
from waiting import PATIENCE, until

EASY = "read=1MBps,write=1MBps"
"""An expectation that every honest disk meets, so that only the fake can be the reason of a refusal."""

GB = 10**9


@dataclass(frozen=True)
class Answer:
    """The result of a run."""

    code: int
    text: str
    record: dict[str, Any] | None


@dataclass(frozen=True)
class Bench:
    """A directory on a disk, and verify in a mount namespace of its own."""

    directory: Path

    @property
    def target(self) -> Path:
        return self.directory / "target"

    def mounted(self, script: str, *arguments: str, expect: str = EASY, **environment: str) -> Answer:
        """Run ``script`` (mounts at ``$T``; nobody else sees them), then verify ``$T``."""
        runs = self.directory / "runs"
        verify = [sys.executable, "-m", "tunetool", "verify", "--target", str(self.target), "--runs-dir", str(runs)]
        if "--require" not in arguments:  # DeepSpeed's rung is no part of these
            verify += ["--python", str(bare_python(self.directory))]
        line = shlex.join([*verify, "--expect", expect, "--duration", "1s", *arguments])
        done = call(
            "unshare",
            "--mount",
            "sh",
            "-euc",
            f"{script}\nexec {line}",
            env={**os.environ, "T": str(self.target), "P": str(self.directory), **environment},
            stdin=subprocess.DEVNULL,
        )
        kept = sorted(runs.glob("*/record.json"), key=lambda path: path.stat().st_mtime)
        record = json.loads(kept[-1].read_text()) if kept else None
        print(done.stdout, done.stderr)
        return Answer(done.returncode, done.stdout + done.stderr, record)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """It needs root, loop devices and fio; without them no fake can be made, and the test would show nothing."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("needs root and loop devices")
    need_program("fio")
    # Not pytest's own directory: it may lie in memory.
    folder = Path(tempfile.mkdtemp(prefix="tunetool-liars-", dir="/var/tmp"))
    (folder / "target").mkdir()
    yield Bench(folder)
    shutil.rmtree(folder)


IMAGE = "truncate -s {size} $P/image; mkfs.ext4 -q -F {options} $P/image; mount -o loop{mount} $P/image $T\n"


@pytest.mark.slow  # an honest disk is in tests/measurement
def test_an_honest_disk_passes_though_the_clock_jumps(bench: Bench, tmp_path: Path) -> None:
    # Otherwise everything below could be refused for a reason of the test bench itself.
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, time\n_real, _calls = time.time, itertools.count()\n"
        "time.time = lambda: _real() + 3600 * (next(_calls) % 2)\n"
    )
    answer = bench.mounted("true", "--allow-busy", PYTHONPATH=str(tmp_path))
    assert answer.record is not None
    undisturbed(answer.code, parse(json.dumps(answer.record), "the record"))
    for figure in answer.record["measurements"]:
        assert figure["value"] < 1000 * GB
    (path,) = (bench.directory / "runs").glob("*/record.json")
    path.write_text(path.read_text().replace('"value": 1', '"value": 2', 1))
    shown = call(*TUNETOOL, "report", "show", str(path))
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert "is damaged: its checksum does not match" in shown.stderr


@pytest.mark.slow  # memory as a target is in tests/measurement
def test_tmpfs(bench: Bench) -> None:
    lied(bench.mounted("mount -t tmpfs -o size=6G none $T"), 3, "lies on tmpfs, in memory", "UNPROVEN")


@pytest.mark.slow
def test_overlay(bench: Bench) -> None:
    script = "mkdir $P/l $P/u $P/w\nmount -t overlay -o lowerdir=$P/l,upperdir=$P/u,workdir=$P/w overlay $T"
    lied(bench.mounted(script, "--allow-busy"), 3, "overlay", "no block device whose counters could prove")


@pytest.mark.slow  # which mount a path lies on is in tests/unit/test_mount_table.py
def test_a_bind_mount_hides_no_loop_device(bench: Bench) -> None:
    script = IMAGE.format(size="5G", options="", mount="").replace("$T", "$P/m")
    answer = bench.mounted(f"mkdir $P/m\n{script}mkdir $P/m/in\nmount --bind $P/m/in $T", "--allow-busy")
    lied(answer, 3, "UNPROVEN", "loop device on", "the page cache may hold the loop device's file")


@pytest.mark.slow
def test_a_file_system_in_a_file_in_memory(bench: Bench) -> None:
    script = "mkdir $P/m; mount -t tmpfs -o size=6G none $P/m; truncate -s 5G $P/m/image\n"
    script += "mkfs.ext4 -q -F $P/m/image; mount -o loop $P/m/image $T"
    lied(bench.mounted(script, "--allow-busy"), 3, "UNPROVEN")


def test_the_page_cache_answers_for_the_drive(bench: Bench) -> None:
    # ext4 with data=journal takes O_DIRECT and then ignores it.
    script = IMAGE.format(size="5G", options="", mount=",data=journal")
    lied(bench.mounted(script, "--allow-busy"), 3, "UNPROVEN", "the page cache holds", "so ext4 ignores that")


def test_a_full_disk(bench: Bench) -> None:
    script = IMAGE.format(size="300M", options="", mount="") + "head -c 400M /dev/zero > $T/full || true"
    lied(bench.mounted(script, "--allow-busy"), 2, "has too little space")


def test_a_quota_that_ends_in_the_middle(bench: Bench) -> None:
    # Space that statfs promises and the writer does not get.
    answer = bench.mounted("ulimit -f 20000", "--allow-busy")
    lied(answer, 3, "was ended by SIGXFSZ")


def moved(pid: int) -> int:
    """Bytes that the disk moved for a process."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


@pytest.fixture
def hammered(bench: Bench) -> Iterator[Bench]:
    """A disk that another program reads and writes all the time."""
    hammer = ["fio", "--name=hammer", "--rw=randrw", "--bs=256k", "--size=256m", "--direct=1", "--time_based"]
    with subprocess.Popen(
        [*hammer, "--runtime=60000", "--ioengine=libaio", "--iodepth=8", "--thread", f"--directory={bench.directory}"],
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    ) as neighbour:
        try:
            until(lambda: moved(neighbour.pid) > 16 * 2**20, "the hammer's first requests", neighbour)
            yield bench
        finally:
            neighbour.terminate()
            neighbour.wait(PATIENCE)


@pytest.mark.parametrize("script", ["true", "mkdir $P/bound; mount --bind $P/bound $T"], ids=["there", "a bind mount"])
def test_somebody_else_hammers_the_disk(hammered: Bench, script: str) -> None:
    lied(hammered.mounted(script), 3, "busy", "within a second (", "`fio` (pid ", "ERROR")
    assert list(hammered.target.iterdir()) == []


@pytest.mark.slow  # how bytes of others are recognised is in tests/unit/test_measure_parts.py
def test_a_measurement_beside_somebody_who_hammers_the_disk(hammered: Bench) -> None:
    answer = hammered.mounted("true", "--allow-busy")
    lied(answer, 3, "more than fio's", "something else uses the drives: ", "`fio` (pid ")
    assert answer.record is not None
    assert "`fio` (pid " in " ".join(answer.record["verdict"]["reasons"])


@pytest.mark.slow  # that it is seen is in tests/unit/test_measure_fio.py
def test_code_that_swallows_every_sync(bench: Bench, tmp_path: Path) -> None:
    need_program("cc")
    source = tmp_path / "swallow.c"
    source.write_text("int fsync(int f) { return 0; }\nint fdatasync(int f) { return 0; }\n")
    library = tmp_path / "swallow.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    lied(bench.mounted("true", "--allow-busy", LD_PRELOAD=str(library)), 3, "`LD_PRELOAD` was set", "UNPROVEN")


@pytest.mark.slow
def test_code_that_every_program_loads(bench: Bench) -> None:
    # As `libeatmydata` is switched on for a whole machine.
    script = "mkdir $P/l $P/u $P/w; mount -t overlay -o lowerdir=/etc,upperdir=$P/u,workdir=$P/w overlay /etc\n"
    script += "echo libeatmydata.so > /etc/ld.so.preload"
    lied(bench.mounted(script, "--allow-busy"), 3, "`/etc/ld.so.preload` was set", "UNPROVEN")


def test_a_scheduler_runs_a_job_that_computes(bench: Bench) -> None:
    job = "slurmstepd: [4711.batch]"
    with subprocess.Popen(["bash", "-c", f"exec -a '{job}' sleep 600"], stdin=subprocess.DEVNULL) as daemon:
        try:
            line = Path(f"/proc/{daemon.pid}/cmdline")
            until(lambda: line.read_bytes().split(b"\0")[0] == job.encode(), "its name", daemon)
            lied(bench.mounted("true"), 3, "busy: Slurm job 4711 runs on this node", "ERROR")
        finally:
            daemon.terminate()
            daemon.wait(PATIENCE)
    assert list(bench.target.iterdir()) == []


def in_front_of_fio(folder: Path, script: str) -> str:
    """A PATH on which a fake fio comes before the real one, which its script can call as ``$REAL``."""
    program = folder / "fio"
    program.write_text(f"#!/bin/bash\nREAL={shutil.which('fio')}\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo fio-3.12", "is fio-3.12, too old; install fio 3.20 or newer"),
        ("exit 0", "is not a fio that can be used"),
        ("case $1 in --version) exec $REAL $1;; esac; echo done", "did not print a result: done"),
        # A broken wrapper: the real program fails, and nobody notices it.
        (
            "trap '' XFSZ; case $1 in --version) ;; *) ulimit -f 20000;; esac; $REAL \"$@\"; exit 0",
            "reports an error: fio: io_u error on file",
        ),
    ],
    ids=["too old", "silent", "garbage", "an error and exit status 0"],
)
def test_a_program_that_is_no_fio(bench: Bench, tmp_path: Path, script: str, said: str) -> None:
    lied(bench.mounted("true", "--allow-busy", PATH=in_front_of_fio(tmp_path, script)), 3, said, "ERROR")
    assert list(bench.target.iterdir()) == []


def test_no_fio(bench: Bench) -> None:
    lied(
        bench.mounted("mkdir $P/bin; PATH=$P/bin"),
        3,
        "`fio` is not on PATH; install it: `apt-get install --no-install-recommends fio`",
        "ERROR",
    )


@pytest.mark.slow  # bytes that no drive counted are in test_the_page_cache_answers_for_the_drive
def test_files_that_became_sparse(bench: Bench, tmp_path: Path) -> None:
    # Reads of a hole come from no drive.
    script = '$REAL "$@" || exit; for f in data.*; do [ ! -e "$f" ] || { truncate -r "$f" new; mv new "$f"; }; done'
    answer = bench.mounted("true", "--allow-busy", PATH=in_front_of_fio(tmp_path, script))
    lied(
        answer,
        3,
        "a sparse, short or compressed file proves nothing",
        "sequential read: ",
        "the rest never reached a drive",
    )


HONEST_ALONE = """[ "$1" = --version ] && exec $REAL "$@"
case "$*" in *--ioengine=null*) exec $REAL "$@";; esac"""
"""What a fake fio does before it lies: it says its version, and what it reaches itself is not the drives'."""

ONE_MEGABYTE_PER_SECOND = f"""{HONEST_ALONE}
exec {sys.executable} - "$REAL" "$@" <<'END'
import json, subprocess, sys
document = json.loads(subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, check=True).stdout)
for job in document["jobs"]:
    for side in ("read", "write"):
        job[side]["runtime"] = job[side]["io_bytes"] // 1000
print(json.dumps(document))
END"""


@pytest.mark.slow  # the arithmetic is in tests/unit/test_verdict.py
def test_seven_per_cent_are_not_forgiven(bench: Bench, tmp_path: Path) -> None:
    # A disk of 1 MB/s by a clock that this test holds; every byte is there. A MiB/s is 5 % more than a MB/s, a GiB/s 7 %,
    # and who mixes them up buys the wrong drives.
    answer = bench.mounted(
        "true",
        "--allow-busy",
        expect="read=0.001GiBps,write=0.95MBps",
        PATH=in_front_of_fio(tmp_path, ONE_MEGABYTE_PER_SECOND),
    )
    assert answer.code == 1, answer.text
    flat = " ".join(answer.text.split())
    assert "sequential read" in flat
    assert "(0.001 GiB/s)" in flat
    assert answer.record is not None
    status = {each["name"]: each["status"] for each in answer.record["expectations"]}
    assert status["sequential.read"] == "fail"
    assert status["sequential.write"] in ("pass", "unproven"), "unproven where others use the disk"


@pytest.mark.slow
def test_a_fio_whose_clock_is_slow(bench: Bench, tmp_path: Path) -> None:
    # It runs four times as long as requested and admits a quarter: four times the bandwidth, with every byte moved.
    script = f"""[ "$1" = --version ] && exec $REAL "$@"
exec {sys.executable} - "$REAL" "${{@/--runtime=1000ms/--runtime=4000ms}}" <<'END'
import json, subprocess, sys
document = json.loads(subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, check=True).stdout)
for job in document["jobs"]:
    for side in ("read", "write"):
        job[side]["runtime"] //= 4
print(json.dumps(document))
END"""
    answer = bench.mounted("true", "--allow-busy", PATH=in_front_of_fio(tmp_path, script))
    lied(answer, 3, "the drives moved its bytes for", "of which fio says that it took 1.0 s: its clock is wrong")


@pytest.mark.slow  # a fio that lies is in tests/unit/test_verify.py
def test_a_fio_that_claims_more_than_it_moves(bench: Bench, tmp_path: Path) -> None:
    real = shutil.which("fio")
    liar = tmp_path / "fio"
    liar.write_text(
        f'#!{sys.executable}\nimport json, subprocess, sys\ndone = subprocess.run(["{real}", *sys.argv[1:]], '
        "stdout=subprocess.PIPE, text=True)\nif '--version' in sys.argv:\n    print(done.stdout, end='')\n    sys.exit()\n"
        "document = json.loads(done.stdout[done.stdout.index('{'):])\nfor job in document['jobs']:\n"
        "    for side in ('read', 'write'):\n        job[side]['io_bytes'] *= 2\nprint(json.dumps(document))\n"
    )
    liar.chmod(0o755)
    answer = bench.mounted("true", "--allow-busy", PATH=f"{tmp_path}:{os.environ['PATH']}")
    lied(answer, 3, "counted only 0.", "the rest never reached a drive")


@pytest.mark.slow  # children that die are in tests/unit/test_deepspeed.py
def test_the_process_that_runs_deepspeed_is_killed(bench: Bench) -> None:
    if not has_deepspeed():
        pytest.skip("needs DeepSpeed: `make setup`")
    # During its work, as soon as its file exists. The probe before it makes none and ends by itself.
    data = f"{bench.target}/.tunetool-*/aio.data"
    watch = f"(while kill -0 $$ && ! [ -e {data} ]; do sleep 0.02; done; sleep 0.3; kill -KILL $$) 2>/dev/null &"
    liar = python_that(bench.directory, watch)
    answer = bench.mounted("true", "--allow-busy", "--require", "deepspeed", "--python", str(liar))
    lied(answer, 3, "deepspeed.io: the process that runs DeepSpeed's `aio_handle` was ended by SIGKILL", "UNPROVEN")
    assert list(bench.target.iterdir()) == []
