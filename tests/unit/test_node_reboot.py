"""Role node_reboot up to the reboot, run by Ansible itself. The hosts are this machine, which Ansible refuses to reboot."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calls import call

pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
MEMORY = {"host_memory_result": {"reboot_reasons": ["1 GiB pages"]}}
GDS = {"gpudirect_storage_result": {"reboot_reasons": ["nvidia-fs", "iommu"]}}
HOSTS: dict[str, dict[str, Any]] = {
    "nothing": {"host_memory_result": {"reboot_reasons": []}, "host_memory_reboot_ok": True},
    "skipped": {"gpudirect_storage_result": {"skipped": True}, "gpudirect_storage_reboot_ok": True},
    "unasked": {**MEMORY, **GDS, "io_tuning_reboot_ok": True},
    "allowed": {**MEMORY, "host_memory_reboot_ok": True},
    "one_of_two": {**MEMORY, **GDS, "gpudirect_storage_reboot_ok": True},
    "busy": {**MEMORY, "host_memory_reboot_ok": True, "scratch_filesystem_mount_point": str(SHM)},
    "ended": {
        **MEMORY,
        "host_memory_reboot_ok": True,
        "scratch_filesystem_mount_point": str(SHM),
        "node_reboot_even_if_busy": True,
    },
}
PLAY = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.include_role:
        name: tunetool.node.node_reboot
    - ansible.builtin.debug:
        msg: "{{ node_reboot_result }}"
"""


@pytest.fixture
def somebody() -> Iterator[None]:
    """A process that uses the directory in place of the volume."""
    path = SHM / f"tunetool-test-{os.getpid()}"
    with path.open("w"):
        yield
    path.unlink()


@pytest.mark.skipif(not SHM.is_mount(), reason="needs a tmpfs at /dev/shm")
@pytest.mark.usefixtures("somebody")
def test_who_is_rebooted(tmp_path: Path) -> None:
    everywhere = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "scratch_filesystem_mount_point": "/nowhere",
    }
    (tmp_path / "hosts.json").write_text(json.dumps({"all": {"vars": everywhere, "hosts": HOSTS}}))
    (tmp_path / "play.yml").write_text(PLAY)
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(tmp_path / "hosts.json"), "--check"]
    done = call(
        *command,
        str(tmp_path / "play.yml"),
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
    )
    said = {}
    for line in re.finditer(r"^(?:ok|fatal): \[(\w+)\](?:: FAILED!)? => ", done.stdout, re.M):
        result, _ = json.JSONDecoder().raw_decode(done.stdout, line.end())
        said[line[1]] = result.get("msg")
    assert set(said) == set(HOSTS), done.stdout
    assert said["nothing"] == said["skipped"] == {"rebooted": False, "reasons": []}
    assert said["unasked"] == {"rebooted": False, "reasons": ["1 GiB pages", "nvidia-fs", "iommu"]}
    for name in ("allowed", "one_of_two", "ended"):
        assert "would reboot the control node" in said[name]
    assert said["busy"].startswith(f"busy: a reboot would end somebody's work: `{SHM}`: ")
    assert "node_reboot_even_if_busy" in said["busy"]
    # Hosts without anything to do were not asked about jobs.
    looked = [part for part in done.stdout.split("TASK [") if part.partition("]")[0].endswith("somebody's work")]
    asked = re.findall(r"^(?:ok|fatal): \[(\w+)\]", "".join(looked), re.M)
    assert sorted(asked) == ["allowed", "busy", "ended", "one_of_two"]
