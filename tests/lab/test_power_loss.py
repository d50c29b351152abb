"""The power fails while a node is being built: it boots, and `site.yml` continues or says what to plan."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import POINT, ROOT, Lab, changed_tasks, reboots_well, row

from tunetool.lab import qemu
from tunetool.lab.qemu import Qmp
from tunetool.lab.state import Lab as State

pytestmark = pytest.mark.usefixtures("marker")

FSTAB = f"grep -q {POINT} /etc/fstab"
CONF = "grep -q ^ARRAY /etc/mdadm/mdadm.conf"
OLD_IMAGE = "[ /etc/mdadm/mdadm.conf -nt $(readlink -f /initrd.img) ]"


@dataclass(frozen=True)
class Cut:
    """A moment of the build. ``when`` is true on the node from then on; ``shows`` is true after the boot if it was not missed."""

    what: str
    when: str
    shows: str
    seconds: float = 0
    """Seconds without work before the power fails, in which a part of what is in memory reaches the disk."""


CUTS = [
    Cut("the array runs, mdadm.conf does not know it", "grep -q raid0 /proc/mdstat", f"! {CONF}"),
    Cut("the initramfs is being rebuilt", "pgrep -x mkinitramfs", f"{CONF} && {OLD_IMAGE}"),
    # None, half or all of it may be on the disk: every case must work.
    Cut("the file system is being made", "pgrep -x mkfs.xfs", f"! {OLD_IMAGE} && ! {FSTAB}"),
    Cut("fstab has the volume, nothing is mounted", FSTAB, f"{FSTAB} && ! [ -e {POINT}/deepspeed_offload ]"),
]
# Names reach the disk every 5 seconds, what is in the files every 30: a program of empty files is the danger.
HOLLOW = Cut(
    "the program is there, the manifest is not",
    "[ -e /opt/tunetool/bin/tunetool ]",
    "[ -e /opt/tunetool/bin/tunetool ] && ! [ -e /etc/tunetool/node.json ]",
    seconds=7,
)


def lose_power(lab: Lab, cut: Cut, *arguments: str) -> None:
    """Run `site.yml`, cut the power at the moment, and boot from the disk."""
    # To a file: Ansible's workers have sessions of their own, and would keep a pipe open until their node is gone.
    with (lab.state / "cut.log").open("w+") as log:
        running = subprocess.Popen(
            ["ansible-playbook", "site.yml", "-i", str(lab.inventory), *arguments],
            cwd=ROOT,
            env=lab.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            # Ansible's processes stop at the moment; the kernel runs until it is stopped.
            lab.ssh(
                "node1",
                f"n=0; until {{ {cut.when}; }} >/dev/null 2>&1; do n=$((n+1)); [ $n -lt 90000 ] || exit 1; sleep 0.02; done;"
                # Repeatedly: the next module may have begun in the meantime.
                f" for n in $(seq {1 + int(cut.seconds * 10)}); do pkill -STOP -x 'mkfs.xfs|mkinitramfs|python3'; sleep 0.1;"
                " done; true",
            )
            with Qmp(State(lab.state).qmp_socket("node1")) as qmp:
                qmp.command("stop")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            log.seek(0)
            print(log.read())
    lab.reboot("node1", "--power-loss")
    assert lab.ssh("node1", f"{cut.shows} && echo yes || echo no") == "yes", cut.what


def converges(lab: Lab, *arguments: str) -> None:
    """Assert that a run succeeds, another has nothing to do, and the node is as it was built after a reboot too."""
    done = lab.site(*arguments)
    assert done.code == 0, done.text
    again = lab.site()
    assert again.code == 0, again.text
    assert changed_tasks(again.stdout) == []
    reboots_well(lab)


@pytest.mark.slow
def test_power_fails_before_the_manifest_is_written(built: Lab) -> None:
    built.ssh("node1", "rm -rf /opt/tunetool /usr/local/bin/tunetool /etc/tunetool && sync")
    lose_power(built, HOLLOW)
    converges(built)


@pytest.mark.slow
def test_power_fails_again_and_again_at_every_boundary(blank: Lab) -> None:
    for cut in CUTS:
        print(f"=== {cut.what}")
        lose_power(blank, cut)
    converges(blank)


# $(dev LAB1NV5): a drive's device node, now.
DEV = "dev() { lsblk -dnpo NAME,SERIAL | awk -v s=$1 '$2 == s {print $1}'; }; "
LEFT = DEV + "for n in 3 4 5 6; do mkfs.ext4 -qF $(dev LAB1NV$n); done; sync"
# The last drive's turn never ends, whatever the node's speed: this program comes before the real one.
HELD = f"""cat > /usr/local/sbin/wipefs <<'END'
#!/bin/sh
{DEV}
case " $* " in *" --all "*" $(dev LAB1NV6) "*) touch /run/turn; sleep 3600 ;; esac
exec /usr/sbin/wipefs "$@"
END
chmod +x /usr/local/sbin/wipefs; sync"""


@pytest.mark.slow
def test_power_fails_while_a_plan_wipes(blank: Lab, tmp_path: Path) -> None:
    blank.ssh("node1", LEFT)
    plan = tmp_path / "plan.json"
    planned = blank.site("--tags", "plan", "-e", f"plan_file={plan}")
    assert planned.code == 0, planned.text
    assert [number for number in range(1, 9) if "  wipe  " in row(planned.stdout, f"LAB1NV{number}")] == [3, 4, 5, 6]
    blank.ssh("node1", HELD)
    cut = Cut(
        "some are blank, others not yet",
        "[ -e /run/turn ]",
        f"{DEV} wipefs -n $(dev LAB1NV6) | grep -q ext4 && ! wipefs -n $(dev LAB1NV5) | grep -q ext4",
    )
    lose_power(blank, cut, "-e", f"apply_plan={plan}")
    blank.ssh("node1", "rm /usr/local/sbin/wipefs")
    # What is blank by now needs no consent, and the others still hold what the plan saw.
    converges(blank, "-e", f"apply_plan={plan}")


BY_HAND = f"""
{DEV}
mkfs.xfs -q $(dev LAB1NV3) && mkdir -p /data && mount -o noatime $(dev LAB1NV3) /data && seq 100000 > /data/numbers
mkswap -q $(dev LAB1NV4) && swapon $(dev LAB1NV4)
"""


@pytest.mark.slow
def test_qemu_crashes_while_its_node_is_saved(blank: Lab) -> None:
    blank.ssh("node1", BY_HAND)
    held = "md5sum < /data/numbers; findmnt -no FSTYPE,OPTIONS /data | cut -c-14; swapon --show=TYPE --noheadings"
    before = blank.ssh("node1", held)
    with subprocess.Popen(
        ["tunetool", "lab", "save", "node1", "crashed"],
        env=blank.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as saving:
        assert saving.stdout is not None
        said = next(line for line in saving.stdout if "pulling its drives" in line)
        pid = qemu.pid_of(State(blank.state).pid_file("node1"))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        said += saving.stdout.read()
    print(said)
    assert saving.returncode == 0
    assert "the memory of the node is lost: the saved state will be that of a booted node" in said
    assert blank.ssh("node1", held) == before
    blank.reset("node1", "--to", "crashed")
    assert blank.ssh("node1", held) == before
