#!/usr/bin/python
# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Ansible module: an archive of wheels, built on the control machine, from which nodes install without a registry."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: wheelhouse
short_description: Build the archive of wheels that nodes install tunetool from
version_added: "0.1.0"
description:
  - Run it on the control machine (C(delegate_to=localhost)). Builds the package's wheel from the collection's own
    sources, or from the installed tunetool that carries the collection, and downloads its dependencies as locked in
    constraints.txt, for the nodes' Python, with this machine's pip.
  - The archive is kept under a key of its inputs, and built again only when one of them changes.
options:
  source:
    description: Directory with pyproject.toml and constraints.txt.
    type: path
    required: true
  python_versions:
    description: Python versions of the nodes, such as V(3.11).
    type: list
    elements: str
    required: true
  machines:
    description: Machine types of the nodes, as C(uname -m) names them.
    type: list
    elements: str
    default: [x86_64]
  cache_dir:
    description: Directory of the archives; by default in the user's cache directory.
    type: path
author:
  - The tunetool authors (@tunetool)
attributes:
  check_mode:
    description: Builds nothing; reports whether it would.
    support: full
  diff_mode:
    description: An archive has no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Build the wheelhouse
  tunetool.node.wheelhouse:
    source: "{{ playbook_dir }}"
    python_versions: ["3.11"]
  delegate_to: localhost
  run_once: true
"""

RETURN = r"""
archive:
  description: Path of the archive on the control machine.
  returned: success
  type: str
key:
  description: Hash of its inputs.
  returned: success
  type: str
"""

import contextlib  # noqa: E402  (Ansible wants the documentation first)
import hashlib  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import tarfile  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

from ..module_utils.common.commands import CommandError, run  # noqa: E402
from ..module_utils.common.file_lock import FileLock  # noqa: E402
from ..module_utils.common.node_wheel import own_pip, package_files, package_wheel, platform_options  # noqa: E402
from ..module_utils.play.convergence import AnsibleModule, in_one_line  # noqa: E402

_INCOMPLETE = "take the whole collection, or install tunetool again"
_NOT_BUILT = (
    "the wheelhouse cannot be built: %s. hint: this machine's pip needs a package index, or wheels for every Python "
    "that `tunetool_python_versions` names"
)
# Oldest glibc first: pip takes any of them. RHEL 9, Debian 12 and Ubuntu 22.04 all have 2.28 or newer.
PLATFORMS = ("manylinux_2_17_%s", "manylinux2014_%s", "manylinux_2_28_%s")


def input_files(source: str) -> list[str]:
    """Every file that determines the package's wheel, and the lock file of versions."""
    return sorted(
        [os.path.join(source, name) for name in ("pyproject.toml", "constraints.txt")] + package_files(source)
    )


def key_of(source: str, versions: list[str], machines: list[str]) -> str:
    """Hash over names and contents of all inputs."""
    digest = hashlib.sha256(repr(("wheelhouse/1", sorted(versions), sorted(machines))).encode())
    for path in input_files(source):
        digest.update(os.path.relpath(path, source).encode() + b"\0")
        with open(path, "rb") as stream:
            digest.update(hashlib.sha256(stream.read()).digest())
    return digest.hexdigest()[:16]


def build(source: str, versions: list[str], machines: list[str], directory: str) -> None:
    """Collect the wheels of the package and its dependencies, for each Python version and machine type."""
    pip = own_pip()
    wheel = package_wheel(source, directory)
    for version in versions:
        for machine in machines:
            platforms = platform_options(machine, PLATFORMS)
            run(
                pip
                + ["download", "--only-binary=:all:", "--implementation", "cp", "--python-version", version]
                + platforms
                + ["--constraint", os.path.join(source, "constraints.txt"), "--dest", directory]
                + [wheel + "[node]"],
                timeout=900,
            )


def pack(directory: str, archive: str) -> None:
    """Write one tar of the wheels, by rename."""
    temporary = archive + ".new"
    with tarfile.open(temporary, "w") as tar:
        for name in sorted(os.listdir(directory)):
            tar.add(os.path.join(directory, name), arcname=name)
    os.replace(temporary, archive)


@contextlib.contextmanager
def only_builder(cache: str):  # type: ignore[no-untyped-def]  # collections.abc is not worth an import here
    """A lock, so that two runs on one control machine build one after the other."""
    with FileLock.file(os.path.join(cache, "lock")) as lock:
        lock.take()
        yield


def main() -> None:
    """Entry point: find the archive under its key, or build it."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "python_versions": {"type": "list", "elements": "str", "required": True},
            "machines": {"type": "list", "elements": "str", "default": ["x86_64"]},
            "cache_dir": {"type": "path"},
        },
        supports_check_mode=True,
        keep_umask=True,
    )
    wanted = module.params
    source = wanted["source"]
    for name in ("pyproject.toml", "constraints.txt"):
        if not os.path.exists(os.path.join(source, name)):
            module.fail_json(msg="`%s` has no %s. hint: it is not a copy of this collection" % (source, name))
    cache = wanted["cache_dir"] or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"), "tunetool", "wheelhouse"
    )
    with in_one_line(module, {CommandError: lambda error: "%s. hint: %s" % (error, _INCOMPLETE)}):
        key = key_of(source, wanted["python_versions"], wanted["machines"])
    archive = os.path.join(cache, "wheelhouse-%s.tar" % key)
    if os.path.exists(archive) or module.check_mode:
        # Never "changed": the control machine's cache is no part of any node.
        module.exit_json(changed=False, archive=archive, key=key, built=False)
    os.makedirs(cache, exist_ok=True)
    with only_builder(cache):
        if not os.path.exists(archive):
            directory = tempfile.mkdtemp(prefix="build-", dir=cache)
            try:
                with in_one_line(module, {CommandError: lambda error: _NOT_BUILT % error}):
                    build(source, wanted["python_versions"], wanted["machines"], directory)
                    pack(directory, archive)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    module.exit_json(changed=False, archive=archive, key=key, built=True)


if __name__ == "__main__":
    main()
