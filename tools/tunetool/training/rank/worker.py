"""One rank of a fine-tune: ``-m tunetool.training.rank.worker --workload JSON``, started by any launcher."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tunetool.errors import TunetoolError, UsageProblem
from tunetool.launch import rank as launched
from tunetool.training.rank.curves import Curves
from tunetool.training.rank.recorder import Recorder, keep_error, keep_result
from tunetool.training.workload import Workload, as_environment, workload_from_json

MODULE = "tunetool.training.rank.worker"
_TRAINERS = {
    "deepspeed": "tunetool.training.trainers.deepspeed",
    "lightning": "tunetool.training.trainers.lightning",
    "llamafactory": "tunetool.training.trainers.llamafactory",
}
"""Modules with ``train(workload, recorder)``."""
Train = Callable[[Workload, Recorder], None]


def run(workload: Workload, own: Path) -> None:
    """Train, and leave result and curves in the rank's ``own`` directory. Raises ``TunetoolError``, told there too."""
    recorder = Recorder(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        launched=launched.started_at,
        beat=launched.beat,
    )
    place = (recorder.rank, recorder.local_rank, "cpu" if workload.device == "cpu" else "cuda")
    try:
        with Curves(own, workload.curves, *place, started=launched.started_at) as curves:
            recorder.scalars = curves.scalar
            with recorder.phase("imports"):
                train: Train = importlib.import_module(_TRAINERS[workload.trainer]).train
            train(workload, recorder)
        keep_result(own, recorder.result())
    except TunetoolError as error:
        keep_error(own, error)
        raise
    except ImportError as error:
        missing = UsageProblem(
            f"`{error.name or error}` is not installed in `{sys.executable}`", "`pip install 'tunetool[finetune]'`"
        )
        keep_error(own, missing)
        raise missing from error


def main(arguments: Sequence[str]) -> int:
    """Exit status 0; 2 and 3 as tunetool's own, with the reason on stderr."""
    try:
        if len(arguments) != 2 or arguments[0] != "--workload":
            raise UsageProblem("a rank is told one thing", "`--workload JSON`")
        workload = workload_from_json(arguments[1])
        os.environ.update(as_environment(workload, os.environ))
        if launched.NODE in os.environ:
            # What loading processes keep in temporary directories outlives a rank that is killed; this goes with it.
            os.environ["TMPDIR"] = tempfile.tempdir = os.environ[launched.NODE]
        run(workload, launched.out())
    except TunetoolError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"error: {error.message}{hint}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
