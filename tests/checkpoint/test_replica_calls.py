"""Wrong calls of ``replicate`` and ``recover``, peers that ssh cannot reach, and replicas that a stand-in for rsync
brings. tests/finetune has real peers."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

import torch
import torch.distributed.checkpoint as dcp
from small_steps import data_of, overwrite, save, values
from thread_ranks import ThreadRanks

from tunetool.checkpoint import DirectWriter, identity, latest, markers, recover, replicate
from tunetool.checkpoint.bulk import replicas_of
from tunetool.checkpoint.markers import Marker
from tunetool.checkpoint.os_errors import SystemRefused
from tunetool.checkpoint.recovering import gather, partial_of
from tunetool.checkpoint.replica_receiver import Incoming, Receiver
from tunetool.checkpoint.retention import leave_replica_note
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.errors import CannotJudge, Unforeseen, UsageProblem
from tunetool.node.common.file_lock import FileLock
from waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_RSYNC = """#!/bin/bash
source="${@: -2:1}"; target="${@: -1}"
cp -a "${source#*:}." "${target#*:}" || exit 11
eval "$MEANWHILE"
"""


@pytest.fixture
def replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole replica of `step_1` of `node1`, which the stand-in for rsync brings from here."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "rsync").write_text(_RSYNC)
    (programs / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("MEANWHILE", "")
    step = replicas_of(tmp_path / "peer", "node1") / "step_1"
    save(step, 1)
    mark(step, {path.name: digest_of(path) for path in data_of(step)})
    return step


def mark(step: Path, files: dict[str, CopiedFile]) -> None:
    sources = identity.look_at(step, files)
    markers.write(step, step.name, Marker(markers.digest_of_metadata(step), files, {}, sources))


def bring(replica: Path, step: Path) -> Path:
    """Recover ``step`` from it."""
    return recover(step, peer="node2", peer_dir=replica.parents[2], host="node1")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"peer": socket.gethostname()}, f"`{socket.gethostname()}` is this node itself"),
        ({"peer": "root@node1", "host": "node1"}, "`root@node1` is this node itself"),
        ({"peer": "node1.example.org", "host": "Node1"}, "`node1.example.org` is this node itself"),
        ({"peer": "node1", "host": "node1.example.org"}, "`node1` is this node itself"),
        ({"peer": "localhost"}, "`localhost` is this node itself"),
        ({"patience": "long"}, "`patience=long` is not a time"),
        ({"patience": 0}, "`patience=0` is not a time"),
        ({"peer": "-oProxyCommand=true"}, "`peer=-oProxyCommand=true`"),
        ({"host": "../other"}, "`host=../other`: not a host's name"),
        ({"peer_dir": "scratch"}, "`peer_dir=scratch` is not absolute"),
        ({"rate": 0}, "`rate=0` is not a rate"),
        ({"max_to_keep": 0}, "`max_to_keep=0` would keep nothing"),
    ],
)
def test_a_wrong_call_of_replicate_is_refused(tmp_path: Path, wrong: dict[str, Any], named: str) -> None:
    step = save(tmp_path / "step_1", 1)
    with pytest.raises(UsageProblem) as refused:
        replicate(step, **{"peer": "node2", **wrong})
    assert named in refused.value.message


def test_a_step_that_is_not_whole_here_is_not_replicated(tmp_path: Path) -> None:
    step = save(tmp_path / "step_1", 1)
    first, second = data_of(step)
    content = first.read_bytes()
    first.write_bytes(content[:-1])
    with pytest.raises(UsageProblem, match=f"`{first}` is cut short"):
        replicate(step, peer="node2")
    first.unlink()
    second.unlink()
    with pytest.raises(UsageProblem, match=f"`{step}` has no file that `.metadata` names"):
        replicate(step, peer="node2")
    (step / ".metadata").unlink()
    with pytest.raises(UsageProblem, match=f"`{step / '.metadata'}` cannot be read"):
        replicate(step, peer="node2")
    with pytest.raises(UsageProblem, match="is not a step directory"):
        replicate(tmp_path, peer="node2")


def test_a_peer_that_cannot_be_reached_is_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step = save(tmp_path / "step_1", 1)
    work = replicate(step, peer="node2", ssh=("false",))
    outcome = work.wait(PATIENCE)
    assert outcome.path is None
    assert str(outcome.problem).startswith("`node2` does not answer: ")
    assert capfd.readouterr().err == f"warning: no replica of `{step}` on `node2`: {outcome.problem}\n"
    with pytest.raises(CannotJudge, match="`node2` does not answer"):
        work.wait(check=True)
    assert not work.running
    assert values(step) == (1, 1)


def ssh_to(program: Path, script: str) -> tuple[str, ...]:
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    return (str(program),)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("5", "`node2` does not answer: it said `5`; "),
        ("{}", "`node2` does not answer: it said `{}`; "),
        ('{"error": "it broke"}', "`node2`: it broke; "),
    ],
)
def test_a_peer_that_says_anything_else_is_a_warning(tmp_path: Path, said: str, problem: str) -> None:
    step = save(tmp_path / "step_1", 1)
    work = replicate(step, peer="node2", ssh=ssh_to(tmp_path / "ssh", f"echo '{said}'"))
    assert str(work.wait(PATIENCE).problem).startswith(problem)


def test_a_peer_that_reads_nothing_ends_with_its_patience(tmp_path: Path) -> None:
    # More tensors than a pipe takes of their order.
    state = {f"weight{number}": torch.ones(1) for number in range(2000)}
    step = tmp_path / "step_1"
    dcp.save(state, storage_writer=DirectWriter(step, threads=1), no_dist=True)
    work = replicate(step, peer="node2", ssh=ssh_to(tmp_path / "ssh", "exec sleep 1000"), patience=1.0)
    assert str(work.wait(PATIENCE).problem).startswith("`node2` gave no sign of life for 1 s")


@pytest.mark.parametrize("links", [True, False])
def test_what_the_system_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], links: bool
) -> None:
    step = save(tmp_path / "step_1", 1)
    file = data_of(step)[0]
    if links:
        file.unlink()
        file.symlink_to(file.name)
        named = f"`{file}`: Too many levels of symbolic links"
    else:

        def refuse(*_: object) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "memfd_create", refuse)
        named = "`system call`: Too many open files"
    work = replicate(step, peer="node2")
    assert not work.running
    work.stop()
    outcome = work.wait()
    assert outcome.path is None
    assert str(outcome.problem).startswith(named)
    assert capfd.readouterr().err == f"warning: no replica of `{step}` on `node2`: {outcome.problem}\n"
    with pytest.raises(CannotJudge, match=re.escape(named)):
        work.wait(check=True)


def test_what_is_there_or_no_step_is_not_recovered(tmp_path: Path) -> None:
    step = save(tmp_path / "step_1", 1)
    with pytest.raises(UsageProblem, match=f"`{step}` exists"):
        recover(step, peer="node2")
    with pytest.raises(UsageProblem, match="are the same step"):
        recover(tmp_path / "step_01", peer="node2")
    shutil.rmtree(step)
    with pytest.raises(UsageProblem, match="`peer=-x`"):
        recover(step, peer="-x")
    with pytest.raises(UsageProblem, match="`peer_dir=scratch` is not absolute"):
        recover(step, peer="node2", peer_dir="scratch")
    assert list(tmp_path.iterdir()) == []


def test_a_replica_is_brought_back(replica: Path, tmp_path: Path) -> None:
    step = tmp_path / "scratch" / "step_1"
    half = step.with_name(".recovering-step_2-node1")
    half.mkdir(parents=True)
    assert bring(replica, step) == step
    assert values(step) == (1, 1)
    assert names_in(step.parent) == ["step_1"], "what another step's call left is swept"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_step_that_appears_meanwhile_is_not_touched(
    replica: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    step = tmp_path / "scratch" / "step_1"
    if not exchanges:
        monkeypatch.setattr("tunetool.stage.system._renameat2", lambda *_: False)
    monkeypatch.setenv("MEANWHILE", f"mkdir {step}; echo precious > {step}/data")
    with pytest.raises(UsageProblem, match=f"`{step}` exists"):
        bring(replica, step)
    assert (step / "data").read_text() == "precious\n"
    assert names_in(step.parent) == ["step_1"]


@pytest.mark.parametrize("absolute", [True, False])
def test_a_replica_that_names_files_elsewhere_deletes_none(replica: Path, tmp_path: Path, absolute: bool) -> None:
    victim = tmp_path / "scratch" / "victim"
    victim.parent.mkdir()
    victim.touch()
    own = {path.name: digest_of(path) for path in data_of(replica)}
    mark(replica, {**own, str(victim) if absolute else "../victim": CopiedFile(1, "0")})
    with pytest.raises(CannotJudge, match=r"is damaged: it names `.*victim`"):
        bring(replica, tmp_path / "scratch" / "step_1")
    assert victim.exists()


def test_the_peers_directory_is_that_of_the_replication(replica: Path, tmp_path: Path) -> None:
    # The volume is mounted elsewhere, and a link leads there: the peer may have no such link.
    (tmp_path / "scratch").symlink_to(tmp_path / "peer")
    shutil.rmtree(replica)
    with pytest.raises(CannotJudge, match=f"the replica `{replica}`"):
        recover(tmp_path / "scratch" / "step_1", peer="node2", host="node1")


def test_a_link_out_of_a_replica_is_not_followed(replica: Path, tmp_path: Path) -> None:
    file = data_of(replica)[0]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotJudge, match=f"is damaged: it names `{file.name}`"):
        bring(replica, tmp_path / "scratch" / "step_1")
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("covered", [0, 1])
def test_a_replica_with_files_that_nothing_proves_is_refused(replica: Path, tmp_path: Path, covered: int) -> None:
    mark(replica, {path.name: digest_of(path) for path in data_of(replica)[:covered]})
    with pytest.raises(CannotJudge, match="its marker does not cover all its files"):
        bring(replica, tmp_path / "scratch" / "step_1")
    assert not (tmp_path / "scratch" / "step_1").exists()


def here(replica: Path) -> Path:
    """The tier that holds it; this job's only rank runs there now."""
    return replica.parents[2]


