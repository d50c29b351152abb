"""How long a test may take before it counts as one that hangs: it then fails, by its name and with its stack.

No test is this slow by itself: `waiting.PATIENCE` ends whatever one test waits for. The default is in pyproject.toml.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from typing import Any

import pytest

LONGEST = {"slow": 9000, "node": 3000}
"""Seconds by the mark of a test: the slow ones build nodes and environments, under emulation. The first that fits."""

AGAIN = 60
"""Seconds after which it fails once more: what cleans up after it may hang as well."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            longest = next((seconds for mark, seconds in LONGEST.items() if item.get_closest_marker(mark)), None)
            if longest is not None:
                item.add_marker(pytest.mark.timeout(longest))


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, Any, Any]:
    """pytest-timeout fails a test once."""
    done = yield
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN)
    return done
