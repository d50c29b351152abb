"""The health check on a virtual node: a fault is in the next result, and so is its end.

The timer decides when that is: `node_health_period` and at most 15 s.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import POINT, Lab, changed_tasks

from waiting import until

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

ON = ("--tags", "health", "-e", json.dumps({"node_health_enabled": True, "node_health_period": 60}))


def next_result(lab: Lab) -> dict[str, Any]:
    """The first result of a check that began after this moment of the node's clock."""
    now = float(lab.ssh("node1", "date +%s.%N"))
    began = "systemctl show --property=ExecMainStartTimestamp --timestamp=unix --value tunetool-health.service"

    def later() -> bool:
        start = lab.ssh("node1", began).lstrip("@")
        return bool(start) and float(start) > now

    until(later, "the next check")
    until(lambda: lab.ssh("node1", "systemctl is-active tunetool-health.service || true") == "inactive", "its end")
    result: dict[str, Any] = json.loads(lab.ssh("node1", "cat /run/tunetool/health.json"))
    print(f"seen {result['at'] - now:.1f} s later: {result}")
    return result


def verdict(lab: Lab) -> str:
    page = lab.ssh("node1", "cat /var/lib/prometheus/node-exporter/tunetool-health.prom")
    (status,) = [
        line.split('status="')[1].split('"')[0]
        for line in page.splitlines()
        if line.endswith('"} 1.0') and "tunetool_verdict" in line
    ]
    return status


def test_faults_are_in_the_next_result(built: Lab) -> None:
    done = built.site(*ON)
    assert done.code == 0, done.text
    assert changed_tasks(built.site(*ON).stdout) == []
    assert next_result(built)["status"] == "pass"
    assert verdict(built) == "pass"

    built.ssh("node1", f"umount {POINT}")
    unmounted = next_result(built)
    assert unmounted["failed"][0].startswith("filesystem.mounted: ")
    assert verdict(built) == "fail"
    built.ssh("node1", f"mount {POINT}")
    assert next_result(built)["status"] == "pass"

    built.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    gone = next_result(built)
    assert any("LAB1NV3" in line for line in gone["failed"]), gone

    assert built.site("--tags", "health", "-e", '{"node_health_enabled": false}').code == 0
    assert built.ssh("node1", "ls /etc/systemd/system/tunetool-health* 2>/dev/null || true") == ""
