"""Two nodes of one inventory: a bad node does not stop the other, and one run builds both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Lab, changed_tasks, started
from summaries import TRIPS_TO_BUILD, host_row


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab of two nodes."""
    with started(tmp_path_factory, "--nodes", "2") as lab:
        yield lab


def with_a_dead_host(lab: Lab, inventory: Path) -> str:
    """The lab's inventory with a third host, first in it, that refuses every connection."""
    document = yaml.safe_load((lab.inventory / "hosts.yml").read_text())
    nodes = document["lab"]["hosts"]
    document["lab"]["hosts"] = {"dead": {**nodes["node1"], "ansible_port": 9}, **nodes}
    inventory.mkdir()
    (inventory / "group_vars").symlink_to(ROOT / "inventory/lab/group_vars")
    (inventory / "hosts.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return str(inventory)


@pytest.mark.slow
def test_a_dead_host_and_a_refusing_one_stop_nobody(two: Lab, tmp_path: Path) -> None:
    two.lab("fault", "node1", "has-filesystem", "--drive", "LAB1NV2")
    inventory = with_a_dead_host(two, tmp_path / "inventory")
    done = two.tool("provision", "-i", inventory, "--hosts-per-batch", "2", "--max-fail", "100")
    assert done.code == 1, done.text
    assert host_row(done.stdout, "dead")[:2] == ["dead", "UNREACHABLE"]
    assert host_row(done.stdout, "node1")[:2] == ["node1", "REFUSED"]
    assert "8 drives asked for, 7 usable" in done.stdout
    assert host_row(done.stdout, "node2")[:2] == ["node2", "BUILT"]
    assert two.ssh("node1", "ls /etc/tunetool 2>/dev/null; true") == ""
    assert '"schema": "tunetool.manifest/1"' in two.ssh("node2", "cat /etc/tunetool/node.json")


@pytest.mark.slow
def test_two_nodes_are_built_side_by_side(two: Lab) -> None:
    for node in ("node1", "node2"):
        two.reset(node)
    done = two.site()
    assert done.code == 0, done.text
    # A node takes as many round trips as it takes alone; how long both take is for bench/fleet.py.
    trips = {node: int(host_row(done.stdout, node)[4]) for node in ("node1", "node2")}
    assert trips["node1"] == trips["node2"] <= TRIPS_TO_BUILD
    again = two.site()
    assert changed_tasks(again.stdout) == []
    for node in ("node1", "node2"):
        assert host_row(again.stdout, node)[:2] == [node, "UNCHANGED"]
