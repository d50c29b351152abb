"""Run groups of tests inside their time boxes (tests/timeboxes.toml), and print used against allowed.

Every group runs even after one failed, so that one run shows all that is wrong. Where all is committed, the group
`fresh` checks the very same files, so it runs first, and of `lint` and `unit` there remains only what it cannot show:
other Pythons, and the tests that a container skips.

The virtual node keeps about one core busy, tests on a disk often wait for it, and the rest computes. So groups run in
three rows at the same time; each line of the output then begins with its group's name.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import tomllib

import steps
from steps import ROOT, Outcome

VENV = ROOT / ".venv/bin"
COLLECTION = "ansible_collections.tunetool.node.plugins"
PARALLEL = ("-n", "auto", "--dist", "worksteal")
"""Options of pytest-xdist, for tests that share nothing."""
ON_A_DISK = {
    "measurement": ["tests/measurement", "tests/liars"],
    "tune": ["tests/tune"],
    "checkpoint": ["tests/checkpoint"],
    "finetune": ["tests/finetune"],
}
"""Groups whose tests measure or fill the disk under the temporary directory: one after another, beside all others."""
TESTS = {"pages": ["tests/pages"], **ON_A_DISK}
"""Groups that are folders of tests and nothing else."""
ON_A_NODE = ("node",)
"""Groups whose tests wait for a virtual node: beside all others."""
SKIPPED_IN_FRESH = ROOT / ".venv/.skipped-in-fresh"
"""Node ids of the unit tests that the container skipped, once it has passed."""
NO_TESTS = 5
"""pytest's exit status when it collected nothing: a fault here, since every group has tests."""


