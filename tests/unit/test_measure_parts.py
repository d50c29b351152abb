"""The parts of a measurement that need no fio: evidence, balance, ceiling, plan, run directory, busy, facts."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import busy, rundir, sampling
from tunetool.measure.balance import balance
from tunetool.measure.evidence import Counted, explain, obstacles, summed, wrong_clock
from tunetool.measure.figures import ceiling
from tunetool.measure.made_by import node_facts
from tunetool.measure.sampling import Counting, Repeats, again, judgement_of_fio
from tunetool.measure.sequential import FREE_SHARE, PROBE_BYTES, file_bytes, plan
from tunetool.node.machine import busy as jobs
from tunetool.node.machine.block_stack import BlockStack, Counters, Leaf, together
from tunetool.node.machine.drives import Drive, Link
from tunetool.node.machine.pcie_links import link_bandwidth
from tunetool.verify.drive_errors import Watch
from tunetool.verify.view import proof_of
from waiting import until


def stack(members: int = 8, iostats: bool = True) -> BlockStack:
    leaves = tuple(
        Leaf(f"nvme{index}n1", "nvme", f"SER{index}", iostats, (f"nvme{index}n1",)) for index in range(members)
    )
    return BlockStack(
        "/mnt", None, "xfs", "md0", "9:0", f"md RAID0 ({members} x nvme)", leaves, redundant=False, in_memory=False
    )


def did(read_bytes: int = 0, ios: int = 1000, milliseconds: int = 1000) -> Counters:
    return Counters(ios, read_bytes // 512, milliseconds, 0, 0, 0, milliseconds)


def sample(milliseconds: Mapping[int, int], members: int = 8) -> Counted:
    devices = {f"nvme{index}n1": did(2**20, 1000, milliseconds.get(index, 100)) for index in range(members)}
    return Counted(members * 2**20, members * 2**20, devices)


@pytest.mark.parametrize(
    ("counted", "judgement"),
    [
        (0, "missing"),
        (979, "missing"),
        (980, "proven"),
        (1000, "proven"),
        (1020, "proven"),
        (1021, "other-io"),
        (1600, "other-io"),
    ],
)
def test_ratio_is_judged(counted: int, judgement: str) -> None:
    assert Counted(1000, counted, {}).judgement == judgement


def test_explanations_name_device_and_bytes() -> None:
    assert "`nvme0n1`" in explain(stack(), "read", Counted(10**9, 0, {}))
    assert "500 MB more" in explain(stack(), "read", Counted(10**9, 15 * 10**8, {}))


def test_obstacles_name_their_cure() -> None:
    assert obstacles(stack()) == []
    assert "queue/iostats" in obstacles(stack(2, iostats=False))[0]
    tmpfs = BlockStack("/t", None, "tmpfs", None, None, "tmpfs", (), redundant=False, in_memory=True)
    overlay = BlockStack("/o", None, "overlay", None, None, "overlay", (), redundant=False, in_memory=False)
    assert "in memory" in obstacles(tmpfs)[0]
    assert "no block device" in obstacles(overlay)[0]


def test_a_sync_of_the_array_below_leaves_figures_unproven(tmp_path: Path) -> None:
    base = tmp_path / "sys/block/md0/md"
    base.mkdir(parents=True)
    for name, text in (("sync_action", "resync"), ("sync_completed", "1 / 4"), ("sync_speed", "10")):
        (base / name).write_text(text + "\n")
    assert "array `md0` does a `resync` (25.0 %" in obstacles(stack(), str(tmp_path))[0]
    other = replace(stack(), device="md1", redundant=True)
    assert obstacles(other, str(tmp_path)) == []
    assert "array `md0` does a `resync`" in obstacles(together("/mnt", [other, stack()]), str(tmp_path))[0]


def test_a_slow_member_is_named_by_its_serial() -> None:
    slow = balance(stack(), {"read": [sample({3: 830}), sample({3: 830}), sample({})]})
    assert slow.status == "fail"
    assert slow.found == "`SER3` 8.3x slower to read than the median of the other 7"
    assert "/dev/nvme3n1" in slow.remedy


def test_one_slow_sample_is_no_slow_member() -> None:
    assert balance(stack(), {"read": [sample({3: 900}), sample({}), sample({})]}).status == "pass"
    assert balance(stack(), {"read": [sample({3: 290})] * 3}).status == "pass"


def test_too_few_members_are_not_compared() -> None:
    assert balance(stack(2), {"read": [sample({0: 9000}, 2)] * 3}).status == "skip"
    assert balance(stack(), {}).status == "skip"


@pytest.mark.parametrize(
    ("speed", "gigabytes"), [(2.5, 0.25), (5.0, 0.5), (8.0, 0.9846), (16.0, 1.9692), (32.0, 3.9385), (64.0, 8.0)]
)
def test_one_lane(speed: float, gigabytes: float) -> None:
    assert link_bandwidth(Link(speed, 1)) == pytest.approx(gigabytes * 1e9, rel=1e-3)


def drive(index: int, link: Link) -> Drive:
    return Drive(f"nvme{index}n1", f"S{index}", "m", "f", 1, 512, 0, "pcie", None, None, None, link)


def test_ceiling_is_the_sum_of_negotiated_links() -> None:
    drives = [drive(index, Link(32.0, 4, 32.0, 4)) for index in range(8)]
    assert ceiling(stack(), drives) == pytest.approx(126.0e9, rel=1e-3)
    assert ceiling(stack(), [*drives[:7], drive(7, Link())]) is None
    assert ceiling(stack(), drives[:7]) is None


@pytest.mark.parametrize(("cpus", "jobs"), [(1, 4), (8, 8), (192, 16)])
def test_jobs_follow_cpus(cpus: int, jobs: int) -> None:
    assert plan(Path("/t"), "disk", 10**15, cpus, 10, None).jobs == jobs


def test_plan_stays_within_the_free_space() -> None:
    free = 40 * 2**30
    shape = plan(Path("/t"), "disk", free, 16, 10, None)
    assert shape.space_bytes <= free * FREE_SHARE
    assert file_bytes(shape, 1e12) == shape.largest_file_bytes
    assert file_bytes(shape, 1.0) == PROBE_BYTES


def test_too_little_space_is_told_in_numbers() -> None:
    with pytest.raises(UsageProblem, match="`/t` has too little space: 1 GB free") as caught:
        plan(Path("/t"), "disk", 10**9, 4, 10, None)
    assert "2.684 GB" in str(caught.value.hint)


def test_announcement_says_bytes_time_and_place() -> None:
    text = " ".join(plan(Path("/t"), "disk", 10**13, 16, 10, 126e9).announcement())
    assert "`/t` (disk)" in text
    assert "at most 19.04 TB in all" in text
    assert "about 150 s" in text
    assert "up to 15 of each, 340 s" in text


def test_run_directory_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    def interrupted() -> None:
        with rundir.run_directory(tmp_path, "a" * 32) as path:
            assert path.stat().st_mode & 0o777 == 0o700
            (path / "data.0").write_bytes(b"x")
            assert rundir.stale_directories(tmp_path) == []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from pathlib import Path
import stops
from tunetool.measure import rundir
tree, log, made, at = sys.argv[1:]
stops.install(Path(tree), Path(log), at)
with rundir.temporary() if made == "temporary" else rundir.run_directory(Path(tree), "a" * 32) as directory:
    (directory / "data").write_text("x")
"""


