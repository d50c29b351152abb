"""`tunetool advise checkpoint`: what the loss of a node costs with and without replicas, and how long drives last."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tunetool.advise.drive_life import Drives, life, rated_bytes
from tunetool.advise.node_loss import DAY, DEFAULT_NODE_MTBF, LONGEST_DRAIN, MONTH, Copies, LostNode, costs
from tunetool.cli.main import cli

HOUR = 3600.0
MACHINE = Path(__file__).parents[2] / "docs/machines/h100-made.json"
GB = 10**9
CALL = ("--model-size", "140GB", "--bandwidth", "2GBps", "--writers", "16", "--samples-per-second", "100")
NODES = ("--mtbf", "5000h", "--nodes", "16", "--shared", "1GBps", "--network", "5GBps")
DRIVES = ("--drives", "8", "--drive-size", "3.84TB", "--dwpd", "1")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["advise", "checkpoint", *CALL, *arguments], standalone_mode=False)


def full_state(*arguments: str) -> Any:
    done = run(*arguments, "--json", "-")
    assert done.exception is None, done.exception
    return json.loads(done.stdout)["states"][1]


sizes, rates = st.integers(10**6, 10**14), st.floats(1e6, 1e12)
cases = st.fixed_dictionaries(
    {
        "size": sizes,
        "write": st.floats(0.01, 1e4),
        "interval": st.floats(60.0, 1e5),
        "copies": st.builds(Copies, rates, rates, st.integers(1, 1000)),
        "node_mtbf": st.floats(HOUR, 1e10),
        "nodes": st.integers(1, 10_000),
        "restart": st.floats(0.0, 1e4),
    }
)


@given(cases)
def test_with_replicas_nothing_is_ever_worse(case: dict[str, Any]) -> None:
    lost = costs(**case)
    drained, replicated = lost.drained, lost.replicated
    assert replicated is not None
    assert 0 < replicated.mean <= drained.mean * (1 + 1e-9)
    assert 0 < replicated.most <= drained.most * (1 + 1e-9)
    assert 0 <= replicated.month <= drained.month * (1 + 1e-9)
    assert replicated.drain_every >= drained.drain_every >= lost.period
    assert 0 < replicated.shared_busy <= drained.shared_busy <= 1 + 1e-9
    if lost.is_worth_it:
        assert replicated.replicate_every is not None
        assert replicated.replicate_every >= lost.period
        assert 0 < (replicated.network_busy or 0) <= 1 + 1e-9
        assert replicated.peer_bytes == 3 * lost.part
    assert lost.written_a_day >= lost.part * DAY / lost.period * (1 - 1e-9)


@given(cases, st.floats(1.0, 1000.0))
def test_nodes_that_fail_more_often_cost_more(case: dict[str, Any], factor: float) -> None:
    seldom, often = costs(**case), costs(**{**case, "node_mtbf": case["node_mtbf"] / factor})
    assert often.drained.month >= seldom.drained.month
    assert often.replicated is not None
    assert seldom.replicated is not None
    assert often.replicated.month >= seldom.replicated.month * (1 - 1e-9)


@given(cases, st.floats(1.0, 1000.0))
def test_faster_shared_storage_never_costs_more(case: dict[str, Any], factor: float) -> None:
    slow = costs(**case).drained
    copies = case["copies"]
    fast = costs(**{**case, "copies": replace(copies, shared=copies.shared * factor)}).drained
    assert fast.most <= slow.most * (1 + 1e-9)


@given(st.floats(1.0, 1e16), st.integers(1, 64), st.integers(10**11, 10**14), st.floats(0.1, 30), st.floats(0, 2))
def test_more_writes_never_make_drives_last_longer(
    written: float, count: int, size: int, dwpd: float, used: float
) -> None:
    drives = Drives(count, size, rated_bytes(dwpd, size), used)
    lasts = life(written, drives)
    assert 0 <= lasts.years < math.inf
    assert life(written * 2, drives).years <= lasts.years
    assert lasts.years <= life(written, replace(drives, used=None)).years
    assert lasts.outlives_warranty == (written <= dwpd * size * count * (1 + 1e-12))


def example(network: float | None = 5e9) -> LostNode:
    # 980 GB of 16 nodes every half hour: drains of 980 s at 1 GB/s, replicas of 12.25 s at 5 GB/s.
    return costs(980 * GB, 30.0, 1770.0, Copies(1e9, network, 16), 5000 * HOUR, 16, 600.0)


def test_the_example_is_what_the_formulas_give() -> None:
    lost = example()
    drained, replicated = lost.drained, lost.replicated
    assert (drained.mean, drained.most, drained.drain_every) == (30 + 980 + 900, 30 + 980 + 1800, 1800)
    assert drained.month == pytest.approx(16 * MONTH / (5000 * HOUR) * 1910)
    assert replicated is not None
    assert (replicated.replica, replicated.replicate_every, replicated.drain_every) == (12.25, 1800, LONGEST_DRAIN)
    assert replicated.most == 30 + 12.25 + 1800
    both = 2 * (600 + 30 + 12.25 + 1800) / (5000 * HOUR)
    assert replicated.mean == pytest.approx((1 - both) * (30 + 12.25 + 900) + both * (30 + 980 + DAY / 2))
    assert lost.written_a_day == pytest.approx(2 * 61.25 * GB * 48)


def test_copies_that_take_longer_than_a_save_are_fewer() -> None:
    slow = costs(980 * GB, 30.0, 1770.0, Copies(0.25e9, 0.02e9, 16), 5000 * HOUR, 16, 600.0)
    assert slow.drained.drain_every == 3 * 1800
    assert slow.replicated is not None
    assert slow.replicated.replicate_every == 2 * 1800


def test_replicas_slower_than_drains_are_not_advised() -> None:
    lost = costs(980 * GB, 30.0, 1770.0, Copies(100e9, 0.02e9, 16), 5000 * HOUR, 16, 600.0)
    assert not lost.is_worth_it
    assert lost.replicated == lost.drained
    assert lost.written_a_day == pytest.approx(61.25 * GB * 48)
    said = run(*NODES[:4], "--shared", "100GBps", "--network", "0.01GBps").stdout
    assert "replicas save nothing" in " ".join(said.split())


def test_the_loss_is_what_a_simulation_loses() -> None:
    source, lost = random.Random(3), example()
    total = 0.0
    for _ in range(200_000):
        at = source.uniform(1e6, 2e6)
        # The last save whose drain was whole by then; saves begin every 1800 s and are drained 1010 s later.
        total += at - ((at - 1010) // 1800) * 1800
    assert total / 200_000 == pytest.approx(lost.drained.mean, rel=0.01)


def test_the_command_says_what_a_node_costs_and_drives_last() -> None:
    state = full_state(*NODES, *DRIVES)
    lost, drives = state["lost_node"], state["drives"]
    assert lost["node_mtbf"] == 5000 * HOUR
    assert lost["part"] == 980 * GB / 16
    assert drives["bytes_a_day"] == pytest.approx(
        lost["part"] * DAY * (1 / lost["period"] + 1 / lost["replicated"]["replicate_every"])
    )
    assert drives["drive_writes_a_day"] == pytest.approx(drives["bytes_a_day"] / (8 * 3.84e12))
    assert drives["years"] == pytest.approx(5 * 365 / 365.25 / drives["drive_writes_a_day"])
    assert drives["outlives_warranty"] is True
    shown = run(*NODES, *DRIVES).stdout
    assert max(map(len, shown.splitlines())) <= 100
    for row in ("costs on average", "costs a month", "drain every", "replicate every", "room on the peer"):
        assert row in shown


def test_a_rating_that_ends_before_the_warranty_is_a_warning() -> None:
    tiny = "--drives", "1", "--drive-size", "1TB", "--dwpd", "0.3"
    shown = " ".join(run(*NODES, *tiny).stdout.split())
    assert "WARNING: that of new drives ends before their warranty" in shown
    assert full_state(*NODES, *tiny)["drives"]["outlives_warranty"] is False
    assert "WARNING" not in run(*NODES, *DRIVES).stdout


def test_two_ratings_of_a_drive_say_the_same() -> None:
    by_dwpd = full_state(*NODES, *DRIVES)["drives"]
    by_tbw = full_state(*NODES, "--drives", "8", "--drive-size", "3840GB", "--tbw", "7008TB")["drives"]
    assert by_tbw == pytest.approx(by_dwpd)


def test_a_failure_rate_that_nobody_gave_has_its_source() -> None:
    shown = " ".join(run("--shared", "1GBps", "--nodes", "16").stdout.split())
    assert "a node fails every 6,335 h: the 419 failures of 2,048 nodes in 54 days of Llama 3" in shown
    assert "Daly" not in shown
    assert full_state("--shared", "1GBps")["lost_node"]["node_mtbf"] == DEFAULT_NODE_MTBF
    assert "lost_node" not in full_state()


def test_drives_come_from_an_inspection(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    assert cli.main(["inspect", "--root", str(MACHINE), "--json", str(path)], standalone_mode=False) == 0
    seen = [each for each in json.loads(path.read_text())["drives"] if each["data"]]
    drives = full_state(*NODES, "--inspection", str(path), "--dwpd", "1")["drives"]
    size = min(each["size_bytes"] for each in seen)
    assert drives["drive_writes_a_day"] == pytest.approx(drives["bytes_a_day"] / (len(seen) * size))
    used = max(each["health"]["used_percent"] for each in seen) / 100
    assert used > 0
    new = full_state(*NODES, "--drives", str(len(seen)), "--drive-size", f"{size}B", "--dwpd", "1")["drives"]
    assert drives["years"] == pytest.approx(new["years"] * (1 - used))
