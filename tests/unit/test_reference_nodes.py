"""`bench reference`: choices by the nodes' capacities, the announcement, and nodes that are left out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from builders import measurement, record
from machines import lay_out_drives
from shown_records import on_screen
from staged import Quiet
from tunetool import record as records
from tunetool.bench.checkpoint import request as checkpoint
from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.preflight import check_memory
from tunetool.bench.checkpoint.states import shape
from tunetool.bench.reference import estimate
from tunetool.bench.reference import nodes as looking
from tunetool.bench.reference import run as chain_run
from tunetool.bench.reference.choice import complete, matrix_for
from tunetool.bench.reference.nodes import Nodes
from tunetool.bench.reference.request import Request
from tunetool.bench.reference.run import bench
from tunetool.bench.strategies.matrix import parse
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.fleet.capacity import Answers
from tunetool.measure.session import Result
from tunetool.node.common import manifest as manifests
from tunetool.node.machine import capacity as capacity_module
from tunetool.node.machine.capacity import Capacity, capacity_of, read_capacity
from tunetool.node.machine.mounts import read_mounts
from tunetool.record import FleetHost, Record, Status, Verdict

GB = 10**9
TB = 10**12
H100 = Capacity(
    target="/mnt/nvme_raid0",
    free_bytes=24 * TB,
    memory_bytes=1800 * GB,
    shared_bytes=900 * GB,
    cpus=96,
    gpus=8,
    gpu_bytes=80 * GB,
    python="/opt/tunetool-training/current/bin/python",
    accelerator="cuda",
)
VIRTUAL = Capacity(
    target="/mnt/nvme_raid0", free_bytes=30 * GB, memory_bytes=3 * GB, shared_bytes=2 * GB, cpus=2, accelerator="cpu"
)


# --- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [9 * GB, 24 * GB, 25 * GB, 40 * GB, 60 * GB])
def test_the_chosen_state_passes_the_benchmarks_own_check(memory: int, tmp_path: Path) -> None:
    asked, _said = complete(Request(), {"node1": replace(VIRTUAL, memory_bytes=memory, free_bytes=TB)})
    made = shape(asked.checkpoint_model, asked.state_bytes).bytes
    check_memory(
        checkpoint.Request(target=tmp_path, model=asked.checkpoint_model, device="cpu"), made, list(ENGINES), [], memory
    )


def test_the_largest_model_where_everything_is_there() -> None:
    request, said = complete(Request(), {"node1": H100, "node2": H100})
    assert request.target == Path("/mnt/nvme_raid0")
    assert request.verify_target is None
    assert (request.material.model, request.material.images) == ("7b", 200)
    assert (request.checkpoint_model, request.state_bytes) == ("phi3-mini", 8 * GB)
    assert request.matrix == "1x1:z2,1x8:z2,2x8:z2,2x8:z3,1x8:z3"
    assert said == [
        "target: `/mnt/nvme_raid0`, from the manifest",
        "model: `7b` (the largest), on 8 GPU(s) of each node",
    ]


@pytest.mark.parametrize(
    ("change", "model", "why"),
    [
        ({"gpu_bytes": 24 * GB}, "3b", "24 GB of GPU memory"),
        ({"gpu_bytes": 16 * GB}, "tiny", "16 GB of GPU memory"),
        ({"gpu_bytes": 0}, "tiny", "0 B of GPU memory"),
        ({"shared_bytes": 12 * GB}, "3b", "of memory for staged files"),
        ({"memory_bytes": 12 * GB}, "3b", "of memory, it needs"),
        ({"free_bytes": 30 * GB}, "3b", "of free space"),
        ({"gpus": 0}, "tiny", "there are no GPUs"),
        ({"accelerator": "cpu"}, "tiny", "there are no GPUs"),
    ],
)
def test_the_least_of_the_nodes_decides_on_the_model(change: dict[str, int], model: str, why: str) -> None:
    request, said = complete(Request(), {"node1": H100, "node2": replace(H100, **change)})  # type: ignore[arg-type]
    assert request.material.model == model
    assert why in said[1]
    if "gpus" not in change and "accelerator" not in change:
        assert "node2 has" in said[1]


def test_small_nodes_without_gpus_get_what_fits() -> None:
    request, _ = complete(Request(), {"node1": VIRTUAL, "node2": VIRTUAL})
    assert (request.material.model, request.material.images) == ("tiny", 32)
    # Six copies of Phi-3's first layer alone do not fit into the memory.
    assert (request.checkpoint_model, request.state_bytes) == ("tiny", None)
    assert request.matrix == "1x1:z2,2x1:z2,2x1:z3,1x1:z3"
    assert request.cluster.device == "cpu"


def test_what_was_asked_for_is_not_chosen() -> None:
    asked = Request(
        model="3b", target=Path("/x"), images=7, checkpoint_model="13b", state_bytes=9 * GB, matrix="1x1:z0",
        ranks_per_node=2, device="cuda",
    )  # fmt: skip
    request, said = complete(asked, {"node1": VIRTUAL})
    assert (request.material.model, request.material.images, request.target) == ("3b", 7, Path("/x"))
    assert (request.checkpoint_model, request.state_bytes, request.matrix) == ("13b", 9 * GB, "1x1:z0")
    assert request.cluster.device == "cuda"
    assert said[0] == "target: `/x`"


def test_nodes_with_different_volumes_need_a_word() -> None:
    with pytest.raises(UsageProblem, match=r"different volumes.*`/mnt/nvme_raid0` on node1; `/mnt/b` on node2"):
        complete(Request(), {"node1": H100, "node2": replace(H100, target="/mnt/b")})


def test_no_room_for_any_checkpoint_is_said_before_the_work() -> None:
    with pytest.raises(CannotJudge, match="too little memory or free space for any checkpoint"):
        complete(Request(), {"node1": replace(VIRTUAL, memory_bytes=10**6)})


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (1, 8), (2, 1), (2, 8), (16, 8)])
def test_strategies_use_the_nodes_that_are_there(nodes: int, ranks: int) -> None:
    cells = parse(matrix_for(nodes, ranks))
    assert {(cell.layout.nodes, cell.layout.ranks) for cell in cells} == {(1, 1), (1, ranks), (nodes, ranks)}
    assert {cell.stage for cell in cells if cell.layout.world == nodes * ranks} == {2, 3}


@pytest.mark.parametrize("node", [H100, VIRTUAL])
def test_it_says_first_what_it_writes_where_and_how_long(node: Capacity) -> None:
    request, _ = complete(Request(), {"node1": node, "node2": node})
    *parts, everything = estimate.lines(request, {"node1": node, "node2": node}, ["verify", "checkpoint", "staging"])
    assert [line.partition(":")[0] for line in parts] == ["verify", "checkpoint", "staging"]
    assert "written in all on each node" in parts[1]
    assert "`/mnt/nvme_raid0`" in parts[1]
    assert "`/dev/shm`" in parts[2]
    assert all("about " in line and ("GB" in line or "MB" in line) for line in parts)
    assert everything.startswith("on node1, node2: about ")


def test_this_machine_says_what_it_has(tmp_path: Path) -> None:
    capacity = read_capacity(str(tmp_path), "/dev/shm", str(tmp_path / "no-manifest"))
    assert capacity.free_bytes > 0
    assert capacity.memory_bytes > 0
    assert capacity.cpus > 0
    assert (capacity.target, capacity.problem) == (str(tmp_path), "")
    assert capacity_of(json.loads(json.dumps(capacity.to_dict()))) == capacity
    nowhere = read_capacity("", "/dev/shm", str(tmp_path / "no-manifest"))
    assert nowhere.target == ""
    assert "run `tunetool provision`" in nowhere.problem


def test_of_several_volumes_the_first_is_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = lay_out_drives(tmp_path)
    for volume in manifest["volumes"]:
        volume["filesystem"]["mount_point"] = str(tmp_path / "mnt/nvme_raid0" / volume["name"])
    manifests.write(manifest, str(tmp_path / "node.json"))
    mounts = read_mounts(str(tmp_path))
    here = [replace(mount, mount_point=str(tmp_path) + mount.mount_point.rstrip("/")) for mount in mounts[1:]]
    monkeypatch.setattr(capacity_module, "read_mounts", lambda: [mounts[0], *here])
    target = read_capacity("", "/dev/shm", str(tmp_path / "node.json")).target
    assert target == str(tmp_path / "mnt/nvme_raid0/drive0")


# --- many nodes -----------------------------------------------------------------------------------------------------

_PROGRAM = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$1" in
verify) cat {folder}/verify.json; [ ! -e {folder}/dies ] || touch {folder}/down; exit {code};;
bench) cat {folder}/checkpoint.json;;
esac
"""
_SSH = """#!/bin/sh
# ssh to a node that is this machine, until the file of its name says that it is down.
for last; do :; done
for word; do case "$word" in node*) folder={folder}/$word;; esac; done
if [ -e "$folder/down" ]; then
    # To its end: Ansible tells of a broken pipe, not of these words, where it still writes to a process that is ending.
    [ -t 0 ] || cat > /dev/null
    echo "ssh: connect to host: No route to host" >&2
    exit 255
fi
case "$last" in node*) exit 0;; esac
exec sh -c "$last"
"""


