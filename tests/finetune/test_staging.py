"""`tunetool bench staging` as a process: both real paths, a slow disk, and interruptions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import whole_disk
from judged import interrupted
from tunetool.record import Record, chosen, read
from tunetool.training.data.pictures import make
from waiting import PATIENCE, until

pytest_plugins = ["disks"]
SLOW = 50 * 10**6


def call(*arguments: object, group: Path | None = None) -> subprocess.Popen[str]:
    """`tunetool bench staging` as a process, in the control group ``group`` with all of its children."""

    def enter() -> None:
        # A shell that runs the tests in the background makes them ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.Popen(
        [sys.executable, "-m", "tunetool", "bench", "staging", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=enter,  # noqa: PLW1509  (tests run no threads)
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def slow_disk(path: Path) -> Iterator[Path]:
    """A control group whose processes read the disk under ``path`` at ``SLOW`` bytes per second."""
    disk = whole_disk(path)
    for parent, file, limit in (
        (Path("/sys/fs/cgroup/blkio"), "blkio.throttle.read_bps_device", f"{disk} {SLOW}"),
        (Path("/sys/fs/cgroup"), "io.max", f"{disk} rbps={SLOW}"),
    ):
        group = parent / f"tunetool-staging-{os.getpid()}"
        with contextlib.suppress(OSError):
            if file == "io.max":
                (parent / "cgroup.subtree_control").write_text("+io")
            group.mkdir()
            try:
                (group / file).write_text(limit)
            except OSError:
                group.rmdir()
                continue
            break
    else:
        pytest.skip("no cgroup of this machine limits the disk: neither blkio (v1) nor io (v2)")
    try:
        yield group
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().strip(), "the group's processes to be gone")
        group.rmdir()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures, small ones to decode, each with 4 MB of a camera's own segments, which a reader must pass."""
    dataset = tmp_path_factory.mktemp("bulk") / "photos"
    make(dataset, images=60, width=56, height=56)
    marker = b"\xff\xef" + (65535).to_bytes(2, "big")
    for path in sorted((dataset / "images").iterdir()):
        picture = path.read_bytes()
        path.write_bytes(picture[:2] + b"".join(marker + os.urandom(65533) for _ in range(61)) + picture[2:])
    return dataset


def test_from_a_slow_disk_only_the_bulk_path_reads(photos: Path, memory: Path, tmp_path: Path) -> None:
    with slow_disk(photos) as group:
        process = call(
            *("--memory-target", memory),
            *("--model", "tiny", "--dataset", photos, "--target", photos.parent, "--scenarios", "single,nodes"),
            # With this seed path B is first: it would find the files in the writer's cache, and path A in its own.
            *(
                "--micro-batch",
                12,
                "--seed",
                1,
                "--rounds",
                1,
                "--device",
                "cpu",
                "--allow-busy",
                "--runs-dir",
                tmp_path,
            ),
            group=group,
        )
        out, err = finish(process)
    assert process.returncode == 0, out + err
    record = read(next(tmp_path.glob("*-bench.staging-*")))
    value = {each.name: each.value for each in record.measurements}
    size = sum(path.stat().st_size for path in photos.rglob("*") if path.is_file())
    # The disk is as slow as it was made, whoever reads it: times are no shorter than what is read allows. That is all
    # that they show, since nobody knows how much longer they are; see bench/ for how much staging wins.
    first = {path: value[f"staging.single.{path}.first_epoch"] for path in ("bulk", "memory")}
    assert first["bulk"] >= 0.9 * size / SLOW
    assert value["staging.single.memory.stage"] >= 0.9 * size / SLOW
    assert value["staging.single.speedup.first_epoch"] == pytest.approx(first["bulk"] / first["memory"])
    # The time of staging is included.
    assert value["staging.single.memory.end_to_end"] > value["staging.single.memory.stage"]
    status = {check.id: check.status for check in record.checks}
    assert status["staging.single.losses"] == status["staging.single.cold"] == "pass"
    assert status["staging.nodes"] == "skip"
    checks_of_memory(record, size)
    assert "losses: PASS, equal to the last bit, over 5 steps" in out
    assert "stage: " in out
    assert (tmp_path / next(tmp_path.glob("*-bench.staging-*")).name / "report.html").is_file()


