"""The engines that start the ranks of one node: torchrun by the guard, or another program."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tunetool.launch.local import RankFailed, Ranks, tail
from tunetool.launch.spec import RUN, Failure, NodeSpec
from tunetool.launch.start import ENDED, RANKS
from tunetool.measure.marked_processes import end_all, end_marked, has_mark, naming
from tunetool.measure.worker import describe_end
from tunetool.node.common.commands import last_line
from tunetool.node.common.waiting import wait_for

_LEAVE_SECONDS = 3.0
_START = ("-m", "tunetool.launch.start")


class Engine(Protocol):
    """A context manager: all processes that it started have ended afterwards."""

    def __enter__(self) -> Engine:
        """Start the ranks, if this engine starts them."""

    def __exit__(self, *_: object) -> None:
        """End the ranks."""

    def done(self) -> bool:
        """Whether all ranks of the node have succeeded."""

    def failure(self) -> Failure | None:
        """The failure of the first failed rank of the node; None if none failed."""


class Torchrun:
    """One torchrun per node, started by the guard."""

    def __init__(self, spec: NodeSpec, directory: Path, environment: Mapping[str, str]) -> None:
        self._spec = spec
        self._directory = directory
        self._environment = environment
        self._ranks: Ranks | None = None
        self._failure: Failure | None = None

    def __enter__(self) -> Torchrun:
        spec = self._spec
        meet = {} if spec.master is None else {"meet": _static(spec, spec.master)}
        program = [*_START, str(self._directory)]
        world, logs, python = spec.ranks_per_host, Path(spec.out) / f"node-{spec.node}", Path(spec.python)
        try:
            self._ranks = Ranks(program, world, self._environment, logs, python, **meet)
        except RankFailed as error:
            self._failure = Failure(error.message, spec.host, error.hint)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ranks is not None:
            for rank_file in started(self._directory).values():
                self._ranks.register_pid(rank_file["pid"])
            self._ranks.end()

    def done(self) -> bool:
        """Whether torchrun has ended with success."""
        return self._ranks is not None and not self._ranks.running() and self.failure() is None

    def failure(self) -> Failure | None:
        """The failure that torchrun reports; None if there is none."""
        if self._failure is not None or self._ranks is None or self._ranks.running():
            return self._failure
        try:
            self._ranks.check()
        except RankFailed as error:
            self._failure = self._failure_of(self._ranks, error)
        return self._failure

    def _failure_of(self, ranks: Ranks, error: RankFailed) -> Failure:
        spec = self._spec
        if error.rank is None:
            return Failure(f"{error.message} (on `{spec.host}`)", spec.host, error.hint, raw=error.raw)
        output = last_output(spec, error.rank) or ranks.output_of(error.rank - spec.ranks.start)
        message, hint = describe_end(f"rank {error.rank} on `{spec.host}`", ranks.exit or 0, output)
        return Failure(message, spec.host, hint, error.rank, ranks.exit, output)


class Adopted:
    """Ranks that another program starts on this node: DeepSpeed's launcher. They report through files."""

    def __init__(self, spec: NodeSpec, directory: Path) -> None:
        self._spec = spec
        self._directory = directory
        self._failure: Failure | None = None

    def __enter__(self) -> Adopted:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the ranks, which are found by their mark; give their starters a few seconds to end, then kill them."""
        end_marked(RUN, self._spec.run)
        wait_for(lambda: not self._starters(), _LEAVE_SECONDS)
        end_all(self._starters)

    def done(self) -> bool:
        """Whether every rank has reported success and has ended."""
        codes = self._codes()
        return len(codes) == self._spec.ranks_per_host and all(code == 0 for code in codes.values())

    def failure(self) -> Failure | None:
        """The failure of the first rank that reported one or disappeared; None if there is none."""
        if self._failure is None:
            spec = self._spec
            for rank, code in sorted(self._codes().items()):
                if code != 0:
                    output = last_output(spec, rank)
                    which_rank = f"rank {rank} on `{spec.host}`"
                    if code is None:
                        last = last_line(output, "no message")[-300:]
                        vanished = f"{which_rank} was ended by a signal: {last}"
                        self._failure = Failure(
                            vanished, spec.host, f"check `dmesg | tail` on `{spec.host}`", rank, -9, output
                        )
                    else:
                        message, hint = describe_end(which_rank, code, output)
                        self._failure = Failure(message, spec.host, hint, rank, code, output)
                    break
        return self._failure

    def _starters(self) -> list[int]:
        return [pid for pid in naming(str(self._directory)) if pid != os.getppid()]

    def _codes(self) -> dict[int, int | None]:
        """Exit status of each rank that has ended, by rank; None for a rank that did not report one."""
        gone = [
            rank
            for rank, rank_file in started(self._directory).items()
            if not has_mark(rank_file["pid"], RUN, self._spec.run)
        ]
        return {rank: ended(self._directory, rank) for rank in gone}


def _static(spec: NodeSpec, master: tuple[str, int]) -> list[str]:
    where = ["--master-addr", master[0], "--master-port", str(master[1])]
    return ["--nnodes", str(len(spec.hosts)), "--node-rank", str(spec.node), *where]


def started(directory: Path) -> dict[int, dict[str, Any]]:
    """What each rank of this node reported when it started, by rank: ``pid``, ``local_rank``, ``master``."""
    by_rank = {}
    for path in (directory / RANKS).glob("*"):
        if path.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                by_rank[int(path.name)] = json.loads(path.read_text())
    return by_rank


def ended(directory: Path, rank: int) -> int | None:
    """The exit status that a rank reported when it ended; None if it has not."""
    try:
        return int((directory / RANKS / f"{rank}{ENDED}").read_text())
    except (OSError, ValueError):
        return None


def last_output(spec: NodeSpec, rank: int) -> str:
    """The end of a rank's stdout, then of its stderr."""
    rank_dir = Path(spec.out) / f"rank-{rank}"
    return tail(rank_dir / "stdout.log") + tail(rank_dir / "stderr.log")