def test_latest_takes_what_a_replica_has(replica: Path) -> None:
    digest = markers.digest_of_metadata(replica)
    unverified = here(replica) / f".recovering-step_1-{digest}" / "__7_0.distcp"
    unverified.parent.mkdir()
    unverified.write_text("of an interrupted call, for another rank")
    assert latest([here(replica)], world=1) is None
    last = latest([here(replica)], world=1, replicas=True)
    assert last is not None
    assert (last.step, last.path, last.skipped, last.brought_bytes) == (1, here(replica) / "step_1", (), 0)
    assert values(last.path) == (1, 1)
    assert names_in(last.path) == [".metadata", *(path.name for path in data_of(replica))]
    assert names_in(here(replica)) == [".replicas", "step_1"]


def test_the_files_of_another_save_are_kept_aside(replica: Path) -> None:
    own = save(here(replica) / "step_1", 2)
    os.utime(own / ".metadata", (0, 0))
    data_of(own)[0].unlink()
    last = latest([here(replica)], world=1, replicas=True)
    assert last is not None
    assert values(last.path) == (1, 1)
    (aside,) = here(replica).glob("step_1.other-save-*")
    assert names_in(aside) == [".metadata", data_of(replica)[1].name]


def test_files_of_an_unknown_save_are_kept_aside(replica: Path) -> None:
    own = here(replica) / "step_1"
    own.mkdir()
    for name in ("__5_0.distcp", data_of(replica)[0].name):
        (own / name).write_text("of a save whose `.metadata` is gone")
    last = latest([here(replica)], world=1, replicas=True)
    assert last is not None
    assert values(last.path) == (1, 1)
    assert data_of(own) == [own / path.name for path in data_of(replica)]
    assert len([*own.glob("*.distcp.other-save-*")]) == 2


