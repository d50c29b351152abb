"""A drive says that it is ill, then the volume is absent: nothing is written in its place, nothing that needs it starts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from conftest import POINT, Lab

from tunetool.lab.qmp import Qmp
from tunetool.lab.state import Lab as State

pytestmark = pytest.mark.usefixtures("marker")

UNIT = "scratch-user.service"
INSTALL = f"""printf '[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=/bin/true\\n[Install]
WantedBy=multi-user.target\\n' > /etc/systemd/system/{UNIT}; systemctl enable {UNIT}"""
REFUSED = f"touch: cannot touch '{POINT}/x': Operation not permitted"


@pytest.fixture(scope="module")
def built(lab: Lab) -> Iterator[Lab]:
    """A node whose inventory names a service that needs the volume."""
    lab.reset("node1")
    lab.ssh("node1", INSTALL)
    done = lab.site("-e", json.dumps({"scratch_filesystem_services": [UNIT]}))
    assert done.code == 0, done.text
    yield lab
    lab.reset("node1")


def service(lab: Lab, command: str = "true") -> str:
    """What systemd says of the service after ``command``."""
    return lab.ssh("node1", f"{command} >&2; systemctl is-active {UNIT} || true")


def warn(lab: Lab, serial: str, bits: int) -> None:
    """Let a drive's health log carry a critical warning."""
    with Qmp(State(lab.state).qmp_socket("node1")) as qmp:
        place = {"path": f"/machine/peripheral/nvme-{serial}", "property": "smart_critical_warning", "value": bits}
        qmp.command("qom-set", place)


def test_a_drive_that_warns_is_named_to_root(built: Lab) -> None:
    warn(built, "LAB1NV6", 0b100)
    done = built.verify("--level", "config")
    assert done.code == 1, done.text
    failed = {check["id"]: check for check in built.record()["checks"] if check["status"] == "fail"}
    assert set(failed) == {"drives.critical_warning"}
    assert failed["drives.critical_warning"]["found"] == "`LAB1NV6`: the media have become unreliable"
    text = built.ssh(
        "node1",
        "cd /tmp && su nobody -s /bin/sh -c '/opt/tunetool/bin/tunetool verify --level config --runs-dir /tmp/nobody"
        " --json -' || true",
    )
    checks = {check["id"]: check for check in json.loads(text)["checks"]}
    assert (checks["drives.wear"]["status"], checks["drives.link"]["status"]) == ("skip", "pass")
    assert checks["drives.wear"]["found"] == "only root may ask the drives"
    warn(built, "LAB1NV6", 0)
    assert built.verify("--level", "config").code == 0


def test_an_unmounted_volume_cannot_be_written_and_comes_back_with_its_service(built: Lab) -> None:
    assert service(built, f"systemctl start {UNIT}") == "active"
    assert built.ssh("node1", f"umount {POINT}; touch {POINT}/x 2>&1 || true") == REFUSED
    assert service(built, f"systemctl stop {UNIT}") == "inactive"
    done = built.verify("--level", "config")
    assert done.code == 1
    assert "it is immutable" in str(built.record()["checks"])
    # Whoever starts the service mounts the volume with it.
    assert service(built, f"systemctl start {UNIT}") == "active"
    built.ssh("node1", f"mountpoint {POINT}")


def test_without_its_array_the_node_boots_and_nothing_starts_or_is_written(built: Lab) -> None:
    built.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    # Fails by itself where ssh does not answer in time: a boot that waits for the array would hang here.
    built.lab("reboot", "node1")
    built.lab("inventory", "--output", str(built.inventory / "hosts.yml"))
    assert service(built, f"timeout 100 systemctl start {UNIT} || true") == "inactive"
    text = built.ssh("node1", f"mountpoint -q {POINT} && echo mounted; touch {POINT}/x 2>&1 || true")
    assert text == REFUSED
