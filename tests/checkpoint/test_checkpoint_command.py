"""``tunetool checkpoint``: every damage is named, nothing sound is accused, and differences are what they are."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import seeded
import small_steps
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from tunetool.checkpoint import (
    DirectSavePlanner,
    DirectWriter,
    bulk,
    differences,
    latest,
    markers,
    metadata,
    rank_layout,
    source,
)
from tunetool.checkpoint.catalogue import catalogue
from tunetool.checkpoint.verification import Verification
from tunetool.checkpoint.verification import verify as verify_step
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.report.progress import PlainProgress

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Run = Callable[..., tuple[int, str]]
BLOCK = 256 << 10


def save(path: Path, state: Any = None, *, seed: int = 1, **settings: Any) -> Path:
    dcp.save(
        seeded.state(seed, 1.0) if state is None else state,
        storage_writer=DirectWriter(path, **settings),
        planner=DirectSavePlanner(),
        no_dist=True,
    )
    return path


def save_by_torch(path: Path, state: Any, **settings: Any) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False, **settings), no_dist=True)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step with every kind of tensor; tests that change it work on a copy."""
    return save(tmp_path_factory.mktemp("sound") / "step_7")


@pytest.fixture
def step(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "step_7"))


def verified(path: Path) -> Verification:
    return verify_step(path, PlainProgress())


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << bit]))


def data_of(step: Path) -> Path:
    (path,) = step.glob("*.distcp")
    return path


def raw_bytes_of(step: Path, name: str) -> int:
    """Where a tensor's item begins."""
    return next(at.offset for index, at in metadata.read(step).storage_data.items() if index.fqn == name)


@cache
def owners(step: Path) -> dict[int, str]:
    """Which tensor or object each byte of the data file belongs to; "" for the table of checksums."""
    content, owned = data_of(step).read_bytes(), {}
    for index, at in metadata.read(step).storage_data.items():
        owned |= dict.fromkeys(range(at.offset, at.offset + at.length), index.fqn)
    start, rows, sums, *_ = struct.unpack("<5Q16s", content[-56:])
    table = (*range(start, start + 24 * rows + 8 * sums), *range(len(content) - 56, len(content)))
    return owned | dict.fromkeys(table, "")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_flipped_bit_is_named_or_is_in_padding(sound: Path, data: st.DataObject) -> None:
    path = data_of(sound)
    owned = owners(sound)
    at = data.draw(st.one_of(st.integers(0, path.stat().st_size - 1), st.sampled_from(sorted(owned))))
    bit = data.draw(st.integers(0, 7))
    flip(path, at, bit)
    try:
        found = verified(sound)
    finally:
        flip(path, at, bit)
    if at not in owned:
        assert (found.code, found.faults) == (0, ())
        return
    (fault,) = found.faults
    assert (found.code, fault.file, fault.tensor) == (1, path.name, owned[at] or None)
    assert str(path) in fault.message


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_flipped_bit_of_the_metadata_is_noticed(sound: Path, data: st.DataObject) -> None:
    path = sound / ".metadata"
    at, bit = data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7))
    flip(path, at, bit)
    try:
        found = verified(sound)
    finally:
        flip(path, at, bit)
    assert found.code == 1
    assert {fault.file for fault in found.faults} == {".metadata"}


def test_all_damage_is_named_and_neighbours_together(step: Path, run: Run) -> None:
    begin = raw_bytes_of(step, "model.large") + 4096
    for at in (begin, begin + 2 * BLOCK, begin + 3 * BLOCK):
        flip(data_of(step), at)
    flip(data_of(step), raw_bytes_of(step, "model.small") + 2)
    flip(data_of(step), raw_bytes_of(step, "step") + 2)
    code, shown = run("verify", step)
    assert code == 1
    said = shown.splitlines()
    assert sum("is damaged" in line for line in said) == 4
    assert f"`model.large` is damaged: bytes 0 to {BLOCK - 1} of its {4 * BLOCK}, " in shown
    assert f"`model.large` is damaged: bytes {2 * BLOCK} to {4 * BLOCK - 1} of its {4 * BLOCK}, " in shown
    assert said[-1] == "FAIL"


