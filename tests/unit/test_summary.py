"""The line of each host: from Ansible's results, and round trips from its real log."""

from __future__ import annotations

import pytest

from tunetool.node.play.host_summary import (
    BUILD,
    BUILT,
    CHANGED,
    FAILED,
    NOT_REACHED,
    REFUSED,
    UNCHANGED,
    Host,
    Route,
    Summary,
    Trips,
    lines,
    trip,
)

# As ansible-core 2.19 logged them, shortened in the middle.
SSH = (
    "<127.0.0.1> SSH: EXEC ssh -o ControlMaster=auto -o ControlPersist=120s -o Port=38451 -o 'User=\"root\"' 127.0.0.1 "
    "'/bin/sh -c '\"'\"'/usr/bin/python3 && sleep 0'\"'\"''"
)
SFTP = "<127.0.0.1> SSH: EXEC sftp -b - -o ControlMaster=auto -o Port=38451 '[127.0.0.1]'"
PUT_BESIDE_SFTP = "<127.0.0.1> PUT /home/me/w.tar TO /home/me/.ansible/tmp/x/.source.tar"
LOCAL = "<localhost> EXEC /bin/sh -c '/usr/bin/python3 && sleep 0'"
OTHERS = (
    "<127.0.0.1> ESTABLISH SSH CONNECTION FOR USER: root",
    '<127.0.0.1> (0, b\'{"changed": false, "msg": "<127.0.0.1> SSH: EXEC ssh"}\', b\'\')',
    "TASK [Choose the drives] *******",
    "<127.0.0.1> sending connection check: [b'ssh', b'-O', b'check']",
)


def test_a_trip_is_what_a_connection_plugin_starts() -> None:
    assert trip(SSH) == trip(SFTP) == Route(True, "127.0.0.1", 38451)
    assert trip(LOCAL) == Route(False, "localhost")
    assert [trip(line) for line in OTHERS] == [None] * len(OTHERS)


def test_trips_are_told_apart_by_address_and_port() -> None:
    trips = Trips()
    trips.goes("node1", Route(True, "127.0.0.1", 38451))
    trips.goes("node2", Route(True, "127.0.0.1", 37483))
    trips.goes("silent", Route(True, "10.0.0.9"))
    trips.goes("box", Route(False, "box"))
    for line in (SSH, SFTP, PUT_BESIDE_SFTP, LOCAL, *OTHERS, "<box> EXEC a", "<box> PUT a TO b", "<box> FETCH b TO a"):
        trips.line(line)
    assert {name: trips.of(name) for name in ("node1", "node2", "silent", "box", "stranger")} == {
        "node1": 2,  # the PUT beside an sftp is the same trip
        "node2": None,
        "silent": None,
        "box": 3,
        "stranger": None,
    }
    trips.goes("twin", Route(True, "127.0.0.1", 38451))
    assert trips.of("node1") is None  # nobody knows whose they were


def test_a_build_is_done_when_its_manifest_is_written() -> None:
    heard = Summary(["new", "same", "other", "stopped", "mended", "cut"], BUILD)
    heard.ok("new", "tunetool.node.raid_array", {"changed": True, "made": True, "differences": []}, 2.5)
    heard.ok("stopped", "tunetool.node.raid_array", {"changed": True, "made": False, "differences": []})
    drift = {"name": "mdadm.conf", "expected": "`ARRAY`", "found": "nothing", "mended": True}
    heard.ok("mended", "tunetool.node.raid_array", {"changed": True, "made": False, "differences": [drift]})
    heard.ok("other", "tunetool.node.host_memory", {"changed": True})
    heard.ok("cut", "tunetool.node.raid_array", {"changed": True, "made": True})
    for name in ("new", "same", "other", "stopped", "mended"):
        heard.ok(name, "ansible.builtin.validate_argument_spec", {})
        heard.ok(name, "tunetool.node.node_manifest", {"changed": False}, 0.5)
    assert {name: host.status for name, host in heard.hosts.items()} == {
        "new": BUILT,
        "same": UNCHANGED,
        "other": CHANGED,
        "stopped": CHANGED,
        "mended": CHANGED,
        "cut": NOT_REACHED,
    }
    # A task on the control machine is not one of the host.
    assert (heard.hosts["new"].tasks, heard.hosts["new"].changed, heard.hosts["new"].seconds) == (2, 1, 3.0)


