"""The lab as an Ansible inventory, so that a playbook reaches virtual nodes as it reaches real ones."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.lab import guest, ssh
from tunetool.lab.state import Lab, NodeState
from tunetool.node.common.files import replace_file
from tunetool.regular_files import open_regular

DEFAULT_PATH = Path("inventory/lab/hosts.yml")
GROUP = "lab"
_HEADER = "# Written by `tunetool lab inventory`; `tunetool lab down` removes it.\n"


def _header(lab: Lab) -> str:
    return f"{_HEADER}# Lab: {lab.directory}\n"


def render(lab: Lab, nodes: list[NodeState]) -> str:
    """The inventory as YAML."""
    if not nodes:
        return f"{_header(lab)}---\n{GROUP}:\n  hosts: {{}}\n"
    lines = [_header(lab) + "---", f"{GROUP}:", "  hosts:"]
    for node in nodes:
        lines.append(f"    {node.name}:")
        lines += [f"      {key}: {json.dumps(value)}" for key, value in _variables(lab, node).items()]
    return "\n".join(lines) + "\n"


def write(lab: Lab, path: Path) -> None:
    """Write the inventory and record its path, so that ``down`` removes it."""
    if path.exists() and not _begins(path, _HEADER):
        raise CannotJudge(f"`{path}` was not written by the lab", "name another file with `--output`")
    replace_file(str(path), render(lab, lab.nodes()), sync=False)
    written = {*generated(lab), str(path.absolute())}
    lab.generated_file.write_text(json.dumps(sorted(written)) + "\n")


def refresh(lab: Lab) -> None:
    """Update every inventory that this lab wrote and that no other lab has overwritten."""
    for name in generated(lab):
        if _begins(Path(name), _header(lab)):
            write(lab, Path(name))


def remove(lab: Lab) -> None:
    """Remove every inventory that this lab wrote and that no other lab has overwritten."""
    for name in generated(lab):
        path = Path(name)
        if _begins(path, _header(lab)):
            path.unlink()


def _begins(path: Path, text: str) -> bool:
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            return stream.read(len(text.encode())) == text.encode()
    except OSError:
        return False


def generated(lab: Lab) -> list[str]:
    """Paths of the inventories that this lab wrote."""
    try:
        document = json.loads(lab.generated_file.read_text())
    except (OSError, ValueError):
        return []
    return [name for name in document if isinstance(name, str)] if isinstance(document, list) else []


def _variables(lab: Lab, node: NodeState) -> dict[str, object]:
    # Ansible splits the arguments as a shell would; `-F` keeps the user's own ssh configuration out.
    arguments = ["-F", "/dev/null", "-o", "IdentitiesOnly=yes", "-o", "IdentityAgent=none"]
    for option in ssh.host_options(lab.known_hosts):
        arguments += ["-o", option]
    return {
        "ansible_host": "127.0.0.1",
        "ansible_port": node.ssh_port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(node.key),
        "ansible_ssh_common_args": shlex.join(arguments),
        "ansible_control_path_dir": str(ssh.control_dir(lab, node.name)),
        "ansible_python_interpreter": "/usr/bin/python3",
        "tunetool_address": guest.link_address(node.index),
    }