def test_a_file_that_a_node_lacks_is_added_to_its_own(replica: Path) -> None:
    own = here(replica) / "step_1"
    shutil.copytree(replica, own, ignore=lambda *_: [markers.MARKER])
    first, second = data_of(own)
    inode = second.stat().st_ino
    first.write_bytes(first.read_bytes()[:-1])
    last = latest([here(replica)], world=1, replicas=True)
    assert last is not None
    assert values(last.path) == (1, 1)
    assert second.stat().st_ino == inode


def test_a_file_written_to_since_its_replication_is_brought_back(replica: Path, tmp_path: Path) -> None:
    own = here(replica) / "step_1"
    shutil.copytree(replica, own, ignore=lambda *_: [markers.MARKER])
    sources = identity.look_at(own, [path.name for path in data_of(own)])
    leave_replica_note(own, markers.digest_of_metadata(own), sources, {}, identity.look(own / ".metadata"))
    copied = shutil.copytree(own, tmp_path / "copied" / "step_1", copy_function=shutil.copyfile)
    assert values(latest_of(copied.parent)) == (1, 1)
    # By a save that died before it wrote `.metadata`.
    overwrite(data_of(own)[0], data_of(save(tmp_path / "step_1", 2))[0])
    with pytest.raises(CannotJudge, match="was written to after it was replicated"):
        latest([own.parent], world=1)
    assert values(latest_of(own.parent)) == (1, 1)


