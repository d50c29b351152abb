"""For all tests: Ctrl-C reaches what they start (tests/signals.py), and which skips are allowed (tests/skips.py)."""

from __future__ import annotations

from signals import pytest_configure, pytest_unconfigure
from skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_configure", "pytest_make_collect_report", "pytest_runtest_makereport", "pytest_unconfigure"]
