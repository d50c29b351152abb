"""The table of checks: whether the node is as its manifest says, its volume takes data, and its drives are healthy.

Reads /proc and /sys; as root asks the drives for their health log, writes 1 MiB to the volume and reads two blocks of
each drive. The only processes are those that lock memory as an ordinary user, and the one that touches the volume:
this one never does, since a dead volume would hold it for ever. Others do what may wait for a drive or for a server.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Callable, Mapping, Sequence, Union

from ..array import array_checks, initramfs_check
from ..array.drive_volumes import AnyVolume, volumes_of
from ..array.md_arrays import Array
from ..array.numa_volumes import CHECK_ID as NUMA
from ..array.numa_volumes import check_numa, is_of_numa_node
from ..array.present import present
from ..common import training_part
from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check, judged
from ..common.file_lock import ForeignLock
from ..common.manifest import built_members, each_volume
from ..common.outlived import Errand, Outcome, Say, in_children
from ..common.raid_levels import SINGLE
from ..gds import md_udev_override, path_choice
from ..health import kernel_faults, wear_forecast
from ..machine.drive_health import HEALTH_CHECKS, Reader, judge_health, judge_links, read_health
from ..machine.drives import Drive, read_drives
from ..machine.mounts import Mount, mount_at, plain_path, read_mounts
from ..memory import memory_checks
from ..memory.memory_checks import HUGEPAGES, LOCKS, MEMLOCK, SHM, SHM_HUGE, Locker, kinds, lock_checks, lock_memory
from ..tuning import checks as io_tuning
from ..tuning import deepspeed_aio
from ..volume import late_mount, offload_check
from ..volume.built_volume import GEOMETRY, OPTIONS, check_built_volume
from ..volume.named_volume import CHECK_ID as MOUNTED
from ..volume.named_volume import check_volume
from ..volume.volume_answers import ALLOWED, ANSWERS, DRIVES, WRITABLE, Asking, Writing, answer_checks, asking
from ..volume.write_read_probe import Answer, Asker, ask_all


@dataclass
class Node:
    """The node that is looked at, and what several checks need of it, each read once."""

    manifest: Mapping[str, Any]
    root: str = "/"
    health: Reader | None = None
    """Asks a controller for its health."""
    locker: Locker | None = None
    """Locks memory."""
    writing: Writing = ALLOWED
    """What may be written to the volume, if root asks."""
    answer: Answer | None = None
    """The volume's; None where it was not asked: it is not mounted, or recorded."""
    volume: str = ""
    """Its name, where it is one of several, and ``manifest`` is that of a node that has it alone."""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """The manifest as it is, in that case."""

    @property
    def filesystem(self) -> Mapping[str, Any]:
        """The manifest's part."""
        return dict(self.manifest["filesystem"])

    @property
    def memory(self) -> Mapping[str, Any]:
        """The manifest's part."""
        return dict(self.manifest["memory"])

    @property
    def built(self) -> bool:
        """Whether the volume was built here: not where its owner has it."""
        return self.manifest["array"] is not None

    @cached_property
    def drives(self) -> Mapping[str, Drive]:
        """Every drive, by kernel name."""
        return {drive.name: drive for drive in read_drives(self.root)}

    @cached_property
    def members(self) -> Sequence[Drive]:
        """The drives that the manifest lists by serial."""
        serials = [member["serial"] for member in built_members(self.whole or self.manifest)]
        return [drive for drive in self.drives.values() if drive.serial in serials]

    @cached_property
    def of_numa_node(self) -> Sequence[AnyVolume]:
        """The volume, where it has the drives of a NUMA node."""
        return [each for each in volumes_of(self.whole) if each.name == self.volume and is_of_numa_node(each)]

    @cached_property
    def array(self) -> Array | None:
        """The manifest's array, if it runs."""
        return present(self.manifest["array"], self.root)

    @cached_property
    def at_the_mount_point(self) -> Mount | None:
        """The volume, or another file system."""
        return mount_at(self.filesystem["mount_point"], read_mounts(self.root))

    @cached_property
    def volume_checks(self) -> Sequence[Check]:
        """Whether the volume is mounted, and how."""
        if not self.built:
            return [check_volume(self.filesystem, self.at_the_mount_point, self.root)]
        return check_built_volume(self.filesystem, self.array, self.at_the_mount_point, self.root)

    @property
    def mounted(self) -> str:
        """The status of the check whether the volume is mounted."""
        return next(check.status for check in self.volume_checks if check.id == MOUNTED)

    @property
    def mount(self) -> Mount | None:
        """The volume's: nothing is written to another file system, and none is looked at."""
        return self.at_the_mount_point if self.mounted == PASS else None

    @cached_property
    def asking(self) -> Asking | None:
        """What the volume is asked; nothing where it is not mounted."""
        return asking(self.manifest, self.mount, self.writing, self.root) if self.mount is not None else None

    @property
    def answers(self) -> Sequence[Check]:
        """The checks of the volume's answer; none where it is not mounted."""
        return answer_checks(self.asking, self.answer) if self.asking is not None else []

    @property
    def silent(self) -> bool:
        """Whether the volume does not answer, so that none may look at it."""
        return self.answer is not None and self.answer.hangs