def test_a_sound_step_passes_and_says_what_was_compared(step: Path, run: Run) -> None:
    code, shown = run("verify", step)
    assert (code, shown.splitlines()[-1]) == (0, "PASS")
    assert "1 file, compared with checksums of the save" in shown
    code, shown = run("verify", step, "--json", "-")
    document = json.loads(shown)
    assert (code, document["verdict"], document["faults"], document["has_sums"]) == (0, "pass", [], True)
    assert document["checked_bytes"] > 4 * BLOCK


def test_the_files_of_many_ranks_are_all_read(forks: Any, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "step_1"
    order = {"path": str(path), "meet": str(tmp_path / "meet"), "seed": 3, "megabytes": 2, "settings": {}}
    assert [each["status"] for each in forks(do="save_state", world=2, **{"with": order})] == [0, 0]
    assert run("verify", path)[0] == 0
    (entry,) = catalogue([tmp_path]).entries
    assert (entry.world, entry.problem, entry.resumed) == (2, None, True)
    held = json.loads(run("show", path, "model.large", "--json", "-")[1])
    (large,) = held["tensors"]
    assert {piece["rank"] for piece in large["pieces"]} == {0, 1}
    # The same state, saved whole, is equal.
    assert run("diff", path, save(tmp_path / "step_2", seeded.state(3, 2)))[0] == 0
    first, second = sorted(path.glob("*.distcp"))
    for each in (first, second):
        flip(each, each.stat().st_size - 1)
    assert {fault.file for fault in verified(path).faults} == {first.name, second.name}


def test_swapped_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_layout, "FILE_BYTES", 1)
    state = {f"t{number}": torch.randn(999) for number in range(2)}
    path, other = (save(tmp_path / name, state, threads=2) for name in ("step_1", "step_2"))
    first, second = sorted(path.glob("*.distcp"))
    shutil.copy(sorted(other.glob("*.distcp"))[1], second)
    (fault,) = verified(path).faults
    assert (fault.file, "of another save" in fault.message) == (second.name, True)
    shutil.copy(first, second)
    (fault,) = verified(path).faults
    assert (fault.file, fault.tensor) == (second.name, "t1")


def named_so(step: Path, name: str) -> None:
    """Let `.metadata` say that all data is in a file of this name."""
    described = metadata.read(step)
    for stored in described.storage_data.values():
        stored.relative_path = name
    (step / ".metadata").write_bytes(metadata.dumps(described, step))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 70000), "has 70000 of "),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "the checksums at its end"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/passwd")), "is a link that leads out of the step"),
        (lambda path: (path.unlink(), path.symlink_to(path.name)), "cannot be read"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "it is not a regular file but a FIFO"),
        (lambda path: (path.unlink(), path.mkdir()), "it is not a regular file but a directory"),
        (lambda path: named_so(path.parent, "a" * 5000), "cannot be read (File name too long)"),
    ],
)
def test_a_file_that_is_not_whole_is_named(damage: Callable[[Path], Any], said: str, step: Path, run: Run) -> None:
    damage(data_of(step))
    name = next(iter(metadata.files_of(metadata.read(step))))
    (fault,) = verified(step).faults
    assert (fault.file, said in fault.message) == (name, True), fault
    code, shown = run("verify", step)
    assert (code, said in shown) == (1, True)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: (path.unlink(), os.mkfifo(path))])
def test_a_step_without_metadata_is_not_whole(damage: Callable[[Path], Any], step: Path, run: Run) -> None:
    damage(step / ".metadata")
    code, shown = run("verify", step)
    assert (code, "`.metadata`" in shown or ".metadata` " in shown) == (1, True)
    assert "not whole" in run("ls", step)[1]


