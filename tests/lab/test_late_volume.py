"""Drives that appear after the boot went on without them: the volume is mounted then, and its services start."""

from __future__ import annotations

import pytest
from conftest import POINT, Lab

from tunetool.lab import guest
from tunetool.lab import node as nodes
from tunetool.lab import ssh as lab_ssh
from tunetool.lab.machine import Drive
from tunetool.lab.qemu import Qmp
from tunetool.lab.state import Lab as State
from tunetool.node.volume.late_mount import UNIT

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

MOUNT = "mnt-nvme_raid0.mount"
NEEDS, BEHIND, OFF = "scratch-user.service", "scratch-behind.service", "scratch-off.service"
# One service needs the volume, one needs that service, one needs the volume and is switched off.
INSTALL = "\n".join(
    f"printf '[Unit]\\n{needs}\\n[Service]\\nType=oneshot\\nRemainAfterExit=yes\\nExecStart=/bin/true\\n[Install]\\n"
    f"WantedBy=multi-user.target\\n' > /etc/systemd/system/{unit}"
    for unit, needs in (
        (NEEDS, f"RequiresMountsFor={POINT}/deepspeed_offload"),
        (BEHIND, f"Requires={NEEDS}\\nAfter={NEEDS}"),
        (OFF, f"RequiresMountsFor={POINT}"),
    )
)
INSTALL += f"\nsystemctl enable {NEEDS} {BEHIND}; echo kept > {POINT}/kept; sync"
STATE = "cat /sys/block/md*/md/array_state"


def boot_without_data_drives(lab: Lab) -> list[Drive]:
    """Boot node1 from its disk with the system drive alone. Returns the others, which are unplugged."""
    state = State(lab.state)
    node = state.read("node1")
    lab_ssh.end_masters(state, "node1")
    nodes.shut_down(state, node)
    absent = [drive for drive in node.drives if drive.serial != node.system_serial]
    node.drives = [drive for drive in node.drives if drive.serial == node.system_serial]
    state.write(node)
    nodes.start_booted(state, node)
    nodes.finish_preparing(node, nodes.start_preparing(state, node))
    lab.refresh()
    return absent


def plug(lab: Lab, drive: Drive) -> None:
    """Plug a drive with what it holds into its slot, and wait until the node has read it."""
    state = State(lab.state)
    node = state.read("node1")
    with Qmp(state.qmp_socket("node1")) as qmp:
        nodes.attach(qmp, drive)
    node.drives.append(drive)
    state.write(node)
    lab_ssh.run(state, node, guest.wait_for_drives(len(node.drives)))


def states(lab: Lab) -> list[str]:
    """The states of the mount and the three services."""
    return lab.ssh("node1", f"systemctl is-active {MOUNT} {NEEDS} {BEHIND} {OFF} || true").split()


def wait(lab: Lab, holds: str) -> None:
    """Wait until a shell condition holds on the node."""
    lab.ssh("node1", f"n=0; until {holds}; do n=$((n+1)); [ $n -lt 1200 ] || exit 1; sleep 0.2; done")


def test_late_drives_are_mounted_and_their_services_start(built: Lab) -> None:
    lab = built
    lab.ssh("node1", INSTALL)
    absent = boot_without_data_drives(lab)

    # The boot is bounded: it ends, and everything else runs.
    assert lab.ssh("node1", "systemctl is-system-running --wait || true") in ("running", "degraded")
    assert states(lab) == ["inactive"] * 4
    assert "tunetool" not in lab.ssh("node1", "systemctl --failed --no-legend")
    assert "scratch volume" in lab.ssh("node1", f"journalctl -b --no-pager -u {UNIT}")
    wait(lab, "[ $(cut -d. -f1 /proc/uptime) -ge 60 ]")

    # All but one: md does not run an incomplete RAID0, and no timer tries it.
    for drive in absent[:-1]:
        plug(lab, drive)
    assert lab.ssh("node1", STATE) == "inactive"
    assert lab.ssh("node1", "systemctl list-units --no-legend 'mdadm-last-resort@*.timer'") == ""
    assert states(lab) == ["inactive"] * 4

    plug(lab, absent[-1])
    wait(lab, f"systemctl is-active -q {BEHIND}")
    assert states(lab) == ["active", "active", "active", "inactive"]
    assert lab.ssh("node1", f"cat {POINT}/kept; findmnt -no FSTYPE {POINT}").split() == ["kept", "xfs"]
    assert "came late and is mounted" in lab.ssh("node1", f"journalctl -b --no-pager -u {UNIT}")
    assert lab.ssh("node1", "systemctl --failed --no-legend") == ""
    done = lab.verify("--level", "config")
    assert done.code == 0, done.text

    # Who unmounts it and stops the array to repair something is not surprised by a mount when it runs again.
    begun = f"systemctl show --property=ExecMainStartTimestampMonotonic --value {UNIT}"
    lab.ssh(
        "node1",
        f"set -e; systemctl stop {BEHIND} {NEEDS}; umount {POINT}; before=$({begun}); mdadm --stop /dev/md/nvme_raid0;"
        f" mdadm --assemble --scan; n=0; until [ $({begun}) != $before ]; do n=$((n+1)); [ $n -lt 300 ]; sleep 0.2; done;"
        f" until [ $(systemctl is-active {UNIT}) = inactive ]; do sleep 0.2; done",
    )
    assert states(lab) == ["inactive"] * 4


def test_an_array_that_was_started_too_early_is_assembled(built: Lab) -> None:
    """As Debian's initramfs tries it where the root file system is late. Such an array takes no more members."""
    lab = built
    lab.ssh("node1", INSTALL)
    absent = boot_without_data_drives(lab)
    lab.ssh("node1", "systemctl is-system-running --wait || true")
    for drive in absent[:-1]:
        plug(lab, drive)
    assert lab.ssh("node1", f"mdadm --run /dev/md127 2>&1; {STATE}").split()[-1] == "inactive"
    plug(lab, absent[-1])
    assert lab.ssh("node1", STATE) == "inactive"
    done = lab.verify("--level", "config")
    assert done.code == 1, done.text
    remedies = {check["id"]: check["remedy"] for check in lab.record()["checks"] if check["status"] == "fail"}
    assert remedies["array.assembled"] == "run `tunetool provision`, which assembles it"
    done = lab.site()
    assert done.code == 0, done.text
    wait(lab, f"systemctl is-active -q {BEHIND}")
    assert states(lab) == ["active", "active", "active", "inactive"]
    assert lab.ssh("node1", f"cat {POINT}/kept") == "kept"


def test_a_boot_in_time_does_not_run_the_unit(built: Lab) -> None:
    built.reboot("node1")
    wait(built, f"systemctl is-active -q {MOUNT}")
    show = f"systemctl show --value {UNIT} --property"
    wait(built, f"[ $({show}=ConditionTimestampMonotonic) != 0 ]")
    assert built.ssh("node1", f"{show}=ConditionResult; {show}=ExecMainStartTimestampMonotonic").split() == ["no", "0"]
