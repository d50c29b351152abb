"""Ctrl-C at the very moment at which a command, or a save, takes a lock of the pool that it waits for: it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_steps
import torch
import torch.distributed.checkpoint as dcp

from at_a_lock import ended, ended_command
from tunetool.checkpoint import DirectSavePlanner, DirectWriter, markers
from tunetool.checkpoint.markers import Marker
from tunetool.checkpoint.transfer import digest_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A step with two tensors and an object, each with its checksum."""
    state = {"a": torch.arange(300_000.0), "b": torch.arange(9.0), "step": 5}
    writer = DirectWriter(tmp_path / "tier/step_5", threads=2)
    dcp.save(state, storage_writer=writer, planner=DirectSavePlanner(), no_dist=True)
    return tmp_path / "tier/step_5"


@pytest.fixture
def drained(tmp_path: Path) -> Path:
    """A step that was drained."""
    step = small_steps.save(tmp_path / "bulk/step_5", 7.0)
    files = {path.name: digest_of(path) for path in small_steps.data_of(step)}
    markers.write(step, step.name, Marker(markers.digest_of_metadata(step), files, dict.fromkeys(files, "node1")))
    return step


_VERIFY, _FETCH = "verify {step}", "fetch {tier}/other/step_5 --from {tier}"
_EXPORT = "export {step} {tier}/out --processes 2 --shard-size 1MB"


@pytest.mark.parametrize(
    ("where", "held", "kind", "words"),
    [
        ("markers.changes", "markers.digest_of", "drained", _VERIFY),
        ("index._ends", "index.pages", "saved", _VERIFY),
        ("verification._Checks._check_whole", "verification._Checks._content", "saved", _VERIFY),
        ("step_fetch._Copies.run", "step_fetch._Copies._bring", "saved", _FETCH),
        # Its processes take seconds to start, while it waits already.
        ("exporting._write_files", None, "saved", _EXPORT),
    ],
    ids=["drained", "index", "objects", "fetch", "export"],
)
def test_ctrl_c_ends_a_command(
    where: str, held: str | None, kind: str, words: str, request: pytest.FixtureRequest
) -> None:
    program = "from tunetool.checkpoint import exporting, index, markers, step_fetch, verification\n"
    for call, name in (("begin_in", where), ("hold", held)):
        owner, _, last = (name or "").rpartition(".")
        program += f"{call}({owner}, '{last}')\n" if name else ""
    step: Path = request.getfixturevalue(kind)
    given = [word.format(step=step, tier=step.parent) for word in words.split()]
    done = ended_command(program, "checkpoint", *given)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "interrupted"


_ENDED_TOO = """
import multiprocessing, time
from tunetool.checkpoint import exporting

def as_it_begins(name, do):
    work = getattr(exporting, name)
    def call(futures):
        do(futures)
        return work(futures)
    setattr(exporting, name, call)

def interrupt(futures):
    while sum(each.running() for each in futures) < 3:  # as many as the pool hands out to two processes
        time.sleep(0.01)
    signal.raise_signal(signal.SIGTERM)

def end(futures):
    for each in multiprocessing.active_children():
        each.kill()

# SIGTERM for a whole group of processes: the one that waits gets it, and then those that write.
as_it_begins("wait_briefly", interrupt)
as_it_begins("until_all_over", end)
"""


def test_export_ends_though_its_processes_are_ended_meanwhile(tmp_path: Path) -> None:
    # More files than processes take at once.
    state = {f"tensor{number}": torch.zeros(300_000) for number in range(9)}
    dcp.save(state, storage_writer=DirectWriter(tmp_path / "step_5"), planner=DirectSavePlanner(), no_dist=True)
    given = _EXPORT.format(step=tmp_path / "step_5", tier=tmp_path).split()
    done = ended_command(_ENDED_TOO, "checkpoint", *given)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]


_SAVES = """
import torch
from tunetool.checkpoint import Saver
from tunetool.checkpoint.writer import DirectWriter

hold(DirectWriter, "finish")
begin_in(Saver, sys.argv[1])
if sys.argv[1] == "save_async":
    moments.append((threading.Condition.__enter__.__code__, threading.Event.wait.__code__))
saver = Saver([sys.argv[2]])
try:
    saver.save_async({"a": torch.arange(9.0)}, 5)
    saver.wait()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("where", ["save_async", "wait"])
def test_ctrl_c_ends_the_wait_for_a_save_which_is_kept(where: str, tmp_path: Path) -> None:
    done = ended(_SAVES, where, tmp_path)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    assert (tmp_path / "step_5/.metadata").exists()
