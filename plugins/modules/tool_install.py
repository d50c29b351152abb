#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: tunetool in its own venv, from an archive of wheels, without a registry and without pip."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: tool_install
short_description: Install tunetool on the node from a wheelhouse archive
version_added: "0.1.0"
description:
  - Makes C(PREFIX/venv-KEY) only from the archive's wheels, with the pip among them, then points
    C(PREFIX/bin/tunetool) at it in one rename and removes older venvs. An interrupted run leaves the old one in use.
options:
  archive:
    description: The archive, on the control machine. It is sent only to a node that has not installed its key.
    type: path
    required: true
  key:
    description: Hash of the archive's inputs.
    type: str
    required: true
  prefix:
    description: Directory that belongs to tunetool.
    type: path
    default: /opt/tunetool
  python:
    description: Interpreter, 3.10 or newer.
    type: path
    default: /usr/bin/python3
  link:
    description: Link to the program in a directory on everyone's PATH; empty for none.
    type: str
    default: /usr/local/bin/tunetool
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Says whether it would install.
    support: full
  diff_mode:
    description: Shows the key before and after.
    support: full
"""

EXAMPLES = r"""
- name: Install tunetool
  tunetool.node.tool_install:
    archive: "{{ tunetool_wheelhouse.archive }}"
    key: "{{ tunetool_wheelhouse.key }}"
"""

RETURN = r"""
opened:
  description: Directories that users could not enter, which they now can (in check mode, could).
  returned: success
  type: list
  elements: str
executable:
  description: The program.
  returned: success
  type: str
"""

import os  # noqa: E402  (Ansible wants the documentation first)
import shutil  # noqa: E402
import tarfile  # noqa: E402
import tempfile  # noqa: E402

from ..module_utils.common.commands import CommandError, run  # noqa: E402
from ..module_utils.common.drift import Ledger  # noqa: E402
from ..module_utils.common.files import closed, open_to_users  # noqa: E402
from ..module_utils.common.refusal import Refusal  # noqa: E402
from ..module_utils.common.venv import make_venv, pip_of, point  # noqa: E402
from ..module_utils.machine.distribution import read_distribution  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, Words, converge, line_of  # noqa: E402

_CANNOT = "tunetool cannot be installed: %s"


def installed_key(program: str) -> str | None:
    """The key of the venv behind the link PREFIX/bin/tunetool, if that exists."""
    if not os.path.exists(program):
        return None
    parts = os.readlink(program).split(os.sep) if os.path.islink(program) else []
    return next((part[len("venv-") :] for part in parts if part.startswith("venv-")), None)


def install(python: str, archive: str, venv: str) -> None:
    """Make a venv without pip, and fill it with the pip from the archive."""
    with tempfile.TemporaryDirectory(prefix="tunetool-") as wheels:
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                # It is our own archive; still, extract only plain files with plain names.
                if not member.isfile() or os.sep in member.name or not member.name.endswith(".whl"):
                    raise CommandError("`%s` holds `%s`, which is not a wheel" % (archive, member.name))
                tar.extract(member, wheels)
        names = sorted(os.listdir(wheels))
        pip = next((name for name in names if name.startswith("pip-")), None)
        package = next((name for name in names if name.startswith("tunetool-")), None)
        if pip is None or package is None:
            raise CommandError("`%s` holds no tunetool or no pip" % archive)
        make_venv(python, venv)
        run(
            pip_of(venv, os.path.join(wheels, pip))
            + ["install", "--quiet", "--no-index", "--no-cache-dir", "--find-links", wheels]
            + ["--root-user-action=ignore", os.path.join(wheels, package)],
            timeout=900,
        )
    run([os.path.join(venv, "bin/tunetool"), "--version"])
    # The link that comes next can reach the disk before what it leads to: after a power loss, a program of empty files.
    run(["sync", "--file-system", venv])


def entrances(prefix: str, key: str) -> list[str]:
    """What shows whether users can start the program: an earlier version made all of it under root's umask."""
    venv = os.path.join(prefix, "venv-" + key)
    return [prefix, os.path.join(prefix, "bin"), venv, *(os.path.join(venv, name) for name in ("bin", "lib"))]


def refuse_old(python: str) -> None:
    """Raises ``CommandError`` for a Python that the package does not run on."""
    if run([python, "-c", "import sys; print(sys.version_info >= (3, 10))"]).stdout.strip() != "True":
        raise CommandError("`%s` is older than Python 3.10" % python)


def work(wanted: dict[str, str], ledger: Ledger) -> list[str]:
    """Install under the new key unless it exists, switch to it, remove the old ones.

    Returns what is closed to users. The action plugin sends the wheelhouse where the diff has an entry `tunetool`.
    """
    prefix, key, link = wanted["prefix"], wanted["key"], wanted["link"]
    program = os.path.join(prefix, "bin/tunetool")
    if link and os.path.lexists(link) and not os.path.islink(link):
        raise Refusal("`%s` is a file that tunetool did not make. hint: set `tunetool_link` to ''" % link)
    before = installed_key(program)
    if before != key and ledger.acting:
        refuse_old(wanted["python"])
    if ledger.note("tunetool", "%s\n" % before if before else "", "%s\n" % key):
        install(wanted["python"], wanted["archive"], os.path.join(prefix, "venv-" + key))
        point(program, os.path.join("..", "venv-" + key, "bin/tunetool"))
    if link and ledger.note(link, os.readlink(link) if os.path.islink(link) else "", program):
        point(link, program)
    shut = closed(entrances(prefix, key))
    if ledger.note("closed to users", "".join("%s\n" % path for path in shut), ""):
        open_to_users(prefix)
    if ledger.acting:
        for name in os.listdir(prefix):
            if name.startswith("venv-") and name != "venv-" + key:
                shutil.rmtree(os.path.join(prefix, name))
    return shut


def main() -> None:
    """Compare keys, install, switch, clean."""
    module = AnsibleModule(
        argument_spec={
            "archive": {"type": "path", "required": True},
            "key": {"type": "str", "required": True, "no_log": False},
            "prefix": {"type": "path", "default": "/opt/tunetool"},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "link": {"type": "str", "default": "/usr/local/bin/tunetool"},
        },
        supports_check_mode=True,
    )
    words: Words = {
        CommandError: lambda error: _CANNOT % ("%s. hint: %s" % (error, read_distribution().python_hint)),
        OSError: lambda error: _CANNOT % line_of(error),
    }
    shut, answer = converge(module, lambda ledger: work(module.params, ledger), lambda: None, words)
    module.exit_json(
        changed=answer["changed"],
        diff=answer["diff"],
        executable=os.path.join(module.params["prefix"], "bin/tunetool"),
        opened=shut,
    )


if __name__ == "__main__":
    main()
