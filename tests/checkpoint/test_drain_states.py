"""Saves, rollbacks, drains and retention in any order: invariants that hold after each of them.

The drains' own code runs in this process, so that hundreds of them take seconds. A drain is asked for and carried out in
two steps, as it is when its process is slow: drains end in any order, and steps change before they are read.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

import torch.distributed.checkpoint.filesystem as torch_filesystem
import torch.distributed.checkpoint.metadata as torch_metadata
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tunetool.checkpoint import latest, verify_drained
from tunetool.checkpoint.drain_worker import Order, Worker
from tunetool.checkpoint.draining import order_of
from tunetool.errors import CannotJudge

SECOND = 10**9
NAMES = ("__0_0.distcp", "__0_1.distcp")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Syncs are left out: thousands take minutes on a disk, and no test here is about power cuts."""
KEEP = st.none() | st.integers(1, 3)


class Clock:
    """The clock of every save and every drain."""

    now = 0


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("retention", "resume"):
        monkeypatch.setattr(f"tunetool.checkpoint.{module}.now_ns", lambda: Clock.now)


def saves_in(step: Path) -> set[int]:
    """The saves from which its data comes."""
    return {int((step / name).read_bytes()) for name in NAMES}


def save_in(step: Path) -> int:
    (save,) = saves_in(step)
    return save