def test_metadata_outside_the_step_fails(step: Path, tmp_path: Path, run: Run) -> None:
    (step / ".metadata").rename(tmp_path / "elsewhere")
    (step / ".metadata").symlink_to(tmp_path / "elsewhere")
    code, shown = run("verify", step)
    assert (code, "`.metadata`" in shown or "/.metadata` is a link that leads out of the step" in shown) == (1, True)


def test_a_cut_checksum_of_the_metadata_is_called_so(step: Path, run: Run) -> None:
    content = (step / ".metadata").read_bytes()
    (step / ".metadata").write_bytes(content[:-3])
    code, shown = run("verify", step)
    assert (code, "the checksum at its end is cut or damaged" in shown) == (1, True)


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_checkpoint_is_run(step: Path, tmp_path: Path, run: Run) -> None:
    (step / ".metadata").write_bytes(pickle.dumps(_Hostile(tmp_path / "made")))
    code, shown = run("verify", step)
    assert (code, "nothing was run" in shown) == (1, True)
    for words in (("show", step), ("diff", step, step)):
        with pytest.raises(UsageProblem, match="nothing was run"):
            run(*words)
    assert "nothing was run" in " ".join(run("ls", step)[1].split())
    theirs = save_by_torch(tmp_path / "theirs", {"object": _Hostile(tmp_path / "made")})
    assert run("diff", theirs, theirs)[0] == 0
    assert run("verify", theirs)[0] == 3
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("single", [True, False])
def test_a_checkpoint_of_torch_is_not_proven(single: bool, tmp_path: Path, run: Run) -> None:
    path = save_by_torch(tmp_path / "step_1", seeded.state(1), single_file_per_rank=single)
    code, shown = run("verify", path)
    assert (code, shown.splitlines()[-1]) == (3, "UNPROVEN")
    assert "no checksums: only lengths and structure were checked" in shown
    assert not json.loads(run("show", path, "--json", "-")[1])["checksums"]
    files = sorted(path.glob("*.distcp"))
    os.truncate(files[0], files[0].stat().st_size - 1)
    assert run("verify", path)[0] == 1


def test_chunks_that_leave_elements_out_are_damage(step: Path) -> None:
    described = metadata.read(step)
    described.state_dict_metadata["model.weight"].chunks.clear()
    (step / ".metadata").write_bytes(metadata.dumps(described, step))
    faults = verified(step).faults
    assert [fault.tensor for fault in faults] == ["model.weight"]
    assert "leave out elements" in faults[0].message


def test_what_a_drive_does_not_read_is_named(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, read = raw_bytes_of(step, "model.large") + BLOCK, source.Files._read

    def failing(self: source.Files, handle: int, view: memoryview, offset: int) -> int:
        if offset <= begin < offset + len(view) and len(view) > BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, handle, view, offset)

    monkeypatch.setattr(source.Files, "_read", failing)
    found = verified(step)
    assert found.code == 1
    assert all("Input/output error" in fault.message for fault in found.faults)


