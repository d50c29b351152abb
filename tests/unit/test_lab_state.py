"""What the lab remembers: state files, locks, inventories, and processes that are not ours."""

from __future__ import annotations

import ipaddress
import json
import os
import shlex
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.lab import faults, inventory, programs, qemu
from tunetool.lab.machine import Drive
from tunetool.lab.qemu import Qmp
from tunetool.lab.state import Fault, Lab, NodeState, cache_dir, data_serial, state_dir, system_serial


def node(lab: Lab, index: int = 1, drives: int = 8) -> NodeState:
    serials = [system_serial(index), *(data_serial(index, number + 1) for number in range(drives))]
    made = NodeState(
        name=f"node{index}",
        index=index,
        os_name="debian12",
        image=Path("/cache/image"),
        memory=2**31,
        accel="tcg",
        ports=drives + 3,
        drive_count=drives,
        drive_size=2**32,
        ssh_port=2200 + index,
        drives=[Drive(serial, Path(f"/d/{serial}"), 2**32, port) for port, serial in enumerate(serials)],
        faults=[Fault("slow-drive", data_serial(index, 1))],
    )
    lab.node_dir(made.name).mkdir(parents=True)
    lab.write(made)
    return made


def test_a_node_reads_back_as_it_was_written(lab: Lab):
    made = node(lab)
    assert lab.read("node1") == made


def test_nodes_are_listed_by_number(lab: Lab):
    for index in (10, 2, 1):
        node(lab, index)
    assert lab.names() == ["node1", "node2", "node10"]


def test_no_two_nodes_share_a_serial():
    serials = [data_serial(n, d) for n in range(1, 17) for d in range(1, 25)]
    serials += [system_serial(n) for n in range(1, 17)]
    assert len(set(serials)) == len(serials)


@pytest.mark.parametrize("name", ["node7", "../etc", "", "node1/..", "boot"])
def test_an_unknown_node_is_the_callers_mistake(lab: Lab, name: str):
    node(lab)
    with pytest.raises(UsageProblem) as caught:
        lab.read(name)
    assert "`node1`" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "node1"}', '{"drives": 3}'])
def test_a_broken_state_file_is_told_and_not_a_traceback(lab: Lab, text: str):
    node(lab)
    (lab.node_dir("node1") / "node.json").write_text(text)
    with pytest.raises(CannotJudge, match=r"node\.json"):
        lab.read("node1")


def test_a_second_call_stops_with_busy(lab: Lab):
    with lab.locked(), pytest.raises(CannotJudge, match="busy"), Lab(lab.directory).locked():
        pass
    with lab.locked():
        pass


def test_the_socket_directory_must_be_ours_alone(lab: Lab):
    lab.sockets.chmod(0o755)
    with pytest.raises(CannotJudge, match="another user"):
        lab.prepare()


def test_socket_paths_stay_short_wherever_the_lab_is(tmp_path: Path):
    deep = Lab(tmp_path / ("x" * 150))
    assert len(str(deep.qmp_socket("node16"))) - len(str(deep.sockets.parent)) < 60


def test_directories_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    monkeypatch.delenv("TUNETOOL_LAB_DIR", raising=False)
    assert cache_dir() == tmp_path / "c/tunetool/lab"
    assert state_dir() == Path.home() / ".local/state/tunetool/lab"
    monkeypatch.setenv("TUNETOOL_LAB_DIR", str(tmp_path / "mine"))
    assert state_dir() == tmp_path / "mine"


def test_removing_the_lab_leaves_nothing(lab: Lab, tmp_path: Path):
    node(lab)
    lab.qmp_socket("node1").touch()
    lab.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_inventory_is_yaml_that_ansible_reads(lab: Lab):
    nodes = [node(lab, 1), node(lab, 2)]
    hosts = yaml.safe_load(inventory.render(lab, nodes))["lab"]["hosts"]
    assert list(hosts) == ["node1", "node2"]
    variables = hosts["node1"]
    assert variables["ansible_host"] == "127.0.0.1"
    assert variables["ansible_port"] == 2201
    assert variables["ansible_ssh_private_key_file"] == "/cache/image/id_ed25519"
    # The directory of this lab has a space: Ansible must get it as one word.
    assert f"UserKnownHostsFile={lab.known_hosts}" in shlex.split(variables["ansible_ssh_common_args"])
    assert variables["ansible_control_path_dir"] != hosts["node2"]["ansible_control_path_dir"]
    # ssh comes by the loopback address, the other nodes by the link.
    assert [each["tunetool_address"] for each in hosts.values()] == ["10.0.3.1", "10.0.3.2"]


