"""Directories of jobs under a real Slurm: slurmd itself calls the program, and two users share a node's volume."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster import CONTROL, NODES, Cluster
from skips import no_xfs
from tunetool.node.job_scratch import scratch_units
from tunetool.node.job_scratch.settings import CONFIG_PATH, dump
from waiting import PATIENCE, until

POINT, JOBS = "/srv/scratch", "/srv/scratch/jobs"
USERS = ("games", "man")
"""Two that every Debian has."""
SHARING = f"""#!/bin/sh
echo "$TUNETOOL_SCRATCH"
echo kept > "$TUNETOOL_SCRATCH/file"
until [ -e /tmp/others ]; do sleep 0.1; done
for job in $(cat /tmp/others); do
    [ $job = $SLURM_JOB_ID ] && continue
    other={JOBS}/job-$job
    cat $other/file && echo read
    touch $other/mine && echo written
    rm -rf $other/file $other
    mv $other "$TUNETOOL_SCRATCH/" && echo moved
    ln -s $other "$TUNETOOL_SCRATCH/theirs"
done 2>/dev/null
cat "$TUNETOOL_SCRATCH/file"
until [ -e /tmp/end-$SLURM_JOB_ID ]; do sleep 0.1; done
"""


@dataclass
class Scratch:
    """The volume of node1, and the program on each node; node2 has no volume."""

    cluster: Cluster
    starter: str

    def at(self, *argv: str, check: bool = True) -> str:
        return self.cluster.run("node1", argv, check=check).stdout

    def submit(self, user: str, script: str, node: str = "node1") -> str:
        wanted = ["--parsable", "-n1", f"--uid={user}", "-w", node, "--chdir=/tmp", "--output=/tmp/%j.out"]
        return self.cluster.run(CONTROL, ["sbatch", *wanted], stdin=script).stdout.strip()

    def directories(self) -> set[str]:
        return set(self.at("ls", JOBS, check=False).split())


@pytest.fixture
def scratch(slurm: Cluster, tmp_path: Path) -> Iterator[Scratch]:
    if no_xfs():
        pytest.skip("needs XFS")
    folder = slurm.shared / "scratch"
    folder.mkdir()
    program, python = folder / "tunetool", folder / "python"
    program.touch()
    # Without -I: this very checkout's code, whatever is installed.
    python.write_text(f'#!/bin/sh\nshift; PYTHONPATH={Path(__file__).parents[2]}/tools exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    starter = scratch_units.starter_path(str(program))
    given = {"directory": JOBS, "limit": "", "by_request": False, "textfile_directory": ""}
    files = scratch_units.files(str(program), dump(given, POINT), POINT, JOBS)
    for name in NODES:
        # The directory of the tests is root's alone, and a task's prolog is its user's.
        for path, mode in ((CONFIG_PATH, "644"), ("/usr/local/bin/" + scratch_units.STARTER_NAME, "755")):
            text = files[CONFIG_PATH if path == CONFIG_PATH else starter]
            script = f"mkdir -p $(dirname {path}); cat > {path}; chmod {mode} {path}"
            slurm.run(name, ["sh", "-c", script], stdin=text)
    image = shlex.quote(str(slurm.shared / "image"))
    make = f"truncate -s 400M {image}; mkfs.xfs -q {image}; mkdir -p {POINT}; mount -o loop {image} {POINT}"
    slurm.run("node1", ["sh", "-ec", make])
    before = slurm.run(CONTROL, ["cat", "/etc/slurm/slurm.conf"]).stdout
    called = f"/usr/local/bin/{scratch_units.STARTER_NAME}"

    def configure(text: str) -> None:
        for name in (CONTROL, *NODES):
            slurm.run(name, ["sh", "-c", "cat > /etc/slurm/slurm.conf"], stdin=text)
        slurm.run(CONTROL, ["scontrol", "reconfigure"])

    configure(f"{before}\nProlog={called}\nEpilog={called}\nTaskProlog={called}\n")
    probe = ["srun", "-n1", "-w", "node1", "printenv", "TUNETOOL_SCRATCH"]
    until(lambda: JOBS in slurm.run(CONTROL, probe, check=False).stdout, "Slurm's new settings")
    try:
        yield Scratch(slurm, called)
    finally:
        configure(before)
        slurm.run("node1", ["umount", "--lazy", POINT])
        slurm.run(CONTROL, ["rm", "-rf", str(folder), str(slurm.shared / "image")])


@pytest.mark.slow
def test_two_jobs_share_a_node_and_neither_hurts_the_other(scratch: Scratch) -> None:
    first, second = jobs = [scratch.submit(user, SHARING) for user in USERS]
    outputs = [f"/tmp/{job}.out" for job in jobs]
    until(lambda: scratch.directories() >= {f"job-{job}" for job in jobs}, "both directories")
    until(lambda: all("job-" in scratch.at("cat", each, check=False) for each in outputs), "both jobs")
    scratch.at("sh", "-c", f"echo {first} {second} > /tmp/.new; mv /tmp/.new /tmp/others")
    for job, output in zip(jobs, outputs, strict=True):
        until(lambda output=output: "kept" in scratch.at("cat", output), "the end of the attack")
        assert scratch.at("cat", output) == f"{JOBS}/job-{job}\nkept\n"
    owners = scratch.at("stat", "--format=%U %a", *(f"{JOBS}/job-{job}" for job in jobs))
    assert owners.split() == [USERS[0], "700", USERS[1], "700"]

    # One ends: its files go in the background, with the link to the other's, whose file stays.
    scratch.at("touch", f"/tmp/end-{first}")
    until(lambda: scratch.directories() == {f"job-{second}"}, "the end of the first")
    until(lambda: not scratch.at("ls", f"{JOBS}/.removed"), "its files are gone")
    assert scratch.at("cat", f"{JOBS}/job-{second}/file") == "kept\n"

    # An epilog is lost: its directory goes once Slurm says that there is no such job, and not before.
    lost = "SLURM_SCRIPT_CONTEXT=prolog_slurmd SLURM_JOB_ID=999999 SLURM_JOB_UID=5"
    scratch.at("sh", "-c", f"{lost} {scratch.starter}")
    both = {f"job-{second}", "job-999999"}
    scratch.at("sh", "-c", f"SLURM_CONF=/nowhere {scratch.starter} sweep")
    assert scratch.directories() == both
    scratch.at(scratch.starter, "sweep")
    assert scratch.directories() == {f"job-{second}"}
    scratch.cluster.run(CONTROL, ["scancel", second])
    until(lambda: not scratch.directories(), "the end of the second")
    assert "DRAIN" not in scratch.cluster.run(CONTROL, ["scontrol", "show", "node", "node1"]).stdout


@pytest.mark.slow
def test_a_node_without_its_volume_is_drained_with_the_reason(scratch: Scratch) -> None:
    job = scratch.submit("games", "#!/bin/sh\nsleep 600\n", "node2")

    def shown() -> str:
        return scratch.cluster.run(CONTROL, ["scontrol", "--oneliner", "show", "node", "node2"]).stdout

    until(lambda: "DRAIN" in shown(), "the drain")
    assert re.search(r"Reason=tunetool scratch: `/srv/scratch` is not mounted\. hint: ", shown())
    scratch.cluster.run(CONTROL, ["scancel", job])
    until(lambda: not scratch.cluster.run(CONTROL, ["squeue", "-h"]).stdout, "the end of the job")
    scratch.cluster.run(CONTROL, ["scontrol", "update", "NodeName=node2", "State=RESUME"], timeout=PATIENCE)
