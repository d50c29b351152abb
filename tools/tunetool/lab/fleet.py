"""The whole lab: starts several nodes, restores their snapshots, and removes them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.lab import faults, image, inventory, node, programs, qemu, renewal, saved, snapshot, ssh
from tunetool.lab.machine import SPARE_PORTS
from tunetool.lab.quiesce import DriveUse
from tunetool.lab.saved import Restores, Say, Source
from tunetool.lab.state import Fault, Lab, NodeState, cache_dir, file_lock

Answer = TypeVar("Answer")

SYSTEM_DEVICE = "/dev/nvme0n1"
BOOT_ATTEMPTS = 3
"""Boots per node: Linux 6.4 and later probe drives at the same time, and the first slot's is not always nvme0. QEMU
crashes now and then, too (7.2.22 without KVM: a general protection fault, seen once)."""

PULL_ATTEMPTS = 2
"""Tries of what pulls drives, ``save`` and some faults: QEMU 7.2.22 without KVM crashed while drives were pulled, by a
call of a memory region that does not exist. QEMU before 8.2 lets one CPU change the memory map while another still uses
its copy of the old one (https://gitlab.com/qemu-project/qemu/-/issues/1826), which fits, but the crash could not be
repeated."""
ENDING_SECONDS = 1.0
"""How long a QEMU that crashed may take to be gone: its connections close first."""

STATE_BYTES = 2**30
"""Free space below which no node starts: the drives are sparse, and a full disk stops a node dead."""


@dataclass(frozen=True)
class Settings:
    """The options of ``up``."""

    nodes: int
    drives: int
    drive_size: int
    memory: int
    os_name: str
    fresh: bool = False
    offline: bool = False
    numa: bool = False


@dataclass(frozen=True)
class Started:
    """A node that runs. ``seconds``: how long its start took; None if it was running already."""

    node: NodeState
    seconds: float | None


def up(lab: Lab, settings: Settings, say: Say) -> list[Started]:
    """Start nodes 1 to N; those that run already stay as they are."""
    programs.require("qemu-system-x86_64", "qemu-img", "mke2fs", "ssh")
    with lab.locked():
        running = [name for name in lab.names() if node.alive(lab, name)]
        if settings.fresh and running:
            raise UsageProblem(
                f"`--fresh` would not reach {', '.join(f'`{name}`' for name in running)}",
                "end them first: tunetool lab down",
            )
        programs.require_space(lab.directory, STATE_BYTES, "what the nodes write")
        wanted = [f"node{number}" for number in range(1, settings.nodes + 1)]
        begun = time.monotonic()
        missing = [name for name in wanted if name not in running]
        for name in running:
            _say_difference(lab.read(name), settings, say)
        for name in sorted(set(missing) & set(lab.names())):
            say(f"{name}: it had ended, starting it again")
        started_nodes = _start(lab, _snapshot(lab, settings, say), missing, say, begun) if missing else []
        started_nodes += [Started(lab.read(name), None) for name in running]
        inventory.refresh(lab)
    return sorted(started_nodes, key=lambda started: started.node.index)


def reset(lab: Lab, name: str, say: Say, *, to: str | None = None) -> Started:
    """Bring a node back to its snapshot, with blank drives and without faults, or to a state saved as ``to``."""
    with lab.locked():
        begun = time.monotonic()
        old = next((state for state in lab.nodes() if state.name == name), None)
        kept = saved.find(lab, name, to) if to is not None else None
        template = kept.node if kept else lab.read(name)
        # Check the call before anything is changed.
        programs.require("qemu-system-x86_64", "qemu-img", "mke2fs", "ssh")
        if kept:
            source = Source(kept.snapshot, kept.node, kept)
        else:
            shape = (template.drive_count, template.drive_size, template.memory, template.os_name)
            settings = Settings(1, *shape, offline=template.offline, numa=template.numa)
            source = _snapshot(lab, settings, say)
        started = _start(lab, source, [name], say, begun, port=(old or source.template).ssh_port)
        inventory.refresh(lab)
    return started[0]


def save(lab: Lab, name: str, wanted: str, say: Say) -> Started:
    """Save a running node under a name that ``reset`` can bring back. The node runs on afterwards."""
    with lab.locked():
        state = lab.read(name)
        saved.check_name(lab, name, wanted)
        programs.require("qemu-system-x86_64", "qemu-img", "ssh")
        if not node.alive(lab, name):
            raise CannotJudge(f"`{name}` does not run", f"tunetool lab reset {name}")
        begun = time.monotonic()
        faults.after_save(state)
        kept = _take(lab, state, wanted, say)
        # Restoring the saved state at once shows that it can be restored.
        started = _start(lab, Source(kept.snapshot, kept.node, kept), [name], say, begun, port=state.ssh_port)
        inventory.refresh(lab)
    return started[0]


def _take(lab: Lab, state: NodeState, wanted: str, say: Say) -> saved.Saved:
    looks: list[DriveUse] = []

    def take() -> saved.Saved:
        looks.append(saved.look(lab, state))
        return saved.take(lab, state, looks[-1], wanted, say)

    def boot() -> None:
        _boot(lab, state, say, looks[-1] if looks else None)

    return _despite_a_crash(lab, state, say, take, boot, "the saved state will be that of a booted node")


def inject(lab: Lab, name: str, kind: str, serial: str | None, say: Say) -> Fault:
    """``faults.inject``; where QEMU crashes while a drive is pulled, the node is booted and the drive pulled again."""

    def pulled(state: NodeState, pull: Callable[[], None]) -> None:
        def boot() -> None:
            faults.after_reboot(state)
            _boot(lab, state, say)

        _despite_a_crash(lab, state, say, pull, boot, "the drive will be pulled from a booted node")

    return faults.inject(lab, name, kind, serial, say, pulled)


def _despite_a_crash(
    lab: Lab, state: NodeState, say: Say, act: Callable[[], Answer], boot: Callable[[], None], outcome: str
) -> Answer:
    """``act``, and once more on a booted node if QEMU itself ended meanwhile."""
    for attempt in range(PULL_ATTEMPTS):
        try:
            return act()
        except CannotJudge as error:
            pid = qemu.pid_of(lab.pid_file(state.name))
            crashed = pid is None or qemu.wait_gone(pid, ENDING_SECONDS)
            if not crashed or attempt == PULL_ATTEMPTS - 1:
                raise
            # What the node had written is in its files. Only what was in its memory is lost.
            say(f"{state.name}: {error.message}, so the memory of the node is lost: {outcome}")
            ssh.end_masters(lab, state.name)
            boot()
    raise AssertionError("the last attempt returns or raises")


def reboot(
    lab: Lab, name: str, say: Say, *, power_loss: bool = False, change: renewal.Change = renewal.NONE
) -> Started:
    """Boot a node from its own disk, after a clean shutdown or after taking its power away."""
    with lab.locked():
        state = lab.read(name)
        renewal.check(state, change)
        programs.require("qemu-system-x86_64", "qemu-img", "e2fsck", "debugfs", "ssh")
        begun = time.monotonic()
        ssh.end_masters(lab, name)
        _shut_down(lab, state, say, power_loss=power_loss)
        faults.after_reboot(state)
        renewal.apply(lab, state, change, say)
        _boot(lab, state, say)
        inventory.refresh(lab)
        return Started(state, time.monotonic() - begun)


def _shut_down(lab: Lab, state: NodeState, say: Say, *, power_loss: bool = False) -> None:
    if node.alive(lab, state.name):
        say(f"{state.name}: {'taking the power away' if power_loss else 'shutting down'}")
        (node.power_loss if power_loss else node.shut_down)(lab, state)


def _boot(lab: Lab, state: NodeState, say: Say, drive_use: DriveUse | None = None) -> None:
    """Boot a node that is off from its own disk, and with ``drive_use`` mount again what was mounted."""
    for attempt in range(BOOT_ATTEMPTS):
        _shut_down(lab, state, say)
        say(f"{state.name}: booting what its disk holds ({state.accel})")
        try:
            node.start_booted(lab, state)
        except ssh.EndedWhileBooting as error:
            if attempt == BOOT_ATTEMPTS - 1:
                raise
            say(f"{state.name}: {error.message}")
            continue
        if node.finish_preparing(state, node.start_preparing(lab, state, drive_use)) == SYSTEM_DEVICE:
            break
        say(f"{state.name}: its drives were numbered in another order than by slot")


def down(lab: Lab, name: str | None = None) -> list[str]:
    """End one node, or all and everything that the lab left; the cached image stays."""
    if name is None and not lab.directory.exists() and not lab.sockets.exists():
        return []
    with lab.locked():
        names = lab.names()
        if name is not None and name not in names:
            lab.read(name)
        with qemu.undisturbed():
            for each in [name] if name is not None else names:
                node.end(lab, each)
                saved.remove(lab, each)
            if name is None:
                for pid in qemu.all_under(lab.directory):
                    qemu.end(pid)
                inventory.remove(lab)
                lab.remove()
                _clean_cache()
            else:
                inventory.refresh(lab)
        return [name] if name is not None else names


def _clean_cache() -> None:
    # A killed `up` may have left an incomplete build; another lab that builds holds the lock.
    cache = cache_dir()
    if cache.is_dir():
        with contextlib.suppress(CannotJudge), file_lock(cache / "lock"):
            image.remove_unfinished(cache)


def _say_difference(running: NodeState, settings: Settings, say: Say) -> None:
    asked = (settings.drives, settings.drive_size, settings.memory, settings.os_name, settings.offline, settings.numa)
    shape = (running.drive_count, running.drive_size, running.memory, running.os_name, running.offline, running.numa)
    if asked != shape:
        say(f"{running.name}: runs already with other settings; to change them: tunetool lab down {running.name}")


def _start(
    lab: Lab, source: Source, names: list[str], say: Say, begun: float, port: int | None = None
) -> list[Started]:
    restores = Restores(lab, source, say)
    try:
        taken = {other.ssh_port for other in lab.nodes() if other.name not in names}
        for name in names:
            restores.begin(name, port or qemu.pick_port(taken))
            taken.add(restores.nodes[name].ssh_port)
        started = []
        for name in names:
            restores.finish(name)
            started.append(Started(restores.nodes[name], time.monotonic() - begun))
    except BaseException:
        # Remove incomplete nodes after any error.
        with qemu.undisturbed():
            restores.end()
            if not lab.names():
                inventory.remove(lab)
                _forget(lab)
        raise
    return started


def _snapshot(lab: Lab, settings: Settings, say: Say) -> Source:
    cache = cache_dir()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with file_lock(cache / "lock", lambda: say("waiting for another lab that builds its image")):
            in_use = {node_image.image for node_image in [*lab.nodes(), *(kept.node for kept in saved.every(lab))]}
            node_image = image.ensure_image(settings.os_name, cache, say, fresh=settings.fresh)
            image.prune(cache, settings.os_name, {node_image.directory, *in_use})
            accel = qemu.accelerator(node_image.kernel, cache, say)
            template = NodeState(
                name="",
                index=0,
                os_name=settings.os_name,
                image=node_image.directory,
                memory=settings.memory,
                accel=accel,
                ports=settings.drives + 1 + SPARE_PORTS,
                drive_count=settings.drives,
                drive_size=settings.drive_size,
                ssh_port=0,
                offline=settings.offline,
                numa=settings.numa,
            )
            taken = snapshot.ensure_snapshot(lab, node_image, template, say)
    except BaseException:
        if not lab.names():
            _forget(lab)
        raise
    return Source(taken, template)


def _forget(lab: Lab) -> None:
    # A lab without nodes; saved states stay until `down`.
    if not saved.every(lab):
        lab.remove()
