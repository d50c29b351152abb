"""One node from call to record: bad calls, fake fio programs, manifests. Real I/O is in tests/measurement."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pythons import bare_python
from tunetool.cli.main import main
from tunetool.errors import UsageProblem
from tunetool.measure import busy, sampling
from tunetool.measure.ladder import sequential
from tunetool.measure.session import Result, Run
from tunetool.node.common.check_result import Check
from tunetool.node.machine.block_stack import BlockStack, Counters, Leaf
from tunetool.node.machine.mounts import Mount
from tunetool.options.shared import parse_expectations
from tunetool.options.values import parse_duration, parse_tolerance
from tunetool.record import Record, read
from tunetool.report.progress import PlainProgress
from tunetool.verdict import TESTER_CEILING, TESTER_CPU_SHARE
from tunetool.verify import run as verify_module
from tunetool.verify.request import Request
from tunetool.verify.run import verify
from tunetool.verify.view import limits, view

GB = 10**9


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _no_manifest_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify_module, "MANIFEST_PATH", str(tmp_path / "no-manifest.json"))
    monkeypatch.setattr(busy, "lock_directory", lambda environment, is_root: tmp_path / "locks")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target"
    path.mkdir()
    (path / "theirs").write_text("keep")
    return path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The program as a shell calls it."""
    monkeypatch.setattr(sys, "argv", ["tunetool", "verify", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def listing(path: Path) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


# --- calls that are wrong -------------------------------------------------------------------------------------


def test_too_little_space_and_no_permission(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(verify_module, "free_bytes", lambda path: GB)
        assert call(monkeypatch, "--target", str(target), "--runs-dir", str(tmp_path / "runs")) == 2
        assert "has too little space: 1 GB free" in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda *arguments, **options: False)
    assert call(monkeypatch, "--target", str(target), "--runs-dir", str(tmp_path / "runs")) == 2
    assert f"`{target}` is not writable" in capsys.readouterr().err
    assert listing(tmp_path) == before


def test_expectations() -> None:
    assert parse_expectations(("50GBps",)) == {"read": 50e9}
    assert parse_expectations(("write=25GB/s",)) == {"write": 25e9}
    assert parse_expectations(("read=50GBps, write=1GiB/s",)) == {"read": 50e9, "write": 2.0**30}
    assert parse_expectations(("50GBps", "write=25GBps")) == {"read": 50e9, "write": 25e9}
    assert parse_expectations(()) == {}


def test_durations() -> None:
    assert [parse_duration(text) for text in ("1s", "10s", "1.5s", "2m")] == [1, 10, 1.5, 120]
    for text in ("0.5s", "2000m", "10ms", "-1s", "1e3s", " s"):
        with pytest.raises(UsageProblem):
            parse_duration(text)


# --- a node of our making -------------------------------------------------------------------------------------


def stack_on(directory: str, mount_point: str = "/mnt/scratch") -> BlockStack:
    mount = Mount("9:0", mount_point, "/", "xfs", "/dev/md0", ("rw",))
    leaves = tuple(Leaf(f"nvme{n}n1", "nvme", f"SER{n}", True, (f"nvme{n}n1",)) for n in range(4))
    return BlockStack(
        directory, mount, "xfs", "md0", "9:0", "md RAID0 (4 x nvme)", leaves, redundant=False, in_memory=False
    )


def fake_fio(folder: Path, body: str, alone: str) -> dict[str, str]:
    """Make a program called fio, which without storage does ``alone``. Returns the environment in which it is found."""
    folder.mkdir(exist_ok=True)
    program = folder / "fio"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo fio-3.33 && exit\n'
        f'case "$*" in *--ioengine=null*)\n{alone}\nexit;; esac\necho >> "$0.runs"\n{body}\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def claims(read: float = 4.0, write: float = 2.0) -> str:
    """Body of a fake fio that claims that number of GB in one second."""
    sides = {
        name: {"io_bytes": int(amount * GB), "runtime": 1000, "clat_ns": {"percentile": {"50.000000": 5000}}}
        for name, amount in (("read", read), ("write", write))
    }
    document = json.dumps({"jobs": [{"error": 0, **sides}]})
    return f"cat <<'END'\n{document}\nEND"


class Drives:
    """Counters that show ``factor`` times the bytes that each fio claims; ``read`` of each drive, of one."""

    def __init__(
        self, folder: Path, factor: list[float], slow: str | None = None, read: tuple[float, ...] = (1, 1, 1, 1)
    ) -> None:
        self.started, self.factor, self.slow, self.read = folder / "fio.runs", factor, slow, read

    def snapshot(self, stack: BlockStack) -> dict[str, Counters]:
        runs = len(self.started.read_text()) if self.started.exists() else 0
        factors = sum(self.factor[min(run, len(self.factor) - 1)] for run in range(runs))
        read, write = (int(size * GB / 512 / 4 * factors) for size in (4, 2))
        counted = {}
        for leaf in stack.leaves:
            milliseconds = runs * 1000 * (8 if leaf.name == self.slow else 1)
            own = int(read * self.read[int(leaf.name[4])])
            counted[leaf.name] = Counters(runs * 1000, own, milliseconds, runs * 1000, write, milliseconds, runs)
        return counted


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: Path) -> Any:
    """Run ``verify`` on a target with four drives; the test chooses their counts and fio's output."""

    def run(
        body: str | None = None,
        factor: tuple[float, ...] = (1.0,),
        slow: str | None = None,
        environment: dict[str, str] | None = None,
        mount_point: str = "/mnt/scratch",
        stored: bool = True,
        alone: str | None = None,
        stack: Callable[[str], BlockStack] | None = None,
        read: tuple[float, ...] = (1, 1, 1, 1),
        **options: Any,
    ) -> Result:
        monkeypatch.setattr(verify_module, "read_stack", stack or (lambda path: stack_on(path, mount_point)))
        monkeypatch.setattr(verify_module, "free_bytes", lambda path: 10**14)
        if stored:
            monkeypatch.setattr(sequential, "incomplete", lambda directory, names, size: [])
        drives = Drives(tmp_path / "bin", list(factor), slow, read)
        drives.started.unlink(missing_ok=True)
        monkeypatch.setattr(sampling, "snapshot", drives.snapshot)
        with_fio = fake_fio(tmp_path / "bin", claims() if body is None else body, alone or claims(1e3, 1e3))
        before = listing(target)
        asked = {name: options.pop(name) for name in ("allow_busy", "dry_run") if name in options}
        fixed = {"target": target, "python": bare_python(tmp_path)}
        request = Request(**{**fixed, **options}, run=Run(tmp_path / "runs", **{"allow_busy": True, **asked}))
        result = verify(request, PlainProgress(), {**with_fio, **(environment or {})})
        assert listing(target) == before
        return result

    return run


def record_of(result: Result) -> Record:
    assert result.record is not None
    assert result.path is not None
    assert read(result.path).verdict == result.record.verdict
    return result.record


def reasons(result: Result) -> str:
    verdict = record_of(result).verdict
    assert verdict is not None
    return " | ".join(verdict.reasons)


def test_it_holds(node: Any) -> None:
    result = node(expect={"read": 4e9, "write": 2e9})
    assert result.code == 0, reasons(result)
    record = record_of(result)
    figures = {measurement.name: measurement for measurement in record.measurements}
    read_figure = figures["sequential.read"]
    assert read_figure.value == 4e9
    assert read_figure.medium == "md RAID0 (4 x nvme)"
    assert read_figure.evidence is not None
    assert read_figure.evidence.ratio == pytest.approx(1.0)
    assert str(read_figure.parameters["fio_path"]).endswith("/bin/fio")
    assert record.tolerance == 0
    assert [expectation.status for expectation in record.expectations] == ["pass", "pass"]
    assert result.path.parent.joinpath("fio-read-1.json").exists()


def test_it_falls_short(node: Any) -> None:
    result = node(expect={"write": 2.1e9})
    assert result.code == 1
    assert "sequential write 2 GB/s" in reasons(result)


def test_a_slow_tester_is_no_slow_drive(node: Any) -> None:
    alone = claims(read=5.0, write=2.1)
    result = node(alone=alone, expect={"read": 4.5e9, "write": 2.05e9})
    assert result.code == 3, reasons(result)
    assert "sequential write: 2 GB/s (1.863 GiB/s) is near the tester's limit" in reasons(result)
    record = record_of(result)
    assert [wanted.status for wanted in record.expectations] == ["unproven", "unproven"]
    figures = {measurement.name: measurement.parameters for measurement in record.measurements}
    assert figures["sequential.write"][TESTER_CEILING] == 2.1e9
    assert figures["sequential.read"][TESTER_CEILING] == 5e9
    assert 0 <= float(figures["sequential.read"][TESTER_CPU_SHARE]) <= 1
    assert result.path.parent.joinpath("fio-write-without-storage.json").exists()
    # What it reached, the drives have.
    assert node(alone=alone, expect={"read": 4e9, "write": 2e9}).code == 0


def test_a_tester_that_takes_every_core_is_no_slow_drive(node: Any) -> None:
    threads = len(os.sched_getaffinity(0))
    busy = claims().replace('"error": 0', f'"error": 0, "sys_cpu": {threads * 97}, "job_runtime": 1000')
    result = node(body=busy, expect={"write": 2.1e9})
    assert result.code == 3, reasons(result)
    assert "kept 97% of the cores busy" in reasons(result)


def test_a_tester_whose_limit_is_not_known_excuses_nothing(node: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = node(alone="echo fio: engine null not loadable >&2; exit 1", expect={"write": 2.1e9})
    assert result.code == 1, reasons(result)
    figures = {measurement.name: measurement.parameters for measurement in record_of(result).measurements}
    assert TESTER_CEILING not in figures["sequential.write"]
    assert "write: the tester's limit is not known" in capsys.readouterr().err


UNEVEN = """n=$(($(cat "$0.n" 2>/dev/null || echo 0) + 1)); echo $n > "$0.n"
echo '{"jobs": [{"error": 0, "read": {"io_bytes": 4000000000, "runtime": '$((900 + n % 2 * 200))'},
 "write": {"io_bytes": 2000000000, "runtime": 1000}}]}'"""
"""A fake fio that takes 0.9 s and 1.1 s in turn for its reads."""


@pytest.mark.parametrize(
    ("expected", "tolerance", "samples", "status"),
    [(3.6e9, 0.0, 6, "pass"), (4e9, 0.0, 15, "unstable"), (4e9, 0.1, 6, "pass"), (4.5e9, 0.0, 6, "fail")],
)
def test_more_samples_only_where_the_expectation_lies_among_them(
    node: Any, expected: float, tolerance: float, samples: int, status: str
) -> None:
    result = node(body=UNEVEN, expect={"read": expected}, tolerance=tolerance)
    record = record_of(result)
    figures = {measurement.name: measurement for measurement in record.measurements}
    assert len(figures["sequential.read"].samples or []) == samples
    assert len(figures["sequential.write"].samples or []) == 6
    assert [wanted.status for wanted in record.expectations] == [status]
    assert record.tolerance == tolerance
    confidence = figures["sequential.read"].confidence
    assert confidence is not None
    assert (confidence.level or 0) >= 0.95


@pytest.mark.parametrize("text", ["2", "-1%", "banana", "50%", "100%", ""])
def test_a_tolerance_is_per_cent(text: str) -> None:
    with pytest.raises(UsageProblem):
        parse_tolerance(text)
    assert parse_tolerance("2.5%") == 0.025


def test_no_expectation(node: Any) -> None:
    result = node()
    assert result.code == 3
    assert "no expectation" in reasons(result)


def test_bytes_that_never_arrived(node: Any) -> None:
    result = node(factor=(0.5,), expect={"read": 1e9})
    assert result.code == 3
    assert "counted only 0.500" in reasons(result)
    assert record_of(result).measurements[0].parameters["repeated_samples"] == 0


def test_files_that_hold_less_than_was_written(node: Any) -> None:
    # The counters agree, yet this fio wrote no file at all.
    result = node(expect={"read": 1e9}, stored=False)
    assert result.code == 3
    assert "`data.0` is gone" in reasons(result)


def test_a_neighbour_is_waited_out(node: Any) -> None:
    # probe, layout, then the write samples: two of them are disturbed.
    result = node(factor=(1, 1, 1.5, 1.5, 1), expect={"read": 1e9, "write": 1e9})
    assert result.code == 0, reasons(result)
    write = next(m for m in record_of(result).measurements if m.name == "sequential.write")
    assert write.parameters["repeated_samples"] == 2


def test_a_neighbour_that_stays_is_named(node: Any) -> None:
    result = node(factor=(1.5,), expect={"read": 1e9})
    assert result.code == 3
    assert "2 GB more" in reasons(result)


def test_a_slow_member_fails_the_node(node: Any) -> None:
    result = node(slow="nvme2n1", expect={"read": 1e9})
    assert result.code == 1
    assert "`SER2` 8.0x slower" in reasons(result)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo rubbish", "did not print a result"),
        ("exit 0", "did not print a result"),
        ('echo \'{"jobs": [{"error": 5}]}\'', "reports an error"),
        (claims(read=0, write=0), "moved 0 bytes"),
        ("echo 'fio: broken' >&2; exit 7", "exit status 7: fio: broken"),
        ("kill -XFSZ $$", "SIGXFSZ"),
    ],
)
def test_a_fio_that_does_not_deliver(node: Any, body: str, said: str) -> None:
    result = node(body=body, expect={"read": 1e9})
    assert result.code == 3
    verdict = record_of(result).verdict
    assert verdict is not None
    assert verdict.status == "error"
    assert said in reasons(result)


