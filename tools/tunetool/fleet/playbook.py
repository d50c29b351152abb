"""Run one of our playbooks with ansible-runner: its hosts, its events, its last error."""

from __future__ import annotations

import os
import queue
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.fleet import ansible_options
from tunetool.fleet.collection import find_collection
from tunetool.measure.marked_processes import swept_away
from tunetool.measure.progress import Progress
from tunetool.node.common.commands import captured
from tunetool.node.common.waiting import wait_for
from tunetool.node.play.host_summary import one_line
from tunetool.node.play.reasons import named
from tunetool.node.play.tunetool_command import MARK
from tunetool.node.units import format_count
from tunetool.origin import install_hint, newer_python_hint

MOST_FORKS = 100
_OLDEST = (3, 11)
"""Python that Ansible's control side runs on."""
_READ_SECONDS = 300
_UNREAD = re.compile(r"Failed to parse .*? with '?(?P<plugin>\w+)'? plugin: (?P<why>.*\S)")
_ORIGIN = re.compile(r"^Origin: .*:([0-9]+):[0-9]+$", re.MULTILINE)
_PLAYBOOK = re.compile(r"^playbook: (.*)$", re.MULTILINE)
_ASK_NOTHING = {f"ANSIBLE_{name}": "False" for name in ("ASK_PASS", "BECOME_ASK_PASS", "ASK_VAULT_PASS")}
"""Whatever an ansible.cfg says: a play waits for ever for an answer that nobody can give it."""


@dataclass(frozen=True)
class Playbook:
    """A playbook, and the environment in which Ansible finds our collection."""

    name: str
    environment: Mapping[str, str]
    options: Sequence[str] = ()
    """Further ones for ansible-playbook, from the user."""


@dataclass(frozen=True)
class HostSelection:
    """Hosts of an inventory, and how Ansible reaches them."""

    inventory: Path
    limit: str | None = None
    forks: int | None = None
    """Number of hosts at the same time; None: all, up to ``MOST_FORKS``."""
    ansible: Sequence[str] = ()
    """Further options for ansible-playbook."""


@dataclass(frozen=True)
class Run:
    """One run of a playbook over an inventory."""

    playbook: Playbook
    inventory: Path
    limit: str | None
    forks: int
    variables: Mapping[str, object]
    check: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of Ansible's own environment on this machine."""


Event = Callable[[str, Mapping[str, Any]], None]
"""Called with the kind of an event and its data."""


def need_ansible() -> None:
    """Raise ``UsageProblem`` where Ansible's control side is not installed."""
    if sys.version_info < _OLDEST:
        own = ".".join(map(str, sys.version_info[:2]))
        raise UsageProblem(
            f"`-i` needs Ansible, which needs Python 3.11 or newer on this machine, and tunetool runs on {own}",
            f"install tunetool with a newer one: {newer_python_hint('3.11')}",
        )
    try:
        import ansible_runner  # noqa: F401, PLC0415
    except ImportError:
        raise UsageProblem(
            "`-i` needs Ansible, and `ansible-runner` is not installed", install_hint("control")
        ) from None
    if shutil.which("ansible-playbook", path=_path()) is None:
        raise UsageProblem("`-i` needs Ansible, and `ansible-playbook` is not on PATH", install_hint("control"))


def need_inventory(inventory: Path) -> None:
    """Raise ``UsageProblem`` where there is no such inventory, or where Ansible would wait for its end."""
    hint = "`-i` takes an inventory file or directory, such as `tunetool init` writes"
    try:
        mode = inventory.stat().st_mode
    except FileNotFoundError:
        raise UsageProblem(f"`{inventory}` does not exist", hint) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageProblem(f"`{inventory}` cannot be read: {why}", hint) from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UsageProblem(
            f"`{inventory}` is neither a file nor a directory", f"{hint}; it is read more than once, so no pipe will do"
        )


def find_playbook(name: str, options: Sequence[str] = ()) -> Playbook:
    """The collection's playbook of that name, and the environment in which Ansible finds it.

    ``options``: further ones for ansible-playbook (``fleet.ansible_options``).
    """
    collection = find_collection()
    return Playbook(collection.playbook(name), collection.environment(), options)


def choose_hosts(name: str, selection: HostSelection) -> tuple[Playbook, list[str]]:
    """The playbook of that name, and the hosts that it would run on. Raises ``UsageProblem`` where it cannot run."""
    need_ansible()
    need_inventory(selection.inventory)
    playbook = find_playbook(name, selection.ansible)
    return playbook, list_hosts(selection.inventory, selection.limit, playbook)


