"""A node on which torch cannot start: fio tunes it, `site.yml` renders the result, and a change of hardware is noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import POINT, Lab, changed_tasks

pytestmark = pytest.mark.usefixtures("marker")

SPACE = {"block_size": ["256K", "1M"], "queue_depth": [8, 32], "intra_op_parallelism": [1, 2]}
MANIFEST_TASK = "tunetool.node.tunetool : Write the manifest and check the node against it"


@pytest.fixture
def variables(lab: Lab) -> Iterator[Path]:
    folder = lab.inventory / "host_vars/node1"
    folder.mkdir(parents=True)
    yield folder / "tunetool_tuned.json"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.slow
def test_eight_settings_by_fio_go_through_the_inventory(built: Lab, variables: Path) -> None:
    node = built
    node.ssh("node1", f"echo '{json.dumps(SPACE)}' > /root/space.json && mkdir -p /root/vars")
    more = "--driver fio --space /root/space.json --budget 240s -o /root/aio.json --store-vars /root/vars"
    record = json.loads(node.ssh("node1", f"tunetool tune --target {POINT} {more} --json -"))
    assert record["verdict"] == {"status": "pass", "reasons": []}
    figures = [m for m in record["measurements"] if "evidence" in m]
    assert {m["parameters"]["direction"] for m in figures} == {"read", "write"}
    assert all(0.98 <= m["evidence"]["ratio"] <= 1.02 for m in figures)
    assert "8 of 8 settings tried" in record["checks"][0]["found"]
    block = json.loads(node.ssh("node1", "cat /root/aio.json"))
    assert node.ssh("node1", f"ls -A {POINT} | grep -c tunetool- || true") == "0"

    variables.write_text(node.ssh("node1", "cat /root/vars/tunetool_tuned.json"))
    done = node.site()
    assert done.code == 0, done.text
    assert changed_tasks(done.stdout) == [MANIFEST_TASK]
    assert json.loads(node.ssh("node1", "cat /etc/tunetool/aio.json")) == block
    assert changed_tasks(node.site().stdout) == []
    assert "deepspeed.tuned" not in node.verify("--level", "config").stdout

    # A property that the speed depends on has changed.
    node.ssh("node1", f"mount -o remount,lazytime {POINT}")
    done = node.verify("--level", "config")
    assert "deepspeed.tuned" in done.text
    assert "tuned on other hardware: mount was " in " ".join(done.text.split())
    node.ssh("node1", f"mount -o remount,nolazytime {POINT}")

    # A result of other hardware does not count for this node.
    stored = json.loads(variables.read_text())["tunetool_tuned"]
    variables.write_text(json.dumps({"tunetool_tuned": {"0" * 64: next(iter(stored.values()))}}))
    done = node.site()
    assert done.code == 0, done.text
    assert "has no result of hardware like this" in done.text
    assert node.ssh("node1", "test -e /etc/tunetool/aio.json && echo there || echo gone") == "gone"
