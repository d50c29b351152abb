"""The scenario molecule/node: a new node is built, rebooted, and checked by tests/infra/test_node.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow  # provisions three times and reboots; `make test` checks a built node in test_main_job.py
def test_the_scenario_of_the_virtual_node() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools/dev/scenario.py"), "node"], check=True)
