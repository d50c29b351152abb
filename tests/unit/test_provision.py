"""``tunetool provision`` without nodes: the call, Ansible's events, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from calls import call
from tunetool.errors import ExitCode, UsageProblem
from tunetool.fleet.playbook import HostSelection
from tunetool.fleet.provision import (
    Listener,
    ProvisionRequest,
    ProvisionResult,
    add_trips,
    check_request,
    exit_code,
    variables,
)
from tunetool.node.plan.plan_file import TEARDOWN, document, dump
from tunetool.node.play.host_summary import BUILT, CHECKED, NOT_REACHED, PLANNED, REFUSED, UNCHANGED, UNREACHABLE, Host
from tunetool.node.play.host_summary import document as document_of_hosts
from tunetool.report.progress import PlainProgress
from tunetool.report.table import print_provision, table_console

INVENTORY = HostSelection(Path("inventory"))


def listener(**changes: object) -> Listener:
    return Listener(["node1", "node2"], ProvisionRequest(INVENTORY, **changes), PlainProgress())  # type: ignore[arg-type]


def ok(action: str, task: str = "a task", host: str = "node1", **result: object) -> dict[str, object]:
    return {"host": host, "task": task, "task_action": action, "res": result}


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([BUILT, UNCHANGED], ExitCode.OK),
        ([BUILT, REFUSED, UNREACHABLE], ExitCode.FALLS_SHORT),
        ([BUILT, UNREACHABLE], ExitCode.NOT_JUDGED),
        ([BUILT, NOT_REACHED], ExitCode.NOT_JUDGED),
    ],
)
def test_a_failed_host_comes_before_one_that_is_out_of_reach(statuses: list[str], code: ExitCode) -> None:
    assert exit_code([Host("n", status) for status in statuses]) == code


def test_a_plan_that_was_not_written_is_not_done() -> None:
    assert exit_code([Host("n", PLANNED)], written=False) == ExitCode.NOT_JUDGED


def test_only_the_last_task_makes_a_host_built(capsys: pytest.CaptureFixture[str]) -> None:
    heard = listener()
    heard("runner_on_ok", ok("tunetool.node.raid_array", "Make or keep the array", changed=True, made=True))
    assert (heard.summary.hosts["node1"].status, heard.summary.hosts["node1"].changed) == (NOT_REACHED, 1)
    heard("runner_on_ok", ok("tunetool.node.node_manifest"))
    heard("runner_on_unreachable", {"host": "node2", "task": "Gathering Facts", "res": {"msg": "no route"}})
    assert heard.summary.hosts["node1"].status == BUILT
    assert (heard.summary.hosts["node2"].status, heard.summary.hosts["node2"].reason) == (UNREACHABLE, "no route")
    assert "node1: Make or keep the array: changed" in capsys.readouterr().err
    checked = listener(check=True)
    checked("runner_on_ok", ok("tunetool.node.node_manifest"))
    assert checked.summary.hosts["node1"].status == CHECKED


def test_a_refusal_shows_its_table_and_keeps_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    heard = listener()
    heard("runner_on_failed", ok("tunetool.node.nvme_drives", "Choose", msg="4 usable. hint: x\nnvme1n1 refuse"))
    assert (heard.summary.hosts["node1"].status, heard.summary.hosts["node1"].reason) == (REFUSED, "4 usable. hint: x")
    assert "nvme1n1 refuse" in capsys.readouterr().err


def test_a_plan_is_printed_host_by_host(capsys: pytest.CaptureFixture[str]) -> None:
    heard = listener(plan=Path("plan.json"))
    part = {"array_action": "create", "array_reason": "RAID0 over 8 drives"}
    heard("runner_on_ok", ok("tunetool.node.nvme_drives", plan=part, table="drive  verdict\nnvme1n1  wipe"))
    heard("runner_on_ok", ok("tunetool.node.write_plan", msg="plan for 1 hosts in `plan.json`"))
    assert heard.wrote
    assert heard.summary.hosts["node1"].status == PLANNED
    result = ProvisionResult(list(heard.summary.hosts.values()), ExitCode.NOT_JUDGED, heard.notes, heard.tables)
    print_provision(result, table_console())
    shown = capsys.readouterr().out
    for text in ("  nvme1n1  wipe", "create: RAID0 over 8 drives", "NOT REACHED", "plan for 1 hosts in `plan.json`"):
        assert text in shown, text


def test_files_are_looked_at_before_any_host(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(dump(document({}, "0.1.0")))
    check_request(ProvisionRequest(INVENTORY, apply=plan))
    plan.write_text(plan.read_text().replace("0.1.0", "0.2.0"))
    other = tmp_path / "teardown.json"
    other.write_text(dump(document({}, "0.1.0", job=TEARDOWN)))
    with pytest.raises(UsageProblem) as refused:
        check_request(ProvisionRequest(INVENTORY, apply=other))
    assert str(refused.value.hint).startswith("apply it with `ansible-playbook tunetool.node.teardown`")
    for request, word in (
        (ProvisionRequest(INVENTORY, apply=plan), "was edited"),
        (ProvisionRequest(INVENTORY, apply=tmp_path / "none"), "cannot be read"),
        (ProvisionRequest(INVENTORY, plan=tmp_path / "no/plan.json"), "cannot be written"),
        (ProvisionRequest(INVENTORY, plan=tmp_path), "cannot be written"),
        (ProvisionRequest(INVENTORY, plan=plan, apply=plan), "do not go together"),
        (ProvisionRequest(INVENTORY, plan=plan, check=True), "do not go together"),
        (ProvisionRequest(INVENTORY, plan=plan, batch=("2",)), "takes no batches"),
    ):
        with pytest.raises(UsageProblem, match=word):
            check_request(request)


def test_paths_are_absolute_for_ansible() -> None:
    assert variables(ProvisionRequest(INVENTORY, plan=Path("p"))) == {"plan_file": str(Path.cwd() / "p")}
    assert variables(ProvisionRequest(INVENTORY, apply=Path("p"))) == {"apply_plan": str(Path.cwd() / "p")}
    assert variables(ProvisionRequest(INVENTORY)) == {}


def test_batches_are_handed_to_the_playbook() -> None:
    handed = variables(ProvisionRequest(INVENTORY, batch=("1", "25%"), max_fail=30))
    assert handed == {"provision_serial": ["1", "25%"], "provision_max_fail_percentage": 30}


@pytest.mark.parametrize("to", ["-", "file"])
def test_a_dry_run_of_hosts_that_are_gone_is_a_document(tmp_path: Path, to: str) -> None:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    inventory, file = tmp_path / "hosts.json", tmp_path / "hosts-found.json"
    # Nothing listens on port 1: the kernel refuses at once.
    gone = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_become": False}
    inventory.write_text(json.dumps({"all": {"hosts": {"node1": gone, "node2": gone}}}))
    done = call(
        *(sys.executable, "-m", "tunetool", "provision", "-i", str(inventory), "--dry-run"),
        *("--json", str(file) if to == "file" else "-"),
    )
    assert done.returncode == ExitCode.NOT_JUDGED, done.stderr
    answer = json.loads(file.read_text() if to == "file" else done.stdout)
    assert (answer["schema"], answer["exit_code"]) == ("tunetool.provision/1", 3)
    assert [(host["host"], host["status"]) for host in answer["hosts"]] == [
        ("node1", UNREACHABLE),
        ("node2", UNREACHABLE),
    ]
    if to == "file":
        # ssh may word what two hosts say in two ways: then each has its line, and no line speaks of both.
        shown = done.stdout.lower()
        assert all(word in shown for word in ("node1", "node2", "unreachable")), "a table for people, unless it is JSON"


def test_round_trips_come_only_from_where_they_were_counted(tmp_path: Path) -> None:
    heard = listener()
    add_trips(heard.summary, tmp_path / "none.json")
    assert heard.summary.hosts["node1"].trips is None
    counted = Host("node1", trips=8)
    (tmp_path / "summary.json").write_text(json.dumps(document_of_hosts([counted, Host("stranger", trips=3)])))
    add_trips(heard.summary, tmp_path / "summary.json")
    assert (heard.summary.hosts["node1"].trips, heard.summary.hosts["node2"].trips) == (8, None)
    assert "stranger" not in heard.summary.hosts