PATIENCE = 20.0
"""Seconds after which a look is left behind: many times what thousands of files take on a busy disk."""
STOPS, WARNS, WAITS, LATER = "stops", "warns", "waits for a reboot", "later sessions"
"""What a failure is worth while the node is built; afterwards every one fails the node.

`waits for a reboot`: nothing while one is pending, since when to reboot is the owner's decision, which no failed run
makes for them. `later sessions`: nothing, since this one began before the limit was set.
"""


@dataclass(frozen=True)
class Row:
    """A check, or those that one look answers."""

    ids: Sequence[str]
    """As records, metrics, schedulers and `node_health_ignored_checks` name them."""
    look: Callable[[Node], Union[Check, Sequence[Check]]] | None = None
    """None: the package makes the check, as the comment beside the row says."""
    where: Callable[[Node], object] = lambda node: True
    """The nodes that are looked at."""
    touches: Callable[[Node], object] = lambda node: False
    """Whether the look waits for the volume: it is left out where that is silent, and the check is unknown."""
    apart: bool = False
    """Whether the look may wait for something else that never answers, as a drive, or a server that has the files."""
    building: str = STOPS
    volumes: bool = False
    """Whether each volume of a node answers; else the answer is the same whichever of them is asked about."""
    halts: bool = False
    """Whether nothing is measured after its failure: I/O of ours would fail, or wait for ever."""

    def checks(self, nodes: Sequence[Node]) -> Sequence[Sequence[Check]]:
        """Look at each of the volumes of a node, as if it had them alone; what each look answers, in their order."""
        found: dict[int, Sequence[Check]] = {}
        apart = []
        for at, node in enumerate(nodes):
            if self.look is None or not self.where(node):
                found[at] = []
            elif self.touches(node) and node.silent:
                found[at] = self._not_looked_at("the volume does not answer", "see `%s`" % ANSWERS)
            elif self.apart and node.root == "/":
                apart.append(at)
            else:
                found[at] = self._looked(node)
        # One patience for all that hang.
        outcomes = in_children([self._errand(nodes[at]) for at in apart], PATIENCE)
        found.update({at: self._from_a_child(outcome) for at, outcome in zip(apart, outcomes)})
        return [found[at] for at in range(len(nodes))]

    def _looked(self, node: Node) -> Sequence[Check]:
        answer = self.look(node) if self.look else []
        return [answer] if isinstance(answer, Check) else answer

    def _errand(self, node: Node) -> Errand:
        def look(say: Say) -> None:
            try:
                say(checks=[asdict(check) for check in self._looked(node)])
            except Exception as error:
                say(fault="%s: %s" % (type(error).__name__, error))

        return Errand(look, "-".join(filter(None, ["check", self.ids[0], node.volume if self.volumes else ""])))

    def _from_a_child(self, outcome: Outcome | OSError | ForeignLock) -> Sequence[Check]:
        if isinstance(outcome, ForeignLock):
            why = outcome.message
        elif isinstance(outcome, OSError):
            why = "`%s`: %s" % (outcome.filename or "system call", outcome.strerror or outcome)
        else:
            said = outcome.messages[-1] if outcome.messages else {}
            if "checks" in said:
                return [Check(**check) for check in said["checks"]]
            why = str(said.get("fault") or "it did not answer for %g s" % PATIENCE)
            if outcome.hangs_since is not None:
                why = "a look that began %.0f s ago still waits, and no second one is started" % outcome.hangs_since
        return self._not_looked_at(why, "see the kernel's log (`dmesg`)")

    def _not_looked_at(self, why: str, remedy: str) -> Sequence[Check]:
        return [Check(each, UNKNOWN, "as it was built", "not looked at: " + why, remedy) for each in self.ids]


