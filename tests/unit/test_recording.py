"""Recordings: their contents, their limits, and that laying one out writes only below its folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import call
from machines import lay_out
from tunetool.node.common.io_settings import ARRAY, CPU, DRIVE, ROWS
from tunetool.node.machine import recording
from tunetool.node.machine.memory import memory_limit

ROOT = Path(__file__).parents[2]

SECRET = "hunter2"

MOUNTS = f"""\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
60 27 0:50 / /home rw,relatime - nfs4 filer.example:/home rw,vers=4.2,addr=10.0.0.9,clientaddr=10.0.0.7
61 27 0:51 / /win rw,relatime - cifs //filer/win rw,username=anna,password={SECRET}
62 27 0:52 / /s3 rw,relatime - fuse.s3fs https://anna:{SECRET}@s3.example rw,user_id=0
63 27 0:53 / /box rw,relatime - overlay overlay rw,lowerdir=/home/anna/layers/1,upperdir=/home/anna/{SECRET}
64 27 0:54 / /a\u2028b\fc rw,relatime - cifs //filer/win rw,username=anna,password={SECRET}
29 27 0:24 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,huge=within_size,size=524288k,inode64
"""


def machine(root: Path) -> Path:
    """A built node with secrets that a recording must not contain."""
    lay_out("built", root)
    for path, text in {
        "proc/sys/kernel/hostname": "node1\n",
        "proc/self/mountinfo": MOUNTS,
        "proc/self/environ": f"TOKEN={SECRET}\0",
        "proc/cmdline": f"root=/dev/vda systemd.set_credential=pw:{SECRET}\n",
        "root/.ssh/id_ed25519": SECRET,
        "etc/shadow": SECRET,
        "etc/fstab": f"//filer/win /win cifs username=anna,password={SECRET} 0 0\n",
        "etc/cufile.json": '{"properties": {"rdma_dev_addr_list": ["10.0.0.7"]}}\n',
        "run/secrets/kubernetes.io/serviceaccount/token": SECRET,
        "run/.containerenv": f'id="{SECRET}"\n',
        "proc/driver/nvidia/gpus/0000:01:00.0/information": f"Model: NVIDIA H100\nGPU UUID: GPU-{SECRET}\n",
        "sys/class/net/eth0/address": "52:54:00:12:34:56\n",
        "dev/nvidia0": SECRET,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_a_recording_holds_no_secret(tmp_path: Path) -> None:
    document = recording.record(str(machine(tmp_path)))
    text = json.dumps(document)
    for word in (SECRET, "anna", "filer", "10.0.0.9", "52:54:00"):
        assert word not in text
    # The recording has the parts of the same files that the readers need.
    files = document["files"]
    mounts = files["/proc/self/mountinfo"].split("\n")
    assert "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw" in mounts
    assert "29 27 0:24 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw,huge=within_size,size=524288k,inode64" in mounts
    assert files["/proc/driver/nvidia/gpus/0000:01:00.0/information"] == "Model: NVIDIA H100\n"
    assert files["/dev/nvidia0"] == ""


def test_anonymous_replaces_names_everywhere_alike(tmp_path: Path) -> None:
    document = recording.anonymous(recording.record(str(machine(tmp_path))))
    text = json.dumps(document)
    for word in ("LAB1NV", "LAB1SYS", "node1", "10.0.0.7"):
        assert word not in text
    serials = {value.strip() for path, value in document["files"].items() if path.endswith("/serial")}
    assert len(serials) == 9
    linked = {path.rsplit("_", 1)[1] for path in document["links"] if "/by-id/nvme-QEMU" in path}
    assert linked <= serials | {f"{serial}_1" for serial in serials} | {"1"}


def test_what_was_laid_out_is_recorded_the_same(tmp_path: Path) -> None:
    document = recording.record(str(machine(tmp_path / "one")))
    recording.lay_out(document, str(tmp_path / "two"))
    assert recording.record(str(tmp_path / "two")) == document


def test_every_io_setting_is_recorded() -> None:
    """The recorder runs alone, without the table of the settings."""
    files = [
        f"/{path.replace('%s', {CPU: 'cpu0', DRIVE: 'nvme0n1', ARRAY: 'md127'}.get(row.target, ''))}"
        for row in ROWS.values()
        for path in (row.file, row.share_file, row.cpus_need)
        if path
    ]
    assert [file for file in files if not any(fnmatch(file, pattern) for pattern in recording.FILES)] == []
    assert len(files) > 10


def test_it_runs_alone_as_a_script() -> None:
    """With it, a node without tunetool can be recorded through a pipe."""
    done = call(sys.executable, "-", input=(ROOT / "plugins/module_utils/machine/recording.py").read_text(), cwd="/")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == recording.SCHEMA_NAME
    assert "/proc/meminfo" in document["files"]
    assert "/proc/self/mountinfo" in document["files"]


@pytest.mark.parametrize(
    "document",
    [
        {"files": {"/../out": "x"}, "links": {}},
        {"files": {"/a/../../out": "x"}, "links": {}},
        {"files": {"out": "x"}, "links": {}},
        {"files": {}, "links": {"/a": "/etc"}},
        {"files": {}, "links": {"/sys/a": "../../etc"}},
        {"files": {}, "links": {}, "directories": ["/../out"]},
    ],
)
def test_a_recording_cannot_lead_out_of_its_folder(document: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "deep/tree"
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="leads out"):
        recording.lay_out(document, str(folder))
    assert not (tmp_path / "deep/out").exists()


PARTS = st.lists(st.sampled_from(["a", "b", "..", ".", ""]), min_size=1, max_size=6).map("/".join)


@given(st.lists(st.tuples(PARTS, PARTS), max_size=4))
def test_no_path_or_link_leads_out(links: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside, "tree")
        folder.mkdir()
        document = {"files": {}, "links": {f"/{path}": target for path, target in links}}
        try:
            recording.lay_out(document, str(folder))
        except (ValueError, OSError):
            return
        assert {entry.name for entry in Path(outside).iterdir()} == {"tree"}
        for directory, folders, names in os.walk(folder):
            for name in [*names, *folders]:
                real = os.path.realpath(Path(directory, name))
                assert Path(real).is_relative_to(folder.resolve())


def test_the_made_machines_are_what_their_script_makes() -> None:
    done = call(sys.executable, "tools/dev/made_trees.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_recordings_memory_limit_is_the_tightest_group(tmp_path: Path) -> None:
    """A recording has no name of a group: a job's, or a user's."""
    node, copy = tmp_path / "node", tmp_path / "copy"
    for path, text in (
        ("proc/self/cgroup", "0::/system.slice/job_7.scope\n"),
        ("sys/fs/cgroup/memory.max", "max\n"),
        ("sys/fs/cgroup/system.slice/memory.max", "9000\n"),
        ("sys/fs/cgroup/system.slice/job_7.scope/memory.max", "max\n"),
        ("sys/fs/cgroup/system.slice/job_7.scope/memory.high", "7000\n"),
    ):
        (node / path).parent.mkdir(parents=True, exist_ok=True)
        (node / path).write_text(text)
    document = recording.record(str(node))
    assert "job_7" not in str(document)
    recording.lay_out(document, str(copy))
    assert memory_limit(str(copy)) == memory_limit(str(node)) == 7000
