"""Steps that leave the node: which can be deleted, which a new job can read, and the limit of speed. Without torch."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stops
from tunetool.checkpoint import pace
from tunetool.checkpoint.pace import Pace, savers, saving
from tunetool.checkpoint.steps import (
    Stamp,
    put_step,
    remove_step,
    replaced_steps,
    same_step,
    stamp,
    stamps,
    step_number,
    steps_in,
    surplus,
    sweep,
)
from tunetool.errors import CannotJudge, UsageProblem

pytest.importorskip("xxhash")

from tunetool.checkpoint.agreement import StepCopy, Survey, agree
from tunetool.checkpoint.bulk import Delivery, lacking, writer_of
from tunetool.checkpoint.draining import launcher_ranks
from tunetool.checkpoint.transfer import CopiedFile

NUMBERS = st.sets(st.integers(0, 40), max_size=12)
FILED = CopiedFile(10, "0" * 16)


@pytest.mark.parametrize(("name", "number"), [("step_100", 100), ("step-7", 7), ("step_000100", 100), ("step_0", 0)])
def test_steps_are_called_so(name: str, number: int) -> None:
    assert step_number(name) == number


@pytest.mark.parametrize("name", ["step100", "step_", "step_1.tmp", "Step_1", "step_-1", ".step_1", "step_1\n", "100"])
def test_and_not_otherwise(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem):
        step_number(name)
    (tmp_path / name).mkdir()
    assert steps_in(tmp_path) == {}


def test_two_directories_of_one_step_are_refused(tmp_path: Path) -> None:
    for name in ("step_100", "step_0100"):
        (tmp_path / name).mkdir()
    with pytest.raises(UsageProblem) as refused:
        steps_in(tmp_path)
    assert "are the same step" in refused.value.message


@given(
    st.dictionaries(st.integers(0, 40), st.builds(Stamp, st.integers(0, 2), st.integers(0, 9)), max_size=12),
    NUMBERS,
    NUMBERS,
    st.integers(1, 5),
)
def test_what_is_deleted_was_saved_before_what_stays(
    steps: dict[int, Stamp], deletable: set[int], spared: set[int], keep: int
) -> None:
    going = surplus(steps, deletable, spared, keep)
    assert set(going) <= steps.keys() & deletable - spared
    left = steps.keys() - set(going)
    assert len(left) >= min(keep, len(steps))
    # A step that stays although a later one was deleted has a reason.
    reasons = spared | (steps.keys() - deletable)
    assert all(steps[gone] <= steps[stays] for gone in going for stays in left - reasons)
    # If nothing else keeps them, all are deleted but those that were saved last.
    last = sorted(steps, key=lambda step: (steps[step], step))[-keep:]
    assert steps.keys() - set(surplus(steps, steps, (), keep)) == set(last)


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(UsageProblem):
        surplus({1: Stamp(0, 1), 2: Stamp(0, 2)}, [1, 2], (), 0)


SECOND = 10**9


class Saver:
    """Saves at given times of its clock; each save is drained at once, or not at all."""

    def __init__(self) -> None:
        self.recorded: dict[int, Stamp] = {}
        self.undrained: dict[int, int] = {}
        self.count = 0

    def save(self, clock: int, drained: bool) -> None:
        self.count += 1
        when = clock * SECOND
        if drained:
            others = self.undrained.values()
            self.recorded[self.count] = stamp(when, list(self.recorded.values()), list(others), when)
        else:
            self.undrained[self.count] = when

    def order(self, clock: int) -> list[int]:
        order = stamps(self.recorded, self.undrained, clock * SECOND)
        return sorted(order, key=order.__getitem__)


@given(st.lists(st.tuples(st.integers(5, 10**6), st.booleans()), min_size=1, max_size=12))
def test_a_clock_that_only_goes_on_orders_by_time(saves: list[tuple[int, bool]]) -> None:
    saver, clock = Saver(), 0
    for later, drained in saves:
        clock += later
        saver.save(clock, drained)
    assert saver.order(clock + 1) == list(range(1, saver.count + 1))


@given(
    st.lists(st.tuples(st.integers(5, 1000), st.booleans()), min_size=1, max_size=8),
    st.integers(4, 10**6),
    st.lists(st.integers(1, 1000), min_size=1, max_size=8),
)
def test_a_clock_that_goes_back_turns_nothing_round(
    before: list[tuple[int, bool]], back: int, after: list[int]
) -> None:
    """It holds if the change is noticed: the last save before it and those after it were drained."""
    saver, clock = Saver(), 10**7
    for later, drained in [*before, (5, True)]:
        clock += later
        saver.save(clock, drained)
    clock -= back
    for later in [1, *after]:
        clock += later
        saver.save(clock, True)
    drained_ones = [each for each in saver.order(clock) if each in saver.recorded]
    assert drained_ones == sorted(drained_ones)


def test_a_step_from_before_the_clock_went_back_is_no_newer() -> None:
    known = [Stamp(0, 1000 * SECOND), Stamp(1, 500 * SECOND)]
    assert stamp(1001 * SECOND, known, (), 510 * SECOND) == Stamp(0, 1001 * SECOND)
    assert stamp(505 * SECOND, known, (), 510 * SECOND) == Stamp(1, 505 * SECOND)
    # A file server whose clock is ahead by less does not count as a clock that went back.
    assert stamp(511 * SECOND, [Stamp(0, 510 * SECOND)], (), 510 * SECOND) == Stamp(0, 511 * SECOND)


def test_another_name_of_a_step_is_found(tmp_path: Path) -> None:
    (tmp_path / "step_7").mkdir()
    (tmp_path / "step_70").mkdir()
    (tmp_path / "step_007").write_text("a file")
    assert same_step(tmp_path / "step_7") is None
    for name in ("step-7", "step_0007"):
        assert same_step(tmp_path / name) == tmp_path / "step_7"
    assert same_step(tmp_path / "nothing" / "step_7") is None


def test_a_deletion_that_was_interrupted_leaves_no_half_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = tmp_path / "step_1"
    step.mkdir()
    (step / "data").write_bytes(bytes(10))
    # The process dies right after the rename.
    monkeypatch.setattr("tunetool.checkpoint.steps.shutil.rmtree", lambda *_, **__: None)
    remove_step(step)
    assert steps_in(tmp_path) == {}
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.undo()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []
    remove_step(step)


STEPS = {"old": b"the step before", "new": b"saved again"}


def two_steps(root: Path) -> tuple[Path, Path]:
    """A complete step without its name, and the one that has it."""
    built, final = root / ".draining-step_1-0123456789abcdef", root / "step_1"
    for path, content in ((built, STEPS["new"]), (final, STEPS["old"])):
        path.mkdir()
        for name in ("a", "b"):
            (path / name).write_bytes(content)
    return built, final


def held(step: Path) -> set[bytes]:
    return {(step / name).read_bytes() for name in ("a", "b")}


def replaced_until(built: Path, final: Path, log: Path, at: int | None) -> None:
    """A process replaces a step, and is killed before its change number ``at``."""
    pid = os.fork()
    if pid == 0:
        stops.install(final.parent, log, at)
        put_step(built, final)
        os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_old_step_stands_until_the_new_one_has_its_name(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr("tunetool.checkpoint.steps.exchange", lambda *_: False)
    (tmp_path / "whole").mkdir()
    replaced_until(*two_steps(tmp_path / "whole"), tmp_path / "log", None)
    assert held(tmp_path / "whole" / "step_1") == {STEPS["new"]}
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["step_1"]
    for at in range(len(stops.points(tmp_path / "log"))):
        root = tmp_path / str(at)
        root.mkdir()
        built, final = two_steps(root)
        replaced_until(built, final, tmp_path / "again", at)
        if exchanges:
            assert final.exists()
        # Readers find the old one meanwhile, and the next drain gives it back its name.
        readable = [*steps_in(root).values(), *replaced_steps(root).values()]
        assert len(readable) == 1
        assert held(readable[0]) in ({STEPS["old"]}, {STEPS["new"]})
        sweep(root)
        assert held(final) in ({STEPS["old"]}, {STEPS["new"]})
        assert {path.name for path in root.iterdir()} <= {"step_1", built.name}


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_error_while_a_step_is_replaced_leaves_both(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, final = two_steps(tmp_path)

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    rename = Path.rename

    def fail_to_name(path: Path, target: Path) -> Path:
        return rename(path, target) if target != final or path != built else Path(str(fail()))

    monkeypatch.setattr("tunetool.checkpoint.steps.exchange", fail if exchanges else lambda *_: False)
    monkeypatch.setattr(Path, "rename", fail_to_name)
    with pytest.raises(OSError, match="Input/output error"):
        put_step(built, final)
    assert (held(built), held(final)) == ({STEPS["new"]}, {STEPS["old"]})
    assert len(list(tmp_path.iterdir())) == 2


class Clock:
    """A clock that advances only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def saves(self, scratch: Path) -> list[pace.RunningSave]:
        return [pace.RunningSave(("a save",), scratch / "lock", "process 7")] if self.now < self.busy_until else []


