"""The health check on a virtual node: a fault is in the next result, and so is its end; all of it outlasts a reboot, and
a dead volume.

The timer decides when that is: `node_health_period` and at most 15 s; after a boot, two minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from conftest import POINT, Lab, changed_tasks

from tunetool.health.answer import PATH
from tunetool.lab import ssh as lab_ssh
from tunetool.lab.qemu import Qmp
from tunetool.lab.state import Lab as State
from waiting import PATIENCE, until

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

SOCKET = "/run/tunetool/health.sock"
ON = (
    "--tags",
    "health",
    "-e",
    json.dumps({"node_health_enabled": True, "node_health_period": 60, "node_health_socket": SOCKET}),
)
BEGAN = "systemctl show --property=ExecMainStartTimestampMonotonic --value tunetool-health.service"
# On the node, in one connection: each further one takes seconds from the node.
NEXT = f"""before=$({BEGAN}); n=0
until [ "$({BEGAN})" != "$before" ] && ! systemctl is-active tunetool-health.service | grep -q activating; do
    n=$((n+1)); [ $n -lt 600 ] || {{ systemctl status --no-pager -l 'tunetool-health*'; exit 1; }}; sleep 1; done
cat /run/tunetool/health.json"""
NOTHING_LEFT = """ls /etc/systemd/system/tunetool-health* /opt/tunetool/bin/tunetool-health /etc/tunetool/health.json \
/run/tunetool/*.json /run/tunetool/*.line /run/tunetool/*.sock /var/lib/prometheus/node-exporter/tunetool-* 2>/dev/null
systemctl list-units --all --no-legend 'tunetool-health*'"""


def next_result(lab: Lab) -> dict[str, Any]:
    """The result of the first check that begins from now on."""
    result: dict[str, Any] = json.loads(lab.ssh("node1", NEXT))
    return result


def verdict(lab: Lab) -> str:
    page = lab.ssh("node1", "cat /var/lib/prometheus/node-exporter/tunetool-health.prom")
    (status,) = [
        line.split('status="')[1].split('"')[0]
        for line in page.splitlines()
        if line.endswith('"} 1.0') and "tunetool_verdict" in line
    ]
    return status


def answer(lab: Lab, folder: Path) -> bytes:
    """What the node's socket answers to gRPC's own client, which reaches it through ssh."""
    state, here = State(lab.state), folder / "s"
    forward = ["-N", "-o", "ExitOnForwardFailure=yes", "-o", "StreamLocalBindUnlink=yes", "-L", f"{here}:{SOCKET}"]
    here.unlink(missing_ok=True)
    forwarding = subprocess.Popen(["ssh", *forward, *lab_ssh.options(state, state.read("node1")), "root@127.0.0.1"])
    try:
        until(here.exists, "the way to the node's socket", forwarding)
        with grpc.insecure_channel(f"unix://{here}") as channel:
            said: bytes = channel.unary_unary(PATH)(b"\x0a\x0a--no-slurm", timeout=PATIENCE)
    finally:
        forwarding.terminate()
        forwarding.wait()
    return said


def switched_on(built: Lab) -> None:
    done = built.site(*ON)
    assert done.code == 0, done.text


def test_a_fault_and_its_end_are_in_the_next_result(built: Lab, tmp_path: Path) -> None:
    switched_on(built)
    assert changed_tasks(built.site(*ON).stdout) == []
    result = next_result(built)
    assert result["status"] == "pass", result
    assert verdict(built) == "pass"
    assert b'"fail_count": 0' in answer(built, tmp_path)

    built.ssh("node1", f"umount {POINT}")
    unmounted = next_result(built)
    assert unmounted["failed"][0].startswith("filesystem.mounted: ")
    assert verdict(built) == "fail"
    assert b'["filesystem.mounted"' in answer(built, tmp_path)
    built.ssh("node1", f"mount {POINT}")
    assert next_result(built)["status"] == "pass"

    built.reboot("node1")
    assert built.ssh("node1", f"systemctl is-active tunetool-health.timer; ls {SOCKET}").split() == ["active", SOCKET]
    result = next_result(built)
    assert result["status"] == "pass", result
    assert built.ssh("node1", "systemctl --failed --no-legend") == ""


# Whatever asks the volume still holds the lock, whose name has the mount point.
ASKING = "find /proc/[0-9]*/fd -lname '/run/tunetool/probe*.lock' 2>/dev/null | wc -l"
LEFT = f"ls -A {POINT} | grep tunetool-probe || true"


