"""Ranks under torchrun: each has its logs, the first that dies is named, and no process remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

from tunetool.launch.local import RankFailed, Ranks, run_ranks
from waiting import PATIENCE, gone, until

# torchrun sets the rank; nothing here imports torch.
PROGRAM = """
import os, pathlib, sys, time
rank, here = int(os.environ["RANK"]), pathlib.Path(sys.argv[1])
(here / f"pid-{rank}").write_text(str(os.getpid()))
print("rank", rank, "of", os.environ["WORLD_SIZE"])
if sys.argv[2] == "die" and rank == 1:
    while not (here / "pid-0").exists(): time.sleep(0.01)
    raise SystemExit("the disk is on fire")
if sys.argv[2] != "work":
    time.sleep(600)
"""


def all_gone(folder: Path) -> bool:
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    return bool(pids) and gone(*pids)


def run(folder: Path, what: str) -> None:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    run_ranks([str(script), str(folder), what], 2, os.environ, folder / "logs", PATIENCE)


def wait_for_ranks(folder: Path) -> None:
    until(lambda: len([path for path in folder.glob("pid-*") if path.read_text()]) == 2, "both ranks")


def test_each_rank_has_its_log(tmp_path: Path) -> None:
    run(tmp_path, "work")
    said = sorted(path.read_text().strip() for path in (tmp_path / "logs").glob("*/attempt_0/*/stdout.log"))
    assert said == ["rank 0 of 2", "rank 1 of 2"]


def test_the_dead_rank_is_named_with_its_last_line(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run(tmp_path, "die")
    assert caught.value.message == "rank 1 ended with exit status 1: the disk is on fire"
    assert caught.value.rank == 1
    assert all_gone(tmp_path)


def test_a_time_limit_ends_them_all(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with Ranks([str(script), str(tmp_path), "hang"], 2, os.environ, tmp_path / "logs") as ranks:
        wait_for_ranks(tmp_path)
        with pytest.raises(RankFailed, match="did not end within 1 s"):
            ranks.wait(1)
        assert all_gone(tmp_path)


def test_a_ctrl_c_while_they_are_ended_leaves_none_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank leads a session of its own, so nothing but its own end ends it."""
    look = os.getpgid
    pressed: list[int] = []

    def press_once(pid: int) -> int:
        if not pressed:
            pressed.append(pid)
            os.kill(os.getpid(), signal.SIGINT)
        return look(pid)

    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with Ranks([str(script), str(tmp_path), "hang"], 2, os.environ, tmp_path / "logs") as ranks:
        wait_for_ranks(tmp_path)
        pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
        for pid in pids:
            ranks.register_pid(pid)
        monkeypatch.setattr(os, "getpgid", press_once)
        with pytest.raises(KeyboardInterrupt):
            ranks.end()
        assert len(pressed) == 1
        # Killed already: it may take a moment until the kernel has freed them.
        assert not ranks.running()
        assert all_gone(tmp_path)


def test_they_die_with_a_launcher_that_is_killed_outright(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    launch = (
        "import os, pathlib\nfrom tunetool.launch.local import run_ranks\n"
        f"run_ranks([{str(script)!r}, {str(tmp_path)!r}, 'hang'], 2, os.environ, pathlib.Path({str(tmp_path / 'l')!r}), {PATIENCE})"
    )
    with subprocess.Popen([sys.executable, "-c", launch]) as launcher:
        wait_for_ranks(tmp_path)
        launcher.kill()
    assert all_gone(tmp_path)
