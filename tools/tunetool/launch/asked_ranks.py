"""Ranks on this machine that live on between orders: workers that know each other, asked all at once.

``run_ranks`` of ``tunetool.launch.local`` is for programs that run from beginning to end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tunetool.launch.local import RankFailed, rank_environment
from tunetool.measure.marked_processes import swept_away
from tunetool.measure.worker import TICK, Failed, Worker, child_command
from tunetool.node.common.waiting import wait_for

Answer = TypeVar("Answer")
_MARK = "TUNETOOL_RANKS"
"""Environment variable of all that the ranks start: it ends with them, even in sessions of its own."""
_STRAGGLERS = 20.0
"""Seconds that the other ranks have after one reports an error: they may hang in a collective."""
_SAME_DEATH = 1.0
"""Seconds within which ranks die of one cause: the others lose their connection to the one that a signal ended."""


class OrderFailed(RankFailed):
    """A rank reported an error. ``together``: every rank has answered, so that they can continue."""

    def __init__(self, message: str, rank: int, together: bool, raw: str = "") -> None:
        super().__init__(message, None, rank, raw)
        self.together = together


class AskedRanks:
    """``world`` processes of ``program``, a file as of ``child_command``, with the variables by which torch's processes
    find each other. A context manager: nothing of them is left when it ends, for any reason, SIGKILL too.
    """

    def __init__(self, program: Path, world: int, environment: Mapping[str, str]) -> None:
        self._command = child_command(Path(sys.executable), program)
        self._environment = {
            **rank_environment(environment, world, os.cpu_count() or 1),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            _MARK: secrets.token_hex(16),
        }
        self._workers: list[Worker] = [None] * world  # type: ignore[list-item]  # started in __enter__
        self._held = contextlib.ExitStack()

    def __enter__(self) -> AskedRanks:
        with contextlib.ExitStack() as started:
            started.enter_context(swept_away(_MARK, self._environment[_MARK]))
            for rank in range(len(self._workers)):
                of_rank = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._workers[rank] = started.enter_context(Worker(self._command, f"rank {rank}", of_rank))
            self._held = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def ask(
        self, order: Mapping[str, Any], timeout: float, tick: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Send an order; each rank's answer, by rank. Raises ``OrderFailed`` where a rank reports an error.

        Raises ``RankFailed`` if a rank dies or does not answer within ``timeout`` seconds; then all have ended.
        """
        for rank in range(len(self._workers)):
            self._of(rank, lambda worker: worker.send(order))
        answers = self._answers(time.monotonic() + timeout, tick)
        together = len(answers) == len(self._workers)
        for rank, answer in answers.items():
            if "error" in answer:
                message = f"{answer['kind']}: {answer['error']}"
                raw = str(answer.get("trace", "")) or self._workers[rank].messages()
                raise OrderFailed(message, rank, together, raw)
        if not together:
            message = f"`{order.get('do')}` took longer than {timeout:.0f} s, and the ranks were ended"
            raise self._ended(RankFailed(message, "check for stuck I/O: `dmesg | tail`", raw=self.messages()))
        return [answers[rank] for rank in sorted(answers)]

    def _answers(self, deadline: float, tick: Callable[[], None]) -> dict[int, dict[str, Any]]:
        """Those that came in time, by rank."""
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                selector.register(worker.output, selectors.EVENT_READ, rank)
            while len(answers) < len(self._workers) and time.monotonic() <= deadline:
                ready = selector.select(TICK)
                for key, _ in ready:
                    answer = self._of(int(key.data), Worker.read)
                    if answer is not None:
                        answers[int(key.data)] = answer
                        if "error" in answer:
                            deadline = min(deadline, time.monotonic() + _STRAGGLERS)
                if not ready:
                    self._look_at_the_silent(answers, selector)
                tick()
        return answers

    def _look_at_the_silent(self, answers: Mapping[int, Any], selector: selectors.BaseSelector) -> None:
        """Raises ``RankFailed`` where one has ended whose output a process that it forked keeps open."""
        for rank, worker in enumerate(self._workers):
            # Its last answer may have come since: what has ended writes nothing more.
            if rank not in answers and worker.has_ended() and not selector.select(0):
                raise self._ended(self._died(rank, worker.dead()))

    def _of(self, rank: int, act: Callable[[Worker], Answer]) -> Answer:
        """What ``act`` gives for a rank; all are ended where it has died."""
        try:
            return act(self._workers[rank])
        except Failed as error:
            raise self._ended(self._died(rank, error)) from None

    def messages(self) -> str:
        """The end of what every rank printed."""
        outputs = {rank: worker.messages() for rank, worker in enumerate(self._workers)}
        return "\n".join(f"--- rank {rank}\n{output}" for rank, output in outputs.items() if output)

    def dismiss(self, patience: float) -> None:
        """Give the order ``end``, and wait up to ``patience`` seconds for the ends of the ranks, so that they leave
        nothing in shared memory."""
        with contextlib.suppress(RankFailed):
            self.ask({"do": "end"}, patience)
            for worker in self._workers:
                worker.finish(patience)
        self._held.close()

    def _died(self, rank: int, error: Failed) -> RankFailed:
        """The error of the rank that died first. ``rank``: the first that was seen."""
        killed = wait_for(lambda: [each for each, worker in enumerate(self._workers) if worker.killed()], _SAME_DEATH)
        if killed and rank not in killed:
            rank = killed[0]
            error = self._workers[rank].dead()
        return RankFailed(error.message, error.hint, rank, error.raw)

    def _ended(self, error: RankFailed) -> RankFailed:
        self._held.close()
        return error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
