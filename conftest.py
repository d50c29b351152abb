"""For every group of tests: which skips are allowed (tests/skips.py)."""

from skips import pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["pytest_make_collect_report", "pytest_runtest_makereport"]
