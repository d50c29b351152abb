"""torchrun itself, with its verdict as JSON instead of prose: ``agent.py VERDICT ARGUMENTS-OF-TORCHRUN``.

Run by path under the Python that has torch, so: standard library and torch, nothing of tunetool.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
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
        rank, failure = error.get_first_failure()
        Path(verdict).write_text(json.dumps({"rank": rank, "exit": failure.exitcode}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
