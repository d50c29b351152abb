"""``tunetool checkpoint fetch``: a step comes from the nearest tier that has it sound, or it does not appear at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import small_steps
import torch
import torch.distributed.checkpoint as dcp

from tunetool.checkpoint import DirectSavePlanner, DirectWriter, markers, step_fetch
from tunetool.checkpoint.bulk import replicas_of
from tunetool.checkpoint.markers import Marker
from tunetool.checkpoint.steps import Stamp
from tunetool.checkpoint.transfer import digest_of
from tunetool.checkpoint.verification import verify
from tunetool.cli.main import cli
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.report.progress import PlainProgress

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Run = Callable[..., tuple[int, Any]]
_SSH = """#!/bin/bash
[ -z "$NO_SSH" ] || { echo "ssh: no route to host" >&2; exit 255; }
exec sh -c "${@: -1}"
"""
_RSYNC = """#!/bin/bash
source="${@: -2:1}"; target="${@: -1}"
exec cp -a "${source#*:}." "$target"
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``tunetool checkpoint fetch`` in this process: its exit code and its JSON."""

    def call(step: Path, *words: object) -> tuple[int, Any]:
        code = cli.main(["checkpoint", "fetch", str(step), *map(str, words), "--json", "-"], standalone_mode=False)
        return int(code), json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A step with checksums of its save in a directory."""
    state = {"a": torch.arange(300_000.0), "b": torch.arange(9.0), "step": 5}
    writer = DirectWriter(tmp_path / "shared/step_5", threads=2)
    dcp.save(state, storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)
    return tmp_path / "shared"


@pytest.fixture
def drained(tmp_path: Path) -> Path:
    """A step of torch's writer that was drained: `a` from node1, `b` from node2."""
    step = small_steps.save(tmp_path / "drained/step_5", 7.0)
    mark(step)
    return step.parent


def mark(step: Path, sums: str | None = None) -> None:
    files = {path.name: digest_of(path) for path in small_steps.data_of(step)}
    hosts = dict(zip(files, ("node1", "node2"), strict=False))
    saved = Stamp(0, 1_700_000_000 * 10**9)
    markers.write(step, step.name, Marker(markers.digest_of_metadata(step), files, hosts, saved=saved, sums=sums))


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The replica of node1 on another node, which stand-ins for ssh and rsync reach."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("ssh", _SSH), ("rsync", _RSYNC)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    step = small_steps.save(replicas_of(tmp_path / "peer", "node1") / "step_5", 7.0)
    mark(step, markers.OF_THE_SOURCE)
    return step


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


def files_in(step: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in step.iterdir() if path.name != markers.MARKER}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_step_comes_with_every_byte_and_its_time(shared: Path, tmp_path: Path, run: Run) -> None:
    step = tmp_path / "scratch/step_5"
    code, told = run(step, "--from", shared)
    assert (code, told["source"], told["done"]) == (0, str(shared / "step_5"), True)
    assert told["bytes"] == sum(map(len, files_in(step).values()))
    assert files_in(step) == files_in(shared / "step_5")
    assert verify(step, PlainProgress()).code == 0
    times = [(each / ".metadata").stat().st_mtime_ns for each in (step, shared / "step_5")]
    assert times[0] == times[1]
    assert names_in(step.parent) == ["step_5"]


def test_a_drained_step_is_held_against_its_marker(drained: Path, tmp_path: Path, run: Run) -> None:
    step = tmp_path / "scratch/step_5"
    assert run(step, "--from", drained)[0] == 0
    assert small_steps.values(step) == (7.0, 7.0)
    assert not (step / markers.MARKER).exists()
    assert (step / ".metadata").stat().st_mtime_ns == 1_700_000_000 * 10**9


def cut(step: Path) -> None:
    os.truncate(max(small_steps.data_of(step)), 10)


def lead_out(step: Path) -> None:
    path = min(small_steps.data_of(step))
    path.rename(step.parent / path.name)
    path.symlink_to(step.parent / path.name)


def make_a_fifo(step: Path) -> None:
    path = min(small_steps.data_of(step))
    path.unlink()
    os.mkfifo(path)


def without_marker(step: Path) -> None:
    (step / markers.MARKER).unlink()