def test_labs_do_not_share_a_link(lab: Lab, tmp_path: Path):
    group, port = lab.link.split(":")
    assert ipaddress.ip_address(group) in ipaddress.ip_network("239.0.0.0/8")
    assert 20000 <= int(port) < 30000
    assert Lab(lab.directory).link == lab.link
    assert Lab(tmp_path / "another").link != lab.link


def test_an_inventory_without_nodes_is_still_one(lab: Lab):
    assert yaml.safe_load(inventory.render(lab, [])) == {"lab": {"hosts": {}}}


def test_the_inventory_is_written_followed_and_removed(lab: Lab, tmp_path: Path):
    path = tmp_path / "inventory/hosts.yml"
    node(lab)
    inventory.write(lab, path)
    node(lab, 2)
    inventory.refresh(lab)
    assert "node2" in path.read_text()
    inventory.remove(lab)
    assert list(path.parent.iterdir()) == []


def test_somebody_elses_inventory_stays_as_it_is(lab: Lab, tmp_path: Path):
    path = tmp_path / "hosts.yml"
    path.write_text("h100:\n")
    with pytest.raises(CannotJudge, match="not written by the lab"):
        inventory.write(lab, path)
    lab.generated_file.write_text(json.dumps([str(path)]))
    inventory.remove(lab)
    assert path.read_text() == "h100:\n"


def test_a_pipe_in_an_inventorys_place_stays(lab: Lab, tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CannotJudge, match="not written by the lab"):
        inventory.write(lab, pipe)
    lab.generated_file.write_text(json.dumps([str(pipe)]))
    inventory.refresh(lab)
    inventory.remove(lab)
    assert pipe.is_fifo()


def test_an_inventory_that_another_lab_took_over_stays(lab: Lab, tmp_path: Path):
    path = tmp_path / "hosts.yml"
    other = Lab(tmp_path / "other")
    other.prepare()
    inventory.write(lab, path)
    inventory.write(other, path)
    inventory.refresh(lab)
    inventory.remove(lab)
    assert str(other.directory) in path.read_text()


def test_the_default_drive_is_the_third_or_the_last(lab: Lab):
    assert faults.default_serial(node(lab, 1)) == "LAB1NV3"
    assert faults.default_serial(node(lab, 2, drives=2)) == "LAB2NV2"


def test_a_boot_ends_a_limit_and_a_mount_but_no_contents(lab: Lab):
    made = node(lab)
    kinds = ["in-use", "mixed-size", "btrfs-in-use", "metadata", "partition-in-use", "lvm", "slow-drive"]
    made.faults = [Fault(kind, f"LAB1NV{number}") for number, kind in enumerate(kinds, 1)]
    faults.after_reboot(made)
    assert [(fault.kind, fault.serial) for fault in made.faults] == [
        ("has-filesystem", "LAB1NV1"),
        ("mixed-size", "LAB1NV2"),
        ("btrfs", "LAB1NV3"),
        ("has-partitions", "LAB1NV5"),
        ("lvm", "LAB1NV6"),
    ]


def test_a_fault_of_the_drive_itself_keeps_its_slot(lab: Lab):
    made = node(lab)
    made.drives[3] = replace(made.drive("LAB1NV3"), bad_sectors=True)
    third = made.drive("LAB1NV3")
    replacements = {kind: faults.replacement(made, third, kind) for kind in faults.KINDS}
    assert {kind for kind, drive in replacements.items() if drive} == {
        "extra-drive",
        "mixed-size",
        "swap-drive",
        "4k-sectors",
        "duplicate-serial",
        "empty-serial",
    }
    assert {(drive.port, drive.bad_sectors) for drive in replacements.values() if drive} == {(third.port, False)}
    shown = {kind: drive.device()["serial"] for kind, drive in replacements.items() if drive}
    assert str(shown["duplicate-serial"]).rstrip() == "LAB1NV1"
    assert shown["empty-serial"] == ""
    assert shown["4k-sectors"] == "LAB1NV3"
    assert shown["swap-drive"] == "LAB1NV3R"
    four = replacements["4k-sectors"]
    assert four is not None
    assert four.device()["logical_block_size"] == 4096


