"""The reasons for which a test may be skipped. A skip for any other reason fails the run, by the test's name.

A missing package is no reason: `programs.need_program` fails the test, and setup.sh installs it.
The conftest.py of the checkout imports the two hooks, for every group and every Python.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

BARE_PYTHON = "TUNETOOL_TESTS_BARE_PYTHON"
"""Set by tools/dev/environments.py: a Python with what a node needs, and nothing of a control machine's."""
SKIPPED_LIST = "TUNETOOL_TESTS_SKIPPED_LIST"
"""Set by tools/dev/fresh.py: a file to which the node id of every skipped test is added, so that they can run elsewhere."""
FRAMEWORKS = "TUNETOOL_TESTS_FRAMEWORKS"
"""Set by tools/dev/environments.py, which installs what its tests need."""
DEEPSPEED = Path(__file__).parents[1] / ".venv/.stamp-deepspeed"
"""Written by tools/dev/setup.sh once torch and DeepSpeed are installed."""
LEFT_OUT = Path(__file__).parents[1] / ".venv/.deepspeed-left-out"
"""Written by tools/dev/setup.sh where the only torch would bring CUDA."""


def not_root() -> bool:
    return os.geteuid() != 0


@cache
def no_mounts() -> bool:
    """A container or an ordinary user without user namespaces."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = ["unshare", *user, "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(script, capture_output=True, check=False).returncode != 0


def no_loops() -> bool:
    """No loop devices, as in a container."""
    return not_root() or no_mounts() or not Path("/dev/loop-control").exists()


def no_xfs() -> bool:
    return no_loops() or "xfs" not in Path("/proc/filesystems").read_text()


def no_counted_reads() -> bool:
    """Some sandboxes count nothing."""
    return not os.access("/proc/self/io", os.R_OK)


def no_huge_tmpfs() -> bool:
    """The kernel or the processor has no huge pages for a tmpfs, denies them, or has others than of 2 MiB."""
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    size = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    return not path.exists() or "[deny]" in path.read_text() or size.read_text().strip() != str(2**21)


def a_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def no_gpu() -> bool:
    return not a_gpu()


def bare_python() -> bool:
    return BARE_PYTHON in os.environ


def left_out() -> bool:
    return LEFT_OUT.exists()


def without_deepspeed() -> bool:
    """`make test` sets DeepSpeed up if there is a torch for it; `make check` does not."""
    return left_out() or not DEEPSPEED.exists()


def without_frameworks() -> bool:
    return FRAMEWORKS not in os.environ


def no_apt() -> bool:
    return not Path("/usr/bin/apt-get").exists()


def no_wheel() -> bool:
    return platform.machine() != "x86_64"


def always() -> bool:
    """For conditions that only the test itself can check."""
    return True


@dataclass(frozen=True)
class Allowed:
    """A pattern of reasons, why it is not a fault, and whether it applies to this machine."""

    pattern: str
    why: str
    holds: Callable[[], bool]


def hardware(pattern: str, why: str) -> Allowed:
    """A skip for what a machine lacks, or has; no look at this machine can tell."""
    return Allowed(pattern, f"hardware: {why}", always)


ALLOWED = (
    Allowed(
        r"needs root\b|only root|by root alone|cluster needs root|gives root up", "rights: an ordinary user", not_root
    ),
    Allowed(r"^root reads every file$", "rights: root has them all", lambda: not not_root()),
    Allowed(r"needs root and loop devices|no loop device here", "rights: a container has none", no_loops),
    Allowed(r"needs root and mount\(2\)|may not (make a mount namespace|mount a file system)", "rights", no_mounts),
    Allowed(r"no file system can be mounted here", "rights: a container mounts none", no_loops),
    Allowed(r"no nodes can be made here", "rights: a container has no network of its own", no_mounts),
    Allowed(r"this kernel has no project quota of XFS", "kernel: built without CONFIG_XFS_QUOTA", always),
    Allowed(r"needs XFS", "kernel: this one has no XFS, and loads no module for it", no_xfs),
    Allowed(r"this kernel has no huge pages for a tmpfs", "kernel, or processor", no_huge_tmpfs),
    Allowed(r"this kernel does not count what a process reads", "kernel", no_counted_reads),
    Allowed(r"no cgroup of this machine limits the disk", "kernel: neither blkio nor io", always),
    hardware(r"settings of a disk can be changed by root alone", "/sys is read-only, or there is no disk"),
    hardware(r"lies on no disk: set TMPDIR to one", "no disk under the temporary directory"),
    hardware(
        r"/dev/shm is too small here|no memory file system|needs a tmpfs at /dev/shm", "little memory, or a container's"
    ),
    hardware(r"no such flag|Operation not (supported|permitted)", "a file system without the immutable flag"),
    hardware(r"no answer here: ", "a file system that does not say where a file lies"),
    hardware(r"this machine is in ephemeral mode", "a node, whose own mode would answer"),
    Allowed(
        r"kvikio is installed here|^there is (one|a GPU here)", "hardware: what is missing elsewhere is here", a_gpu
    ),
    Allowed(r"there is no wheel for this machine", "a licence: NVIDIA has no such wheel for this processor", no_wheel),
    hardware(r"no free network in ", "200 networks are in use"),
    Allowed(r"no apt-get: the \w+'s programs", "another distribution", no_apt),
    hardware(r"no Python \S+ here that `nobody` may start", "the only Python lies in root's home"),
    Allowed(r"it compresses: the tensor's bytes", "an engine to which the question does not apply", always),
    Allowed(r"^(it is for (a state on|samples in) a GPU|a GPU computes in fp16)$", "hardware: there is no GPU", no_gpu),
    Allowed(r"it locks .*, RLIMIT_MEMLOCK is ", "rights: an ordinary user may lock little", not_root),
    Allowed(
        r"^(Orbax|Megatron-core|TensorFlow|torchtitan) is not installed",
        "the group `frameworks` runs these tests where they are installed (tools/dev/environments.py)",
        without_frameworks,
    ),
    Allowed(
        r"^(nvidia-resiliency-ext|NVIDIA DALI) is not installed",
        "a licence: an engine that nobody is made to install",
        always,
    ),
    Allowed(
        r"Ansible's control side needs Python 3.11|^ansible-core is for control machines|could not import '(ansible|ansible_runner|numpy|yaml|xxhash)'",
        "another Python",
        bare_python,
    ),
    Allowed(r"^DeepSpeed is an extra of the package|could not import 'safetensors'", "another Python", bare_python),
    Allowed(r"tools/dev needs Python 3.11", "another Python", lambda: sys.version_info < (3, 11)),
    Allowed(r"tunetool is not installed as a program here", "another Python", bare_python),
    Allowed(r"there is no wheel for this machine", "another Python, without NVIDIA's libraries", bare_python),
    Allowed(
        r"(torch|DeepSpeed|deepspeed|Lightning|peft|accelerate).* not installed|has no torch|needs DeepSpeed|checkpoints are torch's own"
        r"|^DeepSpeed is an extra of the package|could not import '(torch|safetensors)'",
        "torch comes with CUDA alone for this Python, or `make check` after a set-up without DeepSpeed",
        without_deepspeed,
    ),
)


def allowed(reason: str) -> bool:
    """Whether this reason is in the list and applies to this machine."""
    return any(re.search(row.pattern, reason) and row.holds() for row in ALLOWED)


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip for any other reason into a failure."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not allowed(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"`{report.nodeid}` was skipped, and its reason is none of tests/skips.py: {reason}\n"
            "hint: let setup.sh install what it needs (tests/programs.txt), or add the reason with why it is no fault"
        )
    elif SKIPPED_LIST in os.environ:
        # One write per line: several processes append to the file.
        with Path(os.environ[SKIPPED_LIST]).open("a") as listed:
            listed.write(f"{report.nodeid}\n")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report)
    return report
