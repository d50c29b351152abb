"""`tunetool inspect -i`: differences between nodes that should be equal. Machines with one change, and runs
through Ansible's real way on hosts that are this machine."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import call
from tunetool.errors import ExitCode
from tunetool.fleet.inspect import exit_code, member
from tunetool.inspect import fleet_model
from tunetool.inspect.collect import inspect
from tunetool.inspect.fleet_compare import KINDS, compare
from tunetool.inspect.fleet_facts import facts
from tunetool.inspect.fleet_model import Difference, FleetInspection, FleetMember, dumps
from tunetool.inspect.model import Inspection
from tunetool.inspect.source import opened
from tunetool.record import utc_now
from tunetool.report.fleet_inspection import page, screen
from waiting import PATIENCE, alive, until

ROOT = Path(__file__).parents[2]
H100 = ROOT / "docs/machines/h100-made.json"
SPACE = {"/mnt/nvme_raid0": (30_000_000_000_000, 20_000_000_000_000)}


def machine() -> Inspection:
    with opened(H100) as source:
        shown = inspect(source)
    filesystems = [
        each.model_copy(update=dict(zip(("size_bytes", "free_bytes"), SPACE[each.mount_point], strict=True)))
        if each.mount_point in SPACE
        else each
        for each in shown.filesystems
    ]
    return changed(
        shown,
        filesystems=[each.model_dump() for each in filesystems],
        settings=[{"name": "scheduler", "values": {"none": 8}}, {"name": "smt", "values": {"on": 1}}],
        manifest={"profile": "h100", "expect": {"read": 5e10}, "array": {"uuid": "a", "members": []}},
        cuda="12.8.1",
    )


def changed(shown: Inspection, **parts: Any) -> Inspection:
    return Inspection.model_validate(shown.model_dump(by_alias=True) | parts)


def edited(path: str, value: Any) -> Callable[[Inspection], Inspection]:
    """An edit of one value of the document, such as `drives/4/firmware`."""

    def edit(shown: Inspection) -> Inspection:
        document = shown.model_dump(by_alias=True)
        parent: Any = document
        *way, last = path.split("/")
        for key in way:
            parent = parent[int(key) if isinstance(parent, list) else key]
        assert parent[int(last) if isinstance(parent, list) else last] != value
        parent[int(last) if isinstance(parent, list) else last] = value
        return Inspection.model_validate(document)

    return edit


BASE = machine()
DRIVE = next(index for index, drive in enumerate(BASE.drives) if drive.data)
VOLUME = next(index for index, each in enumerate(BASE.filesystems) if each.mount_point in SPACE)
ARRAY = next(index for index, each in enumerate(BASE.arrays) if each.name == "nvme_raid0")
EDITS = {
    "drives.model": edited(f"drives/{DRIVE}/model", "OTHER"),
    "drives.size": edited(f"drives/{DRIVE}/size_bytes", 1_920_000_000_000),
    "drives.firmware": edited(f"drives/{DRIVE}/firmware", "OLD"),
    "drives.lba": edited(f"drives/{DRIVE}/lba_bytes", 4096),
    "drives.link": edited(f"drives/{DRIVE}/link/width", 2),
    "drives.numa": edited(f"drives/{DRIVE}/numa_node", 1),
    "drives.health": edited(f"drives/{DRIVE}/health/status", "failing"),
    "gpus.model": edited("gpus/3/model", "NVIDIA L4"),
    "gpus.link": edited("gpus/3/link/speed_gts", 16.0),
    "gpus.numa": edited("gpus/3/numa_node", 1),
    "host.kernel": edited("host/kernel", "6.8.0"),
    "host.cpus": edited("host/cpus", 112),
    "host.container": edited("host/container", "docker"),
    "driver.version": edited("driver/version", "535.1"),
    "driver.open": edited("driver/open", value=False),
    "cuda": edited("cuda", None),
    "gds.mode": edited("gds/mode", "compat"),
    "memory.total": edited("memory/total", 2**40),
    "memory.memlock": edited("memory/memlock", "65536"),
    "memory.hugepages": edited("memory/hugepages", []),
    "memory.shm_huge": edited("memory/shm_huge", "never"),
    "ceilings.drives": edited("ceilings/0/value", 110e9),
    "settings.scheduler": edited("settings/0/values", {"mq-deadline": 1, "none": 7}),
    "settings.smt": edited("settings/1/values", {"off": 1}),
    "manifest.profile": edited("manifest/profile", "h200"),
    "manifest.expect.read": edited("manifest/expect/read", 4e10),
    "manifest": edited("manifest", None),
    "arrays.nvme_raid0|chunk": edited(f"arrays/{ARRAY}/chunk_bytes", 2**19),
    "arrays.nvme_raid0|drives": edited(f"arrays/{ARRAY}/members/0", None),
    "mounts./mnt/nvme_raid0|options": edited(f"filesystems/{VOLUME}/options", ["rw"]),
    "mounts./mnt/nvme_raid0|free": edited(f"filesystems/{VOLUME}/free_bytes", 1_000_000_000_000),
    "tool_version": edited("tool_version", "9.9.9"),
}
"""Edits by the fact that they change."""
GONE = {
    "drives.count": lambda shown: changed(shown, drives=_without(shown.drives, DRIVE)),
    "gpus.count": lambda shown: changed(shown, gpus=_without(shown.gpus, 7)),
    "mounts./mnt/nvme_raid0": lambda shown: changed(shown, filesystems=_without(shown.filesystems, VOLUME)),
    "arrays.nvme_raid0": lambda shown: changed(shown, arrays=_without(shown.arrays, ARRAY)),
    "driver.version": lambda shown: changed(shown, driver=None),
}
"""The same for lost devices: facts that depend on them are not named as well."""


def _without(parts: Any, index: int) -> list[Any]:
    return [each.model_dump() for number, each in enumerate(parts) if number != index]


def fleet(inspections: dict[str, Inspection], missing: dict[str, str] | None = None) -> FleetInspection:
    comparison = compare(inspections)
    members = [FleetMember(host=host, inspection=shown) for host, shown in inspections.items()]
    members += [FleetMember(host=host, reason=reason) for host, reason in (missing or {}).items()]
    return FleetInspection(
        tool_version="0",
        taken=utc_now(),
        command=["x"],
        facts=comparison.facts,
        differences=comparison.differences,
        hosts=members,
    )


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_host_changed_in_one_fact_is_named_with_only_it(data: st.DataObject) -> None:
    edits = {**EDITS, **GONE}
    fact = data.draw(st.sampled_from(sorted(edits)))
    names = [f"n{number}" for number in range(data.draw(st.integers(3, 12)))]
    odd = data.draw(st.sampled_from(names))
    order = data.draw(st.permutations(names))
    differences = compare({name: edits[fact](BASE) if name == odd else BASE for name in order}).differences
    assert [(each.fact, each.hosts) for each in differences] == [(fact, [odd])]
    (only,) = differences
    assert (only.majority_hosts, only.compared) == (len(names) - 1, len(names))
    assert only.majority is not None
    assert only.value != only.majority


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_order_of_hosts_does_not_matter(data: st.DataObject) -> None:
    edits = [lambda shown: shown, *EDITS.values(), *GONE.values()]
    inspections = {
        f"n{number}": data.draw(st.sampled_from(edits))(BASE) for number in range(data.draw(st.integers(2, 8)))
    }
    order = data.draw(st.permutations(sorted(inspections)))
    assert compare({name: inspections[name] for name in order}) == compare(inspections)


def test_what_is_lost_comes_before_what_is_set_and_in_use() -> None:
    many = {f"n{number}": BASE for number in range(5)}
    many |= {
        "n5": EDITS["mounts./mnt/nvme_raid0|free"](BASE),
        "n6": EDITS["settings.scheduler"](BASE),
        "n7": GONE["drives.count"](BASE),
    }
    assert [each.hosts for each in compare(many).differences] == [["n7"], ["n6"], ["n5"]]


def test_a_drive_that_differs_is_named_with_the_cure() -> None:
    text = screen(fleet({"n1": BASE, "n2": EDITS["drives.firmware"](BASE), "n3": BASE}))
    drive = BASE.drives[DRIVE]
    line, last = " ".join(text.split()).split(" 1 of 3 hosts ")
    assert line.startswith("n2: firmware of the data drives: 7 x OPPA3B5Q, 1 x OLD")
    assert f"({drive.name} {drive.serial}: OLD); OPPA3B5Q on 2 of 3 hosts; do: `nvme fw-download`" in line
    assert last.startswith("differ from most, in 1 fact of ")


def test_hosts_that_are_alike_are_one_line() -> None:
    text = screen(fleet({"n1": BASE, "n2": BASE}))
    assert text == f"2 hosts are alike in {len(facts(BASE))} facts\n"


def test_volumes_are_compared_by_name_without_their_own() -> None:
    def built(host: str, level: str = "raid0") -> Inspection:
        volumes = [
            {"name": name, "array": {"uuid": host + name, "level": level, "members": []}, "offload_dir": None}
            for name in ("numa0", "numa1")
        ]
        return changed(BASE, manifest={"profile": "h100", "volumes": volumes})

    assert screen(fleet({"n1": built("a"), "n2": built("b")})).startswith("2 hosts are alike")
    text = screen(fleet({"n1": built("a"), "n2": built("b"), "n3": built("c", "raid10")}))
    assert "`volumes.numa1.array.level` in the manifest" in text


def test_two_hosts_that_differ_have_no_odd_one() -> None:
    made = fleet({"n1": BASE, "n2": EDITS["host.kernel"](BASE)})
    assert [(each.hosts, each.majority, each.remedy) for each in made.differences] == [
        (["n1"], None, None),
        (["n2"], None, None),
    ]
    text = screen(made)
    assert "n2: kernel: 6.8.0; most have no common value (1 of 2)" in text
    assert "no host is the odd one" in text


def test_spread_free_space_is_no_difference_and_a_full_volume_is() -> None:
    def free(share: float) -> Inspection:
        return edited(f"filesystems/{VOLUME}/free_bytes", int(share * 3e13) + 1)(BASE)

    spread = {f"n{number}": free(0.4 + 0.05 * number) for number in range(8)}
    assert compare(spread).differences == []
    (full,) = compare({**spread, "full": free(0.02)}).differences
    assert (full.fact, full.hosts) == ("mounts./mnt/nvme_raid0|free", ["full"])
    assert "(2%)" in full.value


def test_a_silent_host_is_named_and_the_others_compared() -> None:
    made = fleet({"n1": BASE, "n2": BASE}, {"n3": "Failed to connect to the host"})
    assert exit_code(made) == ExitCode.NOT_JUDGED
    first, second = screen(made).splitlines()
    assert first == "n3: not inspected: Failed to connect to the host"
    assert second.startswith("2 hosts are alike in ")
    assert second.endswith("; 1 not inspected")
    assert exit_code(fleet({"n1": BASE})) == ExitCode.OK
    assert "nothing to compare" in screen(fleet({"n1": BASE}))


def test_what_comes_back_is_an_inspection_or_a_reason() -> None:
    document = json.loads(BASE.model_dump_json(by_alias=True))
    assert member("n1", {"res": {"inspection": document}}).inspection == BASE
    newer = member("n1", {"res": {"inspection": {**document, "tool_version": "9.1", "colour": "red"}}})
    assert newer.inspection is None
    assert "tunetool 9.1 answers with another document" in (newer.reason or "")
    assert member("n1", None).reason == "Ansible reported nothing about this host"
    assert "Failed to connect" in (member("n1", {"res": {"msg": "Failed to\nconnect"}}).reason or "").replace("\n", " ")


def test_json_fits_its_schema_and_the_page_has_all(tmp_path: Path) -> None:
    odd = {f"n{number}": EDITS["host.kernel"](BASE) for number in range(10, 22)}
    made = fleet({**{f"n{number}": BASE for number in range(20, 50)}, **odd}, {"gone": "<timeout>"})
    document = json.loads(dumps(made))
    jsonschema.validate(document, fleet_model.json_schema())
    assert FleetInspection.model_validate(document) == made
    assert all(document["hosts"][number]["inspection"]["drives"] for number in range(40))
    html, text = page(made), screen(made)
    assert all(host in html for host in odd)
    assert "&lt;timeout&gt;" in html
    assert html.count("<script") == 1
    assert "and 4 more" in text


def test_every_fact_has_a_kind_of_its_own() -> None:
    import re

    general = KINDS[-1]
    assert general.pattern == ".+"
    for name in {**EDITS, **GONE, **facts(BASE)}:
        assert any(re.fullmatch(kind.pattern, name) for kind in KINDS[:-1]), name


# Through Ansible


PREFIX = Path(sys.executable).parent.parent


def prefix(folder: Path, name: str, script: str) -> str:
    program = folder / name / "bin/tunetool"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(folder / name)


def inventory(folder: Path, hosts: dict[str, dict[str, Any]]) -> Path:
    variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (folder / "hosts.json").write_text(json.dumps({"all": {"vars": variables, "hosts": hosts}}))
    return folder / "hosts.json"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "tunetool", "inspect", "--no-become", *map(str, arguments)]


@pytest.fixture
def recorded(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Three hosts whose tunetool inspects recordings; the third has another kernel, and a fourth is unreachable."""
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    document = json.loads(H100.read_text())
    (tmp_path / "same.json").write_text(json.dumps(document))
    document["files"]["/proc/sys/kernel/osrelease"] = "6.8.0-odd\n"
    (tmp_path / "odd.json").write_text(json.dumps(document))
    run = f"shift; exec {shlex.quote(sys.executable)} -m tunetool inspect --root {tmp_path}"
    same, odd = (prefix(tmp_path, name, f'{run}/{name}.json "$@"') for name in ("same", "odd"))
    gone = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    return {
        "n1": {"tunetool_prefix": same},
        "n2": {"tunetool_prefix": same},
        "n3": {"tunetool_prefix": odd},
        "gone": gone,
    }