def latest_of(tier: Path) -> Path:
    last = latest([tier], world=1, replicas=True)
    assert last is not None
    return last.path


def test_the_note_of_an_older_save_says_nothing_against_a_file(replica: Path) -> None:
    newer = save(replica.with_name("step_2"), 2)
    own = shutil.copytree(newer, here(replica) / "step_2")
    first, second = data_of(own)
    (newer / first.name).unlink()
    mark(newer, {second.name: digest_of(newer / second.name)})
    second.unlink()
    leave_replica_note(own, "0" * 16, {first.name: identity.look(first)._replace(mtime_ns=1)}, {}, None)
    assert values(latest_of(here(replica))) == (2, 2)
    # But a file that is as that save left it is none of this one.
    second.unlink()
    leave_replica_note(own, "0" * 16, {first.name: identity.look(first)}, {}, None)
    assert values(latest_of(here(replica))) == (1, 1)


@pytest.mark.parametrize("name", ["__9\0.distcp", "__9\ud800.distcp"])
def test_a_marker_with_an_impossible_name_is_passed_over(replica: Path, name: str) -> None:
    newer = save(replica.with_name("step_2"), 2)
    mark(newer, {path.name: digest_of(path) for path in data_of(newer)})
    document = json.loads((newer / markers.MARKER).read_text())
    document["files"][name] = document["files"][data_of(newer)[0].name]
    (newer / markers.MARKER).write_text(json.dumps(document))
    assert values(latest_of(here(replica))) == (1, 1)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda step: flip(data_of(step)[0]), "differs from the replica that was verified"),
        (lambda step: data_of(step)[0].write_bytes(b"cut"), "has 3 of "),
        (lambda step: data_of(step)[0].unlink(), "is missing in "),
        (lambda step: (step / ".metadata").unlink(), "No such file or directory"),
        (lambda step: (step / markers.MARKER).unlink(), "it has no marker"),
        (lambda step: (step / markers.MARKER).write_text("{"), "is damaged"),
        (
            lambda step: shutil.copy(step.with_name("step_1") / ".metadata", step),
            "`.metadata` belongs to another save than the data",
        ),
        (lambda step: mark(step, {}), "does not cover its files"),
    ],
)
def test_a_damaged_replica_is_passed_over_by_name(
    replica: Path, tmp_path: Path, spoil: Callable[[Path], object], named: str
) -> None:
    newer = save(replica.with_name("step_2"), 2)
    mark(newer, {path.name: digest_of(path) for path in data_of(newer)})
    spoil(newer)
    last = latest([here(replica)], world=1, replicas=True)
    assert last is not None
    assert values(last.path) == (1, 1)
    (reason,) = last.skipped
    assert reason.startswith("step 2: ")
    assert "replica of `node1` on `" in reason
    assert named in reason
    shutil.rmtree(replica)
    shutil.rmtree(last.path)
    with pytest.raises(CannotJudge, match="no step can be read by every rank: step 2: "):
        latest([here(replica)], world=1, replicas=True)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def failing_for(condition: str, said: str, code: int) -> str:
    """What the stand-in for rsync does for some sources or targets, once it has copied."""
    return f'if [[ {condition} ]]; then echo "{said}" >&2; exit {code}; fi'


