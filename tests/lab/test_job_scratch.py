"""Limits of jobs on a virtual node, whose kernel has quotas of XFS: each job is kept to its own, and nothing of it stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import POINT, Lab, changed_tasks, reboots_well
from test_replacement import one_line, play

pytestmark = [pytest.mark.usefixtures("marker"), pytest.mark.slow]

ON = ("-e", json.dumps({"job_scratch_enabled": True}))
SCRATCH = "/opt/tunetool/bin/tunetool-scratch"
JOBS = f"{POINT}/jobs"
MIB = 1 << 20
OPTIONS = f"findmnt -no OPTIONS {POINT}"
# On the node, in few connections: each takes seconds from it.
MAKE = "; ".join(
    f"{SCRATCH} make {job} --user {user} --limit {limit}"
    for job, user, limit in (("1", "nobody", "64MiB"), ("2", "games", "32MiB"), ("3", "nobody", "1MiB"))
)
NOBODY = "setpriv --reuid nobody --regid nogroup --clear-groups"
GAMES = "setpriv --reuid games --regid games --clear-groups"
FILES = """import os, sys
made = 0
try:
    while made < 4000:
        os.close(os.open("%s/%d" % (sys.argv[1], made), os.O_CREAT))
        made += 1
except OSError as error:
    print(made, "files:", error.strerror)"""
WRITE = f"""{NOBODY} dd if=/dev/zero of={JOBS}/job-1/big bs=64k count=2048 2>&1
{GAMES} dd if=/dev/zero of={JOBS}/job-2/big bs=1M count=20 2>&1
{NOBODY} python3 -c '{FILES}' {JOBS}/job-3
sync; stat -c 'big has %b blocks' {JOBS}/job-1/big; df -B1 --output=size,itotal {JOBS}/job-3 | tail -n 1"""
REMOVE = "; ".join(f"{SCRATCH} remove {job} --seconds 120" for job in (1, 2, 3))
# A process of job 2 keeps a file; its job's name is free all the same.
KEPT = f"""{GAMES} sh -c 'exec sleep 900 9> {JOBS}/job-2/kept' > /dev/null 2>&1 < /dev/null & holder=$!
until [ -e {JOBS}/job-2/kept ]; do sleep 0.2; done
{GAMES} dd if=/dev/zero of={JOBS}/job-2/kept bs=64k count=10 conv=notrunc 2> /dev/null
{REMOVE}; echo $holder"""
NOT_MOUNTED_WITH = f"""sed -i '\\|{POINT}|s/,prjquota//' /etc/fstab; systemctl daemon-reload; umount {POINT}; mount {POINT}
{OPTIONS}; {SCRATCH} make 4 --user nobody --limit 64MiB 2>&1; echo $?"""


@pytest.fixture(scope="module")
def limited_once(lab: Lab) -> Lab:
    """A node on which jobs are limited since the first `site.yml`, saved for the tests here."""
    lab.reset("node1")
    done = lab.site(*ON)
    assert done.code == 0, done.text
    lab.lab("save", "node1", "limited")
    return lab


@pytest.fixture
def limited(limited_once: Lab) -> Lab:
    limited_once.reset("node1", "--to", "limited")
    return limited_once


def listed(lab: Lab) -> dict[str, tuple[int, int]]:
    """Bytes and limit of each job, by tunetool."""
    jobs = json.loads(lab.ssh("node1", f"{SCRATCH} list --json"))["jobs"]
    return {each["job"]: (each["bytes"], each["limit_bytes"]) for each in jobs}


def counted(lab: Lab) -> list[tuple[int, int, int, int]]:
    """Bytes, their limit, files and theirs of each project, by xfsprogs; without what counts for none."""
    report = lab.ssh("node1", f"xfs_quota -x -c 'report -p -n -N -b -i' {POINT}")
    rows = [line.split() for line in report.splitlines() if line.startswith("#") and not line.startswith("#0 ")]
    return sorted((int(row[1]) << 10, int(row[3]) << 10, int(row[6]), int(row[8])) for row in rows)


def test_each_job_is_kept_to_its_limit_and_leaves_nothing(limited: Lab) -> None:
    assert "prjquota" in limited.ssh("node1", OPTIONS).split(",")
    again = limited.site(*ON)
    assert (again.code, changed_tasks(again.stdout)) == (0, []), again.text

    assert limited.ssh("node1", MAKE).split() == [f"{JOBS}/job-{job}" for job in (1, 2, 3)]
    wrote = limited.ssh("node1", WRITE)
    assert "job-1/big': No space left on device" in wrote
    assert "big has 131072 blocks" in wrote
    assert "20971520 bytes" in wrote
    # The directory itself is one of its 1,024.
    assert "1023 files: No space left on device" in wrote
    assert wrote.splitlines()[-1].split() == [str(MIB), "1024"]
    jobs = listed(limited)
    assert jobs == {"1": (64 * MIB, 64 * MIB), "2": (20 * MIB, 32 * MIB), "3": (jobs["3"][0], MIB)}
    projects = counted(limited)
    assert [project[:2] for project in projects] == sorted(jobs.values())
    assert [project[2:] for project in projects] == [(1024, 1024), (2, 16416), (2, 32832)]
    assert "1 of nobody: 67.11 MB, of 67.11 MB" in limited.ssh("node1", "/opt/tunetool/bin/tunetool inspect")

    holder = limited.ssh("node1", KEPT)
    assert limited.ssh("node1", f"find {JOBS} -mindepth 1") == f"{JOBS}/.removed"
    # What the file holds is still bounded.
    assert counted(limited) == [(640 << 10, 32 * MIB, 1, 16416)]
    limited.ssh("node1", f"kill {holder}; {SCRATCH} make 2 --user games; {SCRATCH} remove 2 --seconds 120")
    assert [project[0] for project in counted(limited)] == [0]


def test_a_mounted_volume_takes_limits_after_an_unmount(limited: Lab) -> None:
    *refused, code = limited.ssh("node1", NOT_MOUNTED_WITH).splitlines()
    assert "prjquota" not in refused[0]
    assert f"the volume of `{JOBS}` is mounted without `prjquota`" in refused[-1]
    assert "hint: unmount it, then run `tunetool provision`" in refused[-1]
    assert code == "3"
    mounted = limited.site(*ON)
    assert mounted.code != 0
    assert changed_tasks(mounted.stdout) == []
    assert "drift: mount.options expected prjquota found none of them" in one_line(mounted)
    assert f"XFS takes it only when it is mounted: stop what uses it, `umount {POINT}`" in one_line(mounted)

    limited.ssh("node1", f"umount {POINT}")
    done = limited.site(*ON)
    assert done.code == 0, done.text
    assert "prjquota" in limited.ssh("node1", OPTIONS).split(",")
    limited.ssh("node1", f"{SCRATCH} make 4 --user nobody --limit 64MiB")
    assert [project[1:] for project in counted(limited)] == [(64 * MIB, 1, 32832)]


def test_a_reboot_keeps_limits_and_ends_jobs_of_no_scheduler(limited: Lab) -> None:
    limited.ssh("node1", f"{MAKE}; {NOBODY} dd if=/dev/zero of={JOBS}/job-1/big bs=1M count=5 2> /dev/null")
    reboots_well(limited)
    assert "prjquota" in limited.ssh("node1", OPTIONS).split(",")
    # The timer's first sweep comes a minute after the boot.
    limited.ssh(
        "node1",
        f'n=0; until [ -z "$(ls {JOBS}; ls {JOBS}/.removed)" ]; do n=$((n+1)); [ $n -lt 600 ] || exit 1; sleep 1; done',
    )
    assert counted(limited) == []
    limited.ssh("node1", f"{SCRATCH} make 1 --user nobody --limit 64MiB")
    assert [project[1:] for project in counted(limited)] == [(64 * MIB, 1, 32832)]


def test_a_teardown_waits_for_the_directories_of_jobs(limited: Lab, tmp_path: Path) -> None:
    limited.ssh("node1", f"{MAKE}; {NOBODY} touch {JOBS}/job-1/file")
    plan = tmp_path / "plan.json"
    planned = play(limited, "teardown", "--tags", "plan", "-e", f"plan_file={plan}")
    assert planned.code == 0, planned.text
    refused = play(limited, "teardown", "-e", f"apply_plan={plan}")
    assert refused.code != 0
    assert "job `1` of nobody has its directory there (`tunetool-scratch remove` if it is over)" in one_line(refused)
    assert limited.ssh("node1", f"ls {JOBS}/job-1; systemctl is-active tunetool-scratch.timer").split() == [
        "file",
        "active",
    ]
    limited.ssh("node1", "; ".join(f"{SCRATCH} remove {job}" for job in (1, 2, 3)) + f"; {SCRATCH} sweep")
    done = play(limited, "teardown", "-e", f"apply_plan={plan}")
    assert done.code == 0, done.text
    left = f"findmnt {POINT}; systemctl list-units --all --no-legend '*tunetool-scratch*'; ls {SCRATCH} 2> /dev/null"
    assert limited.ssh("node1", f"{left}; true") == ""
