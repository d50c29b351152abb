"""Two nodes without a network: blank drives, `site.yml` with a training environment, one record, one page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Lab, changed_tasks, started
from summaries import host_row

from tunetool.record import Record, read
from tunetool.user_directories import cache

pytestmark = pytest.mark.slow
NODES = ("node1", "node2")
HOURS = 4 * 3600.0
"""A limit against what hangs; nothing here depends on how fast the machine is."""
PARTS = ("verify", "checkpoint", "staging", "strategies")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Nodes as `site.yml` leaves them. The wheels are kept for the next run, as `make rehearse-training` does."""
    wheels = cache() / "lab-wheels"
    options = ("--nodes", "2", "--memory", "4G", "--offline")
    with started(tmp_path_factory, *options, like="lab-training", TUNETOOL_WHEELHOUSE=str(wheels)) as lab:
        filled = lab.tool("build-wheelhouse", str(wheels), "--python-version", "3.11", "--build", "cpu")
        assert filled.code == 0, filled.text
        done = lab.site(timeout=HOURS)
        assert done.code == 0, done.text
        yield lab


@pytest.fixture(scope="module")
def reference(trained: Lab) -> Path:
    """The record of the whole chain. Its options are amounts: no path and no Python."""
    runs = trained.state / "runs"
    amounts = ("--thorough", "--rounds", "1", "--steps", "4", "--images", "16", "--duration", "2s")
    kept = ("--runs-dir", str(runs))
    done = trained.run("tunetool", "bench", "reference", "-i", str(trained.inventory), *amounts, *kept, timeout=HOURS)
    # What emulation measures may be unstable; what fails, or could not be run, is a fault.
    assert done.code in (0, 3), done.text
    return next(runs.glob("*-bench.reference-*"))


def parts_of(directory: Path) -> dict[str, Record]:
    return {part.name: read(directory.parent / part.run) for part in read(directory).parts or [] if part.run}


def test_nodes_have_no_way_out_and_a_proven_environment(trained: Lab) -> None:
    for node in NODES:
        out = "python3 -c 'import socket; print(socket.socket().connect_ex((\"10.0.2.2\", 22)) != 0)'"
        assert trained.ssh(node, f"timeout 60 {out} || echo True") == "True"
        part = json.loads(trained.ssh(node, "cat /etc/tunetool/node.json"))["training"]
        assert (part["source"], part["accelerator"]) == ("built", "cpu")
        assert part["python"].startswith("/opt/tunetool-training/")
        assert {"torch", "deepspeed", "tunetool"} <= part["packages"].keys()


def test_one_record_has_every_part_of_both_nodes(reference: Path) -> None:
    record = read(reference)
    parts = {part.name: part for part in record.parts or []}
    assert tuple(parts) == PARTS
    assert {part.status for part in parts.values()} <= {"pass", "unstable", "unproven"}, parts
    assert record.target == "/mnt/nvme_raid0"
    assert {host.host for host in record.hosts or []} == set(NODES)
    assert not [reason for host in record.hosts or [] for reason in host.reasons if "left out" in reason]
    names = {each.name for each in record.measurements}
    # Both nodes as one world, and each alone.
    assert {f"strategies.step.{cell}" for cell in ("1x1.z2", "2x1.z2", "2x1.z3", "1x1.z3")} <= names
    assert {f"staging.{name}.{path}.end_to_end" for name in ("single", "nodes") for path in ("memory", "bulk")} <= names
    for name in ("sequential.read", "sequential.write"):
        assert {each.host for each in record.measurements if each.name == name} == set(NODES)
    saved = [each for each in record.measurements if each.name.startswith("checkpoint.")]
    assert {each.host for each in saved} == set(NODES)


def test_ranks_of_both_nodes_used_the_manifests_environment(trained: Lab, reference: Path) -> None:
    strategies = parts_of(reference)["strategies"]
    steps = [each for each in strategies.measurements if each.name.startswith("strategies.step.")]
    versions = json.loads(trained.ssh("node1", "cat /etc/tunetool/node.json"))["training"]["packages"]
    assert {each.parameters["torch_version"] for each in steps} == {versions["torch"]}
    assert {each.parameters["deepspeed_version"] for each in steps} == {versions["deepspeed"]}


def test_one_page_leads_to_the_pages_of_the_parts(reference: Path) -> None:
    page = (reference / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in PARTS)
    links = re.findall('href="([^"]+)"', page)
    assert {re.findall(r"-bench\.(\w+)-", link)[0] for link in links} >= {"staging", "strategies"}
    assert all((reference / link).is_file() for link in links)


def test_nothing_of_the_runs_is_left_on_a_node(trained: Lab, reference: Path) -> None:
    assert reference.is_dir()
    for node in NODES:
        assert trained.ssh(node, "ls -d /tmp/tunetool* /dev/shm/* 2>/dev/null; true") == ""
        assert trained.ssh(node, "pgrep -fa '[t]unetool.launch|[t]orch' || true") == ""
        # Model and pictures stay, for the next run.
        left = trained.ssh(node, "ls /mnt/nvme_raid0").split()
        assert all(name.startswith(("qwen2.5-vl-tiny", "colours-", "deepspeed_offload")) for name in left), left


def test_a_second_run_changes_nothing(trained: Lab) -> None:
    again = trained.site(timeout=HOURS)
    assert again.code == 0, again.text
    assert changed_tasks(again.stdout) == []
    for node in NODES:
        assert host_row(again.stdout, node)[:2] == [node, "UNCHANGED"]
