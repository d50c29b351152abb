"""Measuring the ladder: the announcement, rungs that are left out or fail, and fio's command lines and logs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import lay_out
from tunetool.errors import UsageProblem
from tunetool.measure.figure import What, computed
from tunetool.measure.fio import Fio, FioFailed, Outcome
from tunetool.measure.ladder import calls, facts, source
from tunetool.measure.ladder import plan as ladder
from tunetool.measure.ladder.deepspeed_handles import Handle, PinnedHandle
from tunetool.measure.ladder.raw import counts, sub_stack
from tunetool.measure.ladder.rung import Context, Result, Rung, Skip, run
from tunetool.measure.ladder.sampler import Sampler
from tunetool.measure.ladder.sequential import Sequential
from tunetool.measure.ladder.source import Span
from tunetool.measure.ladder.volumes import OnVolumes
from tunetool.measure.metrics import RANDOM
from tunetool.measure.sequential import Plan, Results, Sample
from tunetool.measure.worker import Failed
from tunetool.node.machine.block_stack import BlockStack, Leaf, read_stack, together
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.mounts import Mount
from tunetool.node.machine.pcie_links import ports_above, shared_ports
from tunetool.node.units import UnitError, format_figure, parse_rate
from tunetool.options.shared import parse_expectations
from tunetool.record import CheckResult, CheckStatus
from tunetool.report.progress import PlainProgress

FIO = Fio("/usr/bin/fio", "3.33")
MIB = 2**20


def stack(directory: Path, drives: int = 4) -> BlockStack:
    mount = Mount("9:0", str(directory), "/", "xfs", "/dev/md0", ("rw",))
    leaves = tuple(Leaf(f"nvme{n}n1", "nvme", f"SER{n}", True, (f"nvme{n}n1",)) for n in range(drives))
    return BlockStack(str(directory), mount, "xfs", "md0", "9:0", "md RAID0", leaves, redundant=False, in_memory=False)


def plan(directory: Path) -> Plan:
    return Plan(str(directory), "md RAID0", 4, 64 * MIB, 4.0, None)


# --- what it takes is said beforehand -------------------------------------------------------------------------


def test_bytes_time_and_place_are_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = " ".join(ladder.announcement(plan(tmp_path), stack(tmp_path, 8), is_root=True))
    assert "60 s or 512 GB" in lines
    assert "2.147 GB" in lines
    assert "writes at most 520.6 GB more" in lines
    assert "raw rungs are left out" in lines
    monkeypatch.setattr(source, "read_stripe", lambda device: None)
    with_raw = " ".join(ladder.announcement(plan(tmp_path), stack(tmp_path, 8), is_root=True))
    assert "drives alone, drives together, array" in with_raw
    assert "reads 8 drives and their array themselves, read-only" in with_raw
    assert "only root" in " ".join(ladder.announcement(plan(tmp_path), stack(tmp_path, 8), is_root=False))


# --- rungs that are left out, and rungs that fail --------------------------------------------------------------


def context(directory: Path, of: BlockStack | None = None, fio: Fio = FIO, **given: Any) -> Context:
    measured = of or stack(directory)
    sampler = Sampler(measured, fio, directory, dict(os.environ), PlainProgress())
    return Context(plan(directory), measured, directory, sampler, {}, **given)


class OneFigure(Rung):
    """A rung that finds a figure, and a check that fails on one volume."""

    name = "one figure"

    def seconds(self, shape: Plan, drives: int) -> float:
        return 3.0

    def covers(self) -> list[str]:
        return ["gds.direct.read"]

    def run(self, context: Context) -> Result:
        what = What("gds.{way}.read", "bandwidth", "e", "disk", "bandwidth", {"way": "direct"})
        status: CheckStatus = "fail" if context.directory.name == "b" else "pass"
        check = CheckResult(id="gds.path", status=status, expected="x", found=context.stack.leaves[0].label)
        figure = computed(what, context.slowest)
        return Result([figure], {figure.name: "not proven"}, [check], {"gds.posix.read": "no"}, ["e"])


def test_a_rung_on_volumes_says_on_which(tmp_path: Path) -> None:
    parts = [replace(stack(tmp_path, 1), leaves=(leaf,)) for leaf in stack(tmp_path, 2).leaves]
    whole, alone = together(str(tmp_path), parts), {"a": 2.0, "b": 1.0}
    samples = {name: Sample(Outcome(int(rate * MIB), 1.0, {}, ""), None, 0.0) for name, rate in alone.items()}
    both = Sample(Outcome(3 * MIB, 1.0, {}, ""), None, 0.0, samples)
    sequential = Results(samples={"read": [both]})
    places = {name: tmp_path / name for name in alone}
    found = OnVolumes(OneFigure(), ["a", "b"]).run(context(tmp_path, whole, volumes=places, sequential=sequential))
    assert {each.name: each.value for each in found.measurements} == {
        "gds.direct.read.a": 2 * MIB,
        "gds.direct.read.b": MIB,
    }
    assert [each.labels["volume"] for each in found.measurements] == ["a", "b"]
    assert set(found.unproven) == {"gds.direct.read.a", "gds.direct.read.b"}
    assert set(found.skipped) == {"gds.posix.read.a", "gds.posix.read.b"}
    assert [(each.id, each.status, each.found) for each in found.checks] == [("gds.path", "fail", "`b`: SER1")]


def test_several_volumes_count_each_by_what_proves_it(tmp_path: Path) -> None:
    mirror = replace(stack(tmp_path, 2), device="md1", redundant=True)
    plain = stack(tmp_path, 1)
    whole = together("/mnt", [mirror, plain])
    assert whole.counts == ("md1", "nvme0n1")
    assert together("/mnt", [plain]) is plain
    assert together("/mnt", [plain, replace(plain, leaves=())]).counts == (), "a volume that nothing counts"


def test_without_direct_io_only_fio_deepspeed_and_cufile_measure(tmp_path: Path) -> None:
    found = Result()
    run(ladder.all_rungs(), context(tmp_path, sequential=Results(direct=False)), found)
    assert found.measurements == []
    assert set(found.skipped.values()) == {"the file system takes no direct I/O"}
    assert not any(rung.needs_direct_io for rung in (Sequential(), PinnedHandle(Path("p"), 1.0, False)))


def test_a_rung_that_fails_is_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    broken = tmp_path / "fio"
    broken.write_text("#!/bin/sh\necho 'fio: broken' >&2; exit 7\n")
    broken.chmod(0o755)
    found, bare = Result(), replace(stack(tmp_path), leaves=(), device=None)
    made = context(tmp_path, bare, Fio(str(broken), "3.33"), python=Path("/nonexistent/python"))
    made.sequential.file_bytes = MIB
    run(ladder.all_rungs(), made, found)
    assert any(line.startswith("random reads, 4k: ") and "fio: broken" in line for line in found.errors)
    assert any(line.startswith("sustained write: ") for line in found.errors)
    assert "it failed" in found.skipped["random.read.4k"]
    assert "raw rungs need an md RAID0" in found.skipped["array.read"]
    assert "does not start" in found.skipped["checkpoint.save"]
    assert "does not start" in found.skipped["deepspeed.gds.read"]


def test_where_fio_s_sequential_rung_fails_the_run_ends(tmp_path: Path) -> None:
    reached: list[str] = []

    class Next(Rung):
        name = "next"

        def run(self, context: Context) -> Result:
            reached.append(self.name)
            return Result()

    broken = tmp_path / "fio"
    broken.write_text("#!/bin/sh\necho 'fio: broken' >&2; exit 7\n")
    broken.chmod(0o755)
    bare = replace(stack(tmp_path), leaves=(), device=None)
    with pytest.raises(FioFailed, match="fio: broken"):
        run([Sequential(), Next()], context(tmp_path, bare, Fio(str(broken), "3.33")), Result())
    assert not reached


@pytest.mark.parametrize("required", [False, True])
def test_a_handle_that_fails_has_a_say_only_where_it_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    def dies(rung: Handle, context: Context) -> None:
        raise Failed("the process that runs DeepSpeed's `gds_handle` ended with SIGABRT")

    monkeypatch.setattr(Handle, "run", dies)
    found = Result()
    run([Handle("gds")], context(tmp_path, require_deepspeed=required), found)
    assert bool(found.errors) == required
    assert "SIGABRT" in found.skipped["deepspeed.gds.read"]


def test_a_handle_that_is_left_out_says_why_at_both_its_rows(tmp_path: Path) -> None:
    found = Result()
    run([PinnedHandle(Path("p"), 1.0, False, missing="no torch")], context(tmp_path), found)
    assert found.skipped == {"deepspeed.cpu.read": "no torch", "deepspeed.cpu.write": "no torch"}
    assert [(check.id, check.status, check.found) for check in found.checks] == [("deepspeed.io", "skip", "no torch")]


def test_where_the_files_lie_must_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Skip, match="raw rungs need an md RAID0"):
        ladder.all_rungs()[0].run(context(tmp_path))
    monkeypatch.setattr(source, "no_raw", lambda stack: None)
    with pytest.raises(Skip, match="`md0` is no md array"):
        ladder.all_rungs()[0].run(context(tmp_path))


# --- fio's command lines --------------------------------------------------------------------------------------


def test_raw_reads_are_read_only_and_one_group_after_the_other() -> None:
    groups = [
        ("nvme0n1", [Span("nvme0n1", 0, 8 * MIB), Span("nvme0n1", 16 * MIB, 8 * MIB)]),
        ("nvme1n1", [Span("nvme1n1", 5 * MIB, 8 * MIB)]),
    ]
    argv = calls.raw_reads(FIO, groups, 0.5)
    first = argv.index("--name=nvme0n1")
    for word in ("--readonly", "--allow_file_create=0", "--rw=read", "--direct=1", "--runtime=500ms"):
        assert argv.index(word) < first
    assert argv[first:].count("--name=nvme0n1") == 2
    assert argv.count("--stonewall=1") == 1
    assert argv[argv.index("--stonewall=1") - 1] == "--name=nvme1n1"
    assert argv.count("--iodepth=16") == 2
    assert argv.count("--iodepth=32") == 1
    assert not [word for word in argv if "write" in word]
    array = calls.raw_reads(FIO, [("array", [Span("md127", n * 64 * MIB, 8 * MIB) for n in range(32)])], 1.0, 8)
    assert array.count("--iodepth=8") == 32  # as deep a queue for each of eight drives as one has alone


def test_only_random_writes_may_write() -> None:
    for size in (*RANDOM, replace(RANDOM[0], direction="write")):
        argv = calls.random_io(FIO, size, "io_uring", 4, 64 * MIB, 1.0)
        assert f"--rw=rand{size.direction}" in argv
        assert ("--readonly" in argv) == (size.direction == "read")
        assert {f"--bs={size.block_bytes}", "--ioengine=io_uring"} <= set(argv)


def test_the_bandwidth_of_all_jobs_interval_by_interval() -> None:
    logs = ["500, 1024, 1, 0, 0\n1000, 2048, 1, 0, 0\n1500, 9, 1, 0, 0\n", "499, 1024, 1, 0, 0\n1001, 1024, 1, 0, 0\n"]
    assert calls.intervals(logs) == [2 * MIB, 3 * MIB]
    assert calls.intervals([]) == []


def test_how_many_drives_together() -> None:
    assert [counts(number) for number in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


def test_a_part_of_a_stack_counts_its_own_drives(tmp_path: Path) -> None:
    assert sub_stack(stack(tmp_path), ["nvme2n1"]).counts == ("nvme2n1",)


# --- what is expected -----------------------------------------------------------------------------------------


def test_rates_of_requests() -> None:
    assert parse_expectations(("read=5GBps,randread-4k=5MIOPS",)) == {"read": 5e9, "randread-4k": 5e6}
    assert parse_expectations(("randread-64k=800kIOPS", "randread-1m=900IOPS")) == {
        "randread-64k": 8e5,
        "randread-1m": 900.0,
    }
    for text in ("randread-4k=5GBps", "randread-4k=0IOPS", "randread-4k=5", "randread-8k=5IOPS", "read=5MIOPS"):
        with pytest.raises(UsageProblem):
            parse_expectations((text,))
    for text in ("5mIOPS", "5 MIops", "-1IOPS", "5"):
        with pytest.raises(UnitError):
            parse_rate(text)
    assert format_figure(5_200_000, "1/s") == "5.2 MIOPS"
    assert format_figure(5e9, "B/s").startswith("5 GB/s")


# --- facts of a machine ---------------------------------------------------------------------------------------


def test_facts_of_a_recorded_node(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path)
    drives = read_drives(str(root))
    read = facts.read_facts(read_stack("/mnt/nvme_raid0", str(root)), drives, [], str(root))
    assert [drive.serial for drive in read.drives] == [f"LAB1NV{number}" for number in range(1, 9)]
    assert not [drive for drive in read.drives if drive.downgraded]
    # Each drive of that node hangs off a root port of its own.
    assert read.shared == []
    assert read.stripe_unit_bytes == MIB
    assert "noatime" in read.mount_options


def test_drives_behind_one_switch_share_its_link(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path)
    drives = read_drives(str(root))[1:4]
    switch = tmp_path / "sys/devices/pci0000:00/0000:00:01.0/0000:40:00.0"
    for number, drive in enumerate(drives):
        device = switch / f"0000:41:0{number}.0" / f"0000:4{number + 2}:00.0"
        device.mkdir(parents=True)
        link = tmp_path / "sys/class/nvme" / drive.controller
        link.mkdir(parents=True)
        (link / "device").symlink_to(device)
    for bridge in (switch, switch.parent):
        (bridge / "current_link_speed").write_text("16.0 GT/s PCIe\n")
        (bridge / "current_link_width").write_text("8\n")
    assert len(ports_above(drives[0], str(root))) == 3
    shared = shared_ports(drives, str(root))
    assert [(port.address, len(port.serials)) for port in shared] == [("0000:00:01.0", 3), ("0000:40:00.0", 3)]
    read = facts.read_facts(read_stack("/mnt/nvme_raid0", str(root)), drives, [], str(root))
    assert read.shared[0].words == "16 GT/s x8"
    assert read.shared[0].carries == pytest.approx(15.75e9, rel=0.001)
