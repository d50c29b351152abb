"""For all tests: Ctrl-C reaches what they start (tests/signals.py), which skips are allowed (tests/skips.py), how long
each may take (tests/hangs.py), and what Hypothesis draws."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from hangs import pytest_collection_modifyitems, pytest_timeout_set_timer
from signals import pytest_configure, pytest_unconfigure
from skips import pytest_make_collect_report, pytest_runtest_makereport

# The same examples in every run, and no bound on their time: the code alone decides whether a test passes. Runs with
# slow tests draw others every time (`--hypothesis-profile=search`, tools/dev/groups.py).
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("steady", settings.get_profile("search"), derandomize=True)
# For another Python (tools/dev/environments.py): it changes what runs an example, not which examples there are.
settings.register_profile("few", settings.get_profile("steady"), max_examples=10)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update-views``: what tests/unit/test_views.py sees now becomes what it expects."""
    parser.addoption("--update-views", action="store_true", help="write what is shown of records into tests/data/views")


__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_timeout_set_timer",
    "pytest_unconfigure",
]
