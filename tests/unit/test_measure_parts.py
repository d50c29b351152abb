"""The parts of a measurement that need no fio: evidence, balance, ceiling, plan, run directory, busy, facts."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import busy, rundir
from tunetool.measure.balance import balance
from tunetool.measure.ceiling import ceiling, link_bandwidth
from tunetool.measure.evidence import Counted, count, explain, obstacles
from tunetool.measure.facts import node_facts
from tunetool.measure.sequential import FREE_SHARE, PROBE_BYTES, file_bytes, plan
from tunetool.node.blockstack import BlockStack, Counters, Leaf
from tunetool.node.drives import Drive, Link


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
    return count(stack(members), "read", members * 2**20, devices)


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


def test_bytes_are_summed_over_all_members() -> None:
    assert sample({}).ratio == 1.0


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
    assert "about 144 s" in text
    assert "up to 15 of each, 334 s" in text


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


def test_leftovers_of_a_dead_run_are_found(tmp_path: Path) -> None:
    dead = tmp_path / ".tunetool-dead"
    dead.mkdir()
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    (dead / "owner.json").write_text(json.dumps(rundir._identity(process.pid or 0)))
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
    (path / "owner.json").write_text(json.dumps({**rundir._identity(os.getpid()), "start": 1}))
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
    readings = iter([did(0, 0), did(10**9, 5000)])

    def snapshot(stack: BlockStack) -> dict[str, Counters]:
        reading = next(readings)
        return {leaf.name: reading for leaf in stack.leaves}

    monkeypatch.setattr(busy, "snapshot", snapshot)
    found = busy.busy_devices(stack(1), lambda: None, lambda seconds: None)
    assert found == ["`nvme0n1` moved 1 GB in 5000 requests within a second"]
    with pytest.raises(CannotJudge, match="busy: `nvme0n1`") as caught:
        busy.refuse(found)
    assert "--allow-busy" in str(caught.value.hint)
    busy.refuse([])


def test_gpu_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '4711, /usr/bin/python3'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert busy.gpu_processes() == ["process 4711 (`/usr/bin/python3`) uses a GPU"]
    program.write_text("#!/bin/sh\necho 'No running processes found'\n")
    assert busy.gpu_processes() == []
    program.write_text("#!/bin/sh\nexit 9\n")
    assert busy.gpu_processes() == []


def test_speed_hash_follows_the_drives_but_not_their_names(tmp_path: Path) -> None:
    gen5, gen4 = Link(32.0, 4, 32.0, 4), Link(16.0, 4, 32.0, 4)
    base = node_facts([drive(0, gen5), drive(1, gen5)], stack(), str(tmp_path))
    assert node_facts([drive(2, gen5), drive(3, gen5)], stack(), str(tmp_path)).speed_hash == base.speed_hash
    assert node_facts([drive(0, gen5), drive(1, gen4)], stack(), str(tmp_path)).speed_hash != base.speed_hash
