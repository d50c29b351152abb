"""``Saver``: saves that may fail. Training goes on, and the next save, or another place, is tried."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult

from tunetool.checkpoint import ahead, commit, open_saves
from tunetool.checkpoint.host_buffers import use_gpu
from tunetool.checkpoint.os_errors import SystemRefused, naming_errors, warn
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.replicating import Replica
from tunetool.checkpoint.save_counters import Counters
from tunetool.checkpoint.saver_replicas import SaverReplicas
from tunetool.checkpoint.stager import Hold, marks, memory_of
from tunetool.checkpoint.torch_call import TorchCall, taking_part
from tunetool.checkpoint.writer import DirectWriter, Saved
from tunetool.ctrl_c import uninterrupted, until, until_all_over
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem

ANSWER_WITHIN = 1200.0
"""Seconds. Longer than a part of a save takes."""


@dataclass(frozen=True)
class FailedSave:
    """A save that failed in one place, as every rank knows it. ``reason``: why the lowest of the failed ``ranks`` could
    not save, with a hint; ``errno``: the kernel's error number, if there is one."""

    step: int
    place: Path
    ranks: tuple[int, ...]
    reason: str
    errno: int | None = None

    def __str__(self) -> str:
        others = f" and {len(self.ranks) - 1} more" if len(self.ranks) > 1 else ""
        return f"step {self.step} is not saved in `{self.place}`: rank {self.ranks[0]}{others}: {self.reason}"

    @property
    def kind(self) -> str:
        """The reason as one word."""
        return errno.errorcode.get(self.errno or 0, "other")


class _NoAnswer(SystemRefused):
    pass