def test_a_second_duplicate_is_refused(lab: Lab):
    made = node(lab)
    made.drives[3] = replace(made.drives[3], says="LAB1NV1")
    with pytest.raises(UsageProblem, match="LAB1NV5"):
        faults.replacement(made, made.drive("LAB1NV5"), "duplicate-serial")


def test_extra_drives_fill_the_free_slots_and_then_no_more(lab: Lab):
    made = node(lab)
    for serial in ("LAB1NV9", "LAB1NV10"):
        extra = faults.extra_drive(made)
        assert extra.serial == serial
        assert extra.port not in {drive.port for drive in made.drives}
        made.drives.append(extra)
    with pytest.raises(UsageProblem, match="no free slot"):
        faults.extra_drive(made)


def test_a_reused_pid_is_not_ours(lab: Lab):
    node(lab)
    lab.pid_file("node1").write_text(f"{os.getpid()}\n")
    assert qemu.pid_of(lab.pid_file("node1")) is None
    assert qemu.all_under(lab.directory) == []


@pytest.mark.parametrize("text", ["", "abc", "-1", "99999999999"])
def test_a_strange_pid_file_names_nobody(lab: Lab, text: str):
    node(lab)
    lab.pid_file("node1").write_text(text)
    assert qemu.pid_of(lab.pid_file("node1")) is None


def test_a_missing_program_names_the_packages_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "find", lambda program: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(CannotJudge) as caught:
        programs.require("qemu-system-x86_64", "qemu-img")
    assert caught.value.hint == "`apt-get install --no-install-recommends qemu-system-x86 qemu-utils`"
    assert caught.value.exit_code == ExitCode.NOT_JUDGED


def test_too_little_space_stops_before_any_work(tmp_path: Path):
    with pytest.raises(CannotJudge, match="GiB free"):
        programs.require_space(tmp_path, 2**80, "this")


def serve(path: Path, lines: list[str]) -> threading.Thread:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1)

    def talk() -> None:
        connection, _ = server.accept()
        with server, connection, connection.makefile("rb") as asked:
            connection.sendall(b'{"QMP": {}}\n')
            asked.readline()
            connection.sendall(b'{"return": {}}\n')
            for line in lines:
                asked.readline()
                connection.sendall(line.encode())

    thread = threading.Thread(target=talk)
    thread.start()
    return thread


def test_qmp_keeps_events_that_arrive_before_the_answer(tmp_path: Path):
    events = '{"event": "A", "data": {"device": "x"}}\n{"event": "A", "data": {"device": "y"}}\n'
    thread = serve(tmp_path / "q", [events + '{"return": {"status": "ok"}}\n'])
    with Qmp(tmp_path / "q") as qmp:
        assert qmp.command("query-status") == {"status": "ok"}
        assert qmp.wait_event("A", 1, device="y") == {"device": "y"}
        assert qmp.wait_event("A", 1) == {"device": "x"}
    thread.join()


def test_qmp_tells_a_refusal_and_an_end_in_one_line(tmp_path: Path):
    thread = serve(tmp_path / "q", ['{"error": {"class": "GenericError", "desc": "no such bus"}}\n'])
    with Qmp(tmp_path / "q") as qmp:
        with pytest.raises(CannotJudge, match="`device_add`: no such bus"):
            qmp.command("device_add", {"driver": "nvme"})
        thread.join()
        with pytest.raises(CannotJudge, match="QEMU ended"):
            qmp.command("quit")


def test_qmp_does_not_wait_for_ever(tmp_path: Path):
    with pytest.raises(CannotJudge):
        Qmp(tmp_path / "nobody", connect_seconds=0.1)