def test_a_rate_is_kept_and_nothing_is_saved_up_for_a_burst() -> None:
    clock = Clock()
    pace = Pace(Path(), 100.0, clock=clock, sleep=clock.sleep, saves=clock.saves)
    for _ in range(11):
        pace.wait(50)
    assert clock.now == pytest.approx(5.0)
    clock.now = 100.0
    for _ in range(3):
        pace.wait(50)
    assert clock.now == pytest.approx(101.0), "95 idle seconds allow no more than the rate"


def test_it_pauses_while_a_save_runs_and_gives_signs_of_life() -> None:
    clock, signs = Clock(), []
    clock.busy_until = 3.0
    pace = Pace(Path(), None, lambda: signs.append(clock.now), clock, clock.sleep, clock.saves)
    pace.wait(50)
    assert clock.now == pytest.approx(3.0, abs=0.1)
    assert len(signs) > 10
    pace.wait(50)
    assert clock.now == pytest.approx(3.0, abs=0.1), "without a rate it does not wait"


def test_no_save_is_waited_for_without_end_and_it_is_told_which() -> None:
    clock, lines = Clock(), []
    clock.busy_until = 100.0
    pace = Pace(Path(), None, clock=clock, sleep=clock.sleep, saves=clock.saves, say=lines.append, limit=10.0)
    for _ in range(3):
        pace.wait(50)
        assert clock.now == pytest.approx(10.0, abs=0.1), "it waits once for each save"
    (line,) = lines
    assert line.endswith("waited 10 s for a save and now continues beside it: `lock`: process 7")
    clock.now = 200.0
    pace.wait(50)
    clock.busy_until = 205.0
    pace.wait(50)
    assert clock.now == pytest.approx(205.0, abs=0.1), "the next one is another save"


