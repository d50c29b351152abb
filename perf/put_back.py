"""Restores the settings that a measurement changes: at its end, on Ctrl-C and SIGTERM, from a file after a SIGKILL."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tunetool.errors import CannotJudge
from tunetool.node.common.files import replace_file
from tunetool.node.common.io_settings import ROWS
from tunetool.node.tuning.settings import CPU_SETTINGS, Machine

STATE = Path("/run/tunetool-bench-io-tuning.json")
"""Gone after a boot, as the settings are."""


class Touched:
    """The values before the first change; they are on disk before anything is changed."""

    def __init__(self) -> None:
        self.before: list[tuple[str, str, str]] = []

    def remember(self, machine: Machine, setting: str) -> None:
        """Record the values of ``setting`` before it is changed for the first time."""
        # What the kernel resets with it is put back after it.
        for name in (setting, *ROWS[setting].resets):
            known = {(changed, target) for changed, target, _ in self.before}
            for target in machine.targets(name):
                value = machine.read(name, target)
                if value is not None and (name, target) not in known:
                    self.before.append((name, target, value))
        replace_file(str(STATE), json.dumps({"boot": boot_id(), "before": self.before}))

    def put(self, machine: Machine) -> None:
        """Write the recorded values back; the record stays."""
        for setting, target, value in self.before:
            if machine.read(setting, target) != value:
                machine.write(setting, target, value)

    def restore(self, machine: Machine) -> None:
        """Write the values back and forget them. Raises ``CannotJudge`` if the machine does not take one."""
        self.put(machine)
        wrong = [entry for entry in self.before if machine.read(entry[0], entry[1]) != entry[2]]
        if wrong:
            raise CannotJudge(f"{wrong} could not be put back", f"see `{STATE}`; a reboot puts it back")
        STATE.unlink(missing_ok=True)


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def restore() -> str:
    """Restore the values from the file that a killed run left; returns what was done, in words."""
    try:
        document = json.loads(STATE.read_text())
    except FileNotFoundError:
        return "nothing to put back"
    if document["boot"] != boot_id():
        STATE.unlink()
        return "nothing to put back: the machine has booted since, with its own values"
    touched = Touched()
    touched.before = [(setting, target, value) for setting, target, value in document["before"]]
    names = {target: target for _, target, _ in touched.before}
    touched.restore(Machine(drives=names, arrays=names, cpus={setting: list(names) for setting in CPU_SETTINGS}))
    return f"put back: {len(touched.before)} values"


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    old = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP in the block."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
