"""Level full on a plain disk with the real fio: rungs of the file system are measured, raw rungs have a reason why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_verify_on_a_disk import disk, fios_in, only_record  # noqa: F401

from judged import undisturbed
from pythons import bare_python, python_that
from tunetool.measure import busy
from tunetool.measure.aio import Missing, probe
from tunetool.measure.fio import Outcome, find_fio
from tunetool.measure.ladder import calls
from tunetool.measure.ladder.checkpoint import FILE, TorchCheckpoint
from tunetool.measure.ladder.rung import Context
from tunetool.measure.ladder.sampler import Sampler
from tunetool.measure.ladder.source import Span
from tunetool.measure.sequential import Plan, Sample
from tunetool.measure.session import Run
from tunetool.measure.worker import Failed
from tunetool.node.machine.block_stack import read_stack
from tunetool.report.progress import PlainProgress
from tunetool.verify.request import Request
from tunetool.verify.run import verify
from waiting import PATIENCE


def test_the_ladder_of_a_plain_disk(
    disk: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(busy, "lock_directory", lambda environment, is_root: tmp_path / "locks")
    request = Request(
        expect={"read": 1e6, "randread-4k": 10.0},
        target=disk,
        level="full",
        # Shorter than a call may request: this shows that every rung exists, never a speed.
        duration=0.3,
        python=bare_python(tmp_path),
        run=Run(tmp_path / "runs", allow_busy=True),
    )
    result = verify(request, PlainProgress())
    record = result.record
    assert record is not None
    assert record.verdict is not None
    # Samples this short leave no room for what else a shared disk does meanwhile; nothing else may stand in the way.
    undisturbed(result.code, record)
    assert list(disk.iterdir()) == []
    figures = {measurement.name: measurement for measurement in record.measurements}
    for name in (
        *("sequential.write.io_uring", "sequential.read.io_uring", "sustained.write"),
        *("random.read.1m", "random.read.19m"),
    ):
        if name.endswith("io_uring") and name not in figures:
            continue  # a container that forbids it; the rung's reason is looked at below
        evidence = figures[name].evidence
        assert evidence is not None
        assert evidence.kind == "block"
        assert (evidence.ratio or 0) >= 0.98, name
    small = figures["random.read.4k"]
    assert (small.quantity, small.unit) == ("rate", "1/s")
    assert small.percentiles is not None
    assert {"p50", "p99", "p99.9"} <= small.percentiles.keys()
    assert len(small.samples or []) >= 6
    assert len(figures["random.read.64k"].samples or []) == 3
    assert len(figures["sustained.write"].samples or []) >= 6
    assert {wanted.name: wanted.status for wanted in record.expectations}["random.read.4k"] in (
        "pass",
        "unproven",
        "unstable",
    )
    assert record.ladder is not None
    skipped = {rung.name: rung.skipped for rung in record.ladder.rungs if rung.skipped}
    assert "raw rungs need an md RAID0" in str(skipped["array.read"])
    for name in ("deepspeed.cpu.read", "deepspeed.gds.write", "checkpoint.save"):
        assert "torch is not installed" in str(skipped[name])
    said = capsys.readouterr().err
    assert "then the ladder, about" in said
    assert "raw rungs are left out" in said


def test_a_dry_run_says_what_the_ladder_takes(disk: Path, tmp_path: Path) -> None:  # noqa: F811
    arguments = ["--level", "full", "--dry-run", "--target", str(disk), "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-m", "tunetool", "verify", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"then the ladder, about \d+ s", done.stderr)
    assert "the sustained write ends after 60 s or" in done.stderr
    assert list(disk.iterdir()) == []
    assert not (tmp_path / "runs").exists()


def test_raw_reads_open_read_only_and_make_no_file(disk: Path) -> None:  # noqa: F811
    """The system calls of fio with the ladder's command line, on a file in place of a drive."""
    fio = find_fio(dict(os.environ))
    data = disk / "drive"
    data.write_bytes(os.urandom(4 * 2**20))
    spans = [Span("drive", 0, 2**21), Span("drive", 2**21, 2**21)]
    argv = [word.replace("/dev/drive", str(data)) for word in calls.raw_reads(fio, [("drive", spans)], 2.0)]
    process = subprocess.Popen(argv, cwd=disk, stdout=subprocess.PIPE, text=True)
    try:
        flags: set[int] = set()
        while process.poll() is None and len(flags) < 1:
            flags |= open_flags(process.pid, data)
    finally:
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert flags
    assert all(flag & os.O_ACCMODE == os.O_RDONLY and flag & os.O_DIRECT for flag in flags)
    gone = [word.replace("/dev/drive", str(disk / "gone")) for word in calls.raw_reads(fio, [("drive", spans)], 0.2)]
    done = subprocess.run(gone, cwd=disk, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not (disk / "gone").exists()


@pytest.fixture
def with_torch() -> Path:
    """A Python that has torch: `TUNETOOL_TEST_PYTHON`, else the one that `make setup` gave it to."""
    python = Path(os.environ.get("TUNETOOL_TEST_PYTHON", sys.executable))
    try:
        probed = probe(python, os.environ)
    except Missing as error:
        pytest.skip(error.message)
    if probed.torch is None:
        pytest.skip(f"`{python}` has no torch")
    return python


def context(disk: Path, python: Path) -> Context:  # noqa: F811
    stack = read_stack(str(disk))
    sampler = Sampler(stack, find_fio(dict(os.environ)), disk, os.environ, PlainProgress())
    shape = Plan(str(disk), stack.medium, 4, 2**26, 0.2, None)
    made = Context(shape, stack, disk, sampler, os.environ, python=python)
    # A disk so slow that the smallest checkpoint is chosen.
    made.sequential.samples["write"] = [Sample(Outcome(1, 1.0, {}, ""), None, 0.0)]
    return made


def test_a_torch_checkpoint_is_durable_and_comes_back_equal(disk: Path, with_torch: Path) -> None:  # noqa: F811
    outcome = TorchCheckpoint().run(context(disk, with_torch))
    figures = {measurement.name: measurement for measurement in outcome.measurements}
    assert figures.keys() == {"checkpoint.save", "checkpoint.load"}
    for measurement in figures.values():
        assert measurement.layer == "checkpoint"
        assert measurement.evidence is not None
        # Other I/O of this disk is added; fewer bytes would come from the page cache.
        assert (measurement.evidence.ratio or 0) >= 0.98
        assert measurement.evidence.claimed_bytes is not None
        assert measurement.evidence.claimed_bytes >= 3 * 64 * 2**20
        assert float(measurement.parameters["cores_used"]) > 0
    assert list(disk.iterdir()) == []


@pytest.mark.slow  # children that die are in tests/unit/test_deepspeed.py
def test_a_checkpoint_s_process_that_dies_is_told(disk: Path, with_torch: Path, tmp_path: Path) -> None:  # noqa: F811
    # It is killed as soon as its file is there: in the middle of a save.
    watch = f"(while [ ! -e {disk / FILE} ]; do sleep 0.02; done; kill -KILL $$) &"
    program = python_that(tmp_path, watch).read_text().replace(sys.executable, str(with_torch))
    (tmp_path / "python").write_text(program)
    with pytest.raises(Failed, match="SIGKILL"):
        TorchCheckpoint().run(context(disk, tmp_path / "python"))
    assert list(disk.iterdir()) == []


def open_flags(pid: int, path: Path) -> set[int]:
    """The flags with which a process has ``path`` open."""
    flags = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if entry.readlink() == path:
                text = Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()
                flags.add(int(text.split("flags:")[1].split()[0], 8))
        except OSError:
            continue
    return flags