def test_no_fio_on_path(node: Any, tmp_path: Path) -> None:
    result = node(environment={"PATH": str(tmp_path)}, expect={"read": 1e9})
    assert result.code == 3
    assert "`fio` is not on PATH; install it" in reasons(result)


def test_preloaded_code_makes_it_unproven(node: Any) -> None:
    result = node(environment={"LD_PRELOAD": "/x.so"}, expect={"read": 1e9})
    assert result.code == 3
    assert "`LD_PRELOAD` was set" in reasons(result)


def test_busy(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "look", lambda stack, tick: ["process 1 (`job`) uses a GPU"])
    result = node(expect={"read": 1e9}, allow_busy=False)
    assert result.code == 3
    assert "busy: process 1" in reasons(result)
    assert [m for m in record_of(result).measurements if m.name.startswith("sequential")] == []


def test_a_file_system_that_shut_itself_down(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> int:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(verify_module, "free_bytes", fail)
    result = verify(Request(target=target, expect={"read": 1.0}, run=Run(tmp_path / "runs")), PlainProgress())
    assert result.code == 3
    assert reasons(result) == f"`{target}` was not measured: Input/output error; see `dmesg | tail`"


def test_files_that_a_dying_storage_keeps(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path, names: list[str], size: int) -> list[str]:
        raise OSError(errno.EIO, "Input/output error", str(directory))

    monkeypatch.setattr(sequential, "incomplete", fail)
    result = node(expect={"read": 1e9}, stored=False)
    assert result.code == 3
    assert "Input/output error; see `dmesg | tail`" in reasons(result)


def test_dry_run_writes_nothing(node: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = node(dry_run=True)
    assert (result.code, result.record) == (0, None)
    assert not (tmp_path / "runs").exists()
    assert "removed afterwards" in capsys.readouterr().err


# --- with a manifest ------------------------------------------------------------------------------------------


def manifest(tmp_path: Path, mount_point: Path | str, **expect: float) -> Path:
    member = {"serial": "S", "model": "M", "by_id": None, "size_bytes": 1, "pci_address": None, "numa_node": None}
    document = {
        "schema": "tunetool.manifest/1",
        "profile": "h100",
        "array": {"uuid": "a", "name": "scratch", "level": "raid0", "chunk_bytes": 2**20, "members": [member]},
        "filesystem": {
            "uuid": "f",
            "type": "xfs",
            "mount_point": str(mount_point),
            "data_su_bytes": 2**20,
            "data_sw": 8,
            "log_su_bytes": 2**18,
            "mount_options": ["noatime"],
        },
        "memory": {"hugepages": [], "shm_bytes": None, "memlock": None},
        "gds": {"mode": "off", "reasons": []},
        "offload_dir": None,
        "expect": expect,
        "reboot_required": False,
        "tool_version": "0.1.0",
    }
    path = tmp_path / "node.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    def answer(**statuses: str) -> None:
        answers = [
            Check(
                *(name.replace("_", "."), status, "as built", "otherwise"),
                "" if status == "pass" else "run `tunetool provision`",
            )
            for name, status in {"filesystem_mounted": "pass", **statuses}.items()
        ]
        monkeypatch.setattr(verify_module, "manifest_checks", lambda path, document, writing: answers)

    answer()
    return answer


def test_the_manifest_gives_target_and_expectations(node: Any, checks: Any, tmp_path: Path, target: Path) -> None:
    path = manifest(tmp_path, target, read=4e9, write=9e9)
    result = node(target=None, manifest=path, mount_point=str(target))
    assert result.code == 1
    assert "sequential write" in reasons(result)
    assert {expectation.source for expectation in record_of(result).expectations} == {str(path)}


def test_a_given_expectation_replaces_the_manifest_s(node: Any, checks: Any, tmp_path: Path, target: Path) -> None:
    path = manifest(tmp_path, target, read=4e9, write=9e9)
    result = node(target=None, manifest=path, mount_point=str(target), expect={"read": 4e9})
    assert result.code == 0, reasons(result)


@pytest.mark.parametrize(
    "identity", ["filesystem.mounted", "filesystem.writable", "filesystem.answers", "drives.answer"]
)
def test_nothing_is_written_to_a_bare_mount_point(
    node: Any, checks: Any, tmp_path: Path, target: Path, identity: str
) -> None:
    checks(**{identity.replace(".", "_"): "fail"})
    result = node(body="touch written; exit 1", target=None, manifest=manifest(tmp_path, target, read=4e9))
    assert result.code == 1
    assert f"was not measured: see {identity}" in reasons(result)
    assert record_of(result).target is None


def test_another_file_system_than_the_manifest_s(node: Any, checks: Any, tmp_path: Path) -> None:
    path = manifest(tmp_path, "/mnt/scratch", read=1e9)
    result = node(manifest=path, mount_point="/elsewhere")
    assert result.code == 3
    assert "is not on the manifest's file system" in reasons(result)
    assert node(manifest=path, mount_point="/elsewhere", expect={"read": 1e9}).code == 0


@pytest.mark.parametrize(("number", "code"), [("9:0", 0), ("254:1", 3)])
def test_a_bind_mount_is_of_the_file_system_of_its_device(
    node: Any, checks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, code: int
) -> None:
    mounts = [Mount(number, "/mnt/scratch", "/", "xfs", "/dev/md0", ("rw",))]
    monkeypatch.setattr(verify_module, "read_mounts", lambda: mounts)
    result = node(manifest=manifest(tmp_path, "/mnt/scratch", read=1e9), mount_point="/srv/bound")
    assert result.code == code, reasons(result)
    assert ("is not on the manifest's file system" in reasons(result)) == (code != 0)


def volumes(tmp_path: Path, folder: Path, **expect: float) -> Path:
    """The manifest of a node with two volumes, of two drives each, in directories of ``folder``."""
    path = manifest(tmp_path, folder, **expect)
    document = json.loads(path.read_text())
    one = {key: document.pop(key) for key in ("array", "filesystem", "offload_dir")}
    document |= {"schema": "tunetool.manifest/2", "volumes": []}
    for name in ("numa0", "numa1"):
        (folder / name).mkdir(exist_ok=True)
        point = {"mount_point": str(folder / name)}
        document["volumes"].append({**one, "name": name, "filesystem": {**one["filesystem"], **point}})
    path.write_text(json.dumps(document))
    return path


def half_of_the_drives(path: str) -> BlockStack:
    whole, half = stack_on(path, path), slice(2) if path.endswith("0") else slice(2, 4)
    return replace(whole, device=None, device_number=f"9:{path[-1]}", leaves=whole.leaves[half])


def both_claim(read: tuple[float, float] = (2.0, 2.0)) -> str:
    entries = []
    for name, amount in zip(("numa0", "numa1"), read, strict=True):
        sides = {way: {"io_bytes": int(each * GB), "runtime": 1000} for way, each in (("read", amount), ("write", 1.0))}
        entries.append({"jobname": name, "error": 0, **sides})
    return f"cat <<'END'\n{json.dumps({'jobs': entries})}\nEND"


@pytest.fixture
def two_volumes(node: Any, checks: Any, tmp_path: Path, target: Path) -> Any:
    def run(body: str = "", expect: dict[str, float] | None = None, **options: Any) -> Result:
        document = volumes(tmp_path, target, **({"read": 4e9, "write": 2e9} if expect is None else expect))
        fixed = {"target": None, "manifest": document, "stack": half_of_the_drives}
        return node(body=body or both_claim(), **{**fixed, **options})

    return run


def test_volumes_are_measured_at_once_and_their_sum_judged(two_volumes: Any, target: Path) -> None:
    result = two_volumes()
    assert result.code == 0, reasons(result)
    record = record_of(result)
    figures = {each.name: each for each in record.measurements if each.figure == "bandwidth"}
    assert {name: each.value for name, each in figures.items()} == {
        "sequential.read": 4e9,
        "sequential.read.numa0": 2e9,
        "sequential.read.numa1": 2e9,
        "sequential.write": 2e9,
        "sequential.write.numa0": 1e9,
        "sequential.write.numa1": 1e9,
    }
    assert record.target == str(target)
    jobs = [int(figures[name].parameters["jobs"]) for name in ("sequential.read", "sequential.read.numa0")]
    assert jobs[0] == 2 * jobs[1] > 0
    assert figures["sequential.read.numa1"].labels == {"subject": "sequential", "direction": "read", "volume": "numa1"}
    evidence = [figures[name].evidence for name in ("sequential.read", "sequential.read.numa0")]
    assert [each and each.device for each in evidence] == ["nvme0n1, nvme1n1, nvme2n1, nvme3n1", "nvme0n1, nvme1n1"]
    assert all(each and each.ratio == pytest.approx(1.0) for each in evidence)
    assert [(each.name, each.value, each.status) for each in record.expectations] == [
        ("sequential.read", 4e9, "pass"),
        ("sequential.write", 2e9, "pass"),
        ("sequential.read.numa0", 1.8e9, "pass"),
        ("sequential.read.numa1", 1.8e9, "pass"),
        ("sequential.write.numa0", 0.9e9, "pass"),
        ("sequential.write.numa1", 0.9e9, "pass"),
    ]
    assert figures["sequential.read"].medium == "2 x md RAID0 (4 x nvme)"


def test_a_sum_that_falls_short_names_the_slowest_volume(two_volumes: Any) -> None:
    result = two_volumes(both_claim((2.0, 1.0)), factor=(0.75,), expect={"read": 4e9})
    assert result.code == 1
    assert "volume `numa1` gave least, 1 GB/s" in reasons(result)
    record = record_of(result)
    assert "read: volume `numa1` gave least" in " ".join(limits(record))
    rows = [row[0] for section in view(record).sections for part in section.blocks for row in getattr(part, "rows", ())]
    assert [row for row in rows if str(row).startswith("read")] == ["read", "read, numa0", "read, numa1"]


def test_a_slow_volume_fails_though_the_sum_is_fast(two_volumes: Any, target: Path) -> None:
    result = two_volumes(both_claim((2.6, 1.4)), read=(1.3, 1.3, 0.7, 0.7))
    assert result.code == 1, reasons(result)
    record = record_of(result)
    found = {each.name: each.status for each in record.expectations}
    assert found.pop("sequential.read.numa1") == "fail"
    assert set(found.values()) == {"pass"}
    assert reasons(result) == (
        "volume `numa1` (drives `SER2`, `SER3`): sequential read 1.4 GB/s (1.304 GiB/s) [1.4 to 1.4] is below 1.8 GB/s "
        "(1.676 GiB/s), 90% of its share (2 drives of 4) of 4 GB/s (3.725 GiB/s): measure it alone by `tunetool verify "
        f"--level full --target {target / 'numa1'}`"
    )
    shown = " | ".join(
        str(line) for section in view(record).sections for part in section.blocks for line in getattr(part, "lines", ())
    )
    assert "expectation of each volume: 90% of its share, by its number of drives" in shown


def test_what_another_volume_took_fails_none(two_volumes: Any) -> None:
    """Of what all have in common one gets a little less, and the tolerance is that of the sum."""
    assert two_volumes(both_claim((2.15, 1.85)), read=(1.075, 1.075, 0.925, 0.925)).code == 0
    taken = both_claim((2.25, 1.75)), (1.125, 1.125, 0.875, 0.875)
    assert two_volumes(taken[0], read=taken[1]).code == 1
    assert two_volumes(taken[0], read=taken[1], tolerance=0.05).code == 0


def test_a_slow_tester_is_no_slow_volume(two_volumes: Any) -> None:
    uneven = (1.3, 1.3, 0.7, 0.7)
    result = two_volumes(both_claim((2.6, 1.4)), read=uneven, alone=claims(4.5, 1e3))
    assert result.code == 3, reasons(result)
    assert "sequential read numa1: 4 GB/s (3.725 GiB/s) is near the tester's limit" in reasons(result)


def test_a_share_goes_by_the_number_of_drives(two_volumes: Any) -> None:
    def three_and_one(path: str) -> BlockStack:
        whole, own = stack_on(path, path), slice(3) if path.endswith("0") else slice(3, 4)
        return replace(whole, device=None, device_number=f"9:{path[-1]}", leaves=whole.leaves[own])

    result = two_volumes(both_claim((3.0, 1.0)), stack=three_and_one, expect={"read": 4e9})
    assert result.code == 0, reasons(result)
    assert [each.value for each in record_of(result).expectations] == [4e9, 2.7e9, 0.9e9]


def test_more_samples_where_a_volume_is_not_decided(two_volumes: Any) -> None:
    """Its reads take turns on either side of what is expected of it; the sum is far above and decides at once."""
    first, second = both_claim((3.0, 1.0)).replace("<<'END'", "<<END").split("numa1")
    turns = f"{first}numa1{second.replace('1000}', '$((900 + n % 2 * 200))}', 1)}"
    count = 'n=$(($(cat "$0.n" 2>/dev/null || echo 0) + 1)); echo $n > "$0.n"'
    result = two_volumes(f"{count}\n{turns}", read=(1.5, 1.5, 0.5, 0.5), expect={"read": 2.2e9})
    figures = {each.name: each for each in record_of(result).measurements}
    assert len(figures["sequential.read"].samples or []) == 15
    assert len(figures["sequential.write"].samples or []) == 6


def test_what_is_true_of_every_volume_is_said_once(two_volumes: Any) -> None:
    result = two_volumes(expect={"read": 8e9})
    verdict = record_of(result).verdict
    assert verdict is not None
    assert len(verdict.reasons) == 1
    assert "sequential read 4 GB/s" in verdict.reasons[0]
    assert [each.status for each in record_of(result).expectations] == ["fail"] * 3


def test_bytes_that_one_volume_never_got_prove_no_sum(two_volumes: Any) -> None:
    result = two_volumes(both_claim((3.0, 1.0)))
    assert result.code == 3
    assert "sequential read numa0: `nvme0n1`, `nvme1n1` counted only 0.667" in reasons(result)
    record = record_of(result)
    ratios = {each.name: each.evidence.ratio for each in record.measurements if each.evidence is not None}
    assert ratios["sequential.read"] == pytest.approx(1.0)
    assert ratios["sequential.read.numa0"] == pytest.approx(2 / 3)


def test_one_of_several_volumes_can_be_a_target(two_volumes: Any, target: Path) -> None:
    result = two_volumes(claims(2.0, 1.0), target=target / "numa0", expect={"read": 1e15})
    assert result.code == 3, "what the manifest expects is of all volumes"
    record = record_of(result)
    assert record.target == str(target / "numa0")
    assert not record.expectations
    assert not [each for each in record.measurements if "volume" in each.labels]


def test_the_directory_of_volumes_stands_for_all_of_them(two_volumes: Any, target: Path, tmp_path: Path) -> None:
    target.chmod(0o555)
    record = record_of(two_volumes(target=target))
    assert [each.status for each in record.expectations] == ["pass"] * 6


@pytest.mark.parametrize(
    ("identity", "found", "said"),
    [
        ("filesystem.mounted", "`numa1`: nothing is mounted", "has volumes that are not the mounts"),
        ("array.state", "`numa1`: state `suspended`", "lies on an array with `numa1`: state `suspended`"),
        ("filesystem.answers", "`numa1`: the volume did not answer", "`numa1`: the volume did not answer"),
    ],
)
def test_nothing_is_written_where_one_volume_fails(
    two_volumes: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    identity: str,
    found: str,
    said: str,
) -> None:
    answers = {"filesystem.mounted": Check("filesystem.mounted", "pass", "as built", "as built")}
    answers[identity] = Check(identity, "fail", "as built", found, "repair it")
    monkeypatch.setattr(verify_module, "manifest_checks", lambda path, document, writing: list(answers.values()))
    result = two_volumes("touch written; exit 1")
    assert result.code == 1
    assert f"was not measured: see {identity}" in reasons(result)
    assert said in capsys.readouterr().err


def test_what_a_check_warns_of_is_a_note(two_volumes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = Check("filesystem.mounted", "pass", "as built", "as built")
    moved = Check("array.numa", "pass", "its node", "`S1` on 1", "put it back")
    monkeypatch.setattr(verify_module, "manifest_checks", lambda path, document, writing: [mounted, moved])
    result = two_volumes()
    assert result.code == 0
    verdict = record_of(result).verdict
    assert verdict is not None
    assert verdict.kinds == ["note"]
    assert verdict.reasons == ["array.numa: `S1` on 1, expected its node: put it back"]


def test_level_full_takes_one_volume(two_volumes: Any) -> None:
    with pytest.raises(UsageProblem, match=r"measures one volume, and `.*` has 2") as refused:
        two_volumes(level="full")
    assert "numa0" in str(refused.value.hint)


def test_a_failed_check_fails_a_fast_node(node: Any, checks: Any, tmp_path: Path) -> None:
    checks(memory_shm="fail")
    assert node(manifest=manifest(tmp_path, "/mnt/scratch", read=1e9)).code == 1


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("fail", 1), ("unknown", 3), ("skip", 0)])
def test_configuration_only(node: Any, checks: Any, tmp_path: Path, status: str, code: int) -> None:
    checks(memory_shm=status)
    result = node(body="exit 9", level="config", manifest=manifest(tmp_path, "/mnt/scratch", read=1e15))
    assert result.code == code


def test_configuration_only_without_a_manifest(node: Any) -> None:
    result = node(level="config")
    assert result.code == 3
    assert "there is no manifest" in reasons(result)


# --- as a shell sees it ---------------------------------------------------------------------------------------


def test_json_alone_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.json"
    for where in ("-", str(copy)):
        code = call(monkeypatch, "--level", "config", "--runs-dir", str(tmp_path / "runs"), "--json", where)
        assert code == 3
    output = capsys.readouterr().out
    document, _ = json.JSONDecoder().raw_decode(output)
    assert document["kind"] == "verify"
    assert document["command"][:2] == ["tunetool", "verify"]
    assert read(copy).kind == "verify"
    assert os.environ.get("NO_COLOR") is None or "\x1b" not in output


def test_interrupted(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(request: Request, progress: object, environment: object) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_module, "verify", interrupt)
    assert call(monkeypatch, "--target", str(target), "--runs-dir", str(tmp_path / "runs")) == 130
    assert "interrupted" in capsys.readouterr().err