@pytest.mark.parametrize("made", ["temporary", "run_directory"])
@pytest.mark.parametrize("at", ["mkdir", "open", "remove", "rmdir"])
def test_a_kill_at_making_or_removing_leaves_nothing(made: str, at: str, tmp_path: Path) -> None:
    tree, log = tmp_path / "tree", tmp_path / "log"
    tree.mkdir()
    hidden = "" if made == "temporary" else "."
    environment = {**os.environ, "TMPDIR": str(tree), "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = [str(tree), str(log), made, f"{at} /{hidden}tunetool-"]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not list(tree.iterdir()), "the janitor's end")


def test_leftovers_of_a_dead_run_are_found(tmp_path: Path) -> None:
    dead = tmp_path / ".tunetool-dead"
    dead.mkdir()
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    (dead / "owner.json").write_text(json.dumps(rundir.process_identity(process.pid or 0)))
    process.join()
    fresh = tmp_path / ".tunetool-fresh"
    fresh.mkdir()  # not marked yet: perhaps just being made
    foreign = tmp_path / ".tunetool-foreign"
    foreign.mkdir()
    (foreign / "owner.json").write_text(json.dumps({"host": "another", "pid": 1}))
    (tmp_path / ".tunetool-link").symlink_to("/")
    assert rundir.stale_directories(tmp_path) == [dead]
    rundir.remove_stale([dead])
    assert not dead.exists()


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    path = tmp_path / ".tunetool-old"
    path.mkdir()
    (path / "owner.json").write_text(json.dumps({**rundir.process_identity(os.getpid()), "start": 1}))
    assert rundir.stale_directories(tmp_path) == [path]


def test_one_run_at_a_time_on_a_device(tmp_path: Path) -> None:
    with busy.device_lock("9:0", tmp_path):
        with pytest.raises(CannotJudge, match="busy"), busy.device_lock("9:0", tmp_path):
            pass
        with busy.device_lock("9:1", tmp_path):
            pass
    with busy.device_lock("9:0", tmp_path):
        pass


def test_a_planted_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "tunetool-9-0.lock").symlink_to(victim)
    with pytest.raises(CannotJudge, match="cannot be locked"), busy.device_lock("9:0", tmp_path):
        pass
    assert not victim.exists()