def announce(names: Sequence[str], forks: int | None, progress: Progress) -> int:
    """Say which hosts it runs on, and return how many of them at the same time."""
    forks = forks or min(len(names), MOST_FORKS)
    progress.say(f"{format_count(len(names), 'host')}, {forks} at once: {named(names)}")
    return forks


def ask_ansible(argv: Sequence[str], inventory: Path, playbook: Playbook) -> subprocess.CompletedProcess[str]:
    """What a program of Ansible's says of an inventory. Raises ``CannotJudge`` where it does not start or end."""
    try:
        # Ansible starts in a locale of UTF-8 only, and what is read of it is in no other language.
        return captured(argv, _READ_SECONDS, own_locale=True, env=ansible_environment(playbook))
    except subprocess.TimeoutExpired:
        raise CannotJudge(
            f"`{inventory}` was not read within {_READ_SECONDS} s", f"see how long `{shlex.join(argv)}` takes"
        ) from None
    except OSError as error:
        raise CannotJudge(f"`{argv[0]}` does not start: {error.strerror}", install_hint("control")) from None


def list_hosts(inventory: Path, limit: str | None, playbook: Playbook) -> list[str]:
    """The hosts that the inventory and ``--limit`` select. Raises ``UsageProblem`` if there are none."""
    if playbook.options:
        _check_options(inventory, playbook)
    argv = ["ansible", "all", "-i", str(inventory.resolve()), "--list-hosts"]
    argv += ["--limit", limit] if limit is not None else []
    done = ask_ansible([*argv, *ansible_options.for_vault(playbook.options)], inventory, playbook)
    # At line feeds alone: a name may hold whatever else ends a line for Python.
    header, *lines = done.stdout.split("\n")
    hosts = [line.strip() for line in lines if line.strip()]
    if done.returncode == 0 and header.strip().startswith("hosts (") and hosts:
        _check_names(hosts, inventory)
        return hosts
    if limit is not None and "limit" in done.stderr:
        raise UsageProblem(f"`--limit {limit}` matches no host of `{inventory}`", f"see `{' '.join(argv[:5])}`")
    cause = _cause(done.stderr, inventory)
    if cause is not None:
        raise UsageProblem(f"`{inventory}` cannot be read: {cause}", f"see `{' '.join(argv[:5])}`")
    complaints = [line for line in done.stderr.splitlines() if "ERROR" in line or "Unable to parse" in line]
    ours = "put hosts into its hosts.yml; that of inventory/lab is written by `tunetool lab up`"
    hint = ansible_options.vault_hint(done.stderr) or (one_line(complaints[0]) if complaints else ours)
    raise UsageProblem(f"`{inventory}` names no hosts", hint)


def _cause(stderr: str, inventory: Path) -> str | None:
    """Why Ansible cannot read the inventory: each of its plugins says so of the file, and one is meant for its kind."""
    said: dict[str, str] = {}
    for line in stderr.split("\n"):
        found = _UNREAD.search(line)
        if found is not None:
            said.setdefault(found["plugin"], found["why"])
    if not said:
        return None
    order = ("yaml", "auto", "ini") if inventory.suffix in (".yml", ".yaml", ".json") else ("ini", "yaml", "auto")
    plugin = next((each for each in order if each in said), next(iter(said)))
    place = _ORIGIN.search(stderr) if plugin in ("yaml", "auto") else None
    where = f"line {place[1]}: " if place is not None else ""
    return one_line(where + said[plugin]).rstrip(".")


def _check_names(hosts: Sequence[str], inventory: Path) -> None:
    """Raise ``UsageProblem`` for a name that a terminal or a program would take for something else."""
    for host in hosts:
        if not host.isprintable() or host.startswith("-"):
            raise UsageProblem(
                f"`{inventory}` names a host `{ascii(host)[1:-1][:80]}`",
                "a host's name has printable characters alone and does not begin with `-`",
            )


def _check_options(inventory: Path, playbook: Playbook) -> None:
    """Raise ``UsageProblem`` with Ansible's own words where it refuses the options; no host is asked."""
    ansible_options.check(playbook.options)
    argv = ["ansible-playbook", "-i", str(inventory.resolve()), "--syntax-check", playbook.name, *playbook.options]
    done = ask_ansible(argv, inventory, playbook)
    others = _PLAYBOOK.findall(done.stdout)[1:]
    if done.returncode == 0 and not others:
        return
    why = f"`{others[0]}` is another playbook" if others else one_line(_refusal(done.stderr))
    raise UsageProblem(f"Ansible refuses what follows `--`: {why}", "see `ansible-playbook --help`")