def _built(node: Node) -> bool:
    return node.built


def _of_md(node: Node) -> bool:
    return node.built and node.manifest["array"]["level"] != SINGLE.name


def _has_a_path(node: Node) -> bool:
    return str(node.manifest["gds"]["mode"]) != path_choice.OFF


def _training_lies_there(node: Node) -> bool:
    training = training_part.training_of(node.manifest)
    return training is not None and any(
        plain_path(path).startswith(plain_path(volume["filesystem"]["mount_point"]) + "/")
        for _, volume in each_volume(node.whole or node.manifest)
        for path in (training.python, training.directory, training.ops_directory)
    )


def _locks(node: Node) -> list[Check]:
    wanted = node.memory["memlock"]
    if wanted is None or node.locker is None:
        return []
    return lock_checks(wanted, kinds(os.geteuid() == 0, node.root), node.locker, node.root)


REBOOT = "node.reboot"


def _reboot(node: Node) -> Check:
    pending = node.manifest["reboot_required"]
    return judged(
        REBOOT,
        not pending,
        "no reboot pending",
        "something that was asked for waits for a reboot" if pending else "no reboot pending",
        "reboot the node, then run `tunetool provision` again; `host_memory_reboot_ok: true` lets it reboot by itself",
    )


CHECKS: Sequence[Row] = (
    Row(
        array_checks.CHECKS,
        lambda node: array_checks.check_array(node.manifest["array"], node.array, node.drives),
        _built,
        volumes=True,
    ),
    # `replace_drive` builds what is left to do beside a rebuild of hours.
    Row(
        [array_checks.REDUNDANCY],
        lambda node: array_checks.check_redundancy(node.manifest["array"], node.array, node.drives),
        _built,
        building=WARNS,
    ),
    Row(
        [NUMA],
        lambda node: [check_numa(each, node.drives.values()) for each in node.of_numa_node],
        lambda node: node.of_numa_node,
        volumes=True,
    ),
    Row(
        [initramfs_check.CHECK_ID],
        lambda node: initramfs_check.check_images(node.manifest["array"], node.root),
        _of_md,
        volumes=True,
    ),
    Row(
        HEALTH_CHECKS,
        lambda node: [
            *wear_forecast.foretold(judge_health(node.members, node.health), wear_forecast.read(node.root)),
            judge_links(node.members),
        ],
        _built,
        apart=True,
        building=WARNS,
    ),
    Row([MOUNTED, OPTIONS, GEOMETRY], lambda node: node.volume_checks, volumes=True),
    Row(
        [late_mount.CHECK_ID],
        lambda node: late_mount.check_boot(node.filesystem, node.root, node.volume),
        _built,
        volumes=True,
    ),
    Row([WRITABLE, ANSWERS, DRIVES], lambda node: node.answers, volumes=True, halts=True),
    Row([HUGEPAGES], lambda node: memory_checks.check_hugepages(node.memory["hugepages"], node.root), building=WAITS),
    Row(
        [SHM],
        lambda node: memory_checks.check_shm(node.memory["shm_bytes"], node.root),
        lambda node: node.memory["shm_bytes"] is not None,
    ),
    Row(
        [SHM_HUGE],
        lambda node: memory_checks.check_shm_huge(node.memory["shm_huge"], node.root),
        lambda node: "shm_huge" in node.memory,
    ),
    Row(
        [MEMLOCK],
        lambda node: memory_checks.check_memlock(node.memory["memlock"], node.root),
        lambda node: node.memory["memlock"] is not None,
        building=LATER,
    ),
    Row(io_tuning.CHECKS, lambda node: io_tuning.tuning_checks(node.whole or node.manifest, node.root)),
    Row(LOCKS, _locks),
    Row(
        [offload_check.CHECK_ID],
        lambda node: offload_check.check_offload(
            node.manifest, node.mount, node.answer, node.root, node.mounted == UNKNOWN
        ),
        volumes=True,
    ),
    # A path may wait for a reboot; the role gpudirect_storage has reported what it needs.
    Row(
        [path_choice.CHECK_ID],
        lambda node: path_choice.check_mode(node.manifest, node.root),
        touches=_has_a_path,
        volumes=True,
        apart=True,
        building=WARNS,
    ),
    Row([md_udev_override.CHECK_ID], lambda node: md_udev_override.check_md_rule(node.root), _has_a_path),
    Row(
        [deepspeed_aio.CHECK_ID],
        lambda node: deepspeed_aio.check_tuned(node.manifest["aio"], node.filesystem["mount_point"], node.root),
        lambda node: node.manifest.get("aio"),
        touches=lambda node: True,
        apart=True,
    ),
    # A later role of site.yml makes it, or makes it again.
    Row(
        [training_part.CHECK_ID],
        lambda node: training_part.check_training(node.manifest, node.root),
        touches=_training_lies_there,
        apart=True,
        building=WARNS,
    ),
    Row([REBOOT], _reboot, building=WAITS),
    # What the kernel has logged: health/check.py of the package, which keeps where it has read to.
    Row(kernel_faults.CHECKS),
    # Of the files themselves: verify/configuration.py and health/check.py of the package.
    Row(["manifest", "manifest.checksum", "gds.config"]),
    # Of what `tunetool verify` measures.
    Row(["drives.balance", "drives.errors", "deepspeed.io", "gds.path"]),
)
"""Every check of a node once, in the order in which they are made: a later one may rest on an earlier one."""

