"""What may wait for ever is done by a child: no check waits for it. A volume that hangs: test_volume_answers.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from machines import RECORDED
from tunetool.node.audit import manifest_checks
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.file_lock import FileLock
from tunetool.node.common.outlived import Say, in_a_child
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


@pytest.fixture
def training(tmp_path: Path) -> dict[str, Any]:
    """A node whose training environment lies elsewhere: on a server, say."""
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(0o755)
    part = {"python": str(python), "directory": str(tmp_path / "venv"), "source": "built"}
    return {**MANIFEST, "training": part}


def status(manifest: dict[str, Any]) -> tuple[str, str]:
    checks = {check.id: check for check in run_checks(manifest, asker=lambda question: Answer(written=1))}
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