def test_a_working_job_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # Busy once, which is why it is looked at again, to say by whom: tests/unit/test_others.py.
    readings = iter([did(0, 0), did(10**9, 5000), did(10**9, 5000), did(10**9, 5000)])

    def snapshot(stack: BlockStack) -> dict[str, Counters]:
        reading = next(readings)
        return {leaf.name: reading for leaf in stack.leaves}

    monkeypatch.setattr(busy, "snapshot", snapshot)
    reasons = busy.busy_devices(stack(1), lambda: None, lambda seconds: None)
    assert reasons == ["`nvme0n1` moved 1 GB in 5000 requests within a second"]
    with pytest.raises(CannotJudge, match="busy: `nvme0n1`") as caught:
        busy.refuse(reasons)
    assert "--allow-busy" in str(caught.value.hint)
    busy.refuse([])


def test_gpu_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '4711, /usr/bin/python3'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert jobs.gpu_processes() == ["process 4711 (`/usr/bin/python3`) uses a GPU"]
    program.write_text("#!/bin/sh\necho 'No running processes found'\n")
    assert jobs.gpu_processes() == []


@pytest.mark.parametrize("script", ["exit 9", None], ids=["fails", "missing"])
def test_who_has_a_gpu_open_is_seen_without_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert jobs.gpu_processes(str(tmp_path)) == []
    (tmp_path / "proc/4711/fd").mkdir(parents=True)
    (tmp_path / "proc/4711/fd/3").symlink_to("/dev/nvidia0")
    (tmp_path / "proc/4711/comm").write_text("python3\n")
    assert jobs.gpu_processes(str(tmp_path)) == ["process 4711 (`python3`) has a GPU open"]


def test_slurm_jobs_but_for_one_s_own(tmp_path: Path) -> None:
    # Titles as Slurm's documentation shows them (cgroup v2 plugin); the daemon that waits for jobs is none.
    titles = {
        10: b"/usr/sbin/slurmstepd\0infinity\0",
        11: b"slurmstepd: [614.extern]\0",
        12: b"slurmstepd: [614.0]\0",
        13: b"slurmstepd: [99.batch]\0",
        14: b"slurmstepd: [7]\0",
        15: b"grep\0slurmstepd: [1.0]\0",
    }
    for pid, title in titles.items():
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/cmdline").write_bytes(title)
    (tmp_path / "proc/16").mkdir()
    jobs_found = jobs.scheduler_jobs({}, str(tmp_path))
    assert jobs_found == [f"Slurm job {job} runs on this node" for job in (7, 99, 614)]
    assert len(jobs.scheduler_jobs({"SLURM_JOB_ID": "614"}, str(tmp_path))) == 2


def test_a_directory_that_a_dead_storage_keeps_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, **_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr("tunetool.measure.rundir.shutil.rmtree", fail)
        with (
            pytest.raises(CannotJudge, match="fio died"),
            rundir.run_directory(tmp_path, "0" * 12, said.append) as directory,
        ):
            raise CannotJudge("fio died")
        with pytest.raises(OSError, match="Input/output"), rundir.run_directory(tmp_path, "1" * 12):
            pass
        patched.setattr(Path, "mkdir", lambda path, mode: fail(path))
        with (
            pytest.raises(CannotJudge, match="cannot be written"),
            rundir.run_directory(tmp_path, "2" * 12, said.append),
        ):
            pass
    assert said[0] == f"`{directory}` could not be removed: Input/output error; the next run removes it"