def test_the_odd_host_of_an_inventory_is_named(recorded: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    hosts = inventory(tmp_path, recorded)
    out, html = tmp_path / "out.json", tmp_path / "page.html"
    done = call(*command("-i", hosts, "--json", out, "--page", html))
    assert done.returncode == ExitCode.NOT_JUDGED, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("gone: not inspected: ")
    assert "n3: kernel: 6.8.0-odd; 5.15.0-1063-nvidia on 2 of 3 hosts" in " ".join(done.stdout.split())
    made = FleetInspection.model_validate(json.loads(out.read_text()))
    assert [each.host for each in made.hosts] == ["n1", "n2", "n3", "gone"]
    kernels = [each for each in made.differences if each.fact == "host.kernel"]
    assert [each.hosts for each in kernels] == [["n3"]]
    assert "6.8.0-odd" in html.read_text()
    assert "n1: inspected" in done.stderr
    alone = call(*command("-i", hosts, "--limit", "n1:n2", "--json", "-"))
    assert alone.returncode == ExitCode.OK, alone.stderr
    assert json.loads(alone.stdout)["differences"] == []


def test_this_machine_twice_is_alike(tmp_path: Path) -> None:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    run = prefix(tmp_path, "here", f'exec {shlex.quote(sys.executable)} -m tunetool "$@"')
    hosts = inventory(tmp_path, {name: {"tunetool_prefix": run} for name in ("n1", "n2")})
    # Between the two looks, what else runs here may mount something, or take it away.
    for _ in range(5):
        done = subprocess.run(command("-i", hosts), capture_output=True, text=True, check=False)
        assert done.returncode == ExitCode.OK, done.stderr
        if "hosts differ" not in done.stdout:
            break
    assert done.stdout.startswith("2 hosts are alike in ")
    assert len(done.stdout.splitlines()) == 1


def test_ctrl_c_ends_the_hosts_too(tmp_path: Path) -> None:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    pid = tmp_path / "pid"
    slow = prefix(tmp_path, "slow", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 3600")
    hosts = inventory(tmp_path, {"n1": {"tunetool_prefix": slow}})
    process = subprocess.Popen(
        command("-i", hosts),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,  # noqa: PLW1509  (tests run no threads)
    )
    try:
        until(pid.exists, "the host's program runs", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == ExitCode.INTERRUPTED
        until(lambda: not alive(int(pid.read_text())), "the host's program ended")
    finally:
        process.kill()
        process.wait()


def test_differences_are_typed() -> None:
    only = compare({"n1": BASE, "n2": BASE, "n3": EDITS["gpus.link"](BASE)}).differences[0]
    assert isinstance(only, Difference)
    assert only.parts == {"n3": ["GPU 3: Gen4 x16"]}
