"""Fakes and faults on a node: whatever happens to drives, array and mount, verify does not print PASS, but a reason.

Cases for any disk are in tests/liars; a throttled drive is in test_main_job.py.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest
from conftest import BIN, POINT, ROOT, Done, Lab

from judged import lied

pytestmark = pytest.mark.usefixtures("marker")

VERIFY = "/opt/tunetool/bin/tunetool verify --duration 1s --runs-dir /root/runs"
EASY = "--expect read=1MBps,write=1MBps"
"""An expectation that every honest node of the lab reaches, so that only the fault can be the reason of a refusal."""
LONGEST = 900.0
"""Seconds after which a run that lost a drive counts as one that hangs."""


def ask(lab: Lab, arguments: str = EASY) -> Done:
    """Run verify on the node itself."""
    return lab.tool("lab", "ssh", "node1", "--", f"{VERIFY} {arguments}")


def left(lab: Lab) -> str:
    """Files and processes that verify left behind."""
    return lab.ssh("node1", f"ls -A {POINT} | grep -F .tunetool; pgrep -a fio; true")


@pytest.mark.slow  # what fio and the kernel say then is in tests/unit/test_measure_parts.py
def test_sectors_that_cannot_be_written(built: Lab) -> None:
    built.lab("fault", "node1", "io-errors", "--drive", "LAB1NV6")
    lied(ask(built), 1, "`LAB1NV6`: ", "medium error, dev nvme6n1, sector", "fio: io_u error on file", "FAIL")
    assert left(built) == ""
    # They cannot be read either, and disappear with the drive.
    read = "dd if=$(lsblk -dno PATH,SERIAL | awk '/LAB1NV6/ {print $1}') of=/dev/null bs=1M count=64 2>&1 || true"
    assert "Input/output error" in built.ssh("node1", read)
    built.lab("fault", "node1", "mixed-size", "--drive", "LAB1NV6")
    assert "64+0 records in" in built.ssh("node1", read)


@pytest.mark.slow
def test_a_drive_that_is_pulled_while_it_is_measured(built: Lab) -> None:
    with subprocess.Popen(
        [str(BIN / "tunetool"), "lab", "ssh", "node1", "--", f"{VERIFY} {EASY}"],
        cwd=ROOT,
        env=built.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            said.append(line)
            if "write-2" in line:
                break
        built.lab("fault", "node1", "remove-drive", "--drive", "LAB1NV3")
        began = time.monotonic()
        rest, _ = running.communicate(timeout=LONGEST)
    print(*said, rest, f"ended {time.monotonic() - began:.0f} s after the drive was gone")
    lied(Done(running.returncode, rest, "".join(said) + rest), 1, "`LAB1NV3` (`nvme3n1`) is gone", "FAIL")
    assert left(built) == ""
    # Again, on the rest of it.
    lied(ask(built), 1, "LAB1NV3", "FAIL")
    assert built.ssh("node1", f"mountpoint -q {POINT} || ls -A {POINT}") == ""


HAMMER = f"""cd {POINT} && (setsid fio --name=hammer --rw=randrw --bs=256k --size=64m --direct=1 --ioengine=libaio \
--iodepth=4 --thread --time_based --runtime=600 > /dev/null 2>&1 < /dev/null & echo $! > /run/hammer.pid)
while ! ls hammer* > /dev/null 2>&1; do sleep 0.2; done; sleep 2"""


@pytest.fixture
def hammered(built: Lab) -> Iterator[Lab]:
    """A node whose volume another program reads and writes all the time."""
    built.ssh("node1", HAMMER)
    yield built
    built.ssh("node1", "pkill -F /run/hammer.pid; while pgrep -x fio > /dev/null; do sleep 0.1; done")


@pytest.mark.slow
def test_somebody_hammers_the_array(hammered: Lab) -> None:
    lied(ask(hammered), 3, "busy: `nvme", "requests within a second", "ERROR")
    assert hammered.ssh("node1", f"ls -A {POINT} | grep -F .tunetool; true") == ""


@pytest.mark.slow
def test_a_measurement_beside_somebody_who_hammers_the_array(hammered: Lab) -> None:
    lied(
        ask(hammered, f"{EASY} --allow-busy"),
        3,
        "MB more than fio's reads",
        "MB more than fio's writes",
        "something else uses the drives",
        "UNPROVEN",
    )
    assert hammered.ssh("node1", f"ls -A {POINT} | grep -F .tunetool; true") == ""


@pytest.mark.slow
def test_another_file_system_where_the_manifest_s_was(built: Lab) -> None:
    nothing_written = f"test -z \"$(find {POINT} /srv/other -name '.tunetool*')\""
    # A directory of the volume, mounted over the whole of it.
    built.ssh("node1", f"mkdir {POINT}/x; mount --bind {POINT}/x {POINT}")
    lied(ask(built), 1, "filesystem.mounted: xfs from `/dev/md127`, but only its directory `/x`", "FAIL")
    built.ssh("node1", f"umount {POINT}; test -z \"$(find {POINT}/x -name '.tunetool*')\"; rmdir {POINT}/x")
    # A directory on the root file system, whose protection somebody took away.
    built.ssh("node1", f"mkdir /srv/other; umount {POINT} && chattr -i {POINT} && mkdir -p {POINT}/deepspeed_offload")
    lied(ask(built), 1, f"filesystem.mounted: `{POINT}` is not a mount point", "nothing is written there", "FAIL")
    built.ssh("node1", nothing_written)
    # The node's own disk, mounted over it.
    built.ssh("node1", f"mount --bind /srv/other {POINT}")
    lied(ask(built), 1, "filesystem.mounted: ext4 from `/dev/vda", "another file system", "FAIL")
    built.ssh("node1", f"{nothing_written}; umount {POINT}")
    # The ninth drive.
    built.ssh("node1", f"mount --bind /srv/system {POINT}")
    lied(ask(built), 1, "filesystem.mounted: ext4 from `/dev/nvme0n1`, another file system", "FAIL")
    built.ssh("node1", f"{nothing_written}; umount {POINT}")
    # A file system of the same kind, made again on the same array.
    made = "mkfs.xfs -q -f -d su=1m,sw=8 -l su=256k /dev/md/nvme_raid0 && udevadm settle"
    built.ssh("node1", f"{made} && mount -o noatime,logbufs=8,logbsize=256k /dev/md/nvme_raid0 {POINT}")
    lied(ask(built), 1, "filesystem.mounted: xfs from `/dev/md127`, another file system", "FAIL")
    built.ssh("node1", nothing_written)


@pytest.mark.slow
def test_a_drive_that_does_not_count(built: Lab) -> None:
    built.ssh("node1", "echo 0 > /sys/block/nvme4n1/queue/iostats; echo 0 > /sys/block/md127/queue/iostats")
    lied(ask(built), 3, "`nvme4n1` counts nothing: run `echo 1 > /sys/block/nvme4n1/queue/iostats`", "UNPROVEN")
    # The members' counters prove the bytes; those of the array do not count.
    built.ssh("node1", "echo 1 > /sys/block/nvme4n1/queue/iostats")
    honest = ask(built)
    assert honest.code == 0, honest.text


JUMP = """(setsid sh -c "while :; do date -s '+1 hour'; sleep 0.3; date -s '-1 hour'; sleep 0.3; done" \
> /dev/null 2>&1 < /dev/null & echo $! > /run/jump.pid); sleep 1"""


@pytest.mark.slow
def test_a_clock_that_jumps(built: Lab) -> None:
    built.ssh("node1", JUMP)
    answer = ask(built, "--expect read=1TBps,write=1MBps")
    built.ssh("node1", "pkill -F /run/jump.pid")
    lied(answer, 1, "is below 1000 GB/s", "FAIL")
    record = json.loads(built.ssh("node1", "cat /root/runs/*/record.json"))
    # The jumps change no figure: the slower direction is judged as usual.
    assert {each["name"]: each["status"] for each in record["expectations"]}["sequential.write"] == "pass"
    assert {figure["value"] < 50e9 for figure in record["measurements"]} == {True}