KERNEL_SAID = (
    "4,900,1,-;critical medium error, dev nvme1n1, sector 1 op 0x0:(READ) flags 0x0\n"
    "3,901,2,-;blk_update_request: critical medium error, dev nvme0n1, sector 2099200 op 0x1:(WRITE) flags 0x4000\n"
    " SUBSYSTEM=block\n"
    "3,902,3,-;I/O error, dev nvme0n1, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1\n"
    "4,903,4,-;nvme nvme2: I/O 12 QID 1 timeout, aborting\n"
    "3,904,5,-;Buffer I/O error on dev md127, logical block 0, async page read\n"
    "3,905,6,-;I/O error, dev sda, sector 8 op 0x0:(READ)\n"
)


def test_drives_that_fail_meanwhile_are_named(tmp_path: Path) -> None:
    four = stack(4)
    for leaf in four.leaves:
        (tmp_path / "sys/class/block" / leaf.name).mkdir(parents=True)
        (tmp_path / "sys/class/block" / leaf.name / "stat").write_text("1 0 8 1 1 0 8 1 0 1 2\n")
    first, rest = KERNEL_SAID.split("\n", 1)
    log = tmp_path / "kmsg"
    log.write_text(first + "\n")
    with Watch(four, str(log), str(tmp_path)) as watch:
        with log.open("a") as stream:
            stream.write(rest)
        (tmp_path / "sys/class/block/nvme3n1/stat").unlink()
        (check,) = watch.findings()
    assert (check.id, check.status) == ("drives.errors", "fail")
    assert check.found == (
        "`SER0`: critical medium error, dev nvme0n1, sector 2099200 op 0x1:(WRITE) and 1 more; "
        "`SER2`: I/O 12 QID 1 timeout, aborting; `SER3` (`nvme3n1`) is gone"
    )
    assert "look at `/dev/nvme0n1`, `/dev/nvme2n1`: " in check.remedy
    with Watch(four, str(tmp_path / "none"), str(tmp_path)) as watch:
        assert watch.findings() == []


@pytest.mark.parametrize(("said", "believed"), [(1.0, True), (2.0, True), (0.9, False)])
def test_a_programs_clock_is_held_against_its_bytes(said: float, believed: bool) -> None:
    # It does not matter how long the drives were busy: with other work, before and after, or hardly at all.
    busy = {"nvme0n1": Counters(0, 0, 0, 0, 0, 0, 9000), "nvme1n1": Counters(0, 0, 0, 0, 0, 0, 5)}
    counted = Counted(1, 1, busy, moving_seconds=1.45)
    assert (wrong_clock([(None, 0.1), (counted, said)]) is None) is believed


def test_a_sample_slower_than_fio_says_is_taken_again() -> None:
    # Jobs of fio that begin apart, on a node whose cores are all busy: once. A wrong clock: always.
    def taken(*moving: float) -> tuple[float, list[str]]:
        left, said = list(moving), []

        def take(label: str) -> Any:
            said.append(label)
            counted = Counted(100, 100, {}, moving_seconds=left.pop(0))
            return SimpleNamespace(counted=counted, outcome=SimpleNamespace(seconds=1.0))

        sample = again("write-1", take, judgement_of_fio, Repeats(), lambda _: None)
        return sample.counted.moving_seconds, said

    assert taken(1.9, 1.1) == (1.1, ["write-1", "write-1-repeat-1"])
    assert taken(1.1) == (1.1, ["write-1"])
    assert taken(1.9, 1.9, 1.9, 1.8)[0] == 1.8


def test_speed_hash_follows_the_drives_but_not_their_names(tmp_path: Path) -> None:
    gen5, gen4 = Link(32.0, 4, 32.0, 4), Link(16.0, 4, 32.0, 4)
    base = node_facts([drive(0, gen5), drive(1, gen5)], stack(), str(tmp_path))
    assert node_facts([drive(2, gen5), drive(3, gen5)], stack(), str(tmp_path)).speed_hash == base.speed_hash
    assert node_facts([drive(0, gen5), drive(1, gen4)], stack(), str(tmp_path)).speed_hash != base.speed_hash


