"""A drive dies and is replaced; then the node gives its drives back. Each needs a plan that still fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import POINT, Done, Lab, changed_tasks, checksums, row

pytestmark = pytest.mark.usefixtures("marker")

DEV = "dev() { lsblk -dno NAME,SERIAL | awk -v s=$1 '$2 == s {print \"/dev/\" $1}'; }; "
SWAP = ("-e", "replace_drive_old_serial=LAB1NV3", "-e", "replace_drive_new_serial=LAB1NV3R")
# Lines of somebody else.
THEIRS = """echo '# theirs' >> /etc/fstab
echo 'ARRAY /dev/md/theirs metadata=1.2 UUID=00000000:11111111:22222222:33333333' >> /etc/mdadm/mdadm.conf"""
LEFT = f"""for n in 1 2 3 3R 4 5 6 7 8; do d=$(dev LAB1NV$n); [ -z "$d" ] || wipefs -n $d; done
grep -c md127 /proc/mdstat
find /etc/systemd/system -name '*tunetool*'
grep -c . /etc/tunetool/node.json {POINT} 2>&1 | grep -vc 'No such'
grep -e nvme_raid0 /etc/fstab /etc/mdadm/mdadm.conf
tail -n 1 /etc/fstab; tail -n 1 /etc/mdadm/mdadm.conf"""
BLANK = ["0", "0", "# theirs", "ARRAY /dev/md/theirs metadata=1.2 UUID=00000000:11111111:22222222:33333333"]


def play(lab: Lab, name: str, *arguments: str) -> Done:
    return lab.run("ansible-playbook", f"playbooks/{name}.yml", "-i", str(lab.inventory), *arguments)


def one_line(done: Done) -> str:
    return " ".join(done.text.split())


@pytest.mark.slow
def test_a_drive_is_replaced_and_then_all_are_given_back(built: Lab, tmp_path: Path) -> None:
    built.ssh("node1", THEIRS + f"; echo old > {POINT}/old")
    built.lab("fault", "node1", "swap-drive", "--drive", "LAB1NV3")
    broken = built.verify("--level", "config")
    assert broken.code == 1, broken.text
    before = checksums(built)
    refused = play(built, "replace_drive", *SWAP)
    assert refused.code != 0
    assert "nothing is removed without a plan" in one_line(refused)
    plan = tmp_path / "replace.json"
    planned = play(built, "replace_drive", *SWAP, "--tags", "plan", "-e", f"plan_file={plan}")
    assert planned.code == 0, planned.text
    assert "blank, comes for `LAB1NV3`" in row(planned.stdout, "LAB1NV3R")
    assert "  wipe  " in row(planned.stdout, "LAB1NV4")
    assert checksums(built) == before

    applied = play(built, "replace_drive", *SWAP, "-e", f"apply_plan={plan}")
    assert applied.code == 0, applied.text
    manifest = json.loads(built.ssh("node1", "cat /etc/tunetool/node.json"))
    serials = [f"LAB1NV{n}" for n in ("1", "2", "3R", "4", "5", "6", "7", "8")]
    assert [member["serial"] for member in manifest["array"]["members"]] == serials
    assert built.ssh("node1", f"findmnt -no FSTYPE {POINT}; ls {POINT}").split() == ["xfs", "deepspeed_offload"]
    assert built.verify("--level", "config").code == 0
    again = built.site()
    assert again.code == 0, again.text
    assert changed_tasks(again.stdout) == []

    plan = tmp_path / "teardown.json"
    planned = play(built, "teardown", "--tags", "plan", "-e", f"plan_file={plan}")
    assert planned.code == 0, planned.text
    assert "`deepspeed_offload`" in planned.stdout
    pid = built.ssh("node1", f"cd {POINT}; nohup sleep 900 >/dev/null 2>&1 & echo $!")
    before = checksums(built)
    busy = play(built, "teardown", "-e", f"apply_plan={plan}")
    assert busy.code != 0
    assert f"process {pid} `sleep` (working directory)" in one_line(busy)
    assert (built.ssh("node1", f"mountpoint -q {POINT} && echo mounted"), checksums(built)) == ("mounted", before)
    built.ssh("node1", f"kill {pid}")
    preview = play(built, "teardown", "-e", f"apply_plan={plan}", "--check", "--diff")
    assert preview.code == 0, preview.text
    assert "LAB1NV3R: blank" in preview.stdout
    assert checksums(built) == before
    done = play(built, "teardown", "-e", f"apply_plan={plan}")
    assert done.code == 0, done.text
    assert built.ssh("node1", DEV + LEFT + "; true").splitlines() == BLANK
    again = play(built, "teardown")
    assert again.code == 0, again.text
    assert "changed=0" in again.stdout


def give_up(lab: Lab, plan: Path) -> Done:
    """Plan the teardown and apply it."""
    planned = play(lab, "teardown", "--tags", "plan", "-e", f"plan_file={plan}")
    assert planned.code == 0, planned.text
    return play(lab, "teardown", "-e", f"apply_plan={plan}")


@pytest.mark.slow
def test_a_node_is_built_after_its_teardown_and_the_plan_stale(built: Lab, tmp_path: Path) -> None:
    first = built.ssh("node1", f"findmnt -no UUID {POINT}")
    done = give_up(built, tmp_path / "plan.json")
    assert done.code == 0, done.text
    done = built.site()
    assert done.code == 0, done.text
    assert built.ssh("node1", f"findmnt -no UUID {POINT}") != first
    before = checksums(built)
    stale = play(built, "teardown", "-e", f"apply_plan={tmp_path / 'plan.json'}")
    assert stale.code != 0
    assert "not what the plan saw: it names array" in one_line(stale)
    assert (built.ssh("node1", f"mountpoint -q {POINT} && echo mounted"), checksums(built)) == ("mounted", before)


# The array's first member is among the seven: its file system would show in an array that is made of them.
SEVEN = f"""{DEV}mdadm --create /dev/md/again --run --level=0 --raid-devices=7 --chunk=1M \
$(for n in 1 2 4 5 6 7 8; do dev LAB1NV$n; done) 2>&1 >/dev/null && wipefs -n /dev/md/again | wc -l"""


@pytest.mark.slow
def test_a_broken_volume_is_torn_down_and_does_not_come_back(built: Lab, tmp_path: Path) -> None:
    done = built.site("--tags", "health", "-e", '{"node_health_enabled": true}')
    assert done.code == 0, done.text
    built.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
    done = give_up(built, tmp_path / "plan.json")
    assert done.code == 0, done.text
    left = built.ssh("node1", DEV + LEFT + "; true").splitlines()
    assert left[:2] == ["0", "0"], left
    # No check runs on, and none reports a node that is no more.
    health = "systemctl list-units --all --no-legend '*tunetool*'; ls /run/tunetool /var/lib/prometheus/node-exporter"
    assert "health" not in built.ssh("node1", f"{health}; true")
    assert built.ssh("node1", SEVEN).splitlines()[-1] == "0"


@pytest.mark.slow
def test_a_wrong_drive_is_refused_and_a_power_cut_survived(built: Lab, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    built.lab("fault", "node1", "swap-drive", "--drive", "LAB1NV3")
    built.lab("fault", "node1", "mixed-size", "--drive", "LAB1NV3R")
    before = checksums(built)
    small = play(built, "replace_drive", *SWAP, "--tags", "plan", "-e", f"plan_file={plan}")
    assert small.code == 0, small.text
    assert "size 2 GiB is not 4 GiB" in row(small.stdout, "LAB1NV3R")
    refused = play(built, "replace_drive", *SWAP, "-e", f"apply_plan={plan}")
    assert refused.code != 0
    assert "so nothing could be built" in one_line(refused)
    assert checksums(built) == before

    built.reset("node1", "--to", "built")
    built.lab("fault", "node1", "swap-drive", "--drive", "LAB1NV3")
    assert play(built, "replace_drive", *SWAP, "--tags", "plan", "-e", f"plan_file={plan}").code == 0
    wiped = play(built, "replace_drive", *SWAP, "-e", f"apply_plan={plan}", "--tags", "replace")
    assert wiped.code == 0, wiped.text
    built.reboot("node1", "--power-loss")
    # Nothing can be lost any more, so no plan is needed.
    done = play(built, "replace_drive", *SWAP)
    assert done.code == 0, done.text
    assert built.verify("--level", "config").code == 0
    again = play(built, "replace_drive", *SWAP)
    assert again.code == 0, again.text
    assert "`LAB1NV3` is no longer a member, `LAB1NV3R` is one" in one_line(again)
    assert changed_tasks(again.stdout) == []
