"""The time of the save, not the number of a step, decides which steps are deleted and which one is the latest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

from small_steps import data_of, names, overwrite, save, values

from tunetool.checkpoint import Drain, latest, markers
from waiting import PATIENCE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]
HOUR = 3600


def saved_at(step: Path, seconds: float) -> Path:
    """Set the step's times as if it had been saved when this host's clock showed now + ``seconds``."""
    at = time.time() + seconds
    for path in step.iterdir():
        os.utime(path, (at, at))
    return step


def latest_of(*tiers: Path) -> tuple[int, str]:
    newest = latest(list(tiers))
    assert newest is not None
    return newest.step, newest.path.parent.name


def test_a_job_that_went_back_loses_nothing(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    options = {"max_to_keep": 2, "local_max_to_keep": 2}
    for number in (4500, 5000):
        drains(save(scratch / f"step_{number}", number), bulk, **options).wait(PATIENCE)
    # Back to step 1000, and on from there.
    drained = drains(save(scratch / "step_1500", 1500), bulk, **options).wait(PATIENCE)
    assert drained == bulk / "step_1500"
    assert values(drained) == (1500, 1500)
    assert values(scratch / "step_1500") == (1500, 1500)
    assert names(bulk) == ["step_1500", "step_5000"]
    assert latest_of(scratch, bulk) == (1500, "scratch")
    assert latest_of(bulk) == (1500, "bulk")
    save(scratch / "step_2500", 2500)
    assert latest_of(scratch, bulk) == (2500, "scratch")
    drains(save(scratch / "step_3500", 3500), bulk, **options).wait(PATIENCE)
    assert names(bulk) == ["step_1500", "step_3500"]
    assert values(scratch / "step_2500") == (2500, 2500), "never drained"
    assert names(scratch) == ["step_2500", "step_3500"]
    assert latest_of(bulk) == (3500, "bulk")


def test_an_older_step_drained_late_pushes_no_newer_out(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    steps = {number: save(scratch / f"step_{number}", number) for number in (1, 2, 3)}
    options = {"max_to_keep": 1, "local_max_to_keep": 1}
    assert values(drains(steps[3], bulk, **options).wait(PATIENCE)) == (3, 3)
    assert names(scratch) == ["step_1", "step_2", "step_3"]
    assert values(drains(steps[1], bulk, **options).wait(PATIENCE)) == (1, 1)
    assert names(bulk) == ["step_1", "step_3"]
    assert names(scratch) == ["step_1", "step_2", "step_3"]
    assert latest_of(bulk) == (3, "bulk")
    drains(steps[2], bulk, **options).wait(PATIENCE)
    assert names(bulk) == ["step_2", "step_3"]
    assert latest_of(bulk) == (3, "bulk")


def test_a_step_that_was_saved_anew_is_newer_than_those_before(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    for number in (1, 2, 3):
        drains(save(scratch / f"step_{number}", number), bulk).wait(PATIENCE)
    save(scratch / "step_1", 10)
    assert latest_of(scratch, bulk) == (1, "scratch")
    assert latest_of(bulk) == (3, "bulk")
    # Shared storage has another save of this step completely: this one stays.
    drains(scratch / "step_3", bulk, local_max_to_keep=1).wait(PATIENCE)
    assert values(scratch / "step_1") == (10, 10)
    drains(scratch / "step_1", bulk, max_to_keep=2).wait(PATIENCE)
    assert names(bulk) == ["step_1", "step_3"]
    assert latest_of(bulk) == (1, "bulk")
    assert values(bulk / "step_1") == (10, 10)


def test_a_clock_that_goes_back_does_not_turn_the_order_round(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    options = {"max_to_keep": 2, "local_max_to_keep": 2}
    for number in (1, 2, 3):
        drains(saved_at(save(scratch / f"step_{number}", number), HOUR + number), bulk, **options).wait(PATIENCE)
    for number in (4, 5):
        drains(save(scratch / f"step_{number}", number), bulk, **options).wait(PATIENCE)
        assert latest_of(bulk) == (number, "bulk")
        assert latest_of(scratch, bulk) == (number, "scratch")
    assert names(bulk) == ["step_4", "step_5"]
    assert names(scratch) == ["step_4", "step_5"]
    # A step that is not drained at all.
    save(scratch / "step_6", 6)
    assert latest_of(scratch, bulk) == (6, "scratch")


def test_a_new_host_whose_clock_is_behind(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    bulk = tmp_path / "bulk"
    drains(saved_at(save(tmp_path / "first" / "step_1", 1), HOUR), bulk).wait(PATIENCE)
    drains(save(tmp_path / "second" / "step_2", 2), bulk, max_to_keep=1).wait(PATIENCE)
    assert names(bulk) == ["step_2"]


def test_what_is_not_whole_is_neither_counted_nor_deleted(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    for number in (1, 2, 3):
        drains(save(scratch / f"step_{number}", number), bulk).wait(PATIENCE)
    data_of(bulk / "step_2")[0].unlink()
    (bulk / "step_3" / markers.MARKER).write_text("{")
    drains(save(scratch / "step_4", 4), bulk, max_to_keep=2, local_max_to_keep=1).wait(PATIENCE)
    assert names(bulk) == ["step_1", "step_2", "step_3", "step_4"]
    assert names(scratch) == ["step_2", "step_3", "step_4"], "what can be drained again stays, step_1 is whole"
    drains(scratch / "step_3", bulk).wait(PATIENCE)
    assert values(bulk / "step_3") == (3, 3)


def test_a_step_overwritten_since_its_drain_stays(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    """On a node without `.metadata` only the data files tell."""
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    for number in (1, 2):
        drains(save(scratch / f"step_{number}", number), bulk).wait(PATIENCE)
    (scratch / "step_1" / ".metadata").unlink()
    overwrite(data_of(scratch / "step_1")[1], data_of(save(tmp_path / "other" / "step_1", 9))[1])
    drains(save(scratch / "step_3", 3), bulk, local_max_to_keep=1).wait(PATIENCE)
    assert names(scratch) == ["step_1", "step_3"]


def test_steps_that_an_earlier_version_drained_have_no_record(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    for number in (5, 4, 3):
        drains(save(scratch / f"step_{number}", number), bulk).wait(PATIENCE)
        marker = bulk / f"step_{number}" / markers.MARKER
        document = json.loads(marker.read_text())
        kept = {name: document[name] for name in ("schema", "step", "digest", "files", "hosts")}
        assert set(kept) < set(document), "else this shows nothing"
        marker.write_text(json.dumps(kept, indent=1))
    assert latest_of(bulk) == (3, "bulk"), "counts as saved when it was drained"
    drains(save(scratch / "step_2", 2), bulk, max_to_keep=2, local_max_to_keep=2).wait(PATIENCE)
    assert names(bulk) == ["step_2", "step_3"]
    assert names(scratch) == ["step_2", "step_3"]
    assert latest_of(bulk) == (2, "bulk")


def test_a_step_that_a_save_is_written_to_is_not_deleted(tmp_path: Path, drains: Callable[..., Drain]) -> None:
    scratch, bulk = tmp_path / "scratch", tmp_path / "bulk"
    for number in (1, 2):
        drains(save(scratch / f"step_{number}", number), bulk).wait(PATIENCE)
    # Files of a save that another writer has just begun.
    (scratch / "step_1" / "__0_0.0123456789abcdef.distcp").write_bytes(b"new")
    drains(save(scratch / "step_3", 3), bulk, local_max_to_keep=1).wait(PATIENCE)
    assert names(scratch) == ["step_1", "step_3"]
