"""A `mdadm --create` that was cut off: a plan gives it up; members of an array that may be whole, never."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builders import nvme_drive
from tunetool.node.array.adopt_or_wipe import Consent, cut_off
from tunetool.node.array.drive_decisions import KEEP, REFUSE, TAKE, WIPE, Criteria, wipeable
from tunetool.node.array.drive_selection import PLAN_HINT, Selection, select
from tunetool.node.array.md_arrays import Array, Superblock, Wanted, decide
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.machine.drives import Drive

NAME, COUNT, CHUNK = "nvme_raid0", 8, 2**20
UUID = "2d1e0b40:129b6514:c5540f43:066bc3a1"
DATA = 2 * 2**20
SIZE = 64 * 2**20
WRITTEN = ("nvme1n1", "nvme2n1", "nvme3n1")
EIGHT = [
    nvme_drive(number, uses=("member of `md127`",), arrays=("md127",), idle_arrays=("md127",))
    if f"nvme{number}n1" in WRITTEN
    else nvme_drive(number)
    for number in range(1, 9)
]
LABELS = {
    name: [Signature(name, "linux_raid_member", f"node1:{NAME}", "2d1e0b40-129b-6514-c554-0f43066bc3a1", "0x1000")]
    for name in WRITTEN
}
HASHES = {name: f"{number:064x}" for number, name in enumerate(WRITTEN)}
UNDER = {"md127": frozenset(WRITTEN)}
BLOCKS = {
    name: Superblock(name, UUID, NAME, "raid0", COUNT, CHUNK, role, data_offset_bytes=DATA)
    for role, name in enumerate(WRITTEN)
}
BEGUN = Array("md127", UUID, NAME, "raid0", CHUNK, COUNT, "inactive", (*WRITTEN, *[None] * 5))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The drives as `mdadm --create` left them: a superblock at 4 KiB, and nothing else."""
    (tmp_path / "dev").mkdir()
    for name in WRITTEN:
        with (tmp_path / "dev" / name).open("wb") as stream:
            stream.truncate(SIZE)
            stream.seek(4096)
            stream.write(b"\xfc\x4e\x2b\xa9".ljust(4096, b"\1"))
    return tmp_path


def judged(root: Path, known: str = "", arrays: tuple[Array, ...] = (BEGUN,), **changes: object) -> dict[str, str]:
    blocks = {name: replace(block, **changes) for name, block in BLOCKS.items()}  # type: ignore[arg-type]
    return cut_off(NAME, COUNT, blocks, arrays, known, root=str(root))


def chosen(reasons: dict[str, str], drives: list[Drive] = EIGHT, **consent: object) -> Selection:
    allow = Consent(hashes=HASHES, disks_under=UNDER, cut_off=reasons, **consent)  # type: ignore[arg-type]
    return select(drives, LABELS, Criteria(count=COUNT), NAME, None, allow)


def test_a_plan_gives_up_what_a_create_left_half_made(root: Path) -> None:
    reasons = judged(root)
    plain = chosen(reasons)
    assert (plain.problem, plain.hint) == ("8 drives asked for, 5 usable", PLAN_HINT)
    assert plain.decisions[0].verdict == REFUSE
    assert "making its array was cut off: 3 of 8 members were written" in plain.decisions[0].reason
    planned = chosen(reasons, plan=True)
    assert [row.verdict for row in planned.decisions] == [WIPE] * 3 + [TAKE] * 5
    applied = chosen(reasons, wipes={f"S{number}": HASHES[f"nvme{number}n1"] for number in (1, 2, 3)})
    assert applied.problem is None
    assert [drive.serial for drive in wipeable(applied.decisions)] == ["S1", "S2", "S3"]


def test_a_drive_that_is_absent_spares_the_others(root: Path) -> None:
    for allowed in ({"plan": True}, {"wipes": {f"S{n}": HASHES[f"nvme{n}n1"] for n in (1, 2, 3)}}):
        assert wipeable(chosen(judged(root), EIGHT[:7], **allowed).decisions) == []


def write(at: int, name: str = "nvme1n1") -> Callable[[Path], None]:
    def act(root: Path) -> None:
        with (root / "dev" / name).open("r+b") as stream:
            stream.seek(at)
            stream.write(b"XFSB")

    return act