def checks_of_memory(record: Record, size: int) -> None:
    """Assert that path A read from memory the bytes that path B read from the disk."""
    by_path = {each.labels["path"]: each for each in chosen(record.measurements, "rank_model_load")}
    # Not 0: a rank may load a library from the disk at that moment.
    assert float(by_path["memory"].parameters["data_storage_bytes"]) <= 0.05 * size
    assert float(by_path["bulk"].parameters["data_storage_bytes"]) >= 0.95 * size
    end = {each.labels["path"]: each for each in chosen(record.measurements, "end_to_end")}
    assert end["memory"].evidence is not None
    assert end["bulk"].evidence is not None
    assert (end["memory"].medium, end["memory"].evidence.kind) == ("tmpfs", "memory")
    assert (end["bulk"].evidence.kind, end["bulk"].medium != "tmpfs") == ("block", True)


def test_ctrl_c_gives_the_memory_back(photos: Path, memory: Path, tmp_path: Path) -> None:
    process = call(
        *("--memory-target", memory),
        *("--model", "tiny", "--dataset", photos, "--target", tmp_path / "bulk", "--scenarios", "single"),
        *("--device", "cpu", "--allow-busy", "--seed", 0, "--rounds", 9, "--runs-dir", tmp_path),
    )
    try:
        # Path A is first in one of the rounds: there is a complete copy in memory.
        until(lambda: list(memory.glob(".tunetool-*/staged/dataset")), "a copy", process)
        process.send_signal(signal.SIGINT)
    finally:
        out, err = finish(process)
    assert process.returncode == 130, out + err
    interrupted(tmp_path)


def test_too_small_memory_is_said_before_anything_is_done(tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    make(dataset, images=1, width=56, height=56)
    with (dataset / "huge.bin").open("wb") as stream:
        stream.truncate(10 * 10**12)
    target = tmp_path / "bulk"
    process = call(
        "--model", "tiny", "--dataset", dataset, "--target", target, "--device", "cpu", "--scenarios", "single"
    )
    out, err = finish(process)
    assert process.returncode == 2, out + err
    assert "`/dev/shm` is too small: 10 TB are needed" in err
    assert "`/dev/shm` has" in err
    assert "the machine's RAM has" in err or "the memory limit of" in err
    assert "hint: stage less" in err
    assert not target.exists()


def test_memory_is_memory_and_bulk_is_said(tmp_path: Path) -> None:
    for arguments, message in (
        (("--memory-target", tmp_path, "--target", tmp_path), "not in memory"),
        ((), "must be made, but there is no `--target`"),
        (("--target", tmp_path, "--scenarios", "two"), "`two` is not a scenario"),
        (("--target", tmp_path, "--device", "cuda"), "has no GPU"),
    ):
        if "cuda" in arguments and list(Path("/dev").glob("nvidia[0-9]*")):
            continue
        process = call("--model", "tiny", *arguments)
        out, err = finish(process)
        assert process.returncode in (2, 3), out + err
        assert message in err


@pytest.mark.slow
def test_ranks_of_one_node_share_the_page_cache(tmp_path: Path) -> None:
    process = call(
        *("--model", "tiny", "--images", 40, "--target", tmp_path / "bulk", "--scenarios", "node", "--rounds", 2),
        *("--ranks-per-node", 2, "--device", "cpu", "--steps", 5, "--allow-busy", "--runs-dir", tmp_path / "runs"),
    )
    out, err = finish(process)
    assert process.returncode == 0, out + err
    record = read(next((tmp_path / "runs").glob("*-bench.staging-*")))
    ranks = [each for each in record.measurements if each.name == "staging.node.bulk.rank_model_load"]
    assert sorted(each.rank or 0 for each in ranks) == [0, 1]
    model = float(ranks[0].parameters["model_bytes"])
    assert all(float(each.parameters["model_read_bytes"]) >= 0.9 * model for each in ranks)
    assert "is refuted here: no card reads less" in " ".join(out.split())
    kept = next((tmp_path / "runs").glob("*-bench.staging-*"))
    assert json.loads(next(kept.glob("stage/node-1-node-0-model.json")).read_text())["kind"] == "stage"
    assert {each.rank for each in record.series} == {0, 1}


@pytest.mark.slow
def test_a_rank_that_fails_gives_the_memory_back(photos: Path, memory: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "dataset"
    make(dataset, images=8, width=56, height=56)
    victim = sorted((dataset / "images").iterdir())[3]
    victim.write_bytes(b"no picture")
    process = call(
        *("--memory-target", memory),
        *("--model", "tiny", "--dataset", dataset, "--target", tmp_path, "--scenarios", "single", "--rounds", 2),
        *("--device", "cpu", "--allow-busy", "--runs-dir", tmp_path / "runs"),
    )
    out, err = finish(process)
    assert process.returncode == 3, out + err
    assert victim.name in " ".join(out.split())
