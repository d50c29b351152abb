"""``Saver``: a save that fails is said in one line, leaves nothing, and training goes on; so for one rank and for two."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from failing_disks import Meanwhile, fill, frozen, loop, mounted, needs_root, run
from saver_ranks import NUMBERS, state_of
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

from tunetool.checkpoint import DirectReader, DirectSavePlanner, FailedSave, Saver, latest
from tunetool.checkpoint import writer as writer_module
from tunetool.checkpoint.job import Job
from tunetool.errors import CannotJudge, UsageProblem
from waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*process group")
Ask = Callable[..., Any]
HOWS = pytest.mark.parametrize("how", ["sync", "async"])


@pytest.fixture(autouse=True)
def no_cached_plans() -> Iterator[None]:
    yield
    for name, cached in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cached.clear()


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((NUMBERS,), float(step))}, "step": step}


def save(saver: Saver, step: int, how: str) -> Path | None:
    """An asynchronous save, too, has the tensors of its step, though training changes them as soon as it may."""
    mine = state(step)
    if how == "sync":
        return saver.save(mine, step)
    saver.save_async(mine, step)
    mine["model"]["w"].fill_(-1)
    return saver.wait()


def holds(path: Path | None, step: int) -> bool:
    assert path is not None
    assert path.name == f"step_{step}"
    loaded = {"model": {"w": torch.zeros(NUMBERS)}, "step": None}
    dcp.load(loaded, storage_reader=DirectReader(path))
    return loaded["step"] == step and torch.equal(loaded["model"]["w"], state(step)["model"]["w"])


def newest(*places: Path) -> int:
    found = latest(places)
    assert found is not None
    assert holds(found.path, found.step)
    return found.step


class Told(list[FailedSave]):
    """What was reported, each once."""

    def one(self) -> str:
        (failed,) = self
        self.clear()
        assert "\n" not in str(failed)
        return str(failed)


@needs_root
@HOWS
@pytest.mark.parametrize(
    ("caching", "left", "words"),
    [(False, 0, "No space left on device"), (True, 2 << 20, " of space left; the save needs ")],
    ids=["full", "nearly full, with cached plans"],
)
@pytest.mark.parametrize("first", [1, 2], ids=["the first save", "a later one"])
def test_a_full_place_sends_the_step_to_the_next(
    tmp_path: Path, how: str, caching: bool, left: int, words: str, first: int
) -> None:
    other, told = tmp_path / "other", Told()
    with mounted(tmp_path / "full", "-t", "tmpfs", "-o", "size=32m", "tmpfs") as full:
        saver = Saver(
            [full, other],
            planner=lambda: DirectSavePlanner(enable_plan_caching=caching),
            on_failure=told.append,
        )
        for step in range(1, 5):
            if step == first:
                fill(full)
                os.truncate(full / "filler", (full / "filler").stat().st_size - left)
            path = save(saver, step, how)
            assert holds(path, step)
            assert newest(full, other) == step
            if step == first:
                assert path == other / f"step_{step}"
                said = told.one()
                assert said.startswith(f"step {step} is not saved in `{full}`: rank 0: `{full}/step_{step}")
                assert words in said
                assert not (full / f"step_{step}").exists()
                (full / "filler").unlink()
            else:
                assert path == full / f"step_{step}"
        assert told == []


@needs_root
@HOWS
def test_a_medium_that_fills_during_the_save(tmp_path: Path, how: str) -> None:
    """No question before the save shows it."""
    told, other = Told(), tmp_path / "other"
    with (
        mounted(tmp_path / "thin", "-t", "tmpfs", "-o", "size=16m", "tmpfs") as thin,
        loop(thin / "image") as (device, _),
        mounted(tmp_path / "disk", device) as disk,
    ):
        act = [lambda: None, lambda: fill(thin)]
        planner = lambda: Meanwhile(act.pop(0) if act else lambda: None)  # noqa: E731
        saver = Saver([disk, other], on_failure=told.append, planner=planner)
        assert holds(save(saver, 1, how), 1)
        run("sync", "--file-system", str(disk))
        path = save(saver, 2, how)
        # Once training has gone on, the tensors are of another step.
        assert holds(path, 2) if path or how == "sync" else newest(disk, other) == 1
        assert "No space left on device" in told.one()
        assert not list((disk / "step_2").glob("*"))
        (thin / "filler").unlink()
        saved = [save(saver, step, how) for step in (3, 4)]
        assert [holds(each, step) for step, each in enumerate(saved, 3)] == [True, True]
        assert saved[1] == disk / "step_4"


@needs_root
@HOWS
def test_a_drive_with_errors(tmp_path: Path, how: str) -> None:
    told, other = Told(), tmp_path / "other"
    with (
        loop(tmp_path / "image", "has_journal") as (device, fail),
        mounted(tmp_path / "disk", device) as disk,
    ):
        act = [lambda: None, lambda: fail(4096)]
        planner = lambda: Meanwhile(act.pop(0) if act else lambda: None)  # noqa: E731
        saver = Saver([disk, other], on_failure=told.append, planner=planner)
        assert holds(save(saver, 1, how), 1)
        run("sync", "--file-system", str(disk))
        path = save(saver, 2, how)
        assert holds(path, 2) if path or how == "sync" else True
        said = told.one()
        # ext4 says the second where it cannot read what it needs for the answer.
        assert any(words in said for words in ("Input/output error", "Cannot allocate memory"))
        assert f"`{disk}/step_2" in said
        path = save(saver, 3, how)
        assert path == other / "step_3"
        assert newest(other) == 3
        fail(0)


@needs_root
@HOWS
def test_a_drive_that_never_answers(tmp_path: Path, how: str) -> None:
    told, other = Told(), tmp_path / "other"
    with loop(tmp_path / "image") as (device, _), mounted(tmp_path / "disk", device) as disk:
        saver = Saver([disk, other], on_failure=told.append, time_limit=5)
        assert save(saver, 1, how) == disk / "step_1"
        with frozen(disk):
            path = save(saver, 2, how)
            assert f"`{disk}/step_2`: no answer within 5 s; look at" in told.one()
            assert path == other / "step_2"
            # It is not asked again at once, since that takes time.
            assert save(saver, 3, how) == other / "step_3"
            assert told == []
        # What waited for the drive ends, and takes its files away.
        until(lambda: not list((disk / "step_2").glob("*.distcp")))
        until(lambda: not [each for each in threading.enumerate() if each.name == "tunetool-save"])
        assert save(saver, 4, how) == disk / "step_4"
        assert newest(disk, other) == 4


@needs_root
def test_a_drive_that_stops_answering_while_it_is_written(tmp_path: Path) -> None:
    told, other = Told(), tmp_path / "other"
    with (
        loop(tmp_path / "image") as (device, _),
        mounted(tmp_path / "disk", device) as disk,
        contextlib.ExitStack() as until_thawed,
    ):
        act = [lambda: None, lambda: until_thawed.enter_context(frozen(disk))]
        planner = lambda: Meanwhile(act.pop(0) if act else lambda: None)  # noqa: E731
        saver = Saver([disk, other], on_failure=told.append, time_limit=5, planner=planner)
        saver.save(state(1), 1)
        assert holds(saver.save(state(2), 2), 2)
        assert f"`{disk}/step_2`: no answer within 5 s" in told.one()
        until_thawed.close()
        until(lambda: not [each for each in threading.enumerate() if each.name == "tunetool-save"])
        paths = [saver.save(state(step), step) for step in (3, 4)]
        assert paths == [other / "step_3", disk / "step_4"]
        assert not list((disk / "step_2").glob("*.distcp"))


def test_an_attempt_that_ends_late_frees_no_tensors(tmp_path: Path) -> None:
    """Its copy is made while the next attempt still needs them."""
    hangs, told = threading.Event(), Told()

    def end_the_first() -> None:
        hangs.set()
        until(lambda: len([each for each in threading.enumerate() if each.name == "tunetool-save"]) == 1)

    act = [lambda: assert_(hangs.wait(60)), end_the_first]
    saver = Saver(
        [tmp_path / "a", tmp_path / "b"],
        on_failure=told.append,
        time_limit=3,
        planner=lambda: Meanwhile(act.pop(0)),
    )
    mine = state(1)
    saver.save_async(mine, 1)
    mine["model"]["w"].fill_(-1)
    assert holds(saver.wait(), 1)
    assert "no answer within 3 s" in told.one()


def assert_(condition: bool) -> None:
    assert condition


@needs_root
def test_two_ranks_go_on_where_one_s_drive_never_answers(forks: Ask, tmp_path: Path) -> None:
    with loop(tmp_path / "image") as (device, _), mounted(tmp_path / "disk", device) as disk:
        shared = tmp_path / "shared"
        places = [[str(tmp_path / "node0"), str(shared)], [str(disk), str(shared)]]
        given = {"places": places, "meet": str(tmp_path / "meet"), "faults": {2: "frozen"}, "how": "sync"}
        answers = forks(do="save_steps", world=2, **{"with": {**given, "caching": True, "time_limit": 5}})
        assert [answer["status"] for answer in answers] == [0, 0], answers
        saved = [[Path(path).parent for path in answer["value"]["saved"]] for answer in answers]
        # It is passed over once, as what takes long.
        for where, place in zip(saved, (tmp_path / "node0", disk), strict=True):
            assert where == [place, shared, shared, place, place]
        assert holds_both({shared / "step_2"}, 2, tmp_path / "whole")


@HOWS
def test_a_lost_directory_is_not_made_again(tmp_path: Path, how: str) -> None:
    """Its mount point may lie on the system's drive."""
    lost, other, told = tmp_path / "lost", tmp_path / "other", Told()
    saver = Saver([lost, other], on_failure=told.append)
    assert save(saver, 1, how) == lost / "step_1"
    lost.rename(tmp_path / "away")
    assert save(saver, 2, how) == other / "step_2"
    assert f"`{lost}` cannot be used: No such file or directory; mount its volume" in told.one()
    assert not lost.exists()
    (tmp_path / "away").rename(lost)
    assert save(saver, 3, how) == lost / "step_3"
    assert newest(lost, other) == 3


