"""Which mount a path lies on: the mount table read as the kernel walks it, compared with the kernel's answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from calls import call
from skips import no_mounts
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.mounts import mount_at, mount_holding, parse_mountinfo

ARRAY = "40 22 9:127 / /mnt/scratch rw - xfs /dev/md127 rw\n"
TABLE = "22 1 254:1 / / rw - ext4 /dev/vda1 rw\n" + ARRAY


@pytest.mark.parametrize(
    ("more", "path", "expected"),
    [
        ("41 22 9:127 /sub /srv/bound rw - xfs /dev/md127 rw\n", "/srv/bound/x", "9:127 /sub"),
        ("41 22 254:1 /srv/x /srv/bound rw - ext4 /dev/vda1 rw\n", "/srv/bound", "254:1 /srv/x"),
        ("41 40 254:1 /srv /mnt/scratch rw - ext4 /dev/vda1 rw\n", "/mnt/scratch/x", "254:1 /srv"),
        ("41 40 0:50 / /mnt/scratch/in rw - tmpfs t rw\n", "/mnt/scratch/in/x", "0:50 /"),
        ("41 22 254:1 /srv /mnt rw - ext4 /dev/vda1 rw\n", "/mnt/scratch/x", "254:1 /srv"),
        ("41 22 254:1 /srv /mnt rw - ext4 /dev/vda1 rw\n42 41 9:127 / /mnt/scratch rw - xfs d rw\n", "/mnt/scratch", "9:127 /"),
        ("39 40 0:50 / /mnt/scratch rw - tmpfs t rw\n", "/mnt/scratch", "0:50 /"),
    ],
    ids=[
        "a directory of the array",
        "of another file system",
        "over the array",
        "within the array",
        "over its parent",
        "over its parent, and the array again",
        "listed before what it covers",
    ],
)  # fmt: skip
def test_bind_mounts_and_mounts_over_others(more: str, path: str, expected: str) -> None:
    table = TABLE.replace(ARRAY, more + ARRAY) if more.startswith("39") else TABLE + more
    holding = mount_holding(path, parse_mountinfo(table))
    assert holding is not None
    assert f"{holding.device_number} {holding.root}" == expected


def test_a_volume_that_a_mount_hides_is_not_mounted_there(tmp_path: Path) -> None:
    table = TABLE + "41 22 0:50 / /mnt rw - tmpfs t rw\n"
    assert mount_at("/mnt/scratch", parse_mountinfo(table)) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(table)
    assert read_stack("/mnt/scratch", str(tmp_path)).medium == "tmpfs"


KERNEL = """
import ctypes, json, os, random, sys
from pathlib import Path
from tunetool.node.machine.mounts import mount_at, mount_holding, read_mounts

BIND, MOVE = 4096, 8192
base, seed = Path(sys.argv[1]), int(sys.argv[2])
mount = ctypes.CDLL(None, use_errno=True).mount
draw = random.Random(seed)


def make(source, target, kind, flags):
    return mount(os.fsencode(source), os.fsencode(target), kind, flags, None) == 0


def grow(directory):
    for name in ("a", "a/b", "a/b/c", "d"):
        (directory / name).mkdir(exist_ok=True)


def directories():
    return [base, *(path for path in base.rglob("*") if len(path.parts) < len(base.parts) + 6)]


make("none", base, b"tmpfs", 0) or sys.exit("no mounts")
grow(base)
done, wrong = {}, []
for number in range(60):
    here = draw.choice(directories())
    there = draw.choice(directories())
    what = draw.choice(("new", "bind", "bind", "move", "gone"))
    if what == "new":
        worked = make("none", here, b"tmpfs", 0)
        if worked:
            grow(here)
    elif what == "gone":
        worked = here != base and ctypes.CDLL(None).umount2(os.fsencode(here), 0) == 0
    else:
        worked = here != base and make(there, here, None, BIND if what == "bind" else MOVE)
    done[what] = done.get(what, 0) + worked
    mounts = read_mounts()
    for path in directories():
        handle = os.open(path, os.O_PATH)
        lines = Path(f"/proc/self/fdinfo/{handle}").read_text().splitlines()
        os.close(handle)
        (kernel,) = (line.split()[1] for line in lines if line.startswith("mnt_id:"))
        ours = mount_holding(str(path), mounts)
        top = mount_at(str(path), mounts)
        is_point = any(each.number == kernel and each.mount_point == str(path) for each in mounts)
        if ours.number != kernel or (top is not None) != is_point:
            wrong.append([number, what, str(path), kernel, ours.number])
print(json.dumps({"done": done, "wrong": wrong[:5]}))
"""


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_the_mount_that_the_kernel_takes(seed: int, tmp_path: Path) -> None:
    """After each of sixty mounts, bind mounts, moves and unmounts at chance places of a tree."""
    if no_mounts():
        pytest.skip("this user may not make a mount namespace")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    answer = call("unshare", *user, "--mount", sys.executable, "-c", KERNEL, str(tmp_path.resolve()), str(seed))
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout)
    assert said["wrong"] == []
    assert all(said["done"].get(what, 0) for what in ("new", "bind", "gone")), said["done"]
    assert sum(said["done"].values()) > 20, said["done"]
