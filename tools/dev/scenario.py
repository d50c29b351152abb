"""Run a Molecule scenario, and leave nothing of it behind whatever happens.

scenario.py node              `molecule test` of the virtual node; destroyed also after Ctrl-C or a time box
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "TUNETOOL_SCENARIO_RUN"
"""Environment variable that marks the processes of one run."""


def test(scenario: str, variables: Mapping[str, str], clean_up: Callable[[], object]) -> int:
    """Molecule's exit status. Molecule itself leaves everything behind when it is interrupted."""
    token = secrets.token_hex(8)
    try:
        return molecule("test", scenario, {**variables, TOKEN: token})
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        end_started(token)
        clean_up()


def molecule(action: str, scenario: str, variables: Mapping[str, str]) -> int:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "MOLECULE_COMMAND_BORDERS": "false",
        **variables,
    }
    command = ["molecule", action, "--scenario-name", scenario]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def end_started(token: str) -> None:
    """End what Molecule started and did not end: Ansible's workers sit in sessions that no Ctrl-C reaches."""
    deadline = time.monotonic() + 30
    number = signal.SIGTERM
    while started := with_token(token):
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
        time.sleep(0.2)


def with_token(token: str) -> list[int]:
    """Pids of this run's processes, except for a container's, which end with the container."""
    wanted, pids = f"{TOKEN}={token}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                wanted in (process / "environ").read_bytes().split(b"\0")
                and b"conmon" not in (process / "cmdline").read_bytes().split(b"\0")[0]
            ):
                pids.append(int(process.name))
    return pids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=["node"])
    scenario = parser.parse_args().scenario
    # SIGTERM, from a time box, must clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    raise SystemExit(test(scenario, {}, lambda: molecule("destroy", scenario, {})))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