class Drains(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="drains-", dir=MEMORY))
        self.scratch, self.bulk = self.root / "scratch", self.root / "bulk"
        self.scratch.mkdir()
        self.bulk.mkdir()
        Clock.now = 10**9 * SECOND
        self.count = 0
        self.asked: list[tuple[Order, int]] = []
        self.drained: set[int] = set()
        """Saves that were complete on shared storage at some time."""
        self.mixed: set[str] = set()
        """Steps on the node with half of a newer save under the `.metadata` of the one before."""
        self.unseen = False
        """Whether one of them was never drained, so that no drain can notice it."""

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    def here(self) -> dict[str, int]:
        paths = [path for path in self.scratch.glob("step_*") if path.name not in self.mixed]
        return {path.name: save_in(path) for path in paths}

    def there(self) -> dict[str, int]:
        return {path.name: save_in(path) for path in self.bulk.glob("step_*")}

    def write(self, path: Path, names: tuple[str, ...], save: int) -> None:
        path.mkdir(exist_ok=True)
        for name in names:
            (path / name).write_bytes(b"%8d" % save)

    @rule(step=st.integers(1, 5), later=st.integers(3, 1000))
    def save(self, step: int, later: int) -> None:
        Clock.now += later * SECOND
        self.count += 1
        path = self.scratch / f"step_{step}"
        self.write(path, NAMES, self.count)
        storage = {torch_metadata.MetadataIndex(name): torch_filesystem._StorageInfo(name, 0, 8) for name in NAMES}
        which = torch_metadata.StorageMeta(checkpoint_id=str(path), save_id=str(self.count))
        new = path / "new"
        new.write_bytes(pickle.dumps(torch_metadata.Metadata({}, None, storage, which)))
        os.utime(new, ns=(Clock.now, Clock.now))
        new.replace(path / ".metadata")
        self.mixed.discard(path.name)

    @rule(step=st.integers(1, 5), keep=st.integers(1, 3), keep_here=KEEP)
    def save_and_drain(self, step: int, keep: int, keep_here: int | None) -> None:
        self.save(step, 3)
        self.ask_for(f"step_{step}", keep, keep_here)
        self.run(len(self.asked) - 1)

    @precondition(lambda self: self.here())
    @rule(data=st.data(), keep=KEEP, keep_here=KEEP)
    def ask(self, data: st.DataObject, keep: int | None, keep_here: int | None) -> None:
        here = self.here()
        self.ask_for(data.draw(st.sampled_from(sorted(here))), keep, keep_here)

    def ask_for(self, name: str, keep: int | None, keep_here: int | None) -> None:
        order = order_of(
            self.scratch / name,
            self.bulk,
            rank=0,
            coordinator=0,
            world=1,
            local_rank=0,
            local_world=1,
            rate=None,
            max_to_keep=keep,
            local_max_to_keep=keep_here,
            delete_undrained=False,
            patience=5.0,
        )
        self.asked.append((order, save_in(self.scratch / name)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def carry_out(self, data: st.DataObject) -> None:
        self.run(data.draw(st.integers(0, len(self.asked) - 1)))

    def run(self, index: int) -> None:
        order, save = self.asked.pop(index)
        name = Path(order.step_dir).name
        here, there, mixed = self.here(), self.there(), set(self.mixed)
        try:
            final = Worker(order).run()
        except CannotJudge:
            # Only if the step has changed after the drain was requested.
            assert here.get(name) != save
            assert self.there() == there, "a drain that fails takes nothing away"
            assert self.here() == here
            return
        assert final == self.bulk / name
        assert save_in(final) == save
        assert verify_drained(final) == 16
        self.drained.add(save)
        self.judge_shared_storage({**there, name: save}, name, order.max_to_keep)
        self.judge_the_node(here, mixed, name)

    def judge_shared_storage(self, had: dict[str, int], just: str, keep: int | None) -> None:
        left = self.there()
        assert just in left
        assert left.items() <= had.items()
        for name in had.keys() - left.keys():
            assert keep is not None
            assert sum(each > had[name] for each in left.values()) >= keep
        if keep is not None:
            assert len(left.keys() - {just}) <= keep

    def judge_the_node(self, had: dict[str, int], mixed: set[str], just: str) -> None:
        left, whole = self.here(), self.there()
        for name in had.keys() - left.keys():
            assert name != just
            assert had[name] in self.drained, "it was nowhere else"
            assert whole.get(name) == had[name] or any(each > had[name] for each in whole.values())
        assert self.mixed == mixed
        assert all((self.scratch / name).exists() for name in mixed)

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def die_in_the_middle_of_a_save(self, data: st.DataObject) -> None:
        here = self.here()
        name = data.draw(st.sampled_from(sorted(here)))
        if here[name] not in self.drained:
            # Only a drain that was requested before can notice it, and nothing that it copies becomes complete.
            if not any(save == here[name] for _, save in self.asked):
                return
            self.unseen = True
        self.write(self.scratch / name, NAMES[1:], 10**6 + here[name])
        self.mixed.add(name)

    @precondition(lambda self: not self.asked and not self.mixed and set(self.here().values()) <= self.drained)
    @rule(back=st.integers(2000, 10**6), step=st.integers(1, 5), keep=KEEP, keep_here=KEEP)
    def the_clock_goes_back(self, back: int, step: int, keep: int | None, keep_here: int | None) -> None:
        """The next drain notices it if the earlier save was drained."""
        Clock.now -= back * SECOND
        self.save(step, 3)
        self.ask_for(f"step_{step}", keep, keep_here)
        self.run(0)

    @invariant()
    def the_latest_is_the_last_saved(self) -> None:
        there = self.there()
        newest = latest([self.bulk], world=1) if there else None
        if newest is not None:
            assert save_in(newest.path) == max(there.values())
        saved = [*there.values(), *self.here().values()]
        if saved and not (self.unseen and self.mixed):
            newest = latest([self.scratch, self.bulk], world=1)
            assert newest is not None
            assert save_in(newest.path) == max(saved)

    @invariant()
    def shared_storage_is_whole(self) -> None:
        for path in self.bulk.glob("step_*"):
            verify_drained(path)


@pytest.mark.usefixtures("_clock")
def test_nothing_is_lost_and_nothing_mixed() -> None:
    run_state_machine_as_test(
        Drains,
        settings=settings(
            max_examples=20,
            stateful_step_count=20,
            deadline=None,
            # A failing example is shown as it was generated: shrinking it takes minutes.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