def flip_last(step: Path) -> None:
    path = max(small_steps.data_of(step))
    flip(path, path.stat().st_size // 2)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip_last, "is not what was drained"),
    (cut, "has 10 of"),
    (lambda step: max(small_steps.data_of(step)).unlink(), "is missing"),
    (lead_out, "is a link that leads out of the step"),
    (make_a_fifo, "is not a regular file"),
    (lambda step: flip(step / ".metadata", 400), ""),
    (lambda step: (step / markers.MARKER).write_text("{}"), "is damaged"),
    (without_marker, "has no checksums: nothing says whether it is sound"),
    (shutil.rmtree, "it has no `step_5`"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_damaged_source_is_named_and_the_next_one_taken(
    damage: Callable[[Path], None], named: str, drained: Path, tmp_path: Path, run: Run
) -> None:
    step, other = tmp_path / "scratch/step_5", tmp_path / "other"
    shutil.copytree(drained, other)
    damage(drained / "step_5")
    code, told = run(step, "--from", drained, "--from", other)
    assert (code, told["source"]) == (0, str(other / "step_5"))
    (passed,) = told["passed_over"]
    assert named in passed
    assert passed.startswith(f"`{drained}`: ")
    assert files_in(step) == files_in(other / "step_5")
    assert names_in(step.parent) == ["step_5"]


def test_a_block_that_is_not_as_saved_is_named(shared: Path, tmp_path: Path, run: Run) -> None:
    (path,) = {path for path in small_steps.data_of(shared / "step_5") if path.stat().st_size > 300_000}
    flip(path, 200_000)
    with pytest.raises(CannotJudge, match="no tier has `step_5` whole") as refused:
        run(tmp_path / "scratch/step_5", "--from", shared)
    assert "`a`" in refused.value.message
    assert path.name in refused.value.message
    assert not (tmp_path / "scratch/step_5").exists()


def test_a_dry_run_says_from_where_and_whether_it_fits(
    shared: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "scratch/step_5"
    code, told = run(step, "--from", tmp_path, "--from", shared, "--dry-run")
    assert (code, told["source"], told["done"], told["fits"]) == (0, str(shared / "step_5"), False, True)
    assert told["bytes"] == sum(map(len, files_in(shared / "step_5").values()))
    monkeypatch.setattr(step_fetch, "left", lambda directory: (1000, "space"))
    code, told = run(step, "--from", shared, "--dry-run")
    assert (code, told["fits"], told["free"]) == (3, False, 1000)
    with pytest.raises(CannotJudge, match=r"scratch` has 1 kB of space left; `.*step_5` needs 1\.\d+ MB"):
        run(step, "--from", shared)
    assert not step.parent.exists()


def test_only_this_nodes_part_comes_where_it_is_named(drained: Path, tmp_path: Path, run: Run) -> None:
    step = tmp_path / "scratch/step_5"
    assert run(step, "--from", drained, "--host", "node1")[0] == 0
    first = min(small_steps.data_of(drained / "step_5"))
    assert names_in(step) == [".metadata", first.name]
    with pytest.raises(CannotJudge, match="has no file that came from `node3`"):
        run(tmp_path / "new/step_5", "--from", drained, "--host", "node3")


def test_a_replica_comes_from_the_node_that_keeps_it(peer: Path, tmp_path: Path, run: Run) -> None:
    step, tier = tmp_path / "scratch/step_5", f"node2:{tmp_path}/peer"
    words = "--host", "node1", "--from", tier
    code, would = run(step, *words, "--dry-run")
    assert (code, would["source"], would["done"]) == (0, f"node2:{peer}", False)
    assert not step.parent.exists()
    assert run(step, *words)[1]["bytes"] == would["bytes"] == sum(map(len, files_in(peer).values()))
    assert small_steps.values(step) == (7.0, 7.0)
    assert names_in(step.parent) == ["step_5"]


def test_a_damaged_replica_is_passed_over_by_name(
    peer: Path, drained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, tier = tmp_path / "scratch/step_5", f"node2:{tmp_path}/peer"
    words = "--host", "node1", "--from", tier, "--from", drained
    flip_last(peer)
    code, told = run(step, *words)
    (passed,) = told["passed_over"]
    assert (code, told["source"]) == (0, str(drained / "step_5"))
    assert max(small_steps.data_of(peer)).name in passed
    assert "differs from the replica that was verified" in passed
    assert names_in(step.parent) == ["step_5"]
    for named, breaks in (("bytes", cut), ("has no replica", shutil.rmtree)):
        shutil.rmtree(step)
        breaks(peer)
        assert named in run(step, *words)[1]["passed_over"][0]
    shutil.rmtree(step)
    monkeypatch.setenv("NO_SSH", "1")
    assert "`node2` cannot be reached: ssh: no route to host" in run(step, *words)[1]["passed_over"][0]


def test_an_interrupted_call_is_continued(
    drained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = tmp_path / "scratch/step_5"
    first, second = small_steps.data_of(drained / "step_5")
    write, written = step_fetch.write_all, list[int]()

    def dying(out: int, piece: memoryview) -> None:
        written.append(len(piece))
        if len(piece) and second.name in str(Path(f"/proc/self/fd/{out}").readlink()):
            raise KeyboardInterrupt
        write(out, piece)

    monkeypatch.setattr(step_fetch, "default_threads", lambda: 1)
    monkeypatch.setattr(step_fetch, "write_all", dying)
    with pytest.raises(click.Abort):
        run(step, "--from", drained)
    assert not step.exists()
    (partial,) = step.parent.iterdir()
    assert names_in(partial) == [first.name]
    (partial / ".part-0").write_text("of a call that was killed")
    written.clear()
    monkeypatch.setattr(step_fetch, "write_all", lambda out, piece: (written.append(len(piece)), write(out, piece)))
    assert run(step, "--from", drained)[0] == 0
    assert sum(written) == second.stat().st_size
    assert files_in(step) == files_in(drained / "step_5")
    assert names_in(step.parent) == ["step_5"]


def test_what_came_before_is_not_believed(drained: Path, tmp_path: Path, run: Run) -> None:
    step = tmp_path / "scratch/step_5"
    shutil.copytree(drained / "step_5", partial := step.with_name(f".recovering-step_5-{digest(drained)}"))
    flip_last(partial)
    assert run(step, "--from", drained)[0] == 0
    assert files_in(step) == files_in(drained / "step_5")


def digest(tier: Path) -> str:
    return markers.digest_of_metadata(tier / "step_5")


def test_a_full_disk_ends_it_and_no_other_tier_is_asked(
    drained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(out: int, piece: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(step_fetch, "write_all", full)
    with pytest.raises(CannotJudge, match=r"distcp` cannot be written: No space left") as refused:
        run(tmp_path / "scratch/step_5", "--from", drained, "--from", drained)
    assert "no tier has" not in refused.value.message


@pytest.mark.parametrize(("step", "named"), [("step_5", "step_5` exists"), ("step_05", "are the same step")])
def test_a_step_that_is_there_is_not_touched(step: str, named: str, drained: Path, run: Run) -> None:
    with pytest.raises(UsageProblem) as refused:
        run(drained / step, "--from", drained)
    assert named in refused.value.message
    assert names_in(drained) == ["step_5"]
