"""`tunetool advise expect`: a speed that healthy nodes reach, from the best node's record or from the drives' links."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import advised
from builders import PROVEN, measurement, record, sampled, wanted_read
from calls import ROOT
from tunetool.advise.expect import Ceiling, NodeFigures, from_best, from_links, nodes_of, reaches
from tunetool.errors import UsageProblem
from tunetool.node.common import documents
from tunetool.node.units import parse_bandwidth
from tunetool.record import (
    FIRST_SCHEMA,
    FleetHost,
    Measurement,
    Node,
    ReasonKind,
    Record,
    Verdict,
    dumps,
    parse,
    to_document,
)
from tunetool.verdict import CEILING, NO_EXPECTATION, Case, judge

GEN4, GEN5 = 63.02e9, 126.03e9
MACHINE = ROOT / "docs/machines/h100-made.json"
UNPROVEN = Verdict(status="unproven", reasons=[NO_EXPECTATION], kinds=["expectation"])


def speed(direction: str, value: float, **fields: Any) -> Measurement:
    fields = {"evidence": PROVEN, **fields}
    return sampled(f"sequential.{direction}", *(value * (1 + part / 1000) for part in range(-3, 4)), **fields)


def verified(host: str, read: float, write: float, ceiling: float | None = GEN4, **fields: Any) -> Record:
    links = [measurement(CEILING, ceiling, parameters={"drives": 8})] if ceiling is not None else []
    figures = [speed("read", read), speed("write", write), *links]
    return record(*figures, **{"node": Node(host=host), "verdict": UNPROVEN, **fields})


answered = partial(advised.answered, "expect")


def kept(directory: Path, *records_: Record) -> list[str]:
    paths = []
    for each in records_:
        path = directory / f"{each.node.host}.json"
        path.write_text(dumps(each))
        paths.append(str(path))
    return paths


def test_the_best_node_less_the_margin_is_proposed(tmp_path: Path) -> None:
    slow = verified("slow", 41e9, 22e9)
    paths = kept(tmp_path, verified("middle", 48e9, 26e9), verified("best", 50e9, 25e9), slow)
    document = answered(*paths)
    # 50 and 26 GB/s; their intervals begin 0.3 % lower.
    assert document["variables"] == {"tunetool_expect_read": "44GBps", "tunetool_expect_write": "23GBps"}
    assert document["schema"] == "tunetool.advise.expect/1"
    assert {each["host"]: each["reaches"] for each in document["nodes"]} == {
        "middle": True,
        "best": True,
        "slow": False,
    }
    named = [each["reason"].partition(" best node's interval: ")[2].partition(",")[0] for each in document["proposals"]]
    assert named == ["best", "middle"]
    assert answered(*paths, "--margin", "0%")["variables"]["tunetool_expect_read"] == "49GBps"


def test_a_fleet_s_record_has_every_node(tmp_path: Path) -> None:
    figures = [speed("read", 40e9 + number * 1e9, host=f"n{number}") for number in range(4)]
    hosts = [FleetHost(host=f"n{number}", **UNPROVEN.model_dump()) for number in range(4)]
    hosts[3] = FleetHost(host="n3", status="fail", reasons=["array.members: a drive is missing, expected 8"])
    document = answered(*kept(tmp_path, record(*figures, kind="fleet", hosts=hosts, verdict=UNPROVEN)))
    # n3 is the fastest, and a check fails it.
    assert document["variables"] == {"tunetool_expect_read": "37GBps"}
    assert [each["reaches"] for each in document["nodes"]] == [True, True, True, False]
    assert document["nodes"][3]["problem"].startswith("array.members")
    assert document["ceiling"] is None


def test_a_record_that_fell_short_of_an_expectation_still_counts() -> None:
    wanted = wanted_read("fail")
    verdict = judge(Case([speed("read", 50e9)], [wanted[0].model_copy(update={"value": 60e9})]))
    assert "is below 60 GB/s" in verdict.reasons[0]
    failed = verified("n1", 50e9, 25e9, expectations=wanted, verdict=verdict)
    (node,) = nodes_of(failed)
    assert node.problem is None
    (first, _) = from_best([node], None, 0.1)
    assert (first.text, reaches(node, [first])) == ("44GBps", True)


def test_a_note_of_a_pass_is_no_problem() -> None:
    verdict = judge(Case(judged="work", notes=["array.numa: `S1` on 1"]))
    assert (verdict.status, verdict.kinds) == ("pass", ["note"])
    (node,) = nodes_of(verified("n1", 50e9, 25e9, verdict=verdict))
    assert node.problem is None


@pytest.mark.parametrize(
    ("reason", "counts"),
    [("random read 4k 1 MIOPS is below 5 MIOPS: see x", True), ("array.members: one is gone", False)],
)
def test_a_reason_of_a_record_of_schema_1_is_read_by_its_words(reason: str, counts: bool) -> None:
    document = to_document(verified("n1", 50e9, 25e9, verdict=Verdict(status="fail", reasons=[NO_EXPECTATION, reason])))
    document["schema"] = FIRST_SCHEMA
    for each in document["measurements"]:
        del each["figure"], each["labels"]
    document["sha256"] = documents.checksum(document)
    (node,) = nodes_of(parse(json.dumps(document), "old"))
    assert node.problem == (None if counts else reason)


@pytest.mark.parametrize(
    ("reasons", "problem"),
    [
        (["sequential read: `md0` counted only 0.5 of it"], "sequential read: `md0`"),
        (["it has no verdict"], "it has no verdict"),
        (["`/mnt` is busy"], "`/mnt` is busy"),
        (["outlier: read of 41 GB/s"], "outlier: "),
    ],
)
@pytest.mark.parametrize("kinds", [None, ["unproven"]])
def test_a_node_whose_figures_prove_nothing_does_not_count(
    reasons: list[str], problem: str, kinds: list[ReasonKind] | None
) -> None:
    verdict = None if reasons == ["it has no verdict"] else Verdict(status="unproven", reasons=reasons, kinds=kinds)
    nodes = nodes_of(verified("n1", 50e9, 25e9, verdict=verdict))
    with pytest.raises(UsageProblem, match="no figure counts: `n1`") as caught:
        from_best(nodes, None, 0.1)
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "doubtful",
    [
        {"evidence": None},
        {"evidence": PROVEN.model_copy(update={"ratio": 0.4})},
        {"evidence": PROVEN.model_copy(update={"kind": "memory"})},
        {"confidence": None},
    ],
)
def test_a_record_without_a_proven_figure_is_refused(doubtful: dict[str, Any]) -> None:
    with pytest.raises(UsageProblem, match=r"\(kind `verify`\) has no sequential figure that is proven"):
        nodes_of(record(speed("read", 50e9, **doubtful), verdict=UNPROVEN))


def test_nodes_with_other_drives_are_refused(tmp_path: Path) -> None:
    paths = kept(tmp_path, verified("old", 50e9, 25e9), verified("new", 90e9, 40e9, GEN5))
    with pytest.raises(
        UsageProblem, match=r"drives of `old` and `new` differ: their links carry 63\.02 GB/s"
    ) as caught:
        answered(*paths)
    assert "group" in str(caught.value.hint)


def test_virtual_drives_that_exceed_their_links_are_named() -> None:
    (node, *_) = nodes_of(verified("n1", 90e9, 25e9))
    first, second = from_best([node], node.ceiling, 0.1)
    assert "exceeds the links' 63.02 GB/s" in first.notes[0]
    assert not second.notes


def test_before_any_measurement_the_links_decide() -> None:
    document = answered("--root", str(MACHINE))
    assert document["ceiling"]["drives"].startswith("8 drives of Gen5 x4")
    assert document["nodes"] == []
    # What inventory/h100 begins with, which is for eight Gen5 drives; Gen4 gets half of it.
    example = yaml.safe_load((ROOT / "inventory/h100/group_vars/all.yml").read_text())
    assert document["variables"] == {name: example[name] for name in document["variables"]}
    assert [each.text for each in from_links(Ceiling(GEN4, "8 drives"))] == ["25GBps", "12GBps"]


def test_a_node_without_a_visible_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    with pytest.raises(UsageProblem, match="no ceiling of the drives is known here") as caught:
        answered("--root", str(tmp_path))
    assert "--root" in str(caught.value.hint)


@given(
    speeds=st.lists(st.tuples(st.floats(1e6, 2e11), st.floats(1e6, 2e11)), min_size=1, max_size=5),
    margin=st.floats(0.0, 0.49),
)
def test_the_best_node_always_reaches_the_proposal(speeds: list[tuple[float, float]], margin: float) -> None:
    nodes = [
        NodeFigures(f"n{number}", {"read": speed("read", read), "write": speed("write", write)})
        for number, (read, write) in enumerate(speeds)
    ]
    proposals = from_best(nodes, None, margin)
    for each in proposals:
        lows = [node.figures[each.direction].confidence for node in nodes]
        low = max(interval.low for interval in lows if interval is not None)
        # Two digits: rounding takes less than a tenth.
        assert 0.9 * (1 - margin) * low < each.value <= (1 - margin) * low
        assert any(reaches(node, [each]) for node in nodes)
        assert parse_bandwidth(each.text) == pytest.approx(each.value, rel=1e-6)
