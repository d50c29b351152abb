"""Programs of several ranks, which meet on this machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from waiting import PATIENCE


@dataclass(frozen=True)
class Ended:
    """A rank's exit status, and what it printed."""

    code: int
    stdout: str
    stderr: str


def run_ranks(
    program: Path, *arguments: str, world: int = 2, variables: Mapping[str, str] | None = None
) -> list[Ended]:
    """Run ``program`` under this Python once for each rank, with the variables that torchrun sets."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with contextlib.ExitStack() as held:
        ranks = []
        for rank in range(world):
            # Files: a rank whose pipe is full would keep the others waiting for it.
            out, err = (held.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                [sys.executable, str(program), *arguments],
                env={**os.environ, **shared, **own, **(variables or {})},
                stdout=out,
                stderr=err,
            )
            held.enter_context(process)
            held.callback(process.kill)
            ranks.append((process, out, err))
        deadline = time.monotonic() + PATIENCE
        ended = []
        for process, out, err in ranks:
            code = process.wait(timeout=deadline - time.monotonic())
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read())
            ended.append(Ended(code, *said))
        return ended
