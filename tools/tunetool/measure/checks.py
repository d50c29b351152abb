"""Checks of the reader of machines, as a record has them."""

from __future__ import annotations

from typing import Any

from tunetool.node.common.check_result import Check
from tunetool.record import CheckResult


def as_result(check: Check) -> CheckResult:
    """The check for a record."""
    status: Any = check.status
    return CheckResult(id=check.id, status=status, expected=check.expected, found=check.found, remedy=check.remedy)