def test_a_file_of_others_is_not_judged(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may read everything.
    monkeypatch.setattr(
        "tunetool.checkpoint.verification.problem_of_file", lambda *_: "cannot be read (Permission denied)"
    )
    assert verified(step).code == 3


def test_a_drained_step_is_compared_with_its_marker_too(step: Path, tmp_path: Path, drains: Any, run: Run) -> None:
    bulk = tmp_path / "bulk"
    copy = drains(step, bulk).wait()
    code, shown = run("verify", copy)
    assert (code, "compared with checksums of the save and of the drain" in shown) == (0, True)
    padding = next(at for at in range(data_of(copy).stat().st_size) if at not in owners(copy))
    flip(data_of(copy), padding)
    found = verified(copy)
    assert [fault.message for fault in found.faults] == [
        f"`{copy}` differs from what was drained: `{data_of(copy).name}` has other bytes"
    ]
    (copy / markers.MARKER).write_text("{")
    assert "is damaged" in verified(copy).faults[0].message
    by_torch = drains(save_by_torch(tmp_path / "step_8", {"a": torch.ones(3)}), bulk).wait()
    assert run("verify", by_torch)[0] == 0


def test_a_replica_is_not_called_drained(step: Path, tmp_path: Path, drains: Any, run: Run) -> None:
    copy = drains(step, tmp_path / "bulk").wait()
    rewrite(copy / markers.MARKER, sums=markers.OF_THE_SAVE)
    assert [each.drained for each in catalogue([tmp_path / "bulk"]).entries] == [False]
    code, shown = run("verify", copy)
    assert (code, "checksums of the save and of the replica" in shown) == (0, True)
    found = verified(copy)
    assert (found.drained, found.replica) == (False, True)


def rewrite(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_marker_that_lacks_files_proves_nothing(step: Path, tmp_path: Path, drains: Any, run: Run) -> None:
    copy = drains(small_steps.save(tmp_path / "step_8", 1.0), tmp_path / "bulk").wait()
    rows = json.loads((copy / markers.MARKER).read_text())["files"]
    first, second = sorted(rows)
    flip(copy / second, 1000)
    for listed, lacking in (({first: rows[first]}, f"`{second}`"), ({}, f"`{first}` and 1 more")):
        rewrite(copy / markers.MARKER, files=listed)
        code, shown = run("verify", copy)
        assert (code, shown.splitlines()[-1]) == (3, "UNPROVEN")
        assert f"`{copy / markers.MARKER}` has no checksum of {lacking}" in shown
        assert "compared with" not in shown
        assert not verified(copy).drained
    # The save's own checksums do prove.
    proven = drains(step, tmp_path / "bulk").wait()
    rewrite(proven / markers.MARKER, files={})
    code, shown = run("verify", proven)
    assert (code, "checksums of the save: " in shown) == (0, True)


def test_a_fifo_in_place_of_any_file_holds_nobody(tmp_path: Path, drains: Any, run: Run) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    copy = drains(small_steps.save(scratch / "step_8", 1.0), bulk).wait()
    rewrite(copy / markers.MARKER, files={"fifo": {"size": 1, "xxh3_64": "0"}})
    os.mkfifo(copy / "fifo")
    assert "`fifo` cannot be read: it is not a regular file but a FIFO" in run("verify", copy)[1]
    partial = bulk / ".draining-step_9-0123456789abcdef"
    (partial / "ranks").mkdir(parents=True)
    for path in (
        copy / markers.MARKER,
        scratch / "step_8" / ".tunetool-was-drained.json",
        *(partial / name for name in ("plan.json", "changed.json", "ranks/00000.json")),
    ):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert run("ls", scratch, bulk)[0] == 0
    code, shown = run("verify", copy)
    assert (code, "it is not a regular file but a FIFO" in shown) == (1, True)
    (copy / markers.MARKER).unlink()
    drains(scratch / "step_8", tmp_path / "elsewhere").wait()
    other = tmp_path / "elsewhere" / "step_8"
    (other / ".metadata").unlink()
    os.mkfifo(other / ".metadata")
    assert run("verify", other)[0] == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.mkdir(),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(json.dumps({"digest": "", "files": {}, "hosts": {}, "saved": 10**400})),
    ],
)
@pytest.mark.parametrize("name", [markers.MARKER, ".tunetool-was-drained.json"])
def test_one_bad_marker_spoils_no_other_step(name: str, spoil: Callable[[Path], Any], tmp_path: Path, run: Run) -> None:
    for number in (1, 2):
        small_steps.save(tmp_path / f"step_{number}", number)
    spoil(tmp_path / "step_2" / name)
    rows = json.loads(run("ls", tmp_path, "--json", "-")[1])["steps"]
    assert [row["whole"] for row in rows] == [True, name != markers.MARKER]
    if name == markers.MARKER:
        assert name in rows[1]["problem"]
    last = latest([tmp_path], world=1)
    assert last is not None
    assert last.step == (1 if name == markers.MARKER else 2)


