"""What may wait for ever is done by a child: no check waits for it. A volume that hangs: test_volume_answers.py."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from machines import RECORDED
from tunetool.node.audit import manifest_checks
from tunetool.node.audit.manifest_checks import Node, Row, run_checks
from tunetool.node.common import outlived
from tunetool.node.common.check_result import Check
from tunetool.node.common.file_lock import FileLock, ForeignLock
from tunetool.node.common.outlived import Errand, Outcome, Say, in_a_child, in_children
from tunetool.node.common.venv import STAMP
from tunetool.node.volume.named_volume import describe_volume
from tunetool.node.volume.write_read_probe import Answer

MANIFEST: dict[str, Any] = {
    **json.loads((RECORDED / "built-manifest.json").read_text()),
    "array": None,
    "filesystem": describe_volume("/proc"),
    "memory": {"hugepages": [], "shm_bytes": None, "memlock": None},
    "offload_dir": None,
    "gds": {"mode": "off", "reasons": []},
}


def test_what_a_child_said_before_it_hung_is_known(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")

    def act(say: Say) -> None:
        say(step=1, pid=os.getpid())
        (tmp_path / "never").open().close()

    outcome = in_a_child(act, "x", 0.5, directory=str(tmp_path))
    assert (outcome.ended, outcome.hangs_since) == (False, None)
    assert outcome.messages[0]["step"] == 1
    with pytest.raises(ProcessLookupError):
        os.kill(outcome.messages[0]["pid"], 0)


def test_beside_a_child_that_hangs_no_second_one_starts(tmp_path: Path) -> None:
    """What no signal ends holds its lock, as here somebody else does."""
    with FileLock.our_file(str(tmp_path / "x.lock")) as lock:
        assert lock.take(patience=0)
        lock.sign(json.dumps({"began": time.monotonic() - 50, "step": "fsync"}))
        outcome = in_a_child(lambda say: say(started=True), "x", 0.2, directory=str(tmp_path))
    assert outcome.messages == ()
    assert outcome.hangs_since is not None
    assert outcome.hangs_since >= 50
    assert outcome.note["step"] == "fsync"
    assert in_a_child(lambda say: say(started=True), "x", 5, directory=str(tmp_path)).messages[0] == {"started": True}


def test_children_that_hang_share_one_patience(tmp_path: Path) -> None:
    """And what others do meanwhile is known, in the order of the errands."""

    def hang(say: Say) -> None:
        say(pid=os.getpid())
        time.sleep(1000)

    errands = [Errand(hang, f"hangs {at}") for at in range(8)]
    errands.insert(3, Errand(lambda say: say(pid=0), "answers"))
    began = time.monotonic()
    outcomes = [each for each in in_children(errands, 3, str(tmp_path)) if isinstance(each, Outcome)]
    assert time.monotonic() - began < 4 * 3, "eight one after the other take 24 s"
    assert [each.ended for each in outcomes] == [at == 3 for at in range(9)]
    for outcome in outcomes:
        (message,) = outcome.messages
        with pytest.raises(ProcessLookupError):
            os.kill(message["pid"] or 2**22 + 1, 0)


def test_errands_of_another_call_share_one_patience_too(tmp_path: Path) -> None:
    """What hangs since an earlier call holds its lock: nobody waits for one after the other."""
    errands = [Errand(lambda say: say(started=True), name) for name in ("a", "b", "c", "d", "free")]
    with contextlib.ExitStack() as held:
        for name in "abcd":
            lock = held.enter_context(FileLock.our_file(str(tmp_path / f"{name}.lock")))
            assert lock.take(patience=0)
            lock.sign(json.dumps({"began": time.monotonic() - 50}))
        began = time.monotonic()
        *hung, free = in_children(errands, 3, str(tmp_path))
        assert time.monotonic() - began < 3 * 3, "four one after the other take 12 s"
    assert [isinstance(each, Outcome) and (each.hangs_since or 0) >= 50 for each in hung] == [True] * 4
    assert isinstance(free, Outcome)
    assert free.messages == [{"started": True}]


def test_an_errand_without_a_lock_keeps_none_from_a_child(tmp_path: Path) -> None:
    (tmp_path / "linked.lock").symlink_to(tmp_path / "elsewhere")
    foreign, other = in_children(
        [Errand(lambda say: None, "linked"), Errand(lambda say: say(n=1), "b")], 5, str(tmp_path)
    )
    assert isinstance(foreign, ForeignLock)
    assert isinstance(other, Outcome)
    assert other.messages == [{"n": 1}]


def test_a_child_that_ended_is_in_nobodys_way(tmp_path: Path) -> None:
    """Another call at its errand, as the last one here, does not wait for what hangs beside it."""
    answers = Errand(lambda say: say(n=1), "x")
    hangs = Errand(lambda say: time.sleep(1000), "hangs")
    first, _, last = in_children([answers, hangs, answers], 3, str(tmp_path))
    assert isinstance(first, Outcome)
    assert isinstance(last, Outcome)
    assert (first.messages, last.messages) == ([{"n": 1}], [{"n": 1}])


def open_handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_broken_message_is_an_error_of_one_errand(tmp_path: Path) -> None:
    def break_it(say: Say) -> None:
        for handle in range(3, 20):
            with contextlib.suppress(OSError):
                os.write(handle, b"no message\n")

    before = open_handles()
    broken, other = in_children([Errand(break_it, "a"), Errand(lambda say: say(n=1), "b")], 5, str(tmp_path))
    assert isinstance(broken, OSError)
    assert isinstance(other, Outcome)
    assert other.messages == [{"n": 1}]
    assert open_handles() == before


def test_a_full_lock_directory_is_an_error_of_its_errand(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    long = Errand(lambda say: say(n=1), "a", lambda messages, ended: {"step": "x" * 5000 if messages else ""})
    before = open_handles()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        full, other = in_children([long, Errand(lambda say: say(n=1), "b")], 5, str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(full, OSError)
    assert isinstance(other, Outcome)
    assert other.messages == [{"n": 1}]
    assert open_handles() == before


def test_what_was_said_while_nobody_listened_counts(tmp_path: Path) -> None:
    """This process may be stopped, or get no core, until patience is over: that is no silence of the child."""

    def stop(*_: object) -> None:
        (tmp_path / "stopped").touch()
        while not (tmp_path / "said").exists():
            time.sleep(0.01)
        time.sleep(1.1)

    def act(say: Say) -> None:
        os.kill(os.getppid(), signal.SIGUSR1)
        while not (tmp_path / "stopped").exists():
            time.sleep(0.01)
        say(done=True)
        (tmp_path / "said").touch()

    earlier = signal.signal(signal.SIGUSR1, stop)
    try:
        assert in_a_child(act, "x", 1, directory=str(tmp_path)).messages == [{"done": True}]
    finally:
        signal.signal(signal.SIGUSR1, earlier)


def test_volumes_that_hang_are_looked_at_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_checks, "PATIENCE", 2.0)
    monkeypatch.setattr(outlived, "make_run_directory", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def look(node: Node) -> Check:
        if node.volume != "drive3":
            time.sleep(1000)
        return Check("x", "pass", "", node.volume)

    row = Row(["x"], look, volumes=True, apart=True)
    began = time.monotonic()
    found = row.checks([Node(MANIFEST, volume=f"drive{at}") for at in range(8)])
    assert time.monotonic() - began < 4 * 2, "seven one after the other take 14 s"
    assert [check.status for (check,) in found] == ["pass" if at == 3 else "unknown" for at in range(8)]
    assert found[0][0].found == "not looked at: it did not answer for 2 s"
    assert found[3][0].found == "drive3"


@pytest.fixture
def training(tmp_path: Path) -> dict[str, Any]:
    """A node whose training environment lies elsewhere: on a server, say."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    part = {"python": str(python), "directory": str(tmp_path / "venv"), "source": "built"}
    return {**MANIFEST, "training": part}


def status(manifest: dict[str, Any]) -> tuple[str, str]:
    checks = {check.id: check for check in run_checks(manifest, asker=lambda questions: [Answer(written=1)])}
    check = checks["training.environment"]
    return check.status, check.found


def test_files_on_a_server_that_is_gone_hold_no_check(
    training: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_checks, "PATIENCE", 1.0)
    stamp = tmp_path / "venv" / STAMP
    os.mkfifo(stamp)
    assert status(training) == ("unknown", "not looked at: it did not answer for 1 s")
    stamp.unlink()
    assert status(training)[0] == "fail"
    stamp.write_text("{}")
    assert status(training)[0] == "pass"


def test_a_look_that_breaks_off_is_unknown(training: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "venv" / STAMP).write_text("[]")
    assert status(training) == ("unknown", "not looked at: AttributeError: 'list' object has no attribute 'get'")
