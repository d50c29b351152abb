"""Answers of programs and of nodes, damaged or made up: whoever reads them answers, or refuses in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_arrays import EXAMINE
from test_host_files import XFS_INFO

from damaged import bounded_memory, cut, edited, no_hang
from doors import refused_well
from trees import NUMBERS
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch.slurm import down_nodes, parse_sacct, parse_scontrol
from tunetool.node.array.md_arrays import examine, parse_examine
from tunetool.node.common.commands import CommandError
from tunetool.node.common.drift import Difference
from tunetool.node.common.manifest import ManifestError
from tunetool.node.common.refusal import Refusal
from tunetool.node.common.training_part import NoTraining
from tunetool.node.machine.capacity import Capacity, capacity_of, smallest_gpu
from tunetool.node.machine.drive_contents import Signature, UnreadableDevice, parse_signatures
from tunetool.node.machine.file_system import BUILT
from tunetool.node.memory.kernel_parameters import parse as parse_kernel_parameters
from tunetool.node.memory.memory_checks import parse_attempt
from tunetool.node.plan.plan_file import PlanError
from tunetool.node.tuning.deepspeed_aio import TunedError

SLURM = Path(__file__).parents[1] / "data/slurm"
DIGITS = re.compile(r"\d+")
WIPEFS = json.dumps(
    {
        "signatures": [
            {"device": "nvme1n1", "offset": "0x1000", "type": "linux_raid_member", "uuid": "2d1e", "label": "n:a"},
            {"device": "nvme2n1", "offset": "0x438", "type": "ext4", "uuid": None, "label": None},
        ]
    }
)


def _examine(text: str) -> None:
    for name, block in parse_examine(text).items():
        assert (block.device, bool(block.uuid)) == (name, True)
        assert 0 <= block.raid_disks < 2**64
        assert 0 <= block.chunk_bytes < 2**94
        assert block.role is None or block.role >= 0


def _wipefs(text: str) -> None:
    for each in parse_signatures(text):
        assert all(isinstance(value, (str, type(None))) for value in vars(each).values())
        assert str(each)


def _xfs_info(text: str) -> None:
    geometry = BUILT.parse_geometry(text)
    assert min(geometry.data_su_bytes, geometry.data_sw, geometry.log_su_bytes) >= 0


def _pools(text: str) -> None:
    assert all(pool.count >= 0 and pool.size_kib >= 0 for pool in parse_kernel_parameters(text.split()))


ANSWERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "mdadm --examine": (EXAMINE, _examine),
    "wipefs --json": (WIPEFS, _wipefs),
    "xfs_info": (XFS_INFO, _xfs_info),
    "nvidia-smi": ("81559\n81559\n", smallest_gpu),
    "scontrol show job": ((SLURM / "job-failed.txt").read_text(), parse_scontrol),
    "scontrol show node": ((SLURM / "nodes.txt").read_text(), down_nodes),
    "sacct": ("FAILED|1:0|node1|NonZeroExitCode\n", parse_sacct),
    "the kernel's command line": ("ro hugepagesz=1G hugepages=8 hugepagesz=2M hugepages=0:4,1:4", _pools),
    "a child that locks memory": (
        'motd\n{"uid": 65534, "can_pass_limits": false, "limit": -1, "locked": 4096, "error": ""}\n',
        parse_attempt,
    ),
}


@st.composite
def numbered(draw: st.DrawFn, text: str) -> str:
    """The text with another number in the place of one of its numbers."""
    start, end = draw(st.sampled_from([match.span() for match in DIGITS.finditer(text)]))
    return text[:start] + draw(st.sampled_from(NUMBERS)) + text[end:]


def damaged(text: str) -> st.SearchStrategy[str]:
    ways = [cut(text.encode()).map(lambda content: content.decode(errors="replace")), numbered(text)]
    return st.one_of(*ways, *([edited(json.loads(text))] if text.startswith("{") else []))


@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_program_prints_its_reader_answers_or_refuses(name: str) -> None:
    sound, read = ANSWERS[name]
    read(sound)

    @given(damaged(sound))
    def holds(text: str) -> None:
        with no_hang(), bounded_memory():
            try:
                read(text)
            except (CommandError, UnreadableDevice) as error:
                refused_well(error, hinted=False)

    holds()


@pytest.mark.parametrize("more", ["     Raid Level : raid0\n", "   Raid Devices : 8\n", "           Name : x\n"])
def test_a_superblock_whose_name_holds_lines_is_there(more: str) -> None:
    """mdadm prints the name as it is, and the name is whatever somebody wrote into it."""
    text = EXAMINE.replace("  (local to host node1)\n", f"\n{more}")
    with pytest.raises(CommandError, match=r"`mdadm --examine` of `nvme1n1` prints `.*` twice"):
        parse_examine(text)


FORGED = {
    "another drive's, which follows": ("/dev/nvme2n1:\nArray UUID : x", "of `nvme2n1` prints no `Version`"),
    "its own again": ("/dev/nvme1n1:\nArray UUID : x", "prints `/dev/nvme1n1` twice"),
    "a blank drive's": ("/dev/nvme3n1:\nArray UUID : x", "of `nvme3n1` prints no `Version`"),
    "one that nobody asked about": ("/dev/sda:\nArray UUID : x", "prints `/dev/sda`, which was not asked about"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_name_that_looks_like_a_whole_superblock_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name has 32 bytes, and this fits into them."""
    name, reason = FORGED[kind]
    assert len(f"\n{name}") <= 32
    honest = EXAMINE.partition("/dev/nvme2n1:")[0]
    both = honest + honest.replace("nvme1n1", "nvme2n1")
    forged = both.replace("node1:nvme_raid0  (local to host node1)", f"\n{name}", 1)
    assert forged != both
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def mdadm(answer: str) -> None:
        (tmp_path / "answer").write_text(answer)
        (tmp_path / "mdadm").write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
        (tmp_path / "mdadm").chmod(0o755)

    asked = ["nvme1n1", "nvme2n1", "nvme3n1"]
    mdadm(both)
    assert list(examine(asked)) == asked[:2]
    mdadm(forged)
    with pytest.raises(CommandError, match=reason):
        examine(asked)


