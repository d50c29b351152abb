"""What this machine lacks for which command, by the checks that the commands themselves make. Reads alone."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal

from tunetool import user_directories
from tunetool.bench.registry import BENCHMARKS
from tunetool.errors import CannotJudge, ExitCode, TunetoolError
from tunetool.fleet.collection import find_collection
from tunetool.fleet.playbook import need_ansible
from tunetool.lab.programs import require
from tunetool.lab.qemu import KVM_DEVICE
from tunetool.launch.deepspeed import need_pdsh
from tunetool.launch.slurm import need_slurm
from tunetool.measure.fio import find_fio, no_io_uring
from tunetool.measure.target import check_target
from tunetool.node.gds.kernel_modules import read_driver
from tunetool.node.machine.block_stack import read_stack
from tunetool.origin import install_hint, lacking
from tunetool.stage.remote import need_rclone
from tunetool.system_packages import need
from tunetool.training_python import DEEPSPEED, TORCH, check_packages, choose

Kind = Literal["program", "python", "kernel", "right"]
Status = Literal["there", "missing", "unknown"]

WITH_INVENTORY = "-i"
"""In place of a command: every command that gets an inventory."""
_RECORDS = ("bench", "stage", "tune", "verify")
_ANSIBLE = ("provision",)
_MOST_FILES = 1000
"""How many entries of a target are looked at for a file to open."""


class Undecided(Exception):
    """A check that has no answer without a write. The text says why."""


@dataclass(frozen=True)
class Need:
    """A thing that commands need. ``check`` describes what is there, or raises ``TunetoolError`` or ``Undecided``."""

    name: str
    kind: Kind
    check: Callable[[], str]
    needed_by: tuple[str, ...] = ()
    """Commands that do nothing without it."""
    used_by: tuple[str, ...] = ()
    """Commands that use it for a part of their work."""


@dataclass(frozen=True)
class Answer:
    """What a check says. ``detail``: what is there, or what is wrong; ``remedy``: for what is not there."""

    name: str
    kind: Kind
    status: Status
    detail: str
    needed_by: tuple[str, ...]
    used_by: tuple[str, ...]
    remedy: str | None = None


def concerns(entries: Sequence[str], commands: Sequence[str]) -> tuple[str, ...]:
    """Those of ``commands`` that are in ``entries``, or in a group there; of a command that is a group, what is in it.

    All ``entries`` without any command.
    """
    if not commands:
        return tuple(entries)
    narrower = [each for each in commands if any(_within(each, entry) for entry in entries)]
    inside = [entry for entry in entries if any(_within(entry, each) for each in commands)]
    return tuple(dict.fromkeys([*narrower, *inside]))


def _within(command: str, group: str) -> bool:
    """Whether they are the same, or ``command`` is one of the group."""
    return f"{command} ".startswith(f"{group} ")


def examine(commands: Sequence[str] = (), target: Path | None = None, python: str | None = None) -> list[Answer]:
    """Check what ``commands`` need; all commands without any. ``target``: directory that is to be measured; ``python``:
    what ``--python`` will name. Raises ``UsageProblem`` if that is no program."""
    if python is not None:
        choose(python)
    answers = []
    for each in needs(target, python):
        needed_by, used_by = concerns(each.needed_by, commands), concerns(each.used_by, commands)
        if needed_by or used_by:
            answers.append(_ask(each, needed_by, used_by))
    return answers


def _ask(need_: Need, needed_by: tuple[str, ...], used_by: tuple[str, ...]) -> Answer:
    status: Status = "there"
    remedy = None
    try:
        detail = need_.check()
    except TunetoolError as error:
        status, detail, remedy = "missing", error.message, error.hint
    except Undecided as error:
        status, detail = "unknown", str(error)
    return Answer(need_.name, need_.kind, status, detail, needed_by, used_by, remedy)


def code(answers: Sequence[Answer]) -> ExitCode:
    """By what commands need; what they only use does not count."""
    states = {each.status for each in answers if each.needed_by}
    if "missing" in states:
        return ExitCode.FALLS_SHORT
    return ExitCode.NOT_JUDGED if "unknown" in states else ExitCode.OK


def lacks(answers: Sequence[Answer]) -> dict[str, list[str]]:
    """For each command that needs something, the names of what is not there; for a group where nothing in it does."""
    commands = {command for each in answers for command in each.needed_by}
    return {
        command: [
            each.name
            for each in answers
            if each.status != "there" and any(_within(command, group) for group in each.needed_by)
        ]
        for command in sorted(commands)
        if not any(_within(other, command) for other in commands - {command})
    }


def needs(target: Path | None = None, python: str | None = None) -> list[Need]:
    """Everything that a command may lack."""
    lab: tuple[str, ...] = ("qemu-system-x86_64", "qemu-img", "mmdebstrap", "mke2fs", "e2fsck", "debugfs", "ssh-keygen")
    if os.geteuid() != 0:
        lab += ("newuidmap",)
    listed = [
        Need("Ansible", "python", _ansible, _ANSIBLE, (WITH_INVENTORY,)),
        Need("collection", "python", _collection, ("init", *_ANSIBLE), (WITH_INVENTORY,)),
        Need("pip", "python", _pip, ("build-wheelhouse", *_ANSIBLE)),
        Need("ssh", "program", partial(_lab_programs, "ssh"), ("lab", *_ANSIBLE), (WITH_INVENTORY,)),
        Need(
            "sshpass", "program", partial(need, "sshpass", "ssh logs in with it by a password"), (), (WITH_INVENTORY,)
        ),
        Need("fio", "program", _fio, ("tune", "verify"), ("accept",)),
        Need("torch", "python", partial(_trains, TORCH, "checkpoint", python), ("checkpoint",)),
        Need(
            "DeepSpeed",
            "python",
            partial(_trains, DEEPSPEED, "deepspeed", python),
            ("build-ops", "ds-config", "tune"),
            ("verify",),
        ),
        Need("extra finetune", "python", partial(_extra, "finetune")),
        Need("extra engines", "python", partial(_extra, "engines")),
        Need("extra lightning", "python", partial(_extra, "lightning")),
        Need("extra gds", "python", partial(_extra, "gds"), (), ("verify",)),
        Need("c++", "program", partial(need, "c++", "it compiles DeepSpeed's ops"), ("build-ops",)),
        Need(
            "libaio.h",
            "program",
            partial(need, "/usr/include/libaio.h", "DeepSpeed's op async_io is compiled with it"),
            ("build-ops",),
        ),
        Need("virtual nodes", "program", partial(_lab_programs, *lab), ("lab",)),
        Need("rclone", "program", need_rclone, (), ("stage",)),
        Need("pdsh", "program", need_pdsh),
        Need("Slurm", "program", _slurm),
        Need("KVM", "kernel", _kvm, (), ("lab",)),
        Need("io_uring", "kernel", _io_uring, (), ("verify",)),
        Need("NVIDIA driver", "kernel", _driver, (), ("bench", "inspect", "tune", "verify")),
        Need("root", "right", _root, (), ("inspect", "verify")),
        Need("records", "right", _records, _RECORDS),
    ]
    if target is not None:
        listed += [
            Need("target", "right", partial(_target, target), ("bench", "tune", "verify")),
            Need("O_DIRECT", "kernel", partial(_direct, target), (), ("bench", "tune", "verify")),
        ]
    return [_with_benchmarks(each) for each in listed]


def _with_benchmarks(need_: Need) -> Need:
    """And the benchmarks whose folders name it."""

    def naming(constant: str) -> tuple[str, ...]:
        return tuple(
            f"bench {each.name}" for each in BENCHMARKS if need_.name in getattr(each.module("request"), constant, ())
        )

    return replace(
        need_,
        needed_by=(*naming("PREREQUISITES"), *need_.needed_by),
        used_by=(*naming("USED_IN_PART"), *need_.used_by),
    )


def _version(*distributions: str) -> str:
    return ", ".join(f"{each} {_version_of(each)}" for each in distributions)


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "without a version"


def _ansible() -> str:
    need_ansible()
    return _version("ansible-core", "ansible-runner")


def _collection() -> str:
    collection = find_collection()
    collection.environment()
    if collection.root is None:
        raise CannotJudge(
            "there is no copy of the collection `tunetool.node`",
            "install tunetool from the wheel of `make dist`, which carries it",
        )
    return str(collection.root)


def _pip() -> str:
    if find_spec("pip") is None:
        raise CannotJudge(
            f"pip is not installed in `{sys.executable}`: it fetches the nodes' wheels",
            f"`{sys.executable} -m ensurepip`, or with pipx `pipx inject tunetool pip`",
        )
    return _version("pip")


def _lab_programs(*names: str) -> str:
    require(*names)
    return ", ".join(names)


def _fio() -> str:
    fio = find_fio(os.environ)
    return f"{fio.version}, {fio.path}"


def _trains(packages: Sequence[str], extra: str, python: str | None) -> str:
    chosen = choose(python, needs=packages)
    try:
        chosen.need()
    except CannotJudge as error:
        if chosen.named_by == "manifest":
            raise
        # `site.yml` is for nodes; whoever works on this machine alone installs the extra.
        raise CannotJudge(error.message, f"{install_hint(extra)}; on a node: {error.hint}") from None
    if not chosen.runs_tunetool:
        # `tune` and others bring their own program into a Python that a call names.
        check_packages(chosen, packages, chosen.environment(os.environ), ours=python is None)
        return f"in `{chosen.path}`, by {chosen.named_by if python else f'the {chosen.named_by}'}"
    return _version(*packages)


def _extra(name: str) -> str:
    absent = lacking(name)
    if absent is None:
        raise Undecided("the metadata of this tunetool do not list its extras")
    if absent:
        raise CannotJudge(f"not installed in `{sys.executable}`: {', '.join(absent)}", install_hint(name))
    return "every package"


def _slurm() -> str:
    need_slurm()
    return "sbatch, scontrol, scancel"


def _kvm() -> str:
    if not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        why = "is closed to you" if KVM_DEVICE.exists() else "is not there"
        raise CannotJudge(
            f"`{KVM_DEVICE}` {why}: virtual nodes are several times slower",
            "a machine whose processor and kernel offer KVM",
        )
    return str(KVM_DEVICE)


def _io_uring() -> str:
    obstacle = no_io_uring()
    if obstacle is not None:
        raise CannotJudge(f"{obstacle}; `verify --level full` leaves its rung out", "nothing, or another kernel")
    return f"Linux {platform.release()}"


def _driver() -> str:
    version, is_open = read_driver()
    if version is None:
        raise CannotJudge("NVIDIA's driver is not loaded: there is no GPU to use", "it comes with the node's image")
    return f"{version}, {'open' if is_open else 'closed'}"


def _root() -> str:
    if os.geteuid() != 0:
        raise CannotJudge("an ordinary user does not see the drives' health", "run these commands with `sudo`")
    return "root"


def _records() -> str:
    directory = user_directories.default_runs_dir()
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise CannotJudge(f"`{directory}` cannot be written", "name another directory with `--runs-dir`")
    return str(directory)


def _target(target: Path) -> str:
    check_target(target)
    return f"on {read_stack(str(target.resolve())).medium}"


def _direct(target: Path) -> str:
    """A file is opened, not read: none is made to find out."""
    check_target(target)
    try:
        with os.scandir(target) as entries:
            files = [each.path for each in islice(entries, _MOST_FILES) if each.is_file(follow_symlinks=False)]
    except OSError as error:
        raise Undecided(f"`{target}` cannot be listed: {error.strerror}") from None
    for path in files:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        os.close(handle)
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_DIRECT))
        except OSError as error:
            raise CannotJudge(
                f"files in `{target}` cannot be opened past the page cache: {error.strerror}", "measure on a local disk"
            ) from None
        return "its files open past the page cache"
    raise Undecided(f"`{target}` has no file to open; every measurement finds out by its first file")


def as_document(answers: Sequence[Answer], tool_version: str) -> Mapping[str, object]:
    """For ``--json``."""
    return {
        "tool_version": tool_version,
        "python": {"path": sys.executable, "version": platform.python_version()},
        "commands": {name: {"lacks": missing} for name, missing in lacks(answers).items()},
        "needs": [{key: value for key, value in vars(each).items() if value is not None} for each in answers],
    }