BY_ID: Mapping[str, Row] = {identity: row for row in CHECKS for identity in row.ids}


def run_checks(
    manifest: Mapping[str, Any],
    root: str = "/",
    health: Reader | None = None,
    locker: Locker | None = None,
    asker: Asker | None = None,
    writing: Writing = ALLOWED,
) -> list[Check]:
    """Every check that looks at a node, as the fields of ``Node`` say.

    By default this machine's drives are asked, its memory is locked and its volume is asked, and nothing of a recorded
    one.
    """
    if root == "/":
        health, locker, asker = health or read_health, locker or lock_memory, asker or ask_all
    volumes = each_volume(manifest)
    nodes = [Node(each, root, health, locker, writing, None, name, manifest) for name, each in volumes]
    _ask(nodes, asker)
    answers: list[Check] = []
    for row in CHECKS:
        looked = list(zip([name for name, _ in volumes], row.checks(nodes if row.volumes else nodes[:1])))
        if len(looked) == 1:
            answers += looked[0][1]
            continue
        answers += [
            together([(name, check) for name, checks in looked for check in checks if check.id == identity])
            for identity in dict.fromkeys(check.id for _, checks in looked for check in checks)
        ]
    return answers


def _ask(nodes: Sequence[Node], asker: Asker | None) -> None:
    """Ask the volumes that are mounted, all at the same time."""
    asked = [(node, node.asking.question) for node in nodes if node.asking is not None]
    if asker is not None and asked:
        for (node, _), answer in zip(asked, asker([question for _, question in asked])):
            node.answer = answer


_WORST_FIRST = (FAIL, UNKNOWN, PASS, SKIP)


def together(checks: Sequence[tuple[str, Check]]) -> Check:
    """The answers of several volumes to one question, as one: the worst, with the volumes that it is of by name.

    One check with one id: schedulers, metrics and `node_health_ignored_checks` go by that, however many volumes a node
    has.
    """

    def place(check: Check) -> tuple[int, bool]:
        return _WORST_FIRST.index(check.status), not check.warns

    worst = min((check for _, check in checks), key=place)
    of_it = [(name, check) for name, check in checks if place(check) == place(worst)]

    def said(words: Callable[[Check], str]) -> str:
        texts: dict[str, list[str]] = {}
        for name, check in of_it:
            texts.setdefault(words(check), []).append("`%s`" % name)
        return "; ".join("%s: %s" % (", ".join(names), text) for text, names in texts.items() if text)

    first = of_it[0][1]
    return Check(
        first.id,
        worst.status,
        said(lambda check: check.expected),
        said(lambda check: check.found),
        said(lambda check: check.remedy),
    )


def ignored_problems(ignored: Sequence[str]) -> list[str]:
    """Of `node_health_ignored_checks`, a line for each glob that is no check's, with its hint."""
    problems = []
    for glob in ignored:
        if not any(fnmatchcase(identity, glob) for identity in BY_ID):
            near = difflib.get_close_matches(glob, BY_ID, 1)
            hint = "did you mean `%s`?" % near[0] if near else 'the guide "A node\'s health, every day" lists them'
            problems.append("`node_health_ignored_checks` has `%s`, which is no check. hint: %s" % (glob, hint))
    return problems