def test_a_tier_that_cannot_be_read_is_an_error_for_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "tier").touch()
    with pytest.raises(CannotJudge, match="Not a directory"):
        latest([tmp_path / "tier"], world=1)


def test_a_time_that_no_calendar_has_is_left_out(tmp_path: Path, drains: Any, run: Run) -> None:
    copy = drains(small_steps.save(tmp_path / "step_1", 1.0), tmp_path / "bulk").wait()
    rewrite(copy / markers.MARKER, saved={"epoch": 0, "time_ns": 1e40})
    (row,) = json.loads(run("ls", tmp_path / "bulk", "--json", "-")[1])["steps"]
    assert (row["saved"], row["whole"]) == (None, True)
    assert run("ls", tmp_path / "bulk")[0] == 0


def test_steps_are_listed_as_a_job_sees_all_tiers(tmp_path: Path, drains: Any) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    step = small_steps.save(scratch / "step_1", 1.0)
    drains(step, bulk).wait()
    (step / ".tunetool-was-drained.json").unlink()
    first = small_steps.data_of(step)[0]
    first.write_bytes(first.read_bytes())
    last = latest([scratch, bulk], world=1)
    assert last is not None
    listed = catalogue([scratch, bulk]).entries
    assert [(each.path, each.drained) for each in listed if each.resumed] == [(str(last.path), True)]
    assert last.path == bulk / "step_1"
    assert "was written to after it was drained" in str(listed[0].problem)
    assert [each.resumed for each in catalogue([scratch / "step_1", bulk / "step_1"]).entries] == [False, True]


@pytest.mark.parametrize("drained", [False, True])
def test_an_interrupted_verification_leaves_no_thread(drained: bool, step: Path, tmp_path: Path, drains: Any) -> None:
    path = drains(step, tmp_path / "bulk").wait() if drained else step

    class Interrupted(PlainProgress):
        @contextmanager
        def moving(self, name: str, total: int) -> Any:
            def tick(done: int) -> None:
                raise KeyboardInterrupt

            yield tick if ("drained" in name) == drained else lambda done: None

    before = threading.active_count()
    with suppress(KeyboardInterrupt):  # it may be done before the first tick
        verify_step(path, Interrupted())
    assert threading.active_count() == before


def test_steps_are_listed_with_what_a_job_makes_of_them(tmp_path: Path, drains: Any, run: Run) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    for number in (1, 2, 3):
        small_steps.save(scratch / f"step_{number}", number)
    drains(scratch / "step_1", bulk).wait()
    small_steps.save(scratch / "elsewhere", 4)
    small_steps.data_of(scratch / "step_3")[0].unlink()
    code, shown = run("ls", scratch, bulk, "--json", "-")
    document = json.loads(shown)
    rows = {row["path"]: row for row in document["steps"]}
    assert code == 0
    assert [Path(path).relative_to(tmp_path) for path in rows] == [
        *(Path("scratch", f"step_{number}") for number in (1, 2, 3)),
        Path("bulk/step_1"),
        Path("scratch/elsewhere"),
    ]
    assert {path for path, row in rows.items() if not row["whole"]} == {str(scratch / "step_3")}
    assert {path for path, row in rows.items() if row["drained"]} == {str(each / "step_1") for each in (scratch, bulk)}
    assert document["resumed"] == str(scratch / "step_2")
    assert {row["world"] for row in rows.values()} == {1}
    shown = " ".join(run("ls", scratch, bulk)[1].split())
    assert f"A job would resume from `{scratch / 'step_2'}`" in shown
    assert f"`{scratch / 'step_3'}` is not whole: shard " in shown
    assert f"`{scratch / 'elsewhere'}`: no job resumes from it" in shown