def python_files(*folders: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def pytest(*arguments: str) -> list[str]:
    return [str(VENV / "python"), "-m", "pytest", *arguments]


def ansible_lint() -> list[str]:
    """It takes seven times as long as all other tools, so it runs where what it reads has changed since it passed."""
    copied = ("docs/kubernetes", "docs/prometheus")
    folders = (*copied, "inventory", "meta", "molecule", "playbooks", "plugins", "roles", "tests/infra")
    read = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    read += [*ROOT.glob("*.yml"), *ROOT.glob(".*lint*"), ROOT / "ansible.cfg", ROOT / "constraints.txt"]
    key = hashlib.sha256()
    for path in sorted(path for path in read if path.is_file()):
        key.update(f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    script = '[ "$(cat "$1" 2>/dev/null)" = "$2" ] || { "$3" --offline -q && echo "$2" >"$1"; }'
    passed, program = str(VENV.parent / ".ansible-lint-passed"), str(VENV / "ansible-lint")
    return ["bash", "-c", script, "ansible-lint", passed, key.hexdigest(), program]


def lint_commands() -> list[list[str]]:
    cache = os.environ.get("MYPY_CACHE_DIR", ".mypy_cache")
    shell = [path for folder in ("tools/dev", "docs/kubernetes") for path in ROOT.glob(f"{folder}/*.sh")]
    scripts = [str(path) for path in [*shell, ROOT / ".ci/run"]]
    commands = [
        [str(VENV / "ruff"), "format", "--check", "--quiet"],
        [str(VENV / "ruff"), "check", "--quiet"],
        [str(VENV / "mypy")],
        # Modules import each other as parts of the collection, so they are checked under its name. The two may run at
        # the same time, which one cache is not made for.
        [
            *("env", "MYPYPATH=.ansible/collections", str(VENV / "mypy"), "--namespace-packages"),
            *("--cache-dir", f"{cache}/collection"),
            *("--explicit-package-bases", "-p", f"{COLLECTION}.modules", "-p", f"{COLLECTION}.action"),
            *("-p", f"{COLLECTION}.callback", "-p", f"{COLLECTION}.lookup"),
        ],
        # The programs of a clone, which need the Python of a control machine.
        [
            *("env", "MYPYPATH=tools:tests:perf:tools/dev", str(VENV / "mypy"), "--python-version", "3.11"),
            *("--cache-dir", f"{cache}/dev", *python_files("tools/dev", "perf")),
        ],
        ["env", "PYTHONPATH=tools", str(VENV / "lint-imports"), "--no-logo", "--no-cache"],
        [str(VENV / "python"), "tools/dev/docs.py", "--check"],
        [str(VENV / "python"), "tools/dev/website.py"],
        [str(VENV / "yamllint"), "--strict", "."],
        ansible_lint(),
    ]
    return [*commands, ["shellcheck", *scripts]]


def compiled_by_the_oldest() -> list[list[str]]:
    """Compile what runs on the targets' Python with the oldest version that is supported there."""
    oldest = find_python("3.9")
    targets = python_files("plugins/module_utils", "plugins/modules")
    source = "import sys\nfor name in sys.argv[1:]: compile(open(name).read(), name, 'exec')"
    return [[oldest, "-c", source, *targets]] if oldest else []


def other_pythons(slow: bool) -> list[list[str]]:
    """Unit tests on other supported Pythons of this machine: the oldest, which lacks most, and ``slow`` a newer one."""
    commands = []
    for version in ("3.10", "3.12") if slow else ("3.10",):
        interpreter = find_python(version)
        if interpreter:
            commands.append([sys.executable, str(ROOT / "tools/dev/environments.py"), "python", interpreter, version])
    return commands


def find_python(version: str) -> str | None:
    """An interpreter that reports that version (pyenv's shims exist but may fail)."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path / "bin/python") for path in sorted(pyenv.glob(f"{version}.*"))]
    for candidate in candidates:
        if candidate is None:
            continue
        answer = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.stdout.strip() == version:
            return candidate
    return None


def all_is_committed() -> bool:
    """Whether a clone of HEAD has the same files as this checkout."""
    status = ["git", "-C", str(ROOT), "status", "--porcelain"]
    return not subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip()


def commands_of(group: str, slow: bool, pythons: bool, fresh_passed: bool = False) -> list[list[str]]:
    marks = ["--hypothesis-profile=search"] if slow else ["-m", "not slow"]
    if group == "lint":
        return [] if fresh_passed else lint_commands()
    if group == "unit":
        everywhere = other_pythons(slow) if pythons else []
        # Whoever runs the slow tests wants all that Hypothesis can find in them here.
        left = SKIPPED_IN_FRESH.read_text().splitlines() if fresh_passed and not slow else ["tests/unit"]
        # The few that are left are not worth a second process, which would import as much as the first.
        parallel = () if fresh_passed and not slow else PARALLEL
        here = [pytest("-q", *parallel, *left, *marks)] if left else []
        return [*here, *compiled_by_the_oldest(), *everywhere]
    if group == "containers":
        systems = ["debian12", "debian13"] if slow else ["debian12"]
        program = [str(VENV / "python"), "tools/dev/container.py", "test"]
        molecule = [["env", f"TUNETOOL_CONTAINER_OS={system}", *program] for system in systems]
        return [*molecule, pytest("-q", "--durations=5", "tests/containers", *marks)]
    if group == "fresh":
        program = [str(VENV / "python"), "tools/dev/fresh.py"]
        container = [*program, "--skipped", str(SKIPPED_IN_FRESH)]
        return [container, [*program, "--node"]] if slow else [container]
    if group in TESTS or group == "frameworks":
        installed = [str(VENV / "python"), "tools/dev/environments.py", "frameworks"]
        program = installed if group == "frameworks" else pytest("-q", "--durations=5", *TESTS[group])
        return [[*program, *marks]]
    if group == "node":
        everything = pytest("-v", "--durations=0", "tests/lab", *marks)
        # The build and the refusals are what another system's kernel and tools could change.
        core = [f"tests/lab/test_{name}.py" for name in ("main_job", "refusals")]
        on_debian13 = ["env", "TUNETOOL_LAB_OS=debian13", *pytest("-v", "--durations=0", *core, "-m", "not slow")]
        return [everything, on_debian13] if slow else [everything]
    raise SystemExit(f"error: `{group}` is not a group\nhint: see tests/timeboxes.toml")


async def statuses(group: str, commands: Sequence[list[str]], limit: float, why: deque[str] | None) -> list[int]:
    """The exit status of each command that ran. What follows one that was stopped does not.

    The tools of lint know nothing of each other: one per core at a time, and the output of each stays together.
    """
    if group != "lint":
        codes: list[int] = []
        end = time.monotonic() + limit
        for command in commands:
            each_line = None if why is None else steps.named(group, why)
            codes.append(await steps.run(command, max(end - time.monotonic(), 1), each_line))
            if codes[-1] == steps.STOPPED:
                break
        return codes
    cores = asyncio.Semaphore(os.cpu_count() or 1)

    async def apart(command: list[str]) -> int:
        lines: list[str] = []
        async with cores:
            code = await steps.run(command, limit, lines.append)
        print("".join(lines), end="", flush=True)
        return code

    return await asyncio.gather(*(apart(command) for command in commands))


async def run_group(
    group: str, allowed: float, slow: bool, pythons: bool, fresh_passed: bool, beside: bool = False
) -> Outcome:
    print(f"--- {group}", flush=True)
    started, why, status = time.monotonic(), deque[str](maxlen=steps.LINES_OF_WHY), "passed"
    commands = commands_of(group, slow, pythons, fresh_passed)
    # Beside other work all takes longer: only what hangs is stopped.
    codes = await statuses(group, commands, allowed * (10 if slow else 4), why if beside else None)
    for command, code in zip(commands, codes, strict=False):
        if code == NO_TESTS and "pytest" in command:
            print(f"error: the group `{group}` has no tests", flush=True)
        if code:
            status = "stopped" if code == steps.STOPPED else "FAILED"
            shown = " ".join(command[:6]).replace(str(ROOT) + "/", "")
            why.append(f"{group} failed with exit status {code}: {shown}")
            print(why[-1], flush=True)
    used = time.monotonic() - started
    over = "  over its box" if used > allowed and not slow else ""
    return Outcome(group, used, allowed, status + over, () if status == "passed" else tuple(why))


def rows(wanted: Sequence[str], fresh_first: bool) -> list[list[str]]:
    """The wanted groups in rows that run at the same time, so that no core waits long for a guest or a disk.

    Unit tests come last in their row, since they use whatever cores are left. On the disk, what measures it comes last:
    containers and `fresh` fill the disk.
    """
    node = [group for group in wanted if group in ON_A_NODE]
    disk = [group for group in ("frameworks", *reversed(ON_A_DISK)) if group in wanted]
    first = ["containers", *(["fresh"] if fresh_first else [])]
    rest = [group for group in wanted if group not in (*first, *node, *disk)]
    return [row for row in ([*(group for group in first if group in wanted), *rest], node, disk) if row]


async def run_all(options: argparse.Namespace) -> int:
    """The exit status of the groups that were asked for."""
    boxes = tomllib.loads((ROOT / "tests/timeboxes.toml").read_text())
    outcomes, used = [], 0.0
    if options.setup_timed:
        used = float((ROOT / ".venv/.setup-seconds").read_text())
        outcomes.append(Outcome("setup", used, boxes["setup"]["seconds"], "passed"))
    SKIPPED_IN_FRESH.unlink(missing_ok=True)
    started, passed = time.monotonic(), set[str]()
    fresh_first = "fresh" in options.groups and all_is_committed()
    beside = rows(options.groups, fresh_first)

    async def run_one(group: str) -> Outcome:
        seconds, shown_there = boxes[group]["seconds"], fresh_first and "fresh" in passed
        outcome = await run_group(group, seconds, options.slow, options.pythons, shown_there, beside=len(beside) > 1)
        if outcome.status.startswith("passed"):
            passed.add(group)
        return outcome

    outcomes += await steps.in_rows(beside, run_one)
    steps.show([*outcomes, Outcome("all", used + time.monotonic() - started, None, "")], "group")
    return 0 if all(outcome.status.startswith("passed") for outcome in outcomes) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="+")
    parser.add_argument("--slow", action="store_true", help="also the tests marked slow")
    parser.add_argument("--pythons", action="store_true", help="unit tests on the other Pythons too")
    parser.add_argument("--setup-timed", action="store_true", help="show what setup.sh --timed took")
    return steps.finish(run_all(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
