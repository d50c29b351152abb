"""A node's guard that is ended by a signal, as by scancel, just after its rank has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tunetool.launch.spec import SPEC, NodeSpec, write
from waiting import PATIENCE, until

_PROGRAM = """
import os, sys, time
open(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_0", "wb").close()
time.sleep(6000)
"""


def test_what_its_rank_has_in_shared_memory_goes_with_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"1{os.getpid():07d}"}
    buffer = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{where['MASTER_PORT']}_0")
    spec = NodeSpec(
        "a-run", str(tmp_path), str(tmp_path), ["here"], 0, 1, [str(program)], sys.executable, engine="other"
    )
    write(spec, tmp_path, SPEC)
    guard = subprocess.Popen([sys.executable, "-m", "tunetool.launch.node", str(tmp_path)], stdin=subprocess.PIPE)
    variables = {**os.environ, **where, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rank = subprocess.Popen([sys.executable, "-m", "tunetool.launch.start", str(tmp_path)], env=variables)
    try:
        until(buffer.exists, "the rank's buffer", rank)
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(PATIENCE) == 3
        assert rank.wait(PATIENCE) == -signal.SIGKILL
        assert not buffer.exists()
    finally:
        for process in (guard, rank):
            process.kill()
            process.wait()
        if guard.stdin is not None:
            guard.stdin.close()
        buffer.unlink(missing_ok=True)