def test_replicas_that_a_node_keeps_are_listed(tmp_path: Path, drains: Any, run: Run) -> None:
    scratch = tmp_path / "scratch"
    for number in (1, 2, 3):
        home = bulk.replicas_of(scratch, "node7")
        copy = drains(small_steps.save(tmp_path / "node7" / f"step_{number}", number), home).wait()
        rewrite(copy / markers.MARKER, sums=markers.OF_THE_SOURCE)
    small_steps.data_of(home / "step_2")[0].write_bytes(b"cut")
    (home / "step_3").rename(bulk.partial_of(home, "step_3", "0123456789abcdef"))
    document = json.loads(run("ls", scratch, "--json", "-")[1])
    rows = {row["step"]: row for row in document["steps"]}
    assert {number: row["whole"] for number, row in rows.items()} == {1: True, 2: False, 3: False}
    assert {(row["replica_of"], row["drained"], row["resumed"]) for row in rows.values()} == {("node7", False, False)}
    assert "has 3 of " in rows[2]["problem"]
    assert rows[3]["problem"] == "its replication did not end"
    assert document["resumed"] is None
    shown = " ".join(run("ls", scratch)[1].split())
    assert "There are only replicas of other nodes" in shown
    small_steps.save(scratch / "step_1", 1)
    assert f"A job would resume from `{scratch / 'step_1'}`" in " ".join(run("ls", scratch)[1].split())


def test_a_step_may_be_named_itself_and_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_steps.save(tmp_path / "step_1", 1)
    small_steps.save(tmp_path / "step_2", 2)
    monkeypatch.chdir(tmp_path / "step_1")
    assert [Path(each.path).name for each in catalogue([Path()]).entries] == ["step_1"]
    both = catalogue([tmp_path / "step_1", tmp_path]).entries
    assert [(Path(each.path).name, each.resumed) for each in both] == [("step_1", False), ("step_2", True)]


def test_a_drain_that_did_not_end_and_no_step_at_all(tmp_path: Path, run: Run) -> None:
    assert "There is no step: a job would begin anew." in run("ls", tmp_path)[1]
    partial = tmp_path / ".draining-step_5-0123456789abcdef"
    partial.mkdir()
    (partial / "data").write_bytes(b"x" * 1000)
    (entry,) = catalogue([tmp_path]).entries
    assert (entry.step, entry.bytes, entry.resumed) == (5, 1000, False)
    assert "had only begun" in str(entry.problem)
    assert "no step can be read by every rank" in " ".join(run("ls", tmp_path)[1].split())


def test_contents_are_shown_with_totals(step: Path, run: Run) -> None:
    code, shown = run("show", step)
    assert code == 0
    assert "15 tensors of " in shown
    assert "3 objects of " in shown
    code, shown = run("show", step, "model.w*", "--json", "-")
    document = json.loads(shown)
    assert (code, [each["name"] for each in document["tensors"]]) == (0, ["model.weight", "model.waves"])
    weight = document["tensors"][0]
    assert (weight["dtype"], weight["shape"], weight["bytes"]) == ("float32", [301, 257], 301 * 257 * 4)
    (piece,) = weight["pieces"]
    assert (piece["file"], piece["rank"], piece["sizes"]) == (data_of(step).name, 0, [301, 257])
    assert document["totals"]["dtypes"] == {
        "complex64": {"tensors": 1, "bytes": 280},
        "float32": {"tensors": 1, "bytes": 309428},
    }
    with pytest.raises(UsageProblem, match="matches nothing"):
        run("show", step, "nothing*")


