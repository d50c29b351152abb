"""Many hosts that cannot be reached: one line with their number, on every screen and page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

import builders
from builders import NOW
from calls import TUNETOOL, call
from parsed_page import Parsed
from tunetool.fleet.inspect import member
from tunetool.fleet.run_on_hosts import Hosts, host_result, keep, record_over
from tunetool.fleet.verify import name_outliers
from tunetool.inspect.fleet_model import FleetInspection
from tunetool.node.play.host_summary import BUILD, Summary, lines
from tunetool.record import Verdict, to_document
from tunetool.report import fleet_inspection
from tunetool.report.kinds import page_text, write_page
from tunetool.report.page import WIDTH
from tunetool.report.stage_fleet import print_stage_fleet
from tunetool.report.table import print_fleet

NAMES = [f"node{number:03d}" for number in range(1, 41)]
ONE_LINE = "40 of 40 unreachable: cannot resolve (node001, node002, ... 38 more)"


def unresolved(name: str) -> dict[str, object]:
    """What ansible-core 2.19 says of a host whose name does not resolve."""
    said = (
        f'Task failed: Data could not be sent to remote host "{name}". Make sure this host can be reached over ssh: '
        f"ssh: Could not resolve hostname {name}: Name or service not known\r\n"
    )
    return {"host": name, "task": "Gathering Facts", "res": {"unreachable": True, "changed": False, "msg": said}}


def gone() -> Hosts:
    return name_outliers([host_result(name, unresolved(name)) for name in NAMES])


def printed(show: object, hosts: Hosts) -> str:
    console = Console(width=WIDTH, highlight=False, no_color=True)
    with console.capture() as shown:
        show(hosts, console)  # type: ignore[operator]
    return shown.get()


@pytest.mark.parametrize("show", [print_fleet, print_stage_fleet])
def test_forty_hosts_out_of_reach_are_one_line(show: object) -> None:
    first, *others = printed(show, gone()).splitlines()
    assert first == ONE_LINE
    assert ["hint: `getent hosts node001`" in line for line in others] == [True]
    assert max(map(len, [first, *others])) <= 80, "it fits a narrow terminal"


def test_a_host_alone_keeps_its_own_words() -> None:
    good = builders.record(verdict=Verdict(status="pass", reasons=[]))
    hosts = [
        host_result("node001", unresolved("node001")),
        host_result("node002", {"res": {"record": to_document(good)}}),
    ]
    shown = " ".join(printed(print_fleet, hosts).split())
    assert "node001 ERROR" in shown
    assert "unreachable: cannot resolve; ssh: Could not resolve hostname node001" in shown
    assert "of 2" not in shown


def test_what_many_hosts_fail_by_is_one_line_below_their_figures() -> None:
    failed = Verdict(status="fail", reasons=["array.state: degraded"])
    hosts = [
        host_result(name, {"res": {"record": to_document(builders.record(*figures, verdict=failed))}})
        for name, figures in (
            ("n1", [builders.sampled("sequential.read", 5e9, 5.1e9)]),
            ("n2", [builders.sampled("sequential.read", 4e9, 4.1e9)]),
            ("n3", []),
        )
    ]
    shown = printed(print_fleet, hosts)
    assert shown.count("array.state: degraded") == 1
    assert "3 of 3 FAIL: array.state: degraded (n1, n2, n3)" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith("n")]
    assert [row[:2] for row in rows] == [["n1", "FAIL"], ["n2", "FAIL"]]


def test_the_fleets_verdict_counts_them() -> None:
    verdict = record_over(["tunetool"], None, NOW, gone()).verdict
    assert verdict == Verdict(status="error", reasons=[ONE_LINE], kinds=["part"])


def test_provisioning_counts_them() -> None:
    heard = Summary(NAMES, BUILD)
    for name in NAMES:
        heard.unreachable(name, unresolved(name)["res"])  # type: ignore[arg-type]
    first, hint = lines(heard.hosts.values())
    assert first == ONE_LINE
    assert "`getent hosts node001`" in hint


def test_a_refusal_of_many_hosts_is_one_line() -> None:
    heard = Summary(["n1", "n2", "n3"], BUILD)
    heard.ok("n3", "tunetool.node.host_memory", {"changed": True})
    for name in ("n1", "n2", "n3"):
        heard.failed(name, "ansible.builtin.apt", {"msg": f"{name} has no mirror"})
    *table, last = lines(heard.hosts.values())
    assert last == "3 of 3 FAILED: the node has no mirror (n1, n2, n3)"
    assert [line.split()[:2] for line in table[2:]] == [["n3", "FAILED"]], "it has been changed"


def test_inspecting_counts_them(tmp_path: Path) -> None:
    fleet = FleetInspection(
        tool_version="1",
        taken=NOW,
        command=[],
        facts=0,
        differences=[],
        hosts=[member(n, unresolved(n)) for n in NAMES],
    )
    first, hint, last = fleet_inspection.screen(fleet).splitlines()
    assert first == ONE_LINE
    assert "`getent hosts node001`" in hint
    assert "40 not inspected" in last
    text = fleet_inspection.page(fleet)
    assert text.count("cannot resolve") == 1
    assert [name in text for name in NAMES] == [True] * 40
    assert not Parsed(text).rows


def test_the_page_of_a_fleet_counts_them_and_names_all() -> None:
    text = page_text(record_over(["tunetool"], None, NOW, gone()), None)
    rows = [row for row in Parsed(text).rows if "ERROR" in row]
    assert len(rows) == 1
    assert rows[0].startswith("40 nodes")
    assert [name in rows[0] for name in NAMES] == [True] * 40


def test_the_page_of_a_fleet_leads_to_each_nodes_own(tmp_path: Path) -> None:
    own = builders.record(builders.sampled("sequential.read", 5e9, 5.1e9), verdict=Verdict(status="pass", reasons=[]))
    hosts = [host_result(name, {"res": {"record": to_document(own)}}) for name in ("n1", "rack 2")]
    hosts.append(host_result("n3", unresolved("n3")))
    kept = keep(record_over(["tunetool"], None, NOW, hosts), hosts, tmp_path)
    assert kept.path is not None
    assert kept.record is not None
    page = write_page(kept.record, kept.path)
    assert page is not None
    text = page.read_text()
    for name, file in (("n1", "hosts/n1.html"), ("rack 2", "hosts/rack_2.html")):
        assert f'<a href="{file}">{name}</a>' in text
        assert '<td class="number">5.05</td>' in (page.parent / file).read_text()
    assert "n3.html" not in text


def test_a_real_fleet_out_of_reach_is_a_few_lines(tmp_path: Path) -> None:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    inventory = tmp_path / "hosts.json"
    # Nothing listens on port 1: the kernel refuses at once.
    there = {"ansible_host": "127.0.0.1", "ansible_port": 1}
    inventory.write_text(json.dumps({"all": {"hosts": dict.fromkeys(NAMES[:12], there)}}))
    done = call(*TUNETOOL, "inspect", "-i", inventory)
    assert done.returncode == 3, done.stderr
    first, hint, last = done.stdout.splitlines()
    assert first == "12 of 12 unreachable: connection refused (node001, node002, ... 10 more)"
    assert hint.startswith("  hint: ")
    assert "12 not inspected" in last
    assert len(done.stderr.splitlines()) == 3, done.stderr