class Site:
    """Nodes on this machine, each with a tunetool that answers with a record; Ansible reaches them by an ssh of its
    own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []
        ssh = folder / "ssh"
        ssh.write_text(_SSH.format(folder=folder))
        ssh.chmod(0o755)

    def node(self, name: str, status: Status = "pass", *, dies: bool = False, down: bool = False) -> None:
        self.names.append(name)
        folder = self.folder / name
        (folder / "bin").mkdir(parents=True)
        for file, made in (
            ("verify", self._record("verify", status)),
            ("checkpoint", self._record("bench.checkpoint")),
        ):
            (folder / f"{file}.json").write_text(records.dumps(made))
        program = folder / "bin/tunetool"
        program.write_text(_PROGRAM.format(folder=folder, code=0 if status == "pass" else 1))
        program.chmod(0o755)
        for mark, wanted in (("dies", dies), ("down", down)):
            if wanted:
                (folder / mark).touch()

    def _record(self, kind: str, status: Status = "pass") -> Record:
        reasons = [] if status == "pass" else ["sequential read 1 GB/s, expected 50 GB/s"]
        figures = [measurement("sequential.read", 1e9), measurement("sequential.write", 1e9)]
        verdict = Verdict(status=status, reasons=reasons)
        return record(*(figures if kind == "verify" else []), kind=kind, id=records.new_id(), verdict=verdict)

    @property
    def inventory(self) -> Path:
        common = {
            "ansible_connection": "ssh",
            "ansible_ssh_executable": str(self.folder / "ssh"),
            "ansible_ssh_pipelining": True,
            "ansible_ssh_transfer_method": "piped",
            "ansible_ssh_retries": 0,
            "ansible_python_interpreter": sys.executable,
            "ansible_become": False,
        }
        hosts = {name: {"tunetool_prefix": str(self.folder / name)} for name in self.names}
        path = self.folder / "hosts.yml"
        path.write_text(json.dumps({"all": {"vars": common, "hosts": hosts}}))
        return path

    def calls(self, name: str) -> list[str]:
        path = self.folder / name / "calls"
        return [" ".join(line.split()[:2]) for line in path.read_text().splitlines()] if path.exists() else []

    def run(self, **more: object) -> tuple[Result, Quiet]:
        """Run the chain without the parts that need ranks."""
        progress = Quiet()
        asked = Request(
            model="tiny",
            target=self.folder,
            inventory=self.inventory,
            skip=("staging", "strategies"),
            runs_dir=self.folder / "runs",
        )
        return bench(replace(asked, **more), progress), progress  # type: ignore[arg-type]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    return Site(tmp_path)


def statuses(result: Result) -> dict[str, str]:
    assert result.record is not None
    return {part.name: part.status for part in result.record.parts or []}


def left_out(result: Result) -> dict[str, str]:
    assert result.record is not None
    return {host.host: host.reasons[0] for host in result.record.hosts or [] if "left out" in "".join(host.reasons)}


def test_the_chain_goes_on_with_the_nodes_that_can(site: Site) -> None:
    site.node("node1")
    site.node("node2", "fail")
    site.node("node3", down=True)
    result, progress = site.run()
    assert site.calls("node1") == ["verify --json", "bench checkpoint"]
    assert site.calls("node2") == ["verify --json"]
    # A node that fell short still does.
    assert result.code == ExitCode.FALLS_SHORT
    assert statuses(result) == {"verify": "fail", "checkpoint": "pass", "staging": "skip", "strategies": "skip"}
    reasons = left_out(result)
    assert reasons["node2"] == "left out after verify: sequential read 1 GB/s, expected 50 GB/s"
    assert reasons["node3"].startswith("left out at the start: ")
    assert "No route to host" in reasons["node3"]
    assert reasons.keys() == {"node2", "node3"}
    for name, reason in reasons.items():
        assert f"{name}: {reason}" in progress.lines
    assert result.record is not None
    assert "node2 was left out after verify: sequential read 1 GB/s" in " ".join(
        on_screen(result.record, result.path).split()
    )
    # Each host takes its own manifest's Python.
    assert "--python" not in (site.folder / "node1/calls").read_text()


def test_a_node_lost_between_two_parts_is_named(site: Site) -> None:
    site.node("node1")
    site.node("node2", dies=True)
    python = "/opt/other/bin/python"
    result, _ = site.run(python=python)
    assert result.code == ExitCode.NOT_JUDGED
    assert statuses(result)["checkpoint"] == "pass"
    calls = (site.folder / "node1/calls").read_text().splitlines()
    assert [" ".join(line.split()[:2]) for line in calls] == ["verify --json", "bench checkpoint"]
    assert all(f"--python {python}" in line for line in calls)
    assert left_out(result)["node2"].startswith("left out before checkpoint: ")
    assert result.record is not None
    assert {each.host for each in result.record.measurements} >= {"node1", "node2"}


def test_no_node_that_answers_is_one_line(site: Site) -> None:
    site.node("node1", down=True)
    with pytest.raises(CannotJudge, match=r"no node can take part; `node1`: .*No route to host"):
        site.run()
    assert not (site.folder / "runs").exists()


def test_a_dry_run_stops_after_it_said_what_it_would_do(site: Site) -> None:
    site.node("node1")
    result, progress = site.run(dry_run=True, skip=())
    assert (result.record, result.code) == (None, ExitCode.OK)
    assert site.calls("node1") == []
    assert not (site.folder / "runs").exists()
    said = "\n".join(progress.lines)
    for part in ("verify", "checkpoint", "staging", "strategies"):
        assert f"{part}: " in said
    assert "about " in said


# --- which nodes still take part: decided without asking anybody -----------------------------------------------------


def nodes_after_verify(statuses: dict[str, Status], **more: bool) -> Nodes:
    request, _ = complete(Request(inventory=Path("/inventory")), {"node1": H100})
    nodes = Nodes(replace(request, **more), dict.fromkeys(statuses, H100), Quiet())  # type: ignore[arg-type]
    hosts = [
        FleetHost(host=host, record_id=None if status == "error" else "1", status=status, reasons=[f"{host} is slow"])
        for host, status in statuses.items()
    ]
    nodes.after("verify", record(kind="fleet", hosts=hosts))
    return nodes


@pytest.mark.parametrize(
    ("statuses", "more", "left"),
    [
        ({"node1": "pass", "node2": "fail"}, {}, ["node1"]),
        ({"node1": "error", "node2": "pass"}, {}, ["node2"]),
        ({"node1": "unstable", "node2": "unproven"}, {}, ["node1", "node2"]),
        # One that gave no record cannot be kept.
        ({"node1": "fail", "node2": "error"}, {"anyway": True}, ["node1"]),
    ],
)
def test_verify_decides_on_each_node_alone(statuses: dict[str, Status], more: dict[str, bool], left: list[str]) -> None:
    nodes = nodes_after_verify(statuses, **more)
    assert nodes.names == left
    assert nodes.before("checkpoint", []) is None
    assert nodes.current.cluster.limit == ",".join(left)


def test_all_or_nothing_stops_at_the_first_that_fails() -> None:
    nodes = nodes_after_verify({"node1": "pass", "node2": "fail"}, all_or_nothing=True)
    assert nodes.before("checkpoint", []) == "not run: `--all-or-nothing`, and `node2` was left out"


def test_with_no_node_left_nothing_is_run() -> None:
    nodes = nodes_after_verify({"node1": "fail", "node2": "fail"})
    why = str(nodes.before("checkpoint", []))
    assert why == "not run: no node is left; the first was `node1`, left out after verify: node1 is slow"


def test_a_node_without_a_training_environment_ends_no_other() -> None:
    nodes = nodes_after_verify({"node1": "pass", "node2": "pass"})
    nodes.capacities["node2"] = replace(H100, python="")
    assert nodes.before("staging", []) is None
    assert nodes.names == ["node1"]
    ((name, verdict),) = nodes.verdicts()
    assert (name, verdict.status) == ("node2", "error")
    assert "no training environment" in verdict.reasons[0]


GONE = replace(H100, python="", python_problem="`/opt/x/python` is gone; run `tunetool provision` for this node")


def test_a_node_whose_python_is_gone_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = nodes_after_verify({"node1": "pass", "node2": "pass"})
    nodes.before("checkpoint", [])
    monkeypatch.setattr(looking, "ask_hosts", lambda *_: Answers({"node1": H100, "node2": GONE}, {}))
    # Another Python than the manifest's was named: what became of that one does not matter.
    other = replace(nodes.request, python="/opt/other/python")
    for request, left in ((other, ["node1", "node2"]), (nodes.request, ["node1"])):
        nodes.request, nodes._looked = request, False
        assert nodes.before("staging", []) is None
        assert nodes.names == left
    assert nodes.hosts["node2"].reasons == [f"left out before staging: {GONE.python_problem}"]
    ((name, verdict),) = nodes.verdicts()
    assert (name, verdict.status) == ("node2", "error")


def test_a_node_whose_python_is_gone_does_not_count_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chain_run, "ask_hosts", lambda *_: Answers({"node1": H100, "node2": GONE}, {}))
    asked = Request(inventory=tmp_path, runs_dir=tmp_path / "runs", dry_run=True)
    progress = Quiet()
    bench(asked, progress)
    said = "\n".join(progress.lines)
    assert f"node2 is left out: {GONE.python_problem}" in said
    assert "on node1: about " in said