def test_names_of_anybody_stay_in_their_line(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = ("a\nb", "c[bold]d", "\x1b[31me")
    paths = [save(tmp_path / f"step_{number}", dict.fromkeys(names, torch.ones(number))) for number in (1, 2)]
    for words in (("show", paths[0]), ("diff", *paths)):
        shown = run(*words)[1]
        for name in ("a\\nb", "c[bold]d", "\\x1b[31me"):
            assert any(line.startswith(f"{name} ") for line in shown.splitlines()), shown


@pytest.mark.parametrize("threads", [1, 4])
def test_a_name_has_room_in_a_narrow_terminal(
    threads: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunetool.report.page.WIDTH", 80)
    name = "model.layers.10.attn.weight"
    path = save(tmp_path / "step_1", {name: torch.ones(2048, 1024, dtype=torch.bfloat16)}, threads=threads)
    assert any(line.startswith(f"{name} ") for line in run("show", path)[1].splitlines())


def changes(run: Run, a: Path, b: Path, *words: str) -> dict[str, dict[str, Any]]:
    code, shown = run("diff", a, b, *words, "--json", "-")
    rows = {row["name"]: row for row in json.loads(shown)["names"]}
    assert code == int(any(row["state"] != "equal" for row in rows.values()))
    return rows


@pytest.mark.parametrize("at_once", [1, 100, 128 << 20])
def test_one_state_is_equal_however_it_was_saved(
    at_once: int, step: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "AT_ONCE", at_once)
    state = seeded.state(1, 1.0)
    if at_once < 1000:  # few elements at a time
        state = {"a": torch.randn(30, 4), "b": torch.tensor(1.0), "c": 5, "d": torch.randn(2, 3).t()}
        step = save(tmp_path / "step_8", state)
    theirs = save_by_torch(tmp_path / "theirs", state)
    assert {row["state"] for row in changes(run, step, theirs).values()} == {"equal"}
    assert "0 not" in run("diff", theirs, step)[1]


def test_tensors_are_compared_however_ranks_split_them(
    forks: Any, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "AT_ONCE", 50_000)
    for name, world, seed, writer in (("a", 2, 1, "torch"), ("b", 3, 1, "ours"), ("c", 2, 2, "ours")):
        order = {"path": str(tmp_path / name), "meet": str(tmp_path / f"meet-{name}"), "seed": seed, "writer": writer}
        assert {each["status"] for each in forks(do="save_shards", world=world, **{"with": order})} == {0}
    a, b, c = (tmp_path / name for name in "abc")
    assert {row["state"] for row in changes(run, a, b).values()} == {"equal"}
    assert {row["state"] for row in changes(run, a, c).values()} == {"different"}


def test_what_differs_is_measured(tmp_path: Path, run: Run) -> None:
    nan, inf = float("nan"), float("inf")
    a = {
        "same": torch.tensor([1.0, nan]),
        "value": torch.tensor([1.0, -2.0, nan, 4.0]),
        "zero": torch.tensor([0.0]),
        "infinite": torch.tensor([inf, 1.0]),
        "half": torch.tensor([1.0], dtype=torch.bfloat16),
        "whole": torch.tensor([2**62, 5]),
        "farthest": torch.tensor([-(2**63), 7]),
        "unsigned": torch.tensor([2**63 - 1, 0]).view(torch.uint64),
        "complex": torch.tensor([1 + 1j]),
        "shape": torch.ones(3),
        "dtype": torch.ones(3),
        "kind": torch.ones(3),
        "object": {"lr": 1},
        "only": torch.ones(1),
        "empty": torch.ones(0, 2),
    }
    b = {
        **a,
        "value": torch.tensor([1.0, -3.0, nan, nan]),
        "zero": torch.tensor([-0.0]),
        "infinite": torch.tensor([inf, -inf]),
        "half": torch.tensor([1.5], dtype=torch.bfloat16),
        "whole": torch.tensor([2**62 + 1, 5]),
        "farthest": torch.tensor([2**63 - 1, 7]),
        "unsigned": torch.tensor([-(2**63), 0]).view(torch.uint64),
        "complex": torch.tensor([1 + 3j]),
        "shape": torch.ones(4),
        "dtype": torch.ones(3, dtype=torch.float64),
        "kind": "text",
        "object": {"lr": 2},
        "another": torch.ones(1),
    }
    del b["only"]
    rows = changes(run, save(tmp_path / "step_1", a), save_by_torch(tmp_path / "step_2", b))
    shown = {
        name: (
            row["state"],
            row["elements"],
            row["largest_change"],
            row["largest_relative"],
            row["nan_a"],
            row["nan_b"],
        )
        for name, row in rows.items()
    }
    assert shown == {
        "same": ("equal", 0, 0, 0, 1, 1),
        "value": ("different", 2, 1.0, 1 / 3, 1, 2),
        "zero": ("different", 1, 0, 0, 0, 0),
        "infinite": ("different", 1, "inf", "inf", 0, 0),
        "half": ("different", 1, 0.5, pytest.approx(1 / 3), 0, 0),
        "whole": ("different", 1, 1.0, 2**-62, 0, 0),
        "farthest": ("different", 1, 2.0**64, 2.0, 0, 0),
        "unsigned": ("different", 1, 1.0, 2**-63, 0, 0),
        "complex": ("different", 1, 2.0, pytest.approx(2 / 3), 0, 0),
        "shape": ("other shape", 0, 0, 0, 0, 0),
        "dtype": ("other dtype", 0, 0, 0, 0, 0),
        "kind": ("other kind", 0, 0, 0, 0, 0),
        "object.lr": ("different", 0, 0, 0, 0, 0),
        "only": ("only in A", 0, 0, 0, 0, 0),
        "empty": ("equal", 0, 0, 0, 0, 0),
        "another": ("only in B", 0, 0, 0, 0, 0),
    }
    assert set(changes(run, tmp_path / "step_1", tmp_path / "step_2", "s*")) == {"same", "shape"}
    assert set(changes(run, tmp_path / "step_1", tmp_path / "step_2", "anoth*")) == {"another"}


def test_a_size_that_nobody_has_is_refused_at_once(tmp_path: Path, run: Run) -> None:
    path = save_by_torch(tmp_path / "step_1", {"a": torch.ones(3)})
    described, huge = metadata.read(path), torch.Size([1 << 60])
    described.state_dict_metadata["a"].size = huge
    described.state_dict_metadata["a"].chunks[0].sizes = huge
    (path / ".metadata").write_bytes(metadata.dumps(described, path))
    assert run("verify", path)[0] == 1
    with pytest.raises(CannotJudge, match="holds `a` with shape"):
        run("diff", path, path)
    described.state_dict_metadata["a"].chunks[0].sizes = torch.Size([1 << 62])
    (path / ".metadata").write_bytes(metadata.dumps(described, path))
    assert run("verify", path)[0] == 1


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_only_torch_reads(tmp_path: Path, run: Run) -> None:
    turned = save(tmp_path / "step_1", {"turned": torch.randn(40, 50).t()})
    assert (run("verify", turned)[0], run("diff", turned, turned)[0]) == (0, 0)
    quantized = {"q": torch.quantize_per_tensor(torch.randn(5, 5), 0.1, 3, torch.qint8), "a": torch.ones(2)}
    steps = save(tmp_path / "step_2", {"q": quantized["q"]}), save(tmp_path / "step_3", quantized)
    assert [run("verify", step)[0] for step in steps] == [0, 0]
    assert (run("diff", steps[1], steps[1])[0], run("diff", *steps)[0]) == (3, 1)
    flip(data_of(steps[0]), data_of(steps[0]).stat().st_size // 8)
    assert [fault.tensor for fault in verified(steps[0]).faults] == ["q"]


def test_a_damaged_side_cannot_be_compared(step: Path, sound: Path, run: Run) -> None:
    flip(data_of(step), raw_bytes_of(step, "model.large") + 4096)
    with pytest.raises(CannotJudge, match=r"`model.large` is damaged"):
        run("diff", sound, step)
    assert run("diff", sound, step, "model.w*")[0] == 0
    data_of(step).rename(step.parent / "elsewhere")
    (step / data_of(sound).name).symlink_to(step.parent / "elsewhere")
    with pytest.raises(CannotJudge, match="leads out of"):
        run("diff", sound, step)
