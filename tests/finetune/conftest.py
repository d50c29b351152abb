"""Fixtures for the fine-tune and for the launchers that start it on many nodes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import CONTROL, Cluster, cluster_of_two
from cluster_slurm import COMMANDS, start_slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes and a control node for the tests of one module."""
    # A path short enough for the sockets that programs make in it.
    with tempfile.TemporaryDirectory(prefix="tunetool-cluster-") as folder, cluster_of_two(Path(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def slurm(cluster: Cluster) -> Iterator[Cluster]:
    """The same cluster with a slurmctld and a slurmd on each node; Slurm's commands are on PATH."""
    start_slurm(cluster)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{cluster.commands(CONTROL, COMMANDS)}{os.pathsep}{os.environ['PATH']}")
        yield cluster
