"""A drive reports a fault, then the volume is absent: nothing is written below it, and no service that needs it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from conftest import POINT, Lab

from tunetool.lab.qemu import Qmp
from tunetool.lab.state import Lab as State

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]  # without a service it is in test_main_job.py

UNIT = "scratch-user.service"
INSTALL = f"""printf '[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=/bin/true\\n[Install]
WantedBy=multi-user.target\\n' > /etc/systemd/system/{UNIT}; systemctl enable {UNIT}"""
NAMES_UNIT = json.dumps({"scratch_filesystem_services": [UNIT]})
REFUSED = f"touch: cannot touch '{POINT}/x': Operation not permitted"


@pytest.fixture(scope="module")
def built(built_once: Lab) -> Iterator[Lab]:
    """A built node whose inventory names a service that needs the volume."""
    built_once.reset("node1", "--to", "built")
    built_once.ssh("node1", INSTALL)
    done = built_once.site("-e", NAMES_UNIT)
    assert done.code == 0, done.text
    yield built_once
    built_once.reset("node1")


def service(lab: Lab, command: str = "true") -> str:
    """The service's state according to systemd, after ``command``."""
    return lab.ssh("node1", f"{command} >&2; systemctl is-active {UNIT} || true")


def warn(lab: Lab, serial: str, bits: int) -> None:
    """Let a drive's health log carry a critical warning."""
    with Qmp(State(lab.state).qmp_socket("node1")) as qmp:
        fault = {"path": f"/machine/peripheral/nvme-{serial}", "property": "smart_critical_warning", "value": bits}
        qmp.command("qom-set", fault)


def checks(lab: Lab, user: str = "root") -> dict[str, tuple[str, str]]:
    """Status and finding of each check, asked on the node itself by ``user``; without what its inventory left out."""
    command = f"/opt/tunetool/bin/tunetool verify --level config --runs-dir /tmp/runs-{user} --json -"
    text = lab.ssh("node1", f"cd /tmp && su {user} -s /bin/sh -c '{command}' || true")
    by_id = {check["id"]: (check["status"], check["found"]) for check in json.loads(text)["checks"]}
    assert by_id.pop("gds.mode")[0] == "skip"
    assert by_id.pop("training.environment")[0] == "skip"
    return by_id


def test_a_drive_that_warns_is_named_to_root(built: Lab) -> None:
    warn(built, "LAB1NV6", 0b100)
    by_id = checks(built)
    assert by_id.pop("drives.critical_warning") == ("fail", "`LAB1NV6`: the media have become unreliable")
    assert {status for status, _ in by_id.values()} == {"pass"}
    by_id = checks(built, "nobody")
    assert by_id["drives.critical_warning"] == ("skip", "only root may ask the drives")
    assert by_id["drives.link"][0] == "pass"
    warn(built, "LAB1NV6", 0)
    assert {status for status, _ in checks(built).values()} == {"pass"}


def test_an_unmounted_volume_cannot_be_written_and_comes_back(built: Lab) -> None:
    assert service(built, f"systemctl start {UNIT}") == "active"
    assert built.ssh("node1", f"umount {POINT}; touch {POINT}/x 2>&1 || true") == REFUSED
    assert service(built, f"systemctl stop {UNIT}") == "inactive"
    assert "it is immutable" in checks(built)["filesystem.mounted"][1]
    # A start of the service mounts the volume too.
    assert service(built, f"systemctl start {UNIT}") == "active"
    built.ssh("node1", f"mountpoint {POINT}")


def test_without_its_array_the_node_boots_and_nothing_starts(built: Lab) -> None:
    built.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    # This fails if ssh does not answer in time: a boot that waits for the array would hang here.
    built.reboot("node1")
    assert service(built, f"timeout 100 systemctl start {UNIT} || true") == "inactive"
    text = built.ssh("node1", f"mountpoint -q {POINT} && echo mounted; touch {POINT}/x 2>&1 || true")
    assert text == REFUSED