@pytest.mark.parametrize(
    "spoil",
    [write(DATA), write(DATA + 2**20 - 4), write(SIZE // 2), write(SIZE // 2, "nvme3n1"), lambda root: (root / "dev/nvme2n1").unlink()],
    ids=["file system", "in its first MiB", "deep", "deep on another", "unreadable"],
)  # fmt: skip
def test_an_array_that_may_hold_data_is_never_given_up(root: Path, spoil: Callable[[Path], None]) -> None:
    assert judged(root)
    spoil(root)
    assert judged(root) == {}
    assert {row.verdict for row in chosen({}, plan=True).decisions[:3]} == {KEEP}


@pytest.mark.parametrize(
    "changes",
    [
        {"known": f'{{"array": {{"uuid": "{UUID}"'},
        {"name": "data"},
        {"raid_disks": 9},
        {"level": "raid1"},
        {"role": 0},
        {"role": None},
        {"data_offset_bytes": None},
        {"arrays": (replace(BEGUN, state="clean"),)},
    ],
    ids=["built, damaged manifest", "foreign", "other count", "mirror", "roles", "spare", "offset", "runs"],
)
def test_what_a_cut_off_create_cannot_leave_is_none(root: Path, changes: dict[str, object]) -> None:
    assert judged(root, **changes) == {}  # type: ignore[arg-type]


def test_an_array_without_its_first_member_is_not_judged(root: Path) -> None:
    rest = {name: BLOCKS[name] for name in WRITTEN[1:]}
    assert cut_off(NAME, COUNT, rest, [BEGUN], "", root=str(root)) == {}


def test_a_refused_array_names_serials() -> None:
    wanted = Wanted(NAME, "raid0", CHUNK, tuple(drive.name for drive in EIGHT))
    serials = {drive.name: drive.serial for drive in EIGHT}
    (reason,) = decide(wanted, BLOCKS, [], serials).reasons
    assert reason == "`S4`, `S5`, `S6`, `S7`, `S8`: no superblock, while the others have one"
    whole = {name: replace(BLOCKS["nvme1n1"], device=name, role=role) for role, name in enumerate(wanted.members)}
    other = replace(BEGUN, state="clean", members=("nvme9n1", *wanted.members[1:]))
    (reason,) = decide(wanted, whole, [other], serials).reasons
    assert reason.startswith("assembled `md127` has other members: nvme9n1, `S2`, `S3`")


def test_what_spares_an_array_is_named_by_serial(root: Path) -> None:
    under = {"md127": frozenset({*WRITTEN, "nvme4n1"})}
    allow = Consent(plan=True, hashes=HASHES, disks_under=under, cut_off=judged(root))
    selection = select(EIGHT, LABELS, Criteria(count=COUNT), NAME, None, allow)
    assert wipeable(selection.decisions) == []
    assert selection.decisions[0].reason.endswith("its array has other members that may not be wiped: `S4`")


class Ended(Exception):
    """The module's end, with its answer."""


def run_module(root: Path, monkeypatch: pytest.MonkeyPatch, manifest: str = "", begun: str = "", **asked: Any) -> Any:
    """The answer of nvme_drives on that node."""
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    collections = str(Path(__file__).parents[2] / ".ansible/collections")
    if collections not in sys.path:
        sys.path.insert(0, collections)
    module = importlib.import_module("ansible_collections.tunetool.node.plugins.modules.nvme_drives")
    texts = {module.MANIFEST_PATH: manifest or None, module.BEGUN_PATH: begun or None}
    for name, fake in {
        "read_drives": lambda: EIGHT,
        "read_contents": lambda drives, deep: (LABELS, {}),
        "contents_hash": lambda drive: HASHES[drive.name],
        "examine": lambda names: {each: BLOCKS[each] for each in names if each in BLOCKS},
        "read_arrays": lambda: [BEGUN],
        "disks_under": lambda path, array: set(WRITTEN),
        "devices_of": lambda drive: {},
        "built_manifest": lambda: None,
        "obstacles": lambda *_, **__: [],
        "overview": lambda *_: [],
        "read_text": texts.get,
        "cut_off": lambda *given, **more: cut_off(*given, **more, root=str(root)),
    }.items():
        monkeypatch.setattr(module, name, fake)

    def end(**answer: Any) -> None:
        raise Ended(answer)

    params = {
        "count": COUNT,
        "plan": False,
        "wipes": [],
        "array": {"name": NAME, "adopt": False, "groups": "all"},
        "level": "raid0",
        "mount_point": None,
        "wishes": {},
    }
    fake = SimpleNamespace(params={**params, **asked}, exit_json=end, fail_json=end)
    with pytest.raises(Ended) as caught:
        module.report(fake, Criteria(count=COUNT), CHUNK)
    return caught.value.args[0]


def test_the_module_plans_the_wipe(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = run_module(root, monkeypatch, plan=True)["plan"]
    assert [(each["serial"], each["action"]) for each in part["drives"]][2:4] == [("S3", "wipe"), ("S4", "take")]
    assert part["array_action"] == "create"
    # A boot that makes the array of the manifest again was cut off.
    text = f'{{"array": {{"uuid": "{UUID}"}}}}'
    assert run_module(root, monkeypatch, plan=True, manifest=text, begun=UUID)["plan"]["array_action"] == "create"


def test_a_torn_array_is_refused_by_serial_with_a_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = f'{{"array": {{"uuid": "{UUID}"}}}}'
    answer = run_module(root, monkeypatch, manifest=built)
    first = answer["msg"].splitlines()[0]
    assert first.startswith(f"array `{NAME}` is on `S1`, `S2`, `S3` and not on `S4`, `S5`, `S6`, `S7`, `S8`, which are")
    assert "`ansible-playbook tunetool.node.teardown --tags plan" in first
    assert "wipe" not in {row["verdict"] for row in answer["decisions"]}
    part = run_module(root, monkeypatch, manifest=built, plan=True)["plan"]
    assert part["array_action"] == "refuse"
    assert "`S4`, `S5`, `S6`, `S7`, `S8`: no superblock" in part["array_reason"]
    assert "`ansible-playbook tunetool.node.teardown --tags plan" in part["array_reason"]