def test_a_save_is_seen_while_any_rank_saves_and_not_after(tmp_path: Path) -> None:
    assert not savers(tmp_path)
    with saving(tmp_path):
        with saving(tmp_path):
            assert savers(tmp_path)
        assert savers(tmp_path)
    assert not savers(tmp_path)


def test_a_save_that_dies_is_over(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with saving(tmp_path):
            os._exit(0)
    os.waitpid(pid, 0)
    assert not savers(tmp_path)


def test_a_save_that_dies_is_over_though_a_child_of_it_lives(tmp_path: Path) -> None:
    """A data loader that is forked during the save inherits the parent's open files."""
    script = """
import os, sys, time
from pathlib import Path
from tunetool.checkpoint import pace
from tunetool.checkpoint.pace import saving
with saving(Path(sys.argv[1])):
    there, here = os.pipe()
    if os.fork() == 0:
        os.write(here, b"!")
        time.sleep(60)
    os.read(there, 1)
    print("saving", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "saving\n"
            assert savers(tmp_path)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert not savers(tmp_path)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_child_that_leaves_the_save_does_not_end_it(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from tunetool.checkpoint import pace
from tunetool.checkpoint.pace import savers, saving
with saving(Path(sys.argv[1])):
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    print(bool(savers(Path(sys.argv[1]))))
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_the_lock_of_our_writer_counts_until_it_is_stale(tmp_path: Path) -> None:
    from tunetool.checkpoint import pace, saver_lock

    assert pace.SAVE_LOCK == saver_lock.NAME
    (tmp_path / "step_1").mkdir()
    held = tmp_path / "step_1" / saver_lock.NAME
    held.write_text(saver_lock.Holder.this_process("0a", "0b").text())
    # Its ranks have not met: one of them may wait for a drain first.
    (tmp_path / "step_1" / "__0_0.0a.distcp").touch()
    assert not savers(tmp_path)
    (tmp_path / "step_1" / "__1_0.0b.distcp").touch()
    assert savers(tmp_path)
    os.utime(held, (0, 0))
    assert not savers(tmp_path)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("__3_0.distcp", 3),
        ("__12_4.0123abcd.distcp", 12),
        ("data.bin", None),
        ("x/__1_0.distcp", 1),
        # More digits than int() takes: a damaged `.metadata` of one replica would end the call of all ranks.
        pytest.param(f"__{'9' * 5000}_0.distcp", None, id="no-rank"),
    ],
)
def test_a_file_names_its_writer(name: str, rank: int | None) -> None:
    assert writer_of(name) == rank


def test_what_is_missing_names_rank_and_node() -> None:
    needed = {"__0_0.distcp": 1, "__1_0.distcp": 1, "__1_1.distcp": 1, "__2_0.distcp": 1, "__9_0.distcp": 1}
    brought = [
        Delivery(0, "a", {"__0_0.distcp": FILED}),
        Delivery(1, "b", {"__1_0.distcp": None, "__1_1.distcp": None}),
    ]
    assert lacking(needed, brought, world=4) == [
        "`__1_0.distcp` and 1 more of rank 1 on `b`",
        "`__2_0.distcp` of rank 2, which has not reported",
        "`__9_0.distcp` of rank 9 of the job that saved it; this one has 4",
    ]
    assert lacking({"__0_0.distcp": 1}, brought, world=4) == []


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        (
            {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "SLURM_PROCID": "0"},
            (9, 16, 1, 8),
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
            (3, 4, 1, 2),
        ),
        ({}, (None, None, None, None)),
    ],
)
def test_a_launcher_tells_which_rank_this_is(
    environment: dict[str, str], ranks: tuple[int | None, int | None, int | None, int | None]
) -> None:
    assert tuple(launcher_ranks(environment).values()) == ranks


def step_copy(step: int, tier: str, digest: str = "d", problem: str | None = None) -> StepCopy:
    return StepCopy(step, f"/{tier}/step_{step}", digest, problem)


def test_all_ranks_go_on_from_the_newest_step_that_each_can_read() -> None:
    first = Survey(0, "a", (step_copy(300, "local"), step_copy(200, "local"), step_copy(200, "bulk")))
    second = Survey(
        1, "b", (step_copy(300, "local", problem="shard `__0_0.distcp` is missing"), step_copy(200, "bulk"))
    )
    agreed = agree([first, second])
    assert agreed is not None
    assert agreed.step == 200
    assert agreed.paths == {0: "/local/step_200", 1: "/bulk/step_200"}
    assert agreed.skipped == ("step 300: rank 1 on `b`: shard `__0_0.distcp` is missing",)


def test_two_saves_of_one_step_are_never_mixed() -> None:
    first = Survey(0, "a", (step_copy(300, "local", "new"), step_copy(300, "bulk", "old")))
    second = Survey(1, "b", (step_copy(300, "bulk", "old"),))
    agreed = agree([first, second])
    assert agreed is not None
    assert agreed.paths == {0: "/bulk/step_300", 1: "/bulk/step_300"}
    with pytest.raises(CannotJudge) as refused:
        agree([Survey(0, "a", (step_copy(300, "local", "new"),)), second])
    assert "the ranks have different saves of it" in refused.value.message


def test_no_step_is_a_new_beginning_and_an_unreadable_one_not() -> None:
    assert agree([Survey(0, "a"), Survey(1, "b")]) is None
    with pytest.raises(CannotJudge) as refused:
        agree([Survey(0, "a", (step_copy(300, "local"),)), Survey(1, "b"), Survey(2, "b")])
    assert "step 300: rank 1, 2 on `b`: it is not there" in refused.value.message
    assert "to start from step 0" in str(refused.value.hint)


DIGESTS = st.sampled_from(["x", "y"])
PLACES = st.lists(
    st.builds(StepCopy, st.integers(0, 5), st.sampled_from(["/l", "/b"]), DIGESTS, st.sampled_from([None, "gone"])),
    max_size=6,
)


def test_the_last_saved_step_is_taken_whatever_its_number() -> None:
    def saved(step: int, tier: str, stamp: Stamp | None, written: int) -> StepCopy:
        return StepCopy(step, f"/{tier}/step_{step}", f"digest{step}", None, stamp, written)

    copies = (saved(5000, "bulk", Stamp(0, 50), 70), saved(1500, "bulk", Stamp(0, 60), 65))
    agreed = agree([Survey(0, "a", copies, 100)])
    assert agreed is not None
    assert (agreed.step, agreed.skipped) == (1500, ())
    # A step that no drain has seen is ordered by its own time, and the time of a copy is later.
    agreed = agree([Survey(0, "a", (*copies, saved(700, "local", None, 61), saved(700, "bulk", None, 90)), 100)])
    assert agreed is not None
    assert agreed.step == 700
    agreed = agree([Survey(0, "a", (*copies, saved(700, "local", None, 59), saved(700, "bulk", None, 90)), 100)])
    assert agreed is not None
    assert agreed.step == 1500


def test_a_step_saved_anew_is_told_from_the_old_one() -> None:
    old = StepCopy(3, "/bulk/step_3", "old", None, Stamp(0, 10))
    other = StepCopy(4, "/bulk/step_4", "four", None, Stamp(0, 20))
    new = StepCopy(3, "/local/step_3", "new", None, None, 30)
    agreed = agree([Survey(0, "a", (new, old, other))])
    assert agreed is not None
    assert agreed.paths == {0: "/local/step_3"}
    agreed = agree([Survey(0, "a", (new, old, other)), Survey(1, "b", (old, other))])
    assert agreed is not None
    assert agreed.step == 4, "the new one is not there for all, and the old one is older"


@given(st.lists(PLACES, min_size=1, max_size=4))
def test_what_is_agreed_on_is_readable_by_all_and_the_newest(seen: list[list[StepCopy]]) -> None:
    surveys = [Survey(rank, f"node{rank}", tuple(copies)) for rank, copies in enumerate(seen)]
    good = [{(p.step, p.digest) for p in copies if p.problem is None} for copies in seen]
    common = set.intersection(*good)
    if not any(seen):
        assert agree(surveys) is None
    elif not common:
        with pytest.raises(CannotJudge):
            agree(surveys)
    else:
        agreed = agree(surveys)
        assert agreed is not None
        assert agreed.step == max(step for step, _ in common)
        digests = [
            {p.digest for p in copies if (p.step, p.path, p.problem) == (agreed.step, agreed.paths[rank], None)}
            for rank, copies in enumerate(seen)
        ]
        assert set.intersection(*digests), "all from one save"


def test_the_process_that_drains_needs_no_torch() -> None:
    program = "import sys, tunetool.checkpoint.drain_worker; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
