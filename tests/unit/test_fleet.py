"""A fleet without nodes: Ansible's events about a host become its entry in the record and the verdict."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders import NOW, measurement, record
from tunetool import record as records
from tunetool.cli.verify import command as verify_command
from tunetool.cli.verify import parse_expectations
from tunetool.errors import UsageProblem
from tunetool.fleet.playbook import HostSelection, find_playbook
from tunetool.fleet.run_on_hosts import host_result
from tunetool.fleet.verify import FleetRequest, fleet_record, host_command, name_outliers, verify_fleet
from tunetool.measure.figures import NAMES
from tunetool.measure.session import Run
from tunetool.record import FleetHost, Record, Status, Verdict
from tunetool.report.page import WIDTH
from tunetool.report.progress import PlainProgress
from tunetool.report.table import print_fleet

ansible_runner = pytest.importorskip("ansible_runner")


def node_record(status: Status = "pass", value: float = 5e9) -> Record:
    verdict = Verdict(status=status, reasons=[] if status == "pass" else ["too slow"])
    return record(measurement(NAMES["read"], value), id=records.new_id(), verdict=verdict)


def event(record: Record) -> dict[str, Any]:
    return {"host": "n1", "res": {"record": records.to_document(record), "rc": 0}}


@pytest.mark.parametrize("status", ["pass", "fail", "unproven"])
def test_a_host_s_record_is_its_verdict(status: Status) -> None:
    host, record = host_result("n1", event(node_record(status)))
    assert host.status == status
    assert record is not None
    assert host.record_id == record.id


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (None, "reported nothing"),
        ({}, "no record came back"),
        ({"res": {"msg": "Failed to connect\n  to the host", "unreachable": True}}, "Failed to connect to the host"),
        ({"res": {"msg": "error: `/mnt` does not exist; hint: x", "rc": 2}}, "`/mnt` does not exist"),
        ({"res": {"record": {"schema": "other"}}}, "schema"),
        ({"res": {"record": [1]}}, "not a record"),
    ],
)
def test_a_host_without_a_record_is_an_error(said: dict[str, Any] | None, reason: str) -> None:
    host, record = host_result("n1", said)
    assert (host.status, record) == ("error", None)
    assert reason in host.reasons[0]


def test_a_slow_node_among_its_like_is_named_though_it_passes() -> None:
    hosts = [(FleetHost(host=f"n{n}", status="pass"), node_record(value=52e9 + n * 1e7)) for n in range(15)]
    hosts.append((FleetHost(host="slow", status="pass"), node_record(value=31e9)))
    named = name_outliers([*hosts, (FleetHost(host="gone", status="error", reasons=["gone"]), None)])
    assert [host.host for host, _ in named if any(reason.startswith("outlier: ") for reason in host.reasons)] == [
        "slow"
    ]
    assert {host.host: host.kinds for host, _ in named if host.kinds} == {"slow": ["outlier"]}
    record = fleet_record(FleetRequest(HostSelection(Path("i"))), named[:16], NOW)
    assert record.verdict is not None
    assert record.verdict.status == "pass"
    stream = io.StringIO()
    print_fleet(named, Console(file=stream, width=WIDTH))
    text = " ".join(stream.getvalue().split())
    assert "slow: outlier: read 31 GB/s" in text
    assert "of 16 nodes" in text


def test_a_record_damaged_on_the_way_is_an_error() -> None:
    damaged = json.loads(json.dumps(event(node_record())))
    damaged["res"]["record"]["measurements"][0]["value"] = 9e99
    assert "damaged" in host_result("n1", damaged)[0].reasons[0]


def test_fleet_record_lists_its_hosts() -> None:
    hosts = [host_result("n1", event(node_record())), host_result("n2", None), host_result("n3", event(node_record()))]
    record = fleet_record(FleetRequest(HostSelection(Path("inv")), expect={"read": 1e9}), hosts, NOW)
    assert record.kind == "fleet"
    assert record.hosts is not None
    assert [host.host for host in record.hosts] == ["n1", "n2", "n3"]
    assert [measurement.host for measurement in record.measurements] == ["n1", "n3"]
    assert record.verdict is not None
    assert record.verdict.status == "error"
    assert record.verdict.reasons == ["n2: Ansible reported nothing about this host"]
    assert records.parse(records.dumps(record), "r").kind == "fleet"


def test_a_host_that_falls_short_outranks_one_that_is_gone() -> None:
    hosts = [host_result("n1", None), host_result("n2", event(node_record("fail")))]
    verdict = fleet_record(FleetRequest(HostSelection(Path("inv"))), hosts, NOW).verdict
    assert verdict is not None
    assert verdict.status == "fail"


def params(request: FleetRequest) -> dict[str, Any]:
    """The options that `tunetool verify` on the host reads from the arguments."""
    return verify_command.make_context("verify", list(host_command(request).arguments)).params


def test_a_host_reads_what_was_asked_for() -> None:
    request = FleetRequest(
        HostSelection(Path("inv")), expect={"read": 50e9, "write": 2.0**30 * 46.6}, target="/mnt/x", duration=1.5
    )
    read = params(request)
    assert parse_expectations(read["expect"]) == {"read": 50e9, "write": pytest.approx(2.0**30 * 46.6)}
    assert (read["duration"], read["target"], read["level"]) == (1.5, "/mnt/x", "quick")
    bare = params(FleetRequest(HostSelection(Path("inv"))))
    assert (bare["expect"], bare["python"], bare["require"], bare["allow_busy"]) == ((), None, (), False)
    read = params(
        FleetRequest(
            HostSelection(Path("inv")),
            python="/opt/v/bin/python",
            require=("deepspeed",),
            gds="off",
            run=Run(allow_busy=True),
        )
    )
    assert (read["python"], read["require"], read["gds"], read["allow_busy"]) == (
        "/opt/v/bin/python",
        ("deepspeed",),
        "off",
        True,
    )


def test_the_playbook_of_the_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "clone"
    for name in ("playbooks/verify.yml", "galaxy.yml", "tools/tunetool/__init__.py"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    monkeypatch.setattr("tunetool.__file__", str(clone / "tools/tunetool/__init__.py"))
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    with pytest.raises(UsageProblem) as caught:
        find_playbook("verify")
    assert "make setup" in str(caught.value.hint)
    link = clone / ".ansible/collections/ansible_collections/tunetool/node"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../../..")
    playbook = find_playbook("verify")
    assert playbook.name == str(clone / "playbooks/verify.yml")
    assert playbook.environment == {"ANSIBLE_CONFIG": str(clone / "ansible.cfg")}


def test_the_installed_collection_s_playbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunetool.__file__", str(tmp_path / "lib/site-packages/tunetool/__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert find_playbook("verify").name == "tunetool.node.verify"
    assert find_playbook("verify").environment == {}


def test_the_playbook_that_came_in_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "lib/site-packages"
    carried = site / "ansible_collections/tunetool/node"
    (carried / "playbooks").mkdir(parents=True)
    monkeypatch.setattr("tunetool.__file__", str(site / "tunetool/__init__.py"))
    # Not that of a clone in which somebody calls it.
    monkeypatch.chdir(Path(__file__).parents[2])
    for name in ("ANSIBLE_CONFIG", "ANSIBLE_COLLECTIONS_PATH"):
        monkeypatch.delenv(name, raising=False)
    playbook = find_playbook("verify")
    assert playbook.name == "tunetool.node.verify"
    assert playbook.environment["ANSIBLE_CONFIG"] == str(carried / "ansible.cfg")
    first, *others = playbook.environment["ANSIBLE_COLLECTIONS_PATH"].split(":")
    assert first == str(site)
    assert others == [str(Path.home() / ".ansible/collections"), "/usr/share/ansible/collections"]
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "own.cfg"))
    (tmp_path / "own.cfg").write_text("[defaults]\nforks = 3\ncollections_path = beside:/srv/%(x)s\n")
    environment = find_playbook("verify").environment
    assert environment["ANSIBLE_CONFIG"] == str(tmp_path / "own.cfg")
    assert environment["ANSIBLE_COLLECTIONS_PATH"] == f"{site}:{tmp_path}/beside:/srv/%(x)s"
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", "/srv/a:/srv/b")
    assert find_playbook("verify").environment["ANSIBLE_COLLECTIONS_PATH"] == f"{site}:/srv/a:/srv/b"


def test_an_inventory_that_selects_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = tmp_path / "hosts.ini"
    inventory.write_text("[nodes]\nn1\n")
    keeping = Run(tmp_path / "runs")
    with pytest.raises(UsageProblem, match="`--limit zzz` matches no host"):
        verify_fleet(FleetRequest(HostSelection(inventory, "zzz"), run=keeping), PlainProgress())
    inventory.write_text("")
    with pytest.raises(UsageProblem, match="names no hosts"):
        verify_fleet(FleetRequest(HostSelection(inventory), run=keeping), PlainProgress())
    with pytest.raises(UsageProblem, match="does not exist"):
        verify_fleet(FleetRequest(HostSelection(tmp_path / "none"), run=keeping), PlainProgress())
    assert not (tmp_path / "runs").exists()
