"""torchrun itself, with its verdict as JSON instead of prose: ``agent.py VERDICT ARGUMENTS-OF-TORCHRUN``.

Run by path under the Python that has torch, so: standard library and torch, nothing of tunetool.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main(verdict: str, arguments: list[str]) -> int:
    """Exit status 1, and the first rank that failed in ``verdict``, when a rank fails."""
    # Killed at once with its parent, as the launcher arranged, torchrun could not end its ranks any more.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, code = first({rank: (failed.timestamp, failed.exitcode) for rank, failed in error.failures.items()})
        Path(verdict).write_text(json.dumps({"rank": rank, "exit": code}))
        return 1
    return 0


def first(failures: Mapping[int, tuple[float, int]]) -> tuple[int, int]:
    """Which rank failed first, and its exit status, from the second in which each was found dead, and that status.

    Within one second a rank that a signal ended is the cause of those that then lost its connection. Those that
    torchrun ended by SIGTERM are never the cause.
    """
    rank = min(
        failures,
        key=lambda failed_rank: (
            failures[failed_rank][1] == -signal.SIGTERM,
            *_order(failures[failed_rank]),
            failed_rank,
        ),
    )
    return rank, failures[rank][1]


def _order(failure: tuple[float, int]) -> tuple[int, bool]:
    died_at, code = failure
    return int(died_at), code >= 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
