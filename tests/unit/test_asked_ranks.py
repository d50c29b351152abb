"""Ranks that are asked all at once: whose error it is, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tunetool.launch import asked_ranks
from tunetool.launch.asked_ranks import AskedRanks, OrderFailed
from tunetool.launch.local import RankFailed
from tunetool.measure.marked_processes import marked
from waiting import until

PROGRAM = """
import os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])

def answer(order):
    print("heard", order["do"], flush=True)
    if order["do"] == "child":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    if order["do"] == "fork" and rank == 1 and os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    if order["do"] == "fork":
        time.sleep(600)
    if order["do"] in ("die", "fail", "hang") and rank == order["rank"]:
        if order["do"] == "hang":
            time.sleep(600)
        if order["do"] == "fail":
            raise ValueError("no\\nspace")
        os.kill(os.getpid(), signal.SIGKILL)
    if order.get("others") == "hang":
        time.sleep(600)
    if order.get("others") == "exit":
        sys.exit("lost a connection")
    if order["do"] == "end":
        open(order.get("file", os.environ["ENDED"] + str(rank)), "w").close()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    elastic = "".join(name for name in os.environ if name.startswith("TORCHELASTIC_"))
    return {"elastic": elastic, **{name: os.environ[name] for name in names}}
"""


@pytest.fixture
def two(tmp_path: Path) -> Callable[[], AskedRanks]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda: AskedRanks(
        program, 2, {**os.environ, "ENDED": f"{tmp_path}/ended-", "TUNETOOL_TESTS": str(tmp_path)}
    )


def test_each_is_told_who_it_is_and_where_they_meet(two: Callable[[], AskedRanks]) -> None:
    with two() as ranks:
        first, second = ranks.ask({"do": "hello"}, 60)
        assert "heard hello" in ranks.messages()
    assert [each["RANK"] + each["LOCAL_RANK"] for each in (first, second)] == ["00", "11"]
    assert first["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("others", ["", "hang", "exit"])
def test_the_rank_that_a_signal_ended_is_named(two: Callable[[], AskedRanks], rank: int, others: str) -> None:
    with two() as ranks, pytest.raises(RankFailed, match=f"rank {rank} was ended by SIGKILL: heard die") as caught:
        ranks.ask({"do": "die", "rank": rank, "others": others}, 60)
    assert caught.value.rank == rank
    assert "out-of-memory" in str(caught.value.hint)
    assert "heard die" in caught.value.raw


def test_a_killed_rank_is_seen_while_its_child_lives(two: Callable[[], AskedRanks]) -> None:
    with two() as ranks, pytest.raises(RankFailed, match="rank 1 was ended by SIGKILL: heard fork"):
        ranks.ask({"do": "fork"}, 600)


def test_a_launcher_around_them_is_not_theirs(two: Callable[[], AskedRanks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with two() as ranks:
        assert {answer["elastic"] for answer in ranks.ask({"do": "hello"}, 60)} == {""}
        ranks.dismiss(60)
        with pytest.raises(RankFailed):
            ranks.ask({"do": "hello"}, 60)


def test_an_error_of_one_is_one_line_and_they_go_on(two: Callable[[], AskedRanks]) -> None:
    with two() as ranks:
        with pytest.raises(OrderFailed, match=r"^ValueError: no space$") as caught:
            ranks.ask({"do": "fail", "rank": 1}, 60)
        assert (caught.value.rank, caught.value.together) == (1, True)
        assert "raise ValueError" in caught.value.raw
        assert len(ranks.ask({"do": "hello"}, 60)) == 2


def test_who_waits_for_a_rank_that_failed_is_not_waited_for(
    two: Callable[[], AskedRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    with two() as ranks:
        ranks.ask({"do": "hello"}, 60)
        monkeypatch.setattr(asked_ranks, "_STRAGGLERS", 0.0)
        with pytest.raises(OrderFailed, match="no space") as caught:
            ranks.ask({"do": "fail", "rank": 0, "others": "hang"}, 600)
        assert not caught.value.together


def test_a_time_limit_ends_all(two: Callable[[], AskedRanks], tmp_path: Path) -> None:
    with two() as ranks:
        ranks.ask({"do": "hello"}, 60)
        with pytest.raises(RankFailed, match="`hang` took longer than 0 s, and the ranks were ended") as caught:
            ranks.ask({"do": "hang", "rank": 1}, 0.4)
        assert "--- rank 1\n" in caught.value.raw
        assert marked("TUNETOOL_TESTS", str(tmp_path)) == []


def test_dismissed_they_end_in_order_and_leave_no_process(two: Callable[[], AskedRanks], tmp_path: Path) -> None:
    with two() as ranks:
        ranks.ask({"do": "child"}, 60)
        ranks.dismiss(60)
    assert sorted(path.name for path in tmp_path.glob("ended-*")) == ["ended-0", "ended-1"]
    assert marked("TUNETOOL_TESTS", str(tmp_path)) == []


KILLED = """
import os, pathlib, signal, sys
from tunetool.launch.asked_ranks import AskedRanks
with AskedRanks(pathlib.Path(sys.argv[1]), 2, os.environ) as ranks:
    ranks.ask({"do": "child"}, 60)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_they_and_what_they_started_die_with_a_killed_one(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TUNETOOL_TESTS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(program)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not marked("TUNETOOL_TESTS", str(tmp_path)), "the end of all")
