"""Names of tests say a behaviour, and can be read at a glance."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python


def test_no_name_of_a_test_has_more_than_60_letters() -> None:
    long = re.compile(r"^ *(?:async )?def (test_\w{56,})", re.MULTILINE)
    paths = Path(__file__).parents[1].rglob("*.py")
    assert [f"{path.name}: {name}" for path in paths for name in long.findall(path.read_text())] == []