def test_a_drive_with_two_labels_of_members_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a superblock of another version at its end: wipefs names it twice, and mdadm answers each argument."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "answer").write_text(EXAMINE.partition("/dev/nvme2n1:")[0])
    script = f'shift; for each; do sed "s#/dev/nvme1n1:#$each:#" {tmp_path}/answer; done'
    (tmp_path / "mdadm").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "mdadm").chmod(0o755)
    assert list(examine(["nvme1n1", "nvme2n1", "nvme1n1"])) == ["nvme1n1", "nvme2n1"]


def test_signatures_of_another_device_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    text = WIPEFS.replace("nvme2n1", "sda1")
    assert parse_signatures(text)[1] == Signature("sda1", "ext4", None, None, "0x438")
    with pytest.raises(UnreadableDevice, match="`sda1`"):
        parse_signatures(text, ["nvme1n1", "nvme2n1"])


CAPACITY = Capacity("/mnt/a", "", 10, 20, 30, 4, 1, 2**36, "/opt/python", "", "cuda")


@given(st.one_of(edited(CAPACITY.to_dict()), edited([CAPACITY.to_dict()]), st.just("null")))
def test_whatever_a_node_says_of_its_capacity_is_read_or_refused(text: str) -> None:
    try:
        answer = json.loads(text)
    except ValueError:  # a number of thousands of digits, which Ansible cannot read either
        return
    try:
        capacity = capacity_of(answer)
    except TypeError:
        return
    for field in fields(capacity):
        value = getattr(capacity, field.name)
        assert type(value) is type(getattr(CAPACITY, field.name)), field.name
        assert not isinstance(value, int) or 0 <= value < 2**64, field.name


def test_a_refusal_keeps_the_lines_of_its_table_and_no_other() -> None:
    refused = Refusal("`a\nb` holds data", "SERIAL  ACTION", "S\x1b[2J  wipe")
    assert str(refused).split("\n") == ["`a\\nb` holds data", "SERIAL  ACTION", "S\\x1b[2J  wipe"]


@pytest.mark.parametrize("error", [CannotJudge, UsageProblem, ManifestError, PlanError, NoTraining, TunedError])
def test_a_hint_is_one_line_as_its_message_is(error: Callable[[str, str], Any]) -> None:
    """It repeats names and values of somebody's file as well."""
    raised = error("`a\nb` is wrong", "remove `a\nb\x1b[2J`")
    assert (raised.message, raised.hint) == ("`a\\nb` is wrong", "remove `a\\nb\\x1b[2J`")
    assert str(raised).isprintable()


def test_a_difference_is_one_line_whatever_the_node_holds() -> None:
    left = Difference("array", "`a`", "`b\nc`", mended=False, hint="look at `b\nc\x1b[2J`")
    assert str(left) == "`array`: expected `a`, found `b\\nc`. hint: look at `b\\nc\\x1b[2J`"