@pytest.mark.parametrize(
    ("action", "message", "status"),
    [
        ("tunetool.node.nvme_drives", "7 usable. hint: look at the table\ndrive serial", REFUSED),
        ("tunetool.node.raid_array", "MODULE FAILURE", FAILED),
        ("ansible.builtin.apt", "No package. hint: no", FAILED),
    ],
)
def test_a_refusal_is_told_from_a_failure(action: str, message: str, status: str) -> None:
    heard = Summary(["n"], BUILD)
    heard.failed("n", action, {"msg": message})
    assert (heard.hosts["n"].status, heard.hosts["n"].reason) == (status, message.split("\n", 1)[0])
    heard.ok("n", "tunetool.node.node_manifest", {})
    assert heard.hosts["n"].status == status  # a later play does not make it good


def test_drift_stands_beneath_its_host_or_costs_nothing() -> None:
    heard = Summary(["node1", "node2"])
    differences = [
        {"name": "mount options", "expected": "noatime", "found": "relatime", "mended": True},
        {"name": "chunk", "expected": "1 MiB", "found": "512 KiB", "mended": False},
    ]
    heard.ok("node1", "tunetool.node.scratch_filesystem", {"changed": True, "differences": differences})
    heard.ok("node2", "tunetool.node.scratch_filesystem", {"differences": None})
    heard.failed("node2", "tunetool.node.raid_array", {"msg": "not as asked. hint: move " + "the data " * 12})
    shown = lines(heard.hosts.values())
    assert shown[2].split() == ["node1", "CHANGED", "1", "1", "-", "0.0"]
    assert shown[3:5] == [
        "  drift: mount options expected noatime found relatime (mended)",
        "  drift: chunk expected 1 MiB found 512 KiB (left)",
    ]
    assert shown[5].startswith("node2  REFUSED      2        0      -      0.0  not as asked. hint: move the data")
    # A long reason continues below, within the width of the page.
    assert shown[6].strip().startswith("the data")
    assert max(map(len, shown)) <= 100
    assert lines([Host("a")])[0].split() == ["host", "result", "tasks", "changed", "trips", "seconds", "reason"]


DRIFT = {
    "msg": "the node is not as it was built and asked for:\n"
    "`array.chunk`: expected 512 KiB, found 1 MiB. hint: ask for what is there\n"
    "`mount.options`: expected noatime, found relatime. hint: it is mended by the next run that nothing else stops",
    "changed": False,
    "differences": [
        {
            "name": "array.chunk",
            "expected": "512 KiB",
            "found": "1 MiB",
            "mended": False,
            "hint": "ask for what is there",
        },
        {
            "name": "mount.options",
            "expected": "noatime",
            "found": "relatime",
            "mended": False,
            "hint": "it is mended by",
        },
    ],
}


def test_drift_that_stops_a_run_is_a_refusal_with_its_hints() -> None:
    heard = Summary(["n"], BUILD)
    heard.failed("n", "tunetool.node.nvme_drives", DRIFT)
    assert heard.hosts["n"].status == REFUSED
    assert heard.hosts["n"].reason == " ".join(
        str(DRIFT["msg"]).replace("for:\n", "for:; ").replace("\n", "; ").split()
    )
    shown = lines(heard.hosts.values())
    at = shown.index("  drift: array.chunk expected 512 KiB found 1 MiB (left)")
    assert shown[at + 1] == "    hint: ask for what is there"


def test_several_obstacles_are_all_in_the_reason() -> None:
    heard = Summary(["n"], BUILD)
    message = "2 obstacles. hint: each line below\n`/m` holds files. hint: move them\nlabel. hint: x\ndrive  serial"
    heard.failed("n", "tunetool.node.nvme_drives", {"msg": message})
    expected = "2 obstacles. hint: each line below; `/m` holds files. hint: move them; label. hint: x"
    assert (heard.hosts["n"].status, heard.hosts["n"].reason) == (REFUSED, expected)


