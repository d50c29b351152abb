"""The table of checks: every check of a node is in it once, and what is documented and what is made is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from machines import RECORDED, lay_out
from tunetool.node.audit.manifest_checks import BY_ID, CHECKS, LATER, STOPS, WAITS, WARNS, ignored_problems, run_checks
from tunetool.node.common.check_result import UNKNOWN
from tunetool.node.health import kernel_faults
from tunetool.node.machine.drive_health import Health
from tunetool.node.memory.memory_checks import Attempt
from tunetool.node.volume.write_read_probe import Answer

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
ASKED = {
    **MANIFEST,
    "memory": {**MANIFEST["memory"], "shm_huge": "within_size"},
    "tuning": {"nr_requests": 1023, "fstrim_timer": "enabled"},
    "aio": {"path": "/etc/tunetool/aio.json", "block": {}, "hardware": {}},
    "gds": {"mode": "nvidia-fs", "reasons": []},
}
"""A manifest with everything that a check is about."""
OWNERS = {**ASKED, "array": None, "tuning": {}}
IDS = [identity for row in CHECKS for identity in row.ids]
GLOBS = ("io_tuning.*",)
"""Rows of the page that stand for several checks, which another page describes."""


def documented() -> list[str]:
    """The ids in the table of the page."""
    table = (ROOT / "docs/guides/health-check.md").read_text().partition("## What it sees")[2].partition("###")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    return [identity for row in rows for identity in re.findall(r"`([^`]+)`", row)]


@pytest.mark.any_python
def test_every_check_is_documented_once() -> None:
    expected = [identity for identity in IDS if not identity.startswith("io_tuning.")]
    assert sorted(documented()) == sorted([*expected, *GLOBS])
    assert len(IDS) == len(BY_ID), "an id has two rows"


@pytest.mark.any_python
def test_what_the_package_makes_itself_is_in_the_table() -> None:
    made = {
        identity
        for path in (ROOT / "tools/tunetool").rglob("*.py")
        for identity in re.findall(r'^CHECK_ID = "([^"]+)"', path.read_text(), re.MULTILINE)
    }
    assert made
    assert made | {"manifest", "manifest.checksum", *kernel_faults.CHECKS} == {
        name for row in CHECKS if row.look is None for name in row.ids
    }


@pytest.mark.parametrize("manifest", [MANIFEST, ASKED, OWNERS], ids=["plain", "everything", "owner's volume"])
@pytest.mark.parametrize("machine", ["built", "lost-drive"])
def test_checks_are_made_in_the_order_of_the_table(machine: str, manifest: dict[str, Any], tmp_path: Path) -> None:
    root = lay_out(machine, tmp_path)
    checks = run_checks(
        manifest,
        str(root),
        health=lambda _: Health(0, 40, 100, 10, 3, 0, 0, 0, 0, 70),
        locker=lambda kind, size: Attempt(65534, False, -1, size),
        asker=lambda questions: [Answer(is_directory=True)],
    )
    places = [IDS.index(check.id) for check in checks]
    assert places == sorted(places)
    assert len(checks) > 10


def test_nothing_looks_at_a_volume_that_is_silent(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path)
    checks = {each.id: each for each in run_checks(ASKED, str(root), asker=lambda _: [Answer(silent_at="open")])}
    for identity in ("gds.mode", "deepspeed.tuned"):
        assert (checks[identity].status, checks[identity].found) == (
            UNKNOWN,
            "not looked at: the volume does not answer",
        )


def test_what_a_failure_is_worth_while_a_node_is_built() -> None:
    worth = {name: row.building for name, row in BY_ID.items() if row.building != STOPS}
    drives = {name: WARNS for name in BY_ID if name.startswith("drives.") and BY_ID[name].look}
    del drives["drives.answer"]
    assert worth == {
        **drives,
        "gds.mode": WARNS,
        "training.environment": WARNS,
        "array.redundancy": WARNS,
        "memory.memlock": LATER,
        "memory.hugepages": WAITS,
        "node.reboot": WAITS,
    }
    assert [name for name, row in BY_ID.items() if row.halts] == [
        "filesystem.writable",
        "filesystem.answers",
        "drives.answer",
    ]


def test_a_glob_that_is_no_checks_is_named_with_the_nearest() -> None:
    assert ignored_problems(["io_tuning.*", "memory.memlock.*", "*", "drives.wear", "gds.path"]) == []
    (problem,) = ignored_problems(["drives.wear", "array.initramf"])
    assert problem.endswith("has `array.initramf`, which is no check. hint: did you mean `array.initramfs`?")
    assert "guide" in ignored_problems(["zzz"])[0]