def throttle(lab: Lab, serial: str, bytes_per_second: int) -> None:
    """Limit the speed of a drive; 0 for none."""
    state = State(lab.state)
    limits = dict.fromkeys(("bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"), 0)
    with Qmp(state.qmp_socket("node1")) as qmp:
        drive = state.read("node1").drive(serial)
        qmp.command("block_set_io_throttle", {"id": drive.device_id, "bps": bytes_per_second, **limits})


def test_a_volume_that_no_job_can_use_fails_by_its_cause(built: Lab) -> None:
    switched_on(built)
    assert next_result(built)["status"] == "pass"
    assert built.ssh("node1", LEFT) == ""

    built.ssh("node1", f"mount -o remount,ro {POINT}")
    assert next_result(built)["failed"] == [f"filesystem.writable: `{POINT}` is mounted read-only"]
    built.ssh("node1", f"mount -o remount,rw {POINT}; fsfreeze --freeze {POINT}")
    # The first one may have begun before the freeze.
    first = next_result(built)
    frozen = first if "still waits" in first["failed"][0] else next_result(built)
    assert frozen["failed"][0].startswith("filesystem.answers: the volume does not answer: a check that began ")
    assert "no second one is started" in frozen["failed"][0]
    assert [line.partition(":")[0] for line in frozen["failed"]] == ["filesystem.answers"]
    assert built.ssh("node1", ASKING) == "1"
    assert built.ssh("node1", "systemctl --failed --no-legend") == ""
    assert verdict(built) == "fail"
    built.ssh("node1", f"fsfreeze --unfreeze {POINT}")
    assert next_result(built)["status"] == "pass"
    assert built.ssh("node1", LEFT) == ""

    built.ssh("node1", f"xfs_io -x -c 'shutdown -f' {POINT}")
    answers, logged = next_result(built)["failed"]
    assert answers == "filesystem.answers: XFS is shut down: every access fails with an I/O error"
    assert re.match("kernel.filesystem: `md[^`]*`: XFS was shut down; the kernel: `XFS ", logged)
    built.ssh("node1", f"umount {POINT}; mount {POINT}")
    assert [line.partition(":")[0] for line in next_result(built)["failed"]] == ["kernel.filesystem"]
    built.ssh("node1", "/opt/tunetool/bin/tunetool-health repaired")
    assert next_result(built)["status"] == "pass"

    # A request of 512 KiB takes 13 s, and two make a chunk: what waits behind them does so for more than 10 s, and for less
    # than the 60 after which the guest resets the controller, and QEMU stands still until all its requests are done.
    throttle(built, "LAB1NV3", 40 << 10)
    writing = f"dd if=/dev/zero of={POINT}/big bs=1M count=64 oflag=direct"
    built.ssh("node1", f"nohup {writing} > /dev/null 2>&1 < /dev/null & sleep 1")
    slow = next_result(built)
    assert "drives.answer: `LAB1NV3` did not answer for 10 s" in slow["failed"]
    assert built.ssh("node1", ASKING) == "1"
    throttle(built, "LAB1NV3", 0)
    assert next_result(built)["status"] == "pass"
    assert built.ssh("node1", f"rm {POINT}/big; {LEFT}") == ""


def test_a_lost_drive_is_named_and_a_check_that_is_off_is_gone(built: Lab) -> None:
    switched_on(built)
    built.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    gone = next_result(built)
    assert any("LAB1NV3" in line for line in gone["failed"]), gone

    assert built.site("--tags", "health", "-e", '{"node_health_enabled": false}').code == 0
    assert built.ssh("node1", NOTHING_LEFT) == ""