@needs_root
def test_a_place_whose_volume_is_not_mounted_any_more(tmp_path: Path) -> None:
    told, place = Told(), tmp_path / "volume"
    with mounted(place, "-t", "tmpfs", "tmpfs"):
        saver = Saver([place, tmp_path / "other"], on_failure=told.append)
        assert saver.save(state(1), 1) == place / "step_1"
    assert saver.save(state(2), 2) == tmp_path / "other/step_2"
    assert f"`{place}` is on another file system than at the first save; mount" in told.one()
    assert list(place.iterdir()) == []


def lose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save's directory is gone once all of its bytes are written."""
    sync = writer_module.fsync_directory

    def lose_it_first(directory: Path) -> None:
        monkeypatch.setattr(writer_module, "fsync_directory", sync)
        shutil.rmtree(directory)
        sync(directory)

    monkeypatch.setattr(writer_module, "fsync_directory", lose_it_first)


def test_a_step_is_lost_once_its_tensors_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, told = tmp_path / "one", tmp_path / "two", Told()
    saver = Saver([one, two], on_failure=told.append)
    paths = []
    for step in range(1, 6):
        if step == 2:
            lose_once(monkeypatch)
        paths.append(save(saver, step, "async"))
    # The place that cost a step is passed over once.
    assert paths == [one / "step_1", None, two / "step_3", one / "step_4", one / "step_5"]
    assert "`" + str(one / "step_2") + "` cannot be written: No such file or directory" in told.one()
    assert sorted(path.name for path in (*one.iterdir(), *two.iterdir())) == ["step_1", "step_3", "step_4", "step_5"]
    assert newest(one, two) == 5


