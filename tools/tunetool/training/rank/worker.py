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
from tunetool.origin import install_hint
from tunetool.training.rank.curves import Curves
from tunetool.training.rank.recorder import Recorder, keep_error, keep_result
from tunetool.training.workload import Workload, as_environment, workload_from_json

_TRAINERS = {
    "deepspeed": "tunetool.training.trainers.deepspeed",
    "lightning": "tunetool.training.trainers.lightning",
    "llamafactory": "tunetool.training.trainers.llamafactory",
}
"""The module of each trainer, which has ``train(workload, recorder)``."""
Train = Callable[[Workload, Recorder], None]


def run(workload: Workload, directory: Path) -> None:
    """Train, and write result and curves to the rank's ``directory``; a ``TunetoolError`` too, before it is raised."""
    recorder = Recorder(
        rank=int(os.environ["RANK"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        world=int(os.environ["WORLD_SIZE"]),
        launched=launched.started_at,
        beat=launched.beat,
    )
    identity = (recorder.rank, recorder.local_rank, "cpu" if workload.device == "cpu" else "cuda")
    try:
        with Curves(directory, workload.curves, *identity, started=launched.started_at) as curves:
            recorder.scalars = curves.scalar
            with recorder.phase("imports"):
                train: Train = importlib.import_module(_TRAINERS[workload.trainer]).train
            train(workload, recorder)
        keep_result(directory, recorder.result())
    except TunetoolError as error:
        keep_error(directory, error)
        raise
    except ImportError as error:
        missing = UsageProblem(
            f"`{error.name or error}` is not installed in `{sys.executable}`", install_hint("finetune")
        )
        keep_error(directory, missing)
        raise missing from error


def main(arguments: Sequence[str]) -> int:
    """Run one rank; returns 0, or tunetool's exit status 2 or 3 with the reason on stderr."""
    try:
        if len(arguments) != 2 or arguments[0] != "--workload":
            raise UsageProblem("a rank needs exactly one option", "`--workload JSON`")
        workload = workload_from_json(arguments[1])
        os.environ.update(as_environment(workload, os.environ))
        if launched.NODE in os.environ:
            # Temporary files of loading processes outlive a killed rank; in this directory they are removed with it.
            os.environ["TMPDIR"] = tempfile.tempdir = os.environ[launched.NODE]
        run(workload, launched.out())
    except TunetoolError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        sys.stderr.write(f"error: {error.message}{hint}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
