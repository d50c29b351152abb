"""A tunetool command on the hosts of an inventory, whose play over ssh is stopped: it ends on the hosts as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import NODES, ROOT, Cluster

pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
_SECONDS = 60
"""A bound for a busy machine, not what is expected."""


def _soon(holds: Callable[[], bool], seconds: float = _SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_verify_stops_measuring_on_every_host_and_removes_its_files(
    cluster: Cluster, tmp_path: Path, how: signal.Signals
) -> None:
    target = "/tmp/measured"
    for name in NODES:
        cluster.run(name, ["mkdir", "-p", target])
    argv = ["-m", "tunetool", "verify", "-i", str(cluster.inventory), "--target", target, "--duration", "60m"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *argv, "--runs-dir", str(tmp_path / "runs"), "--allow-busy"],
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            stdout=log,
            stderr=log,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (tests run no threads)
        )
    try:
        begun = _soon(lambda: all(cluster.processes(name, "fio ") for name in NODES), 2 * _SECONDS)
        assert begun, (tmp_path / "log").read_text()
        process.send_signal(how)
        assert process.wait(_SECONDS) == (-how if how == signal.SIGKILL else 130)
        for name in NODES:
            ended = _soon(
                lambda name=name: not cluster.processes(name, "tunetool verify") + cluster.processes(name, "fio ")
            )  # type: ignore[misc]
            assert ended, cluster.processes(name, "")
            assert cluster.run(name, ["ls", "-A", target]).stdout == ""
    finally:
        process.kill()
        process.wait()
        for name in NODES:
            cluster.run(name, ["pkill", "-KILL", "-f", target], check=False)