class _Place:
    """A directory of steps. ``rests``: saves by which it is passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failures = self.rests = 0
        self._device: int | None = None

    def require(self) -> None:
        """Make it if it was never there. Raises ``SystemRefused`` if it is not there any more: a save would fill
        whatever its mount point lies on."""
        with naming_errors(self.path, "mount its volume, or make it again", "cannot be used"):
            if self._device is None:
                commit.make_directory(self.path)
            device = self.path.stat().st_dev
        if self._device not in (None, device):
            raise SystemRefused.with_number(
                errno.ENODEV,
                f"`{self.path}` is on another file system than at the first save",
                "mount its volume again",
            )
        self._device = device


class _Writer(DirectWriter):
    """Ends its waits for a storage that does not answer."""

    def __init__(self, place: _Place, step: int, limit: float | None, settings: dict[str, Any]) -> None:
        super().__init__(place.path / f"step_{step}", **settings)
        self._place, self._limit = place, limit

    def hold(self, hold: Hold) -> None:
        self._hold = hold

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._answered(self._place.require)
        return super().prepare_local_plan(plan)

    def _begin(self) -> Any:
        return self._answered(super()._begin)

    def _write(self, *arguments: Any) -> Any:
        return self._answered(super()._write, *arguments)

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        self._answered(super().finish, metadata, results)

    def clear(self) -> None:
        """Remove what the failed save left on this node. A save that may still be writing is left to the next."""
        self._answered(self._clear)

    def _clear(self) -> None:
        open_saves.end_overdue()
        if self.token is not None:
            open_saves.remove_handed_over(self.token)
        if not (self.path / ".metadata").exists():
            for name in (commit.UNFINISHED, f"{commit.UNFINISHED}.tmp"):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()

    def _answered(self, act: Callable[..., Any], *arguments: Any) -> Any:
        if self._limit is None:
            return act(*arguments)
        call, gpu, done = TorchCall.current(), _gpu(), threading.Event()
        outcome: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                use_gpu(gpu)
                with taking_part(call):
                    outcome.append((act(*arguments), None))
            except BaseException as error:
                outcome.append((None, error))
            done.set()

        # Nobody waits for its end: a thread that waits for a drive cannot be interrupted.
        threading.Thread(target=work, name="tunetool-save", daemon=True).start()
        if not done.wait(self._limit):
            open_saves.give_up(self.path.absolute())
            raise _NoAnswer.with_number(
                errno.ETIMEDOUT,
                f"`{self.path}`: no answer within {self._limit:g} s",
                "look at `dmesg | tail` and the drives' health",
            )
        value, error = outcome.pop()
        try:
            if error is not None:
                raise error
        finally:
            del error  # which has this frame
        return value


class _HoldUntil(Hold):
    """Tells the training loop, too, that the tensors are copied, until this attempt is over."""

    def __init__(self, after: Sequence[Any], copied: threading.Event, memory: Mapping[int, int]) -> None:
        super().__init__(after)
        self.ahead = ahead.begin(memory, after)
        self._copied, self._telling, self._counts = copied, threading.Lock(), True

    def release(self) -> None:
        super().release()
        with self._telling:
            if self._counts:
                self._copied.set()

    def give_up(self) -> None:
        """A thread that hangs may copy later, while the next attempt needs the tensors. What reads them by address ends
        here: training, which may free them, goes on after a failure."""
        with self._telling:
            self._counts = False
        self.drop_ahead()


class Saver:
    """Saves steps by ``dcp.save`` with ``DirectWriter``, and survives what the storage does.

    A save that fails is reported in one line, its files are removed, and the same step is tried in the next of
    ``places``. torch tells every rank what failed on any rank, so all of them try the same place. If none takes the
    step, training goes on, and the next save is tried. A rank that died, a collective that timed out, and a wrong call
    are no such failures: they raise.

    ``places``: directories for ``step_<N>``, the preferred first; give the same to ``latest``. ``planner``: makes the
    planner of each save. ``process_group``: as for ``dcp.save``, and used by the saver alone, since a collective of
    training would mix with those of a save; default: a group of all ranks over gloo, made by the first save.
    ``give_up_after``: so many failed saves in a row raise ``CannotJudge``. ``time_limit``: seconds in which each part
    of a save must answer; None: no limit. ``on_failure``: called on every rank with each ``FailedSave``; default: rank
    0 prints it to stderr. ``on_saved``: called on every rank with the directory of each step once it is saved, such as
    ``lambda step: drain(step, bulk)``, for `save_async` in its thread; it may call no collective. ``replicas``: True:
    the first rank of each node replicates each step that the first place took, or the newest where that takes longer
    than from one save to the next; a mapping is that with arguments of ``replicate``, such as ``{"rate": 1e9}``. No
    failure of it is one of the save. ``metrics``: a file for the textfile collector of Prometheus' node exporter, which
    rank 0 replaces after each save. ``settings``: those of ``DirectWriter``.

    >>> saver = Saver(["/mnt/nvme_raid0/run7", "/shared/run7"])
    >>> saver.save_async(state, step)
    """

    def __init__(
        self,
        places: Sequence[str | os.PathLike[str]],
        *,
        planner: Callable[[], SavePlanner] = DirectSavePlanner,
        process_group: dist.ProcessGroup | None = None,
        give_up_after: int = 3,
        time_limit: float | None = ANSWER_WITHIN,
        on_failure: Callable[[FailedSave], object] | None = None,
        on_saved: Callable[[Path], object] | None = None,
        replicas: bool | Mapping[str, Any] = False,
        metrics: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(places, str | os.PathLike) or not places:
            raise UsageProblem(f"`places={places}` is no list of directories", "give at least one, as a list")
        if give_up_after < 1:
            raise UsageProblem(f"`give_up_after={give_up_after}` would never save", "give 1 or more")
        if time_limit is not None and not time_limit > 0:
            raise UsageProblem(f"`time_limit={time_limit}` would fail every save", "give seconds, or None")
        self._places = [_Place(Path(place).absolute()) for place in places]
        self._planner, self._group, self._give_up_after = planner, process_group, give_up_after
        self._limit, self._settings = time_limit, settings
        self._on_failure = on_failure or self._print
        self._on_saved = on_saved
        self._replicas = None if replicas is False else SaverReplicas({} if replicas is True else replicas)
        self._counters = Counters(None if metrics is None else Path(metrics))
        self._failures = 0
        self._saving: futures.Future[Path | None] | None = None
        self.last: Saved | None = None
        """Figures of this rank's last complete save."""
        DirectWriter(self._places[0].path, **settings)  # refuses wrong settings

    @property
    def replica(self) -> Replica | None:
        """The last replica that this rank began, which may be running: on the first rank of each node."""
        return None if self._replicas is None else self._replicas.last

    def save(self, state: dict[str, Any], step: int) -> Path | None:
        """Save the state now. Returns the directory of the step; None if no place took it."""
        self.wait()
        self._meet()
        return self._save(state, step, None)

    def save_async(self, state: dict[str, Any], step: int) -> None:
        """Save the state, and return as soon as this rank's part is copied to pinned memory. `wait` has the outcome, or
        the next save, which calls it.

        A failure before any rank's training went on is tried again elsewhere, with the same tensors. After that they
        may have changed: the step is lost, and the next save passes the place over, if there is another.
        """
        self.wait()
        self._meet()
        state = {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state.items()}
        devices, memory = memory_of(state)
        after, copied, gpu = marks(devices), threading.Event(), _gpu()

        def work() -> Path | None:
            try:
                use_gpu(gpu)
                return self._save(state, step, lambda: _HoldUntil(after, copied, memory), copied)
            finally:
                copied.set()

        def begin() -> None:
            # Python waits for such a thread before it ends, so that a last save is not lost.
            executor = futures.ThreadPoolExecutor(1, "tunetool-saver")  # noqa: TID251  (all of this is uninterrupted)
            self._saving = executor.submit(work)
            executor.shutdown(wait=False)

        try:
            uninterrupted(begin)
            until(copied.wait)
        except BaseException:
            # Whoever catches an interruption may change the tensors.
            if self._saving is not None:
                until(copied.wait)
            raise

    def wait(self) -> Path | None:
        """Wait for the last `save_async`. Returns the directory of its step; None if there was none, or no place took
        it. Raises as `save` does. Ctrl-C ends the wait and not the save: call it again."""
        if self._saving is None:
            return None
        until_all_over([self._saving])
        saving, self._saving = self._saving, None
        return saving.result()

    def close(self) -> None:
        """`wait`, at the end of training."""
        self.wait()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _meet(self) -> None:
        # The other ranks wait in it for the longest save.
        timeout = timedelta(seconds=2 * max(self._limit or 0, ANSWER_WITHIN))
        if self._group is None and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        if self._replicas is not None:
            self._replicas.meet(self._group, timeout)

    def _save(
        self,
        state: dict[str, Any],
        step: int,
        holding: Callable[[], _HoldUntil] | None,
        copied: threading.Event | None = None,
    ) -> Path | None:
        """All places in turn. The state is the one of ``step`` until ``copied`` is set."""
        failed: FailedSave | None = None
        for place in self._in_turn():
            writer = _Writer(place, step, self._limit, self._settings)
            hold = None if holding is None else holding()
            if hold is not None:
                writer.hold(hold)
            try:
                with self._counters.timing():
                    failed = self._failure(state, step, place, writer)
            finally:
                if hold is not None:
                    hold.give_up()
            if failed is None:
                self._failures = place.failures = 0
                self.last = writer.last
                if _rank(self._group) == 0:
                    self._counters.saved(place.path, step)
                self._replicate(place, writer.path, step)
                if self._on_saved is not None:
                    self._on_saved(writer.path)
                return writer.path
            place.failures += 1
            went_on = copied is not None and any(self._gathered(copied.is_set(), step))
            if went_on or failed.errno == errno.ETIMEDOUT:
                # To try it cost the step, or much time.
                place.rests = place.failures
            if _rank(self._group) == 0:
                self._counters.failed(place.path, failed.kind)
            self._on_failure(failed)
            if went_on:
                break
        self._failures += 1
        if self._failures >= self._give_up_after:
            raise CannotJudge(
                f"{self._failures} saves in a row failed, the last: {failed}", "restart the job from `latest()`"
            )
        return None

    def _replicate(self, place: _Place, path: Path, step: int) -> None:
        if self._replicas is not None and place is self._places[0]:
            try:
                self._replicas.begin(path)
            except RuntimeError as error:
                raise _no_agreement(step, error) from error

    def _in_turn(self) -> list[_Place]:
        awake = [place for place in self._places if not place.rests]
        for place in self._places:
            place.rests -= place.rests > 0
        return awake or self._places

    def _failure(self, state: dict[str, Any], step: int, place: _Place, writer: _Writer) -> FailedSave | None:
        """Save in one place; why that failed. Raises what a job cannot survive."""
        try:
            dcp.save(state, storage_writer=writer, planner=self._planner(), process_group=self._group)
        except CheckpointException as error:
            errors = {rank: failure[0] for rank, failure in error.failures.items()}
            if not all(isinstance(each, SystemRefused | OSError) for each in errors.values()):
                raise
            for each in (error, *errors.values()):
                _drop_frames(each)
        except RuntimeError as error:
            raise _no_agreement(step, error) from error
        else:
            return None
        if not any(isinstance(each, _NoAnswer) or getattr(each, "committed", False) for each in errors.values()):
            with contextlib.suppress(OSError, SystemRefused):
                writer.clear()
        ranks = tuple(sorted(errors))
        first = errors[ranks[0]]
        reason = first.line if isinstance(first, TunetoolError) else str(first)
        return FailedSave(step, place.path, ranks, reason, getattr(first, "errno", None))

    def _gathered(self, value: bool, step: int) -> list[bool]:
        """The value of every rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return [value]
        values = [value] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise _no_agreement(step, error) from error
        return values

    def _print(self, failed: FailedSave) -> None:
        if _rank(self._group) == 0:
            warn(str(failed))


def _drop_frames(error: BaseException | None) -> None:
    """They have the state, and refer to their error: both would stay until a collection."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _no_agreement(step: int, error: RuntimeError) -> CannotJudge:
    return CannotJudge(
        f"the ranks cannot agree on the save of step {step}: a rank died, or a collective timed out: `{error}`",
        "restart the job from `latest()`",
    )


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def _gpu() -> torch.device | None:
    """The current GPU, which a new thread would not have."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