def test_the_only_place_is_tried_at_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver([tmp_path / "one"], on_failure=Told().append)
    lose_once(monkeypatch)
    assert save(saver, 1, "async") is None
    assert save(saver, 2, "async") == tmp_path / "one/step_2"


def test_a_late_failure_of_a_synchronous_save_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, told = tmp_path / "one", tmp_path / "two", Told()
    saver = Saver([one, two], on_failure=told.append)
    lose_once(monkeypatch)
    assert holds(saver.save(state(1), 1), 1)
    assert saver.save(state(2), 2) == one / "step_2"
    told.one()


def blocked(folder: Path) -> Path:
    """A place that takes nothing."""
    folder.mkdir()
    (folder / "place").touch()
    return folder / "place"


@HOWS
def test_so_many_failed_saves_in_a_row_raise(tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = blocked(tmp_path / "a")
    saver = Saver([place], give_up_after=3)
    assert [save(saver, step, how) for step in (1, 2)] == [None, None]
    place.unlink()
    assert holds(save(saver, 3, how), 3)
    shutil.rmtree(place)
    assert [save(saver, step, how) for step in (4, 5)] == [None, None]
    with pytest.raises(CannotJudge, match="3 saves in a row failed, the last: step 6 is not saved in") as caught:
        save(saver, 6, how)
    assert caught.value.hint == "restart the job from `latest()`"
    lines = capsys.readouterr().err.splitlines()
    assert [line[:23] for line in lines] == [f"warning: step {step} is not " for step in (1, 2, 4, 5, 6)]


def test_the_outcome_comes_with_the_next_save_or_the_end(tmp_path: Path) -> None:
    place = blocked(tmp_path / "a")
    saver = Saver([place], give_up_after=2)
    with pytest.raises(CannotJudge, match="2 saves in a row failed"), saver:  # noqa: PT012
        saver.save_async(state(1), 1)
        saver.save_async(state(2), 2)
    saver = Saver([place], give_up_after=1)
    saver.save_async(state(1), 1)
    with pytest.raises(CannotJudge, match="1 saves in a row failed"):
        saver.save(state(2), 2)
    assert saver.wait() is None


@HOWS
def test_what_no_other_place_could_save_is_raised(tmp_path: Path, how: str) -> None:
    saver, told = Saver([tmp_path / "a", tmp_path / "b"]), Told()
    wrong = {"w": torch.zeros(3).to_sparse()}
    with pytest.raises(CheckpointException, match="w"):
        saver.save(wrong, 1) if how == "sync" else (saver.save_async(wrong, 1), saver.wait())
    assert told == []
    assert holds(save(saver, 2, how), 2)


def test_metrics_replace_no_device(tmp_path: Path) -> None:
    fifo = tmp_path / "metrics.prom"
    os.mkfifo(fifo)
    with Saver([tmp_path / "place"], metrics=fifo) as saver:
        assert saver.save({"x": torch.ones(3)}, 1) is not None
    assert fifo.is_fifo()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"places": []}, "is no list"),
        ({"places": "a"}, "is no list"),
        ({"give_up_after": 0}, "would never save"),
        ({"time_limit": 0}, "would fail every save"),
        ({"replicas": {"host": "node2"}}, "`replicas` takes no `host`"),
        ({"replicas": {"rate": 0}}, "`rate=0` is not a rate"),
        ({"replicas": {"max_to_keep": 0}}, "would keep nothing"),
        ({"replicas": {"patience": -1}}, "is not a time"),
    ],
)
def test_wrong_calls(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageProblem, match=words):
        Saver(**{"places": [tmp_path], **wrong})
    with pytest.raises(UsageProblem, match="threads"):
        Saver([tmp_path], threads=0)


