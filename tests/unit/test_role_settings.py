"""A role's variables as one dictionary: whoever sets them, with the types of the role's specification."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calls import call

pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")

ROOT = Path(__file__).parents[2]
PLAY: list[dict[str, Any]] = [
    {
        "hosts": "all",
        "gather_facts": False,
        "vars": {
            "base": 4,
            "io_tuning_read_ahead": "{{ base }}MiB",
            "io_tuning_nomerges": 0,
            "io_tuning_scheduler": None,
            "gpudirect_storage_mode": False,
            "scratch_filesystem_label": "{{ no_label | default(omit) }}",
            "scratch_filesystem_services": "{{ no_services | default(omit) }}",
            "scratch_filesystem_mount_point": "~/{{ inventory_hostname }}",
            "scratch_filesystem_protect_mount_point": "no",
            "host_memory_hugepages": [{"size": "1GiB", "count": "3"}],
        },
        "tasks": [
            {
                "ansible.builtin.copy": {
                    "content": "{{ {'by_role': by_role, 'without': without} | to_json }}",
                    "dest": "{{ answer }}",
                    "mode": "0600",
                },
                "vars": {
                    "roles": ["io_tuning", "scratch_filesystem", "host_memory", "gpudirect_storage", "nvme_drives"],
                    "by_role": "{{ dict(roles | zip(query('tunetool.node.role_settings', *roles))) }}",
                    "without": "{{ lookup('tunetool.node.role_settings', 'host_memory', without=['reboot_ok']) }}",
                },
            }
        ],
    }
]


def play(tmp_path: Path, document: list[dict[str, Any]], *more: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "play.yml").write_text(json.dumps(document))
    (tmp_path / "hosts.yml").write_text(
        json.dumps({"all": {"hosts": {"n1": {}}, "vars": {"ansible_connection": "local", "nvme_drives_count": 4}}})
    )
    return call(
        *(Path(sys.executable).with_name("ansible-playbook"), tmp_path / "play.yml", "-i", tmp_path / "hosts.yml"),
        *("-e", f"ansible_python_interpreter={sys.executable}", *more),
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
    )


def test_whoever_sets_a_variable_it_is_seen_with_its_type(tmp_path: Path) -> None:
    done = play(tmp_path, PLAY, "-e", f"answer={tmp_path}/answer.json host_memory_hugepages_max_share=40")
    assert done.returncode == 0, done.stdout
    answer = json.loads((tmp_path / "answer.json").read_text())
    tuning = answer["by_role"]["io_tuning"]
    # By the play: a template, a number where a text is due, and nothing; by nobody.
    assert (tuning["read_ahead"], tuning["nomerges"], tuning["scheduler"]) == ("4MiB", "0", "")
    assert (tuning["fstrim_timer"], tuning["dirty"]) == ("enabled", "")
    # Left out, they have the role's default.
    assert answer["by_role"]["scratch_filesystem"]["label"] == "nvme_raid0"
    # A default that is made from another variable. The home directory is the node's, so it is not known here.
    volume = answer["by_role"]["scratch_filesystem"]
    assert (volume["mount_point"], volume["offload_dir"]) == ("~/n1", "~/n1/deepspeed_offload")
    assert volume["protect_mount_point"] is False
    # By the command line, which is text; by the inventory; YAML reads a bare off as false.
    memory = answer["by_role"]["host_memory"]
    assert (memory["hugepages_max_share"], memory["hugepages"][0]["count"]) == (40, 3)
    assert answer["by_role"]["nvme_drives"]["count"] == 4
    assert answer["by_role"]["gpudirect_storage"]["mode"] == "off"
    assert answer["without"] == {name: value for name, value in memory.items() if name != "reboot_ok"}


WRONG: list[tuple[str, dict[str, str], str]] = [
    ("nix", {}, "the collection tunetool.node has no role `nix`"),
    ("nvme_drives", {"nvme_drives_count": "x"}, "role nvme_drives: argument 'nvme_drives_count' is of type"),
    ("io_tuning", {"io_tuning_dirty": "{{ nowhere }}"}, "'nowhere' is undefined"),
]


def test_what_is_no_value_of_a_role_is_named(tmp_path: Path) -> None:
    tasks = [
        {
            "ansible.builtin.debug": {"msg": f"{{{{ lookup('tunetool.node.role_settings', '{role}') }}}}"},
            "vars": variables,
            "ignore_errors": True,
        }
        for role, variables, _ in WRONG
    ]
    done = play(tmp_path, [{"hosts": "all", "gather_facts": False, "tasks": tasks}])
    said = " ".join((done.stdout + done.stderr).split())
    assert [message for _, _, message in WRONG if message not in said] == []
    assert done.stdout.count("...ignoring") == len(WRONG)