@pytest.mark.parametrize(("check", "word"), [(True, "would be mended"), (False, "mended")])
def test_check_mode_mends_nothing(check: bool, word: str) -> None:
    heard = Summary(["n"], BUILD, check=check)
    one = {"name": "mount.options", "expected": "noatime", "found": "relatime", "mended": True}
    heard.ok("n", "tunetool.node.scratch_filesystem", {"changed": True, "differences": [one]})
    assert f"  drift: mount.options expected noatime found relatime ({word})" in lines(heard.hosts.values())


@pytest.mark.parametrize(("check", "status"), [(True, REFUSED), (False, FAILED)])
def test_a_refusal_after_a_change_is_no_refusal(check: bool, status: str) -> None:
    heard = Summary(["n"], BUILD, check=check)
    heard.ok("n", "tunetool.node.raid_array", {"changed": True})
    heard.failed("n", "tunetool.node.scratch_filesystem", {"msg": "it holds ext4. hint: move it"})
    assert (heard.hosts["n"].status, heard.hosts["n"].reason) == (status, "it holds ext4. hint: move it")


# As ansible-core 2.19 returned them, shortened.
FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (
            {
                "msg": "The following modules failed to execute: setup.",
                "failed_modules": {"setup": {"failed": True, "module_stderr": f"Traceback:\n{FULL}\n", "rc": 1}},
            },
            "a disk of the node is full (No space left on device): The following modules failed to execute: setup. hint: "
            "`df -h / /tmp` on the node; free space, then run this again",
        ),
        (
            {
                "msg": "The following modules failed to execute: ansible.legacy.setup.",
                "failed_modules": {
                    "ansible.legacy.setup": {
                        "module_stderr": "Traceback:\nFileNotFoundError: [Errno 2] No usable temporary directory found in "
                        "['/tmp', '/var/tmp', '/usr/tmp', '/root']\n",
                        "msg": "Module result deserialization failed: No start of json char found",
                    }
                },
            },
            "no temporary file can be made on the node: The following modules failed to execute: ansible.legacy.setup. hint: "
            "`df -h / /tmp` and `findmnt / /tmp` on the node: free space, or make it writable, then run this again",
        ),
        (
            {
                "msg": "The following modules failed to execute: setup\n",
                "failed_modules": {"setup": {"module_stderr": "/bin/sh: 1: /usr/bin/python3: not found\n"}},
            },
            "The following modules failed to execute: setup: /bin/sh: 1: /usr/bin/python3: not found",
        ),
        (
            {"msg": "The following modules failed to execute: setup.", "failed_modules": {"setup": {"msg": "no json"}}},
            "The following modules failed to execute: setup: no json",
        ),
        (
            {"msg": "MODULE FAILURE\nSee stdout/stderr for the exact error", "module_stderr": "X\nKeyError: 'a'\n"},
            "MODULE FAILURE: KeyError: 'a'",
        ),
    ],
)
def test_a_module_that_could_not_run_says_why(result: dict[str, object], reason: str) -> None:
    heard = Summary(["n"], BUILD)
    heard.failed("n", "ansible.builtin.gather_facts", result)
    assert (heard.hosts["n"].status, heard.hosts["n"].reason) == (FAILED, reason)


def test_what_waits_for_a_reboot_stands_below_the_host() -> None:
    heard = Summary(["node1", "node2"])
    memory = {"hugepages_bytes": 8 * 2**30, "ram_bytes": 2**41, "reboot_reasons": ["huge pages: 8 of 1 GiB"]}
    heard.ok("node1", "tunetool.node.host_memory", memory)
    heard.ok("node1", "tunetool.node.gds", {"reboot_reasons": ["nvidia-fs"]})
    heard.ok("node2", "tunetool.node.host_memory", {"hugepages_bytes": 0, "ram_bytes": 2**41, "reboot_reasons": []})
    shown = lines(heard.hosts.values())
    assert shown[3:6] == [
        "  huge pages take 8 GiB of 2 TiB RAM, 0.4 %",
        "  reboot required: huge pages: 8 of 1 GiB",
        "  reboot required: nvidia-fs",
    ]
    assert shown[6].startswith("node2")
    assert len(shown) == 7
    # After the reboot, a task of one host looked again.
    heard.ok("node1", "tunetool.node.host_memory", dict(memory, reboot_reasons=[]))
    assert heard.hosts["node1"].reboot_reasons == ["nvidia-fs"]