def _refusal(text: str) -> str:
    """Ansible's error without its usage and help."""
    lines = [line.strip() for line in text.splitlines()]
    starts = (at for at, line in enumerate(lines) if line.startswith(("[ERROR]:", "ERROR!")) or ": error: " in line)
    at = next(starts, None)
    # The second line often has what the first is about.
    words = (
        "it printed nothing"
        if at is None
        else " ".join(lines[at : at + 2] if lines[at].startswith("[") else [lines[at]])
    )
    return re.sub(r"^(\[ERROR\]:|ERROR!|\S+: error:)\s*", "", words)


def _path() -> str:
    # The program may be called by its path, with its environment's own bin not on PATH.
    return str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath)


def ansible_environment(playbook: Playbook) -> dict[str, str]:
    """The environment for a program of Ansible, which must find the collection and Ansible's other programs."""
    return {**os.environ, **_environment(playbook)}


def _environment(playbook: Playbook) -> dict[str, str]:
    return {**playbook.environment, **_ASK_NOTHING, "PATH": _path()}


def run_playbook(run: Run, on_event: Event, progress: Progress, title: str, seconds: float) -> int:
    """As ``play``, with its own step on the progress line."""
    with progress.step(title, seconds) as tick:
        return play(run, on_event, tick)


def play(run: Run, on_event: Event, tick: Callable[[], None]) -> int:
    """Run the play, pass every event to ``on_event`` in this thread, return Ansible's exit status.

    Raises ``CannotJudge`` when Ansible failed before it reported on any host. No process of Ansible remains on this
    machine afterwards, even if this process is killed with SIGKILL.
    """
    import ansible_runner  # noqa: PLC0415

    events: queue.SimpleQueue[tuple[str, Mapping[str, Any]]] = queue.SimpleQueue()
    cancelled = threading.Event()
    heard: set[str] = set()

    def hand_over(event: Mapping[str, Any]) -> bool:
        # Runs in ansible-runner's thread: only pass the event on; the main thread prints.
        events.put((str(event.get("event", "")), event.get("event_data") or {}))
        return False  # no event files: the caller keeps what it needs

    def drain() -> None:
        while not events.empty():
            kind, data = events.get()
            if kind in ("runner_on_ok", "runner_on_failed", "runner_on_unreachable"):
                heard.add(str(data.get("host")))
            on_event(kind, data)

    private = tempfile.mkdtemp(prefix="tunetool-fleet-")
    # Ansible's workers lead sessions of their own, so that neither ansible-runner, which kills one process group,
    # nor the end of this process would end them.
    with swept_away(MARK, token := secrets.token_hex(16), private):
        thread, runner = ansible_runner.run_async(
            private_data_dir=private,
            playbook=run.playbook.name,
            inventory=str(run.inventory.resolve()),
            limit=run.limit,
            forks=run.forks,
            extravars=dict(run.variables),
            envvars={**_environment(run.playbook), **run.environment, MARK: token},
            cmdline=shlex.join([*(["--check", "--diff"] if run.check else []), *run.playbook.options]) or None,
            # Paths in the options are the caller's; without this it would be a directory of ansible-runner's.
            **({"project_dir": str(Path.cwd())} if run.playbook.options else {}),
            settings={"pexpect_timeout": 1},
            event_handler=hand_over,
            cancel_callback=cancelled.is_set,
            quiet=True,
        )
        try:
            # Not join(): after Ctrl-C it reports a running thread as ended (Python before 3.13).
            while thread.is_alive():
                time.sleep(0.2)
                drain()
                tick()
            drain()
        except BaseException:
            cancelled.set()
            wait_for(lambda: not thread.is_alive(), 30)
            raise
        if not heard and runner.rc != 0:
            error = _last_error(runner)
            settings = "`ansible-playbook --version` names the Ansible and the settings in use"
            raise CannotJudge(f"Ansible could not start: {error}", ansible_options.vault_hint(error) or settings)
        return int(runner.rc)


def _last_error(runner: Any) -> str:
    with runner.stdout as stream:
        lines = [line.strip() for line in stream.read().splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return one_line((errors or lines or ["it printed nothing"])[-1])
