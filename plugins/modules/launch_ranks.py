#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: a node's part of a run of ranks."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: launch_ranks
short_description: Run the ranks of one node, together with those of other nodes
version_added: "0.1.0"
description:
  - Starts the guard that C(tunetool) has for the ranks of a node, and waits until the run ended on all nodes.
  - The guard ends its ranks when the connection to this module is lost, and leaves nothing behind.
  - P(tunetool.node.launch#playbook) uses it.
options:
  state:
    description:
      - V(prepared) makes O(directory), and says which ports are free.
      - V(run) runs the ranks, and packs what they wrote into C(out.tar) there.
      - V(absent) ends what still runs, and removes O(directory).
    type: str
    choices: [prepared, run, absent]
    required: true
  directory:
    description: A directory for this run alone. V(prepared) fails where it exists.
    type: path
    required: true
  python:
    description:
      - Interpreter that has torch and tunetool. Empty for the one that C(/etc/tunetool/node.json) names for training,
        or O(default_python) where it names none.
    type: path
    default: ""
  default_python:
    description: Interpreter on a node without a training environment.
    type: path
    default: /opt/tunetool/bin/python
  spec:
    description: What to run, base64 of JSON. For V(run).
    type: str
    default: ""
  node:
    description: Index of this node among the nodes, from 0.
    type: int
    default: 0
  addresses:
    description: Addresses by which the nodes reach each other, in their order. They meet at the first.
    type: list
    elements: str
    default: []
  ports:
    description: Two free ports of the first node, as V(prepared) returned them.
    type: list
    elements: int
    default: []
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: The module is skipped.
    support: none
  diff_mode:
    description: There is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Remove what a run of yesterday left
  tunetool.node.launch_ranks:
    state: absent
    directory: /tmp/tunetool-launch-0123
"""

RETURN = r"""
ports:
  description: Ports on which no program listened.
  returned: when prepared
  type: list
  elements: int
verdict:
  description: How the run ended here.
  returned: when run
  type: dict
"""

import base64  # noqa: E402  (Ansible wants the documentation first)
import errno  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import tarfile  # noqa: E402
from typing import Any, Mapping  # noqa: E402

from ..module_utils.common.commands import last_line  # noqa: E402
from ..module_utils.common.training_part import REPAIR, SWITCH_ON, python_of_ranks  # noqa: E402
from ..module_utils.common.waiting import wait_for  # noqa: E402
from ..module_utils.play import connection  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, in_one_line  # noqa: E402
from ..module_utils.play.tunetool_command import MARK  # noqa: E402

GUARD = "tunetool.launch.node"
PID = "guard.pid"
HAVE = "import importlib.util as u; print(' '.join(n for n in ('torch', 'tunetool.launch') if not u.find_spec(n)))"
END_SECONDS = 60.0


def prepare(module: Any) -> None:
    """Make the directory, and return free ports."""
    directory = module.params["directory"]
    python, _ = python_of(module)
    if not os.access(python, os.X_OK):
        module.fail_json(
            msg="`%s` does not exist. hint: run `tunetool provision`, whose role tunetool installs it" % python
        )
    rc, stdout, stderr = module.run_command([python, "-c", HAVE], cwd="/")
    missing = stdout.split()
    if rc != 0 or missing:
        why = "lacks `%s`" % missing[0].split(".")[0] if missing else "does not run: %s" % last_line(stderr)
        hint = "install `tunetool[finetune]` there" if module.params["python"] else REPAIR
        if python == module.params["default_python"]:
            hint = SWITCH_ON
        module.fail_json(msg="`%s` %s. hint: %s" % (python, why, hint))
    try:
        os.makedirs(directory, 0o700)
    except OSError as error:
        module.fail_json(msg="`%s`: %s" % (directory, error.strerror))
    module.exit_json(changed=True, ports=free_ports(2))


def python_of(module: Any) -> tuple[str, Mapping[str, str]]:
    """The interpreter of the ranks, and the variables that the manifest wants to be set for it."""
    with in_one_line(module):
        return python_of_ranks(module.params["python"], module.params["default_python"])


def free_ports(count: int) -> list[int]:
    """``count`` ports on which nobody listens now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def run(module: Any) -> None:
    """Run the guard of the ranks until it ends."""
    given = module.params
    directory = given["directory"]
    spec = json.loads(base64.b64decode(given["spec"]))
    python, variables = python_of(module)
    first, second = given["ports"]
    spec.update(
        node=given["node"],
        master=[given["addresses"][0], first],
        # A host's own name may resolve to its loopback there, so the first one looks for the route to the second.
        towards=given["addresses"][0 if given["node"] else min(1, len(given["addresses"]) - 1)],
        line_port=second,
        directory=directory,
        out=os.path.join(directory, "out"),
        python=python,
        environment={**variables, **spec["environment"]},
    )
    os.makedirs(spec["out"], exist_ok=True)
    with open(os.open(os.path.join(directory, "spec.json"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(spec, out)
    log = os.path.join(directory, "guard.log")
    with open(log, "wb") as log_stream:
        guard = subprocess.Popen(
            [python, "-m", GUARD, directory],
            cwd="/",
            # It ends in order when its input closes, even if this host is the control machine itself.
            env={name: value for name, value in os.environ.items() if name != MARK},
            stdin=subprocess.PIPE,
            stdout=log_stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    with open(os.path.join(directory, PID), "w") as out:
        out.write(str(guard.pid))
    connection.wait(guard, guard.stdin.close if guard.stdin is not None else guard.terminate, END_SECONDS)
    try:
        with open(os.path.join(directory, "verdict.json")) as stream:
            verdict = json.load(stream)
    except (OSError, ValueError):
        module.fail_json(msg="the guard of the ranks died: %s" % last_line(read(log)))
        return
    pack(spec["out"], os.path.join(directory, "out.tar"))
    module.exit_json(changed=True, verdict=verdict)


def pack(folder: str, archive: str) -> None:
    """Pack everything in ``folder``, by its relative name."""
    with tarfile.open(archive, "w") as tar:
        for name in sorted(os.listdir(folder)):
            tar.add(os.path.join(folder, name), arcname=name)


def remove(module: Any) -> None:
    """End what still runs, and remove the directory."""
    directory = module.params["directory"]
    was = os.path.isdir(directory)
    if was:
        pid = read(os.path.join(directory, PID)).strip()
        if pid.isdigit() and not gone(int(pid), directory, END_SECONDS):
            os.kill(int(pid), signal.SIGKILL)  # its ranks die with it
        shutil.rmtree(directory, ignore_errors=True)
        if os.path.isdir(directory):
            module.fail_json(msg="`%s` cannot be removed" % directory)
    module.exit_json(changed=was)


def gone(pid: int, directory: str, seconds: float) -> bool:
    """Whether the guard ended in time, after its connection was lost."""
    return wait_for(lambda: directory not in read("/proc/%d/cmdline" % pid), seconds)


def read(path: str) -> str:
    """A file's text; empty if the file does not exist."""
    try:
        with open(path, errors="replace") as stream:
            return stream.read()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESRCH):
            raise
        return ""


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["prepared", "run", "absent"], "required": True},
            "directory": {"type": "path", "required": True},
            "python": {"type": "path", "default": ""},
            "default_python": {"type": "path", "default": "/opt/tunetool/bin/python"},
            # Contains the ranks' environment, and so perhaps a secret.
            "spec": {"type": "str", "default": "", "no_log": True},
            "node": {"type": "int", "default": 0},
            "addresses": {"type": "list", "elements": "str", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
        },
        required_if=[("state", "run", ["spec", "addresses", "ports"])],
        supports_check_mode=False,
        keep_umask=True,
    )
    {"prepared": prepare, "run": run, "absent": remove}[module.params["state"]](module)


if __name__ == "__main__":
    main()
