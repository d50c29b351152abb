"""Steps that leave the node: which may be deleted, which a new job can read, and how fast they may go. Without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint.pace import Pace, Saver, is_saving, saving
from tunetool.checkpoint.steps import remove_step, step_number, steps_in, surplus, sweep
from tunetool.errors import CannotJudge, UsageProblem

pytest.importorskip("xxhash")

from tunetool.checkpoint.bulk import Delivery, lacking, writer_of
from tunetool.checkpoint.draining import places_of
from tunetool.checkpoint.tiers import Place, Survey, agree
from tunetool.checkpoint.transfer import Filed

NUMBERS = st.sets(st.integers(0, 40), max_size=12)
FILED = Filed(10, "0" * 16)


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


@given(NUMBERS, NUMBERS, st.integers(1, 5))
def test_what_is_deleted_is_older_than_the_newest_drained_step(steps: set[int], drained: set[int], keep: int) -> None:
    going = surplus(steps, drained, keep)
    assert set(going) <= steps
    assert len(steps) - len(going) >= min(keep, len(steps))
    if drained:
        assert all(step < max(drained) for step in going)
    else:
        assert going == []
    # On shared storage itself all that may go goes.
    left = steps - set(surplus(steps, steps, keep))
    assert left == set(sorted(steps)[-keep:])


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(UsageProblem):
        surplus([1, 2], [1, 2], 0)


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


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy_until = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def saves(self, scratch: Path) -> list[Saver]:
        return [Saver(("a save",), scratch / "lock", "process 7")] if self.now < self.busy_until else []


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
    assert line.endswith("waited 10 s for a save and goes on beside it: `lock`: process 7")
    clock.now = 200.0
    pace.wait(50)
    clock.busy_until = 205.0
    pace.wait(50)
    assert clock.now == pytest.approx(205.0, abs=0.1), "the next one is another save"


def test_a_save_is_seen_while_any_rank_saves_and_not_after(tmp_path: Path) -> None:
    assert not is_saving(tmp_path)
    with saving(tmp_path):
        with saving(tmp_path):
            assert is_saving(tmp_path)
        assert is_saving(tmp_path)
    assert not is_saving(tmp_path)


def test_a_save_that_dies_is_over(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with saving(tmp_path):
            os._exit(0)
    os.waitpid(pid, 0)
    assert not is_saving(tmp_path)


def test_a_save_that_dies_is_over_though_a_child_of_it_lives(tmp_path: Path) -> None:
    """A loader of data, forked during the save, has the parent's open files."""
    script = """
import os, sys, time
from pathlib import Path
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
            assert is_saving(tmp_path)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert not is_saving(tmp_path)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_child_that_leaves_the_save_does_not_end_it(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from tunetool.checkpoint.pace import is_saving, saving
with saving(Path(sys.argv[1])):
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    print(is_saving(Path(sys.argv[1])))
"""
    found = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert found.stdout == "True\n"


def test_the_lock_of_our_writer_counts_until_it_is_stale(tmp_path: Path) -> None:
    from tunetool.checkpoint import pace, saver_lock

    assert pace.SAVE_LOCK == saver_lock.NAME
    (tmp_path / "step_1").mkdir()
    held = tmp_path / "step_1" / saver_lock.NAME
    held.write_text("{}")
    assert is_saving(tmp_path)
    os.utime(held, (0, 0))
    assert not is_saving(tmp_path)


@pytest.mark.parametrize(
    ("name", "rank"), [("__3_0.distcp", 3), ("__12_4.0123abcd.distcp", 12), ("data.bin", None), ("x/__1_0.distcp", 1)]
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
        "`__2_0.distcp` of rank 2, of which nothing was heard",
        "`__9_0.distcp` of rank 9 of the job that saved it; this one has 4",
    ]
    assert lacking({"__0_0.distcp": 1}, brought, world=4) == []


@pytest.mark.parametrize(
    ("environment", "found"),
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
    environment: dict[str, str], found: tuple[int | None, int | None, int | None, int | None]
) -> None:
    assert tuple(places_of(environment).values()) == found


def place(step: int, tier: str, digest: str = "d", problem: str | None = None) -> Place:
    return Place(step, f"/{tier}/step_{step}", digest, problem)


def test_all_ranks_go_on_from_the_newest_step_that_each_can_read() -> None:
    first = Survey(0, "a", (place(300, "local"), place(200, "local"), place(200, "bulk")))
    second = Survey(1, "b", (place(300, "local", problem="shard `__0_0.distcp` is missing"), place(200, "bulk")))
    found = agree([first, second])
    assert found is not None
    assert found.step == 200
    assert found.paths == {0: "/local/step_200", 1: "/bulk/step_200"}
    assert found.skipped == ("step 300: rank 1 on `b`: shard `__0_0.distcp` is missing",)


def test_two_saves_of_one_step_are_never_mixed() -> None:
    first = Survey(0, "a", (place(300, "local", "new"), place(300, "bulk", "old")))
    second = Survey(1, "b", (place(300, "bulk", "old"),))
    found = agree([first, second])
    assert found is not None
    assert found.paths == {0: "/bulk/step_300", 1: "/bulk/step_300"}
    with pytest.raises(CannotJudge) as refused:
        agree([Survey(0, "a", (place(300, "local", "new"),)), second])
    assert "the ranks have different saves of it" in refused.value.message


def test_no_step_at_all_is_a_new_beginning_and_unreadable_ones_are_not() -> None:
    assert agree([Survey(0, "a"), Survey(1, "b")]) is None
    with pytest.raises(CannotJudge) as refused:
        agree([Survey(0, "a", (place(300, "local"),)), Survey(1, "b"), Survey(2, "b")])
    assert "step 300: rank 1, 2 on `b`: it is not there" in refused.value.message
    assert "to begin anew" in str(refused.value.hint)


DIGESTS = st.sampled_from(["x", "y"])
PLACES = st.lists(
    st.builds(Place, st.integers(0, 5), st.sampled_from(["/l", "/b"]), DIGESTS, st.sampled_from([None, "gone"])),
    max_size=6,
)


@given(st.lists(PLACES, min_size=1, max_size=4))
def test_what_is_agreed_on_is_readable_by_all_and_the_newest(seen: list[list[Place]]) -> None:
    surveys = [Survey(rank, f"node{rank}", tuple(places)) for rank, places in enumerate(seen)]
    good = [{(p.step, p.digest) for p in places if p.problem is None} for places in seen]
    common = set.intersection(*good)
    if not any(seen):
        assert agree(surveys) is None
    elif not common:
        with pytest.raises(CannotJudge):
            agree(surveys)
    else:
        found = agree(surveys)
        assert found is not None
        assert found.step == max(step for step, _ in common)
        digests = [
            {p.digest for p in places if (p.step, p.path, p.problem) == (found.step, found.paths[rank], None)}
            for rank, places in enumerate(seen)
        ]
        assert set.intersection(*digests), "all from one save"


def test_the_process_that_drains_needs_no_torch() -> None:
    program = "import sys, tunetool.checkpoint.drain_worker; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