@HOWS
def test_a_job_on_one_node_saves_without_a_replica(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Saver([tmp_path], replicas=True) as saver:
        assert [holds(save(saver, step, how), step) for step in (1, 2)] == [True, True]
        assert saver.replica is None
    assert capsys.readouterr().err.startswith("warning: no replicas: all ranks are on `")


@HOWS
def test_a_peer_that_does_not_answer_fails_no_save(tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    with Saver([tmp_path], replicas={"peer": "node2", "ssh": ("sh", "-c", "echo no route >&2; exit 255")}) as saver:
        assert holds(save(saver, 1, how), 1)
        assert saver.replica is not None
        problem = saver.replica.wait().problem
    assert problem is not None
    assert capfd.readouterr().err == f"warning: no replica of `{tmp_path}/step_1` on `node2`: {problem}\n"


def test_of_the_steps_that_wait_for_a_replica_the_newest_has_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def warned(step: int) -> bool:
        said.append(capfd.readouterr().err)
        return f"step_{step}`" in "".join(said)

    ssh = ("sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.1; done; exit 255")
    with Saver([tmp_path / "steps"], replicas={"peer": "node2", "ssh": ssh}) as saver:
        for step in range(1, 5):
            save(saver, step, "async")
        first = saver.replica
        assert first is not None
        assert first.running
        (tmp_path / "go").touch()
        until(lambda: saver.replica is not first)
        save(saver, 5, "sync")
        until(lambda: warned(5))
        assert saver.replica is not None
        saver.replica.wait()
    named = re.findall(r"no replica of `\S+/step_(\d)`", "".join(said))
    assert named == ["1", "4", "5"]


@HOWS
def test_a_saved_step_is_handed_on(tmp_path: Path, how: str) -> None:
    seen: list[Path] = []
    saver = Saver([blocked(tmp_path / "a"), tmp_path / "b"], on_saved=seen.append, on_failure=Told().append)
    save(saver, 7, how)
    assert seen == [tmp_path / "b/step_7"]
    assert saver.last is not None
    assert saver.last.bytes > 4 * NUMBERS


@pytest.mark.parametrize("how", ["full", "closed", "none"])
def test_a_line_that_cannot_be_written_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """stderr often leads to the disk that is full."""
    with Path("/dev/full").open("w", buffering=1, encoding="utf-8") as full:
        monkeypatch.setattr("sys.stderr", None if how == "none" else full)
        if how == "closed":
            with contextlib.suppress(OSError):
                full.close()
        saver = Saver([blocked(tmp_path / "a"), tmp_path / "b"])
        assert saver.save(state(1), 1) == tmp_path / "b/step_1"
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_counters_for_prometheus(tmp_path: Path) -> None:
    bad, good, text = blocked(tmp_path / "a"), tmp_path / 'b"', tmp_path / "saves.prom"
    saver = Saver([bad, good], on_failure=Told().append, metrics=text)
    for step in (10, 20):
        saver.save(state(step), step)
    lines = [line for line in text.read_text().splitlines() if not line.startswith("#")]
    names = [line.rpartition(" ")[0] for line in lines]
    assert names == [
        'tunetool_checkpoint_saves_total{place="' + str(good).replace('"', '\\"') + '"}',
        f'tunetool_checkpoint_failed_saves_total{{place="{bad}",reason="EEXIST"}}',
        "tunetool_checkpoint_save_seconds_total",
        "tunetool_checkpoint_last_step",
        "tunetool_checkpoint_last_save_timestamp_seconds",
    ]
    assert [line.rpartition(" ")[2] for line in lines][:2] == ["2", "2"]
    assert lines[3].endswith(" 20")
    text.unlink()
    text.mkdir()
    assert saver.save(state(30), 30) == good / "step_30"


def test_counters_of_a_place_that_is_no_utf_8_in_a_relative_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter refuses a whole file for one such byte; and a job may change its directory."""
    monkeypatch.chdir(tmp_path)
    saver = Saver([tmp_path / "a\udcff"], metrics="saves.prom")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert saver.save(state(1), 1)
    assert f'saves_total{{place="{tmp_path}/a\\\\xff"}} 1\n' in (tmp_path / "saves.prom").read_text("utf-8")


def test_an_interruption_waits_until_the_tensors_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches it may change them."""
    saver, mine, run_job = Saver([tmp_path]), state(1), Job._run

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        return run_job(*arguments)

    monkeypatch.setattr(Job, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.save_async(mine, 1)
    mine["model"]["w"].fill_(-1)
    assert holds(saver.wait(), 1)


def test_a_wait_that_was_interrupted_can_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, begun, let_go, finish = (
        Saver([tmp_path]),
        threading.Event(),
        threading.Event(),
        writer_module.DirectWriter.finish,
    )

    def late(*arguments: Any) -> Any:
        assert begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)
        assert let_go.wait(60)
        return finish(*arguments)

    def wait() -> None:
        begun.set()
        saver.wait()
        time.sleep(60)

    monkeypatch.setattr(writer_module.DirectWriter, "finish", late)
    saver.save_async(state(1), 1)
    with pytest.raises(KeyboardInterrupt):
        wait()
    let_go.set()
    assert holds(saver.wait(), 1)


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon:")).split()[1]) * 1024


@HOWS
def test_fifty_failed_saves_take_no_memory(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver([tmp_path / "a"], on_failure=Told().append, give_up_after=99)
    sizes = []
    for step in range(50):
        lose_once(monkeypatch)
        assert save(saver, step, how) is None
        sizes.append(resident())
    assert max(sizes[10:]) - sizes[9] < 6 * 4 * NUMBERS, sizes
    assert len(threading.enumerate()) < 10
    assert list((tmp_path / "a").iterdir()) == []


@needs_root
@HOWS
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(
    "faults",
    [{1: "full", 4: "late"}, {2: "late", 3: "full"}, {2: "commit"}],
    ids=["first and fourth", "second and third", "the commit"],
)
def test_two_ranks_of_which_one_fails(
    forks: Ask, tmp_path: Path, how: str, caching: bool, faults: dict[int, str]
) -> None:
    """Each rank has a scratch of its own."""
    meet, shared = tmp_path / "meet", tmp_path / "shared"
    with (
        mounted(tmp_path / "node0", "-t", "tmpfs", "-o", "size=96m", "tmpfs") as node0,
        mounted(tmp_path / "node1", "-t", "tmpfs", "-o", "size=96m", "tmpfs") as node1,
    ):
        places = [[str(node), str(shared)] for node in (node0, node1)]
        given = {"places": places, "meet": str(meet), "faults": faults, "how": how, "caching": caching}
        answers = forks(do="save_steps", world=2, **{"with": given})
        assert [answer["status"] for answer in answers] == [0, 0], answers
        values = [answer["value"] for answer in answers]
        said, other_said = ([line.partition(": ")[2] for line in value["said"]] for value in values)
        assert said == other_said
        assert [line.partition(" `")[0] for line in said] == [f"rank {int('commit' not in faults.values())}:"] * len(
            said
        )
        saved = [[path and Path(path) for path in value["saved"]] for value in values]
        for step, paths in enumerate(zip(*saved, strict=True), 1):
            fault = faults.get(step)
            if paths == (None, None):
                # Its tensors were of another step by then.
                assert (how, bool(fault)) == ("async", True)
                assert not [place for place in (node0, node1, shared) if (place / f"step_{step}").exists()]
            else:
                # A place that cost a step is passed over once.
                rests = how == "async" and saved[0][step - 2] is None
                where = (shared, shared) if fault or rests else (node0, node1)
                assert paths == tuple(place / f"step_{step}" for place in where)
                assert holds_both({path for path in paths if path}, step, tmp_path / f"whole_{step}")


def holds_both(parts: set[Path], step: int, whole: Path) -> bool:
    """Whether the step has both ranks' bytes of it; each node has a part."""
    for part in parts:
        shutil.copytree(part, whole, dirs_exist_ok=True)
    expected = {**state_of(0, step), **state_of(1, step)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, storage_reader=DirectReader(whole))
    return all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_rank_that_died_ends_the_job_by_a_clear_line(forks: Ask, tmp_path: Path) -> None:
    places = [[str(tmp_path / f"node{rank}")] for rank in range(2)]
    given = {"places": places, "meet": str(tmp_path / "meet"), "faults": {2: "dies"}, "how": "sync", "caching": False}
    for place in places:
        Path(place[0]).mkdir()
    survivor = forks(do="save_steps", world=2, **{"with": given})[0]
    assert survivor["status"] == 1
    words = "CannotJudge: the ranks cannot agree on the save of step 2: a rank died, or a collective timed out"
    assert survivor["error"].startswith(words)
    assert "\n" not in survivor["error"]


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")  # torch's own, at each use
def test_a_sharded_tensor_is_saved_and_loaded(tmp_path: Path) -> None:
    def sharded(start: float) -> ShardedTensor:
        parts = torch.arange(start, start + 12.0).view(4, 3).split(2)
        return init_from_local_shards(
            [Shard.from_tensor_and_offsets(each.clone(), [2 * row, 0], 0) for row, each in enumerate(parts)], 4, 3
        )

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Saver([tmp_path]) as saver:
            saver.save_async({"weight": sharded(1.0)}, 1)
        state = {"weight": sharded(50.0)}
        dcp.load(state, storage_reader=DirectReader(tmp_path / "step_1"))
    finally:
        dist.destroy_process_group()
    loaded = torch.cat([shard.tensor for shard in state["weight"].local_shards()])
    assert torch.equal(loaded, torch.arange(1.0, 13.0).view(4, 3))