def test_locks_lie_where_everyone_looks_or_where_told() -> None:
    assert busy.lock_directory({}, is_root=True) == Path("/run/tunetool")
    assert busy.lock_directory({"XDG_RUNTIME_DIR": "/run/user/7"}, is_root=False) == Path("/run/user/7")
    for is_root in (True, False):
        assert busy.lock_directory({"TUNETOOL_LOCK_DIR": "/shared"}, is_root) == Path("/shared")


@pytest.mark.parametrize("made", ["file", "link"])
def test_another_users_lock_file_is_refused_by_its_owner(tmp_path: Path, made: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    path, elsewhere = tmp_path / "tunetool-9-127.lock", tmp_path / "elsewhere"
    if made == "file":
        path.touch()
    else:
        path.symlink_to(elsewhere)
    os.chown(path, 65534, 65534, follow_symlinks=False)
    with pytest.raises(CannotJudge) as refused, busy.device_lock("9:127", tmp_path):
        pass
    assert f"it is a {made} of user `nobody`" in refused.value.message
    assert f"rm {path}" in refused.value.hint
    assert not elsewhere.exists()


def test_root_locks_a_device_where_no_user_can_be_first(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    before = os.umask(0o077)
    try:
        with busy.device_lock("dev-of-a-test", busy.lock_directory({}, is_root=True)):
            directory = Path("/run/tunetool").stat()
    finally:
        os.umask(before)
        Path("/run/tunetool/tunetool-dev-of-a-test.lock").unlink(missing_ok=True)
    assert (directory.st_uid, directory.st_mode & 0o7777) == (0, 0o755)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counted]:
    """Takes a sample over files of 4 MiB that the page cache holds or not, whose drives count ``counted`` bytes."""
    made = replace(stack(1), directory=str(tmp_path), fs_type="ext4")
    name = made.leaves[0].name

    def take(counted: int, cached: bool, direct: bool) -> Counted:
        looks = iter([{name: did(0)}, {name: did(counted)}])
        monkeypatch.setattr(sampling, "snapshot", lambda _: next(looks))
        file = tmp_path / "process-0/aio.data"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(4 * 2**20))
        if not cached:
            # Holes are in no page cache, on tmpfs neither.
            file.write_bytes(b"")
            os.truncate(file, 4 * 2**20)
        with Counting(made, "`read-1`", direct=tmp_path if direct else None) as counting:
            pass
        sample = counting.count("read", 4 * 2**20)
        assert sample is not None
        return sample

    return take


@pytest.mark.parametrize("counted", [0, 8 * 2**20], ids=["answers reads", "doubles writes"])
def test_the_page_cache_is_named_where_direct_io_was_asked(beside: Callable[..., Counted], counted: int) -> None:
    sample = beside(counted, cached=True, direct=True)
    assert sample.cached_bytes == 4 * 2**20
    line = explain(replace(stack(1), fs_type="ext4"), "read", sample)
    assert "the page cache holds 4.194 MB of files that were opened for direct I/O, so ext4 ignores that" in line
    assert "something else uses the drives" not in line


@pytest.mark.parametrize(
    ("counted", "cached", "direct"),
    [(0, False, True), (0, True, False), (4 * 2**20, True, True)],
    ids=["nothing cached", "the page cache was asked", "the drives did it"],
)
def test_the_page_cache_is_blamed_for_nothing_else(
    beside: Callable[..., Counted], counted: int, cached: bool, direct: bool
) -> None:
    sample = beside(counted, cached=cached, direct=direct)
    assert sample.cached_bytes == 0
    assert "page cache" not in explain(stack(1), "read", sample)


def test_a_loop_device_s_own_cache_is_hinted_at() -> None:
    line = explain(replace(stack(1), medium="loop device on disk"), "read", Counted(1000, 10, {}))
    assert "`losetup --direct-io=on`" in line


def test_the_sample_that_decides_is_shown() -> None:
    proven, disturbed = Counted(10**9, 10**9, {}), Counted(10**9, 1031 * 10**6, {})
    evidence = summed(stack(), [proven, disturbed, proven, proven], 4 * 10**9)
    assert evidence.ratio == pytest.approx(1.00775)
    assert evidence.worst_ratio == pytest.approx(1.031)
    assert proof_of(evidence) == "block 1.0077, once 1.0310"
    assert proof_of(summed(stack(), [proven, proven], 2 * 10**9)) == "block 1.0000"
