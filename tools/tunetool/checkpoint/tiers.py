"""The tiers of steps and the nodes that keep replicas, as a caller names them: checked before anything is read.

Needs no package, so a wrong call is refused under every Python.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.checkpoint.steps import same_step, same_step_error, step_number
from tunetool.errors import UsageProblem

_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15", "ServerAliveCountMax=4")
"""A dead link ends after a minute. What the caller's command says of these comes first, and counts."""
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PEER = re.compile(rf"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?{_HOST.pattern}")


@dataclass(frozen=True)
class Tier:
    """A directory of steps, here or with the replicas of ``peer``."""

    name: str
    """As it was given."""
    peer: str | None
    directory: Path

    @classmethod
    def parse(cls, text: str) -> Tier:
        """Of ``DIR``, or ``HOST:DIR`` as ssh and rsync have it: a colon after a slash belongs to a path."""
        peer, colon, directory = text.partition(":")
        remote = bool(colon) and "/" not in peer
        return cls(text, peer if remote else None, Path(directory if remote else text))


def checked(step_dir: Path, tiers: Sequence[str], host: str | None) -> tuple[Path, list[Tier]]:
    """What ``fetch`` is called with. Raises ``UsageProblem`` for a wrong call."""
    final = not_there(step_dir)
    return final, [_checked(Tier.parse(text), final, host) for text in tiers]


def not_there(step_dir: Path) -> Path:
    """The absolute path of a step that is to be brought. Raises ``UsageProblem`` if it is there, or none."""
    final = step_dir.absolute()
    step_number(final.name)
    namesake = same_step(final)
    if namesake is not None:
        raise same_step_error(namesake, final)
    if os.path.lexists(final):
        raise there_error(final)
    return final


def _checked(tier: Tier, final: Path, host: str | None) -> Tier:
    if tier.peer is None:
        if not tier.directory.is_dir():
            raise UsageProblem(f"`{tier.name}` is not a directory", "name a directory of steps, or `HOST:DIR`")
    else:
        check_names(tier.peer, host or socket.gethostname())
        peer_directory(final, tier.directory)
    return tier


def there_error(final: Path) -> UsageProblem:
    """The error for a step that is there."""
    return UsageProblem(f"`{final}` exists", "only a step that was lost is recovered: move it away if it is damaged")


def peer_directory(step_dir: Path, given: str | Path | None) -> Path:
    """The peer's directory of steps. Raises ``UsageProblem`` for one that is not absolute."""
    directory = Path(os.path.realpath(step_dir.parent) if given is None else given)
    if not directory.is_absolute():
        raise UsageProblem(f"`peer_dir={directory}` is not absolute", "name the peer's directory from `/` on")
    return directory


def check_names(peer: str, host: str) -> None:
    """Raises ``UsageProblem`` for names that are none, or the same."""
    if not _PEER.fullmatch(peer) or not _HOST.fullmatch(host):
        raise UsageProblem(f"`peer={peer}`, `host={host}`: not a host's name", "give the name that ssh takes")
    # Without the user, and with or without the domain.
    short, long = sorted((peer.rpartition("@")[2].lower(), host.lower()), key=len)
    if short == long or long.startswith(f"{short}.") or "localhost" in (short, long):
        raise UsageProblem(f"`{peer}` is this node itself", "a replica belongs on another node: see `peer_of`")


def with_limits(ssh: Sequence[str]) -> list[str]:
    """The command, which asks nobody for a password and ends with a dead link."""
    return [*ssh, *(part for option in _SSH_OPTIONS for part in ("-o", option))]
