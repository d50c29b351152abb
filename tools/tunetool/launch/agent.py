"""torchrun, with the first failure written as JSON: ``agent.py VERDICT ARGUMENTS-OF-TORCHRUN``.

It is run by path under the Python that has torch, so it imports only the standard library and torch, not tunetool.
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
    """Run torchrun. If a rank fails, write the first failed rank to the file ``verdict`` and return exit status 1."""
    # The launcher arranged SIGKILL at the death of the parent; SIGTERM lets torchrun end its ranks first.
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
    """The rank that failed first, and its exit status. ``failures``: time of death (seconds) and exit status, by rank.

    Of the ranks that died within the same second, one that was ended by a signal counts as first: the others lost their
    connection to it. A rank that torchrun ended by SIGTERM is never the cause.
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
