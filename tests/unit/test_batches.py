"""The batches of provision.yml, run by Ansible: the real plays with harmless tasks instead of the roles."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from calls import call

pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ADDRESS_THAT_REFUSES = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 9}


@dataclass(frozen=True)
class Done:
    code: int
    output: str
    hosts: dict[str, dict[str, Any]]
    """The callback's summary."""

    @property
    def built(self) -> list[str]:
        """Hosts in the order in which they reached their last task."""
        return re.findall(r"last word of (\w+)", self.output)


@dataclass(frozen=True)
class Fleet:
    """Six hosts that are this machine, on which nothing but `echo` runs."""

    directory: Path

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def run(self, bad: str = "", dead: str = "", inventory: dict[str, Any] | None = None, **extra: Any) -> Done:
        hosts: dict[str, Any] = {name: dict(ADDRESS_THAT_REFUSES) if name in dead else {} for name in "abcdef"}
        group = {
            "ansible_connection": "local",
            "ansible_become": False,
            "ansible_python_interpreter": sys.executable,
            "bad": list(bad),
            **(inventory or {}),
        }
        (self.directory / "hosts.json").write_text(json.dumps({"all": {"vars": group, "hosts": hosts}}))
        plays = yaml.safe_load((ROOT / "playbooks/provision.yml").read_text())
        assert [bool(play.get("roles")) for play in plays] == [False, False, True]
        del plays[2]["roles"]
        plays[2]["tasks"] = [
            {
                "name": "Build",
                "ansible.builtin.command": "echo {{ 'no' if inventory_hostname in bad else 'yes' }}",
                "register": "said",
                "failed_when": "said.stdout == 'no'",
            },
            {"name": "End", "ansible.builtin.debug": {"msg": "last word of {{ inventory_hostname }}"}},
        ]
        playbook = self.directory / "playbook.yml"
        playbook.write_text(yaml.safe_dump(plays, sort_keys=False))
        done = call(
            str(BIN / "ansible-playbook"),
            str(playbook),
            "-i",
            str(self.directory / "hosts.json"),
            "-e",
            json.dumps(extra),
            cwd=ROOT,
            env={
                **os.environ,
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_LOG_PATH": str(self.log),
                "TUNETOOL_SUMMARY_FILE": str(self.directory / "summary.json"),
            },
        )
        summary = self.directory / "summary.json"
        hosts = {host["host"]: host for host in json.loads(summary.read_text())["hosts"]} if summary.exists() else {}
        return Done(done.returncode, done.stdout + done.stderr, hosts)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_one_bad_and_one_dead_host_stop_nobody(fleet: Fleet) -> None:
    done = fleet.run(bad="b", dead="d")
    assert done.code != 0
    assert sorted(done.built) == ["a", "c", "e", "f"], done.output
    assert {name: host["status"] for name, host in done.hosts.items()} == {
        **dict.fromkeys("acef", "changed"),
        "b": "failed",
        "d": "unreachable",
    }
    assert {host["tasks"] for host in done.hosts.values() if host["status"] == "changed"} == {2}
    assert done.hosts["d"]["tasks"] == 0
    # Without pipelining each task is several round trips: exactly those in the log.
    log = fleet.log.read_text()
    for name in "abcef":
        assert done.hosts[name]["trips"] == len(re.findall(rf"\| <{name}> (EXEC|PUT|FETCH) ", log)) > 2
    assert done.hosts["d"]["trips"] == log.count("| <127.0.0.1> SSH: EXEC") == 1


def test_a_dead_host_is_out_before_a_batch_of_one_counts_it(fleet: Fleet) -> None:
    done = fleet.run(dead="b", provision_serial=1)
    assert done.built == list("acdef"), done.output  # one by one


@pytest.mark.parametrize("where", ["extra", pytest.param("inventory", marks=pytest.mark.slow)])
def test_a_bad_host_in_each_batch_ends_nothing(fleet: Fleet, where: str) -> None:
    sizes = {"provision_serial": [1, "50%"]}  # a; b c d; e f
    done = fleet.run(bad="ce", **({"inventory": sizes} if where == "inventory" else sizes))
    # Within a batch the order is random.
    assert [done.built[0], set(done.built[1:3]), done.built[3:]] == ["a", {"b", "d"}, ["f"]], done.output
    assert done.output.count("TASK [End]") == 3


def test_the_share_that_may_fail_ends_the_run(fleet: Fleet) -> None:
    done = fleet.run(bad="a", provision_serial=3, provision_max_fail_percentage=20)
    assert done.built == [], done.output
    done = fleet.run(bad="a", provision_serial=3, provision_max_fail_percentage=40)
    assert sorted(done.built) == list("bcdef"), done.output


@pytest.mark.slow
def test_a_batch_that_failed_whole_ends_the_run(fleet: Fleet) -> None:
    # This is Ansible's own rule, as docs/guides/provision.md says.
    done = fleet.run(bad="ab", provision_serial=2)
    assert done.built == [], done.output


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"provision_serial": "ten"}, "`provision_serial` has `ten`. hint: a number of hosts from 1 on"),
        ({"provision_serial": [1, 0]}, "`provision_serial` has `0`."),
        ({"provision_max_fail_percentage": 101}, "`provision_max_fail_percentage` is `101`."),
        ({"provision_seral": 2}, "did you mean `provision_serial`?"),
    ],
)
def test_wrong_batches_stop_all_before_any_is_touched(fleet: Fleet, wrong: dict[str, Any], message: str) -> None:
    done = fleet.run(**wrong)
    assert done.code != 0
    assert message in " ".join(done.output.split())
    assert "Gathering Facts" not in done.output
    assert done.built == []
