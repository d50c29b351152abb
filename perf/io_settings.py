"""What is an I/O setting worth here? Each alone against what the machine has now, proven, and put back.

    sudo .venv/bin/python perf/io_settings.py --target DIR [--set scheduler=none,nr_requests=64] [--duration 1.5]

fio reads and writes, directly, or through the page cache for settings of that; a sample whose bytes the drives'
counters do not prove is taken again with its round. What is touched is put back after each sample, and after SIGKILL
too. Without --set a chosen set is tried; what the machine does not offer is said. The share is `tried` of `now` in the
same round.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rounds import Arm, Sample, fio, program, sample
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import busy
from tunetool.measure.evidence import obstacles
from tunetool.measure.janitor import Janitor
from tunetool.node.common.io_settings import ARGUMENTS, ROWS, SETTINGS
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.tuning.settings import Machine, impossible, normal_form, read_cpus, wanted

CHOSEN = ",".join(f"{row.name}={value}" for row in ROWS.values() for value in row.tried)
JOBS = 4


def machine_under(stack: BlockStack) -> Machine:
    """The places by kernel name: a measurement outlives no reboot."""
    leaves = {leaf.name: leaf.name for leaf in stack.leaves}
    # Read-ahead belongs to what is mounted; a partition has that of its disk.
    top = stack.device if Path(f"/sys/block/{stack.device}").exists() else next(iter(leaves), None)
    return Machine(drives=leaves, arrays={top: top} if top else {}, cpus=read_cpus())


def parsed(text: str, machine: Machine) -> tuple[str, str, str]:
    """The setting, its value as the kernel shows it, and why it cannot be tried here. Raises ``UsageProblem``."""
    name, _, value = text.partition("=")
    if name not in SETTINGS:
        raise UsageProblem(f"`{name}` is not a setting", f"one of {', '.join(SETTINGS)}")
    tuning = normal_form({**dict.fromkeys(ARGUMENTS, ""), name: value})
    there = any(machine.read(name, target) is not None for target in machine.targets(name))
    return name, str(wanted(tuning, name)), next(iter(impossible(tuning, machine)), "" if there else "there is none")


def present(machine: Machine, names: Sequence[str]) -> dict[tuple[str, str], str]:
    """The values of settings on their targets."""
    values = {(name, target): machine.read(name, target) for name in names for target in machine.targets(name)}
    return {place: value for place, value in values.items() if value is not None}


def prepare(asked: argparse.Namespace, folder: Path, held: ExitStack) -> dict[str, Arm]:
    stack = read_stack(str(folder))
    if problems := obstacles(stack):
        raise CannotJudge(problems[0])
    held.enter_context(busy.device_lock(str(stack.device_number), busy.lock_directory(os.environ, True)))
    machine = machine_under(stack)
    size, noted = asked.size_mib * 2**20, dict[tuple[str, str], str]()

    def turn(text: str, name: str, value: str) -> Iterable[Sample]:
        cached = ROWS[name].page_cache
        # Buffered once over the file: what is moved twice in the page cache reaches no drive twice.
        how = {"direct": False, "engine": "psync"} if cached else {"seconds": asked.duration}
        for direction in [cached] if cached else ["read", "write"]:
            speeds = {}
            for state in ("now", "tried"):
                try:
                    for target in machine.targets(name) if state == "tried" else ():
                        machine.write(name, target, value)
                    speeds[state] = fio(folder, direction, JOBS, size, proven=True, **how)
                finally:
                    for (touched, target), before in noted.items():
                        if machine.read(touched, target) != before:
                            machine.write(touched, target, before)
                yield sample("bandwidth", speeds[state], part=text, direction=direction, state=state)
            yield sample("share", speeds["tried"] / speeds["now"], part=text, direction=direction)

    arms: dict[str, Arm] = {}
    for text in asked.set.split(","):
        name, value, reason = parsed(text, machine)
        if reason:
            print(f"`{text}` is not tried: {reason}")
            continue
        noted |= present(machine, (name, *ROWS[name].resets))  # what the kernel resets is put back after it
        arms[text] = partial(turn, text, name, value)
    entries = []
    for (name, target), before in noted.items():
        file = ROWS[name].share_file if before.endswith("%") else machine.file(name, target)
        entries.append({"kind": "value", "path": f"/{file}", "value": before.rstrip("%")})
    held.enter_context(Janitor("perf/io_settings.py")).note(*entries)
    for direction in ("write", "read"):  # the files are there, and what comes first is not timed
        fio(folder, direction, JOBS, size)
    return arms


if __name__ == "__main__":
    program(prepare, set=CHOSEN, duration=1.5, size_mib=1024)
