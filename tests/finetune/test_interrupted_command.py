"""A tunetool command on the hosts of an inventory, whose play over ssh is interrupted: it ends on the hosts as well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cluster import NODES, ROOT, Cluster
from waiting import PATIENCE, until

pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")


def _ended(cluster: Cluster, name: str) -> bool:
    return not cluster.processes(name, "tunetool verify") + cluster.processes(name, "fio ")


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_verify_stops_on_every_host_and_cleans_up(
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
        until(lambda: all(cluster.processes(name, "fio ") for name in NODES), "fio on every host", process)
        process.send_signal(how)
        assert process.wait(PATIENCE) == (-how if how == signal.SIGKILL else 130)
        for name in NODES:
            # By itself the measurement would take an hour.
            until(partial(_ended, cluster, name), f"the end of what runs on {name}")
            assert cluster.run(name, ["ls", "-A", target]).stdout == ""
    finally:
        process.kill()
        process.wait()
        for name in NODES:
            cluster.run(name, ["pkill", "-KILL", "-f", target], check=False)
