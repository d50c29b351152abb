"""Fixtures of the fine-tune and of what starts it on many nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, cluster_of_two


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes and a control node for the tests of one module."""
    # A path short enough for the sockets that programs make in it.
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder)) as made:
        yield made