@pytest.fixture
def three(replica: Path, tmp_path: Path) -> list[Path]:
    """The scratch of three nodes: `a` is blank, `b` has the whole step, and `c` a replica of it."""
    scratch = [tmp_path / "nodes" / name for name in "abc"]
    for each in scratch:
        each.mkdir(parents=True)
    shutil.copytree(replica, scratch[1] / "step_1", ignore=lambda *_: [markers.MARKER])
    shutil.copytree(replica, replicas_of(scratch[2], "b") / "step_1")
    return scratch


def on_three(scratch: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    ranks = ThreadRanks("abc")
    return ranks.run(lambda rank: latest([scratch[rank]], replicas=True), monkeypatch)


@pytest.mark.parametrize("short", [1, 16])
def test_a_node_keeps_its_own_step_that_another_could_not_take(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, short: int
) -> None:
    monkeypatch.setattr("tunetool.checkpoint.survey_exchange._SHORT", short)  # the two files are many, or few
    monkeypatch.setenv(
        "MEANWHILE", failing_for('"$source" == b:*', "rsync: [receiver] read error: Connection reset by peer (104)", 12)
    )
    size = sum(path.stat().st_size for path in (three[1] / "step_1").iterdir())
    for scratch, last in zip(three, on_three(three, monkeypatch), strict=True):
        assert last.path == scratch / "step_1"
        assert values(last.path) == (1, 1)
        # To `a` alone.
        assert last.brought_bytes == size


def test_what_is_damaged_for_another_node_is_not_loaded_at_home(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = three[1] / "step_1"
    file = data_of(own)[0]
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for scratch, last in zip(three, on_three(three, monkeypatch), strict=True):
        assert last.path == scratch / "step_1"
        assert values(last.path) == (1, 1)


@pytest.mark.parametrize("times", [2, 99])
def test_a_peer_that_many_ask_at_once_is_asked_again(
    replica: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr("tunetool.checkpoint.recovering._PAUSES", (0, 0, 0))
    asked = tmp_path / "asked"
    crowded = "kex_exchange_identification: Connection closed by remote host"
    count = f"echo >> {asked}; test $(wc -l < {asked}) -gt {times}"
    monkeypatch.setenv("MEANWHILE", f"{count} || {{ echo '{crowded}' >&2; exit 255; }}")
    if times == 2:
        assert values(bring(replica, tmp_path / "step_1")) == (1, 1)
        assert len(asked.read_text().splitlines()) == 3
    else:
        with pytest.raises(CannotJudge, match=crowded):
            bring(replica, tmp_path / "step_1")
        assert len(asked.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("received", "times", "calls"), [(4096, 1, 2), (4096, 99, 2), (0, 1, 1)], ids=["once", "always", "never stood"]
)
def test_a_connection_that_breaks_is_made_once_more(
    replica: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, received: int, times: int, calls: int
) -> None:
    monkeypatch.setattr("tunetool.checkpoint.recovering._PAUSES", (0, 0, 0))
    asked = tmp_path / "asked"
    cut = f"rsync: connection unexpectedly closed ({received} bytes received so far) [receiver]"
    count = f"echo >> {asked}; test $(wc -l < {asked}) -gt {times}"
    monkeypatch.setenv("MEANWHILE", f"{count} || {{ echo '{cut}' >&2; exit 12; }}")
    if received and times == 1:
        assert values(bring(replica, tmp_path / "step_1")) == (1, 1)
    else:
        with pytest.raises(CannotJudge, match=re.escape(cut)):
            bring(replica, tmp_path / "step_1")
    assert len(asked.read_text().splitlines()) == calls


@pytest.mark.parametrize(("before", "code"), [(True, 11), (False, 12)])
def test_a_node_that_is_full_takes_no_source_from_others(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, before: bool, code: int
) -> None:
    full = 'rsync: [receiver] write failed on \\"x\\": No space left on device (28)'
    monkeypatch.setenv("MEANWHILE", failing_for('"$target" == */a/.recovering*', full, code))
    if before:
        older = save(three[0] / "step_0", 0)
        os.utime(older / ".metadata", (1, 1))
        for scratch in three[1:]:
            shutil.copytree(older, scratch / "step_0")
    outcomes = on_three(three, monkeypatch)
    why = "step 1: `a` cannot take what it lacks: `"
    for scratch, outcome in zip(three, outcomes, strict=True):
        if before:
            assert outcome.path == scratch / "step_0"
            (reason,) = outcome.skipped
        else:
            assert isinstance(outcome, CannotJudge)
            reason = outcome.message.removeprefix("no step can be read by every rank: ")
        assert reason.startswith(why)
        assert reason.endswith(
            ".recovering-step_1-"
            + markers.digest_of_metadata(three[1] / "step_1")
            + '`: rsync: [receiver] write failed on "x": No space left on device (28)'
        )


def test_a_lock_on_a_node_takes_no_source_from_others(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunetool.checkpoint.recovering._SILENT_SECONDS", 0)
    partial = three[0] / f".recovering-step_1-{markers.digest_of_metadata(three[1] / 'step_1')}"
    partial.mkdir()
    with FileLock.on(partial) as lock:
        assert lock.take(patience=0)
        outcomes = on_three(three, monkeypatch)
    assert {type(each) for each in outcomes} == {CannotJudge}
    (message,) = {each.message for each in outcomes}
    assert message.endswith(
        f"step 1: `a` cannot take what it lacks: `{partial}` is locked: this step is being recovered"
    )


@pytest.mark.parametrize("name", ["tunetool.checkpoint.resume.survey", "tunetool.checkpoint.recovering.gather"])
@pytest.mark.parametrize(
    ("error", "named"),
    [
        (MemoryError(), "rank 2 on `c` failed: `MemoryError`"),
        (KeyError("what"), "rank 2 on `c` failed: `KeyError`: 'what'"),
        (OSError("of no number"), "of no number"),
    ],
)
def test_what_nobody_foresaw_ends_all_ranks(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, named: str
) -> None:
    module, _, function = name.rpartition(".")
    real = getattr(importlib.import_module(module), function)

    def failing(*arguments: Any, **options: Any) -> Any:
        if socket.gethostname() == "c":
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(name, failing)
    outcomes = on_three(three, monkeypatch)
    assert {type(each) for each in outcomes} <= {CannotJudge, SystemRefused, Unforeseen}
    (message,) = {each.message for each in outcomes}
    assert named in message


def receiver_of(replica: Path) -> Receiver:
    """What the peer runs for a save that is the one of ``replica``."""
    sources = identity.look_at(replica, [path.name for path in data_of(replica)])
    order = Incoming(
        directory=str(replica.parents[2]),
        host="node1",
        step="step_1",
        digest=markers.digest_of_metadata(replica),
        metadata_bytes=(replica / ".metadata").stat().st_size,
        metadata=None,
        needed={name: file.size for name, file in sources.items()},
        sources=identity.rows(sources),
        now_ns=0,
        saved_ns=0,
        save=None,
        items=None,
        rate=None,
        max_to_keep=None,
        patience=1.0,
    )
    return Receiver(order)


def test_a_replica_that_lacks_a_file_is_not_there_yet(replica: Path) -> None:
    files = {path.name: digest_of(path) for path in data_of(replica)}
    receiver = receiver_of(replica)

    def there(covered: dict[str, CopiedFile]) -> bool:
        sources = identity.parsed(receiver.order.sources)
        markers.write(replica, "step_1", Marker(receiver.order.digest, covered, {}, sources))
        return receiver._is_there(replica)

    assert there(files)
    assert not there({})


def test_what_is_no_replica_is_refused_before_files_come(replica: Path) -> None:
    (replica / markers.MARKER).unlink()
    with pytest.raises(UsageProblem, match=f"`{replica}` exists, and is no replica"):
        receiver_of(replica).run((replica / ".metadata").read_bytes())
    assert names_in(replica.parent) == ["step_1"]


def test_a_step_is_recovered_by_one_call_at_a_time(replica: Path, tmp_path: Path) -> None:
    step = tmp_path / "scratch" / "step_1"
    partial = step.with_name(".recovering-step_1-node1")
    partial.mkdir(parents=True)
    # As the rsync of a call that was killed holds it.
    with FileLock.on(partial) as lock:
        assert lock.take(patience=0)
        with pytest.raises(CannotJudge, match=f"`{partial}` is locked"):
            bring(replica, step)
    assert bring(replica, step) == step


def test_a_recovery_that_got_nothing_leaves_nothing(replica: Path, tmp_path: Path) -> None:
    shutil.rmtree(replica)
    with pytest.raises(CannotJudge, match=f"`node2` does not give the replica `{replica}`"):
        bring(replica, tmp_path / "scratch" / "step_1")
    assert names_in(tmp_path / "scratch") == []


def test_what_ssh_leaves_running_is_not_waited_for(
    replica: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEANWHILE", f"sleep {3 * PATIENCE} & echo $! > {tmp_path}/left")
    began = time.monotonic()
    try:
        assert bring(replica, tmp_path / "scratch" / "step_1").is_dir()
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert time.monotonic() - began < PATIENCE


def test_what_brings_files_ends_with_its_process(
    replica: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    monkeypatch.setenv("MEANWHILE", f"exec 9> {fifo}; echo >&9; exec sleep {3 * PATIENCE}")
    code = "import sys; from tunetool.checkpoint import recover; recover(sys.argv[1], peer='n', peer_dir=sys.argv[2], host='node1')"
    argv = [sys.executable, "-c", code, str(tmp_path / "scratch" / "step_1"), str(replica.parents[2])]
    with subprocess.Popen(argv) as process, fifo.open("rb") as alive:
        assert alive.readline() == b"\n"
        process.kill()
        assert select.select([alive], [], [], PATIENCE)[0]
        assert alive.read() == b""


def test_what_another_call_has_put_into_place_is_no_failure(
    replica: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs in one scratch, or one that was started again before the first had ended."""
    final, digest = tmp_path / "scratch" / "step_1", markers.digest_of_metadata(replica)
    partial, take = partial_of(final, digest), FileLock.take

    def waiting(lock: FileLock, *args: Any, **options: Any) -> bool:
        if not final.exists():  # the other call ends
            shutil.copytree(replica, partial, dirs_exist_ok=True)
            partial.rename(final)
        return take(lock, *args, **options)

    monkeypatch.setattr(FileLock, "take", waiting)
    files = {path.name: digest_of(path) for path in data_of(replica)}
    sources = {("node1", str(replica)): {**files, markers.METADATA: None}}
    _, failures = gather(final, digest, sources, (), 1, here="node1", ssh=("ssh",))
    assert not failures
    assert not partial.exists()
    assert {name: digest_of(final / name) for name in files} == files


def test_a_link_in_place_of_what_is_recovered_is_refused(replica: Path, tmp_path: Path) -> None:
    step, outside = tmp_path / "scratch" / "step_1", tmp_path / "outside"
    step.parent.mkdir()
    outside.mkdir()
    partial_of(step, "node1").symlink_to(outside)
    with pytest.raises(CannotJudge, match="is locked"):
        bring(replica, step)
    assert not names_in(outside)
