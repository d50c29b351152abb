"""Detects drives that fail during a measurement, by the kernel log and by missing drives."""

from __future__ import annotations

import contextlib
import os
import re

from tunetool.node.machine.block_stack import BlockStack, CountersChanged, Leaf, read_counters
from tunetool.record import CheckResult

CHECK_ID = "drives.errors"

_EXPECTED = "every drive is present, and the kernel logged no I/O error of theirs during the measurement"
_RECORD_BYTES = 8192
"""/dev/kmsg hands out one record for each read, and refuses a smaller buffer than it needs (kernel: dev-kmsg)."""
_ERROR = re.compile(r"(?P<what>[\w/ -]*error, dev (?P<device>\S+), sector \d+(?: op \S+)?)")
_TIMEOUT = re.compile(r"nvme (?P<controller>nvme\d+): (?P<what>I/O.* timeout.*)")


class Watch:
    """Watches the drives of ``stack`` while it is open. Without access to the kernel log it sees only lost drives."""

    def __init__(self, stack: BlockStack, log: str = "/dev/kmsg", root: str = "/") -> None:
        self._stack = stack
        self._log = log
        self._root = root
        self._handle: int | None = None
        self._counted: set[str] = set()

    def __enter__(self) -> Watch:
        with contextlib.suppress(OSError):
            self._handle = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._handle, 0, os.SEEK_END)
        self._counted = {leaf.name for leaf in self._stack.leaves if self._counts(leaf)}
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def findings(self) -> list[CheckResult]:
        """The failed check ``drives.errors``, by serial; empty if no error was seen."""
        lines = self._new_lines()
        faults, failed = [], []
        for leaf in self._stack.leaves:
            errors = [what for what in (_error_of(line, leaf.counted_by) for line in lines) if what]
            if leaf.name in self._counted and not self._counts(leaf):
                faults.append(f"`{leaf.label}` (`{leaf.name}`) is gone")
            elif errors:
                more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
                faults.append(f"`{leaf.label}`: {errors[0]}{more}")
                failed.append(leaf.name)
        if not faults:
            return []
        look = f"look at {', '.join(f'`/dev/{name}`' for name in failed)}: `nvme smart-log`; " if failed else ""
        remedy = f"{look}see `dmesg`; a drive that fails or is gone must be reseated or replaced (RAID0 loses its data)"
        return [CheckResult(id=CHECK_ID, status="fail", expected=_EXPECTED, found="; ".join(faults), remedy=remedy)]

    def _counts(self, leaf: Leaf) -> bool:
        try:
            for name in leaf.counted_by:
                read_counters(name, self._root)
        except CountersChanged:
            return False
        return True

    def _new_lines(self) -> list[str]:
        text = b""
        while self._handle is not None:
            try:
                record = os.read(self._handle, _RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                # The kernel overwrote what was not read yet; the next read goes on behind the hole.
                continue
            except OSError:
                break
            if not record:
                break
            text += record
        return [line.partition(";")[2] for line in text.decode(errors="replace").splitlines() if ";" in line]


def _error_of(line: str, names: tuple[str, ...]) -> str | None:
    error = _ERROR.search(line)
    if error and error["device"] in names:
        return error["what"].strip()
    timeout = _TIMEOUT.search(line)
    if timeout and any(re.match(rf"{timeout['controller']}(c\d+)?n\d+$", name) for name in names):
        return timeout["what"].strip()
    return None
