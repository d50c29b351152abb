"""Packages of GPUDirect Storage: which are missing or have another version, and whether repositories offer them."""

from __future__ import annotations

from typing import Mapping, Sequence

from ..common.commands import CommandError, NotInstalled, run


def installed() -> dict[str, str]:
    """Version by name of every installed package. Raises ``CommandError`` if neither dpkg nor rpm answers."""
    problem = CommandError("there is neither dpkg nor rpm")
    for argv in (
        ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n"],
        ["rpm", "-qa", "--qf", "installed %{NAME} %{VERSION}-%{RELEASE}\n"],
    ):
        try:
            lines = run(argv).stdout.splitlines()
        except CommandError as error:
            # The error of a dpkg that fails matters more than a missing rpm.
            problem = problem if isinstance(error, NotInstalled) else error
            continue
        fields = [line.split() for line in lines]
        return {field[1]: field[2] for field in fields if len(field) == 3 and field[0] == "installed"}
    raise problem


def differing(names: Sequence[str], versions: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """The packages of ``names`` that are absent, and those of ``versions`` that are present in another version."""
    missing = [name for name in names if name not in present]
    missing += [name for name, version in versions.items() if name in present and not matches(present[name], version)]
    return list(dict.fromkeys(missing))


def pinned(names: Sequence[str], versions: Mapping[str, str], debian: bool) -> list[str]:
    """The packages in the notation of apt or dnf."""
    between = "=" if debian else "-"
    return [name + between + versions[name] if name in versions else name for name in names]


def matches(version: str, asked: str) -> bool:
    """Whether ``version`` is ``asked``, which may leave out rpm's release."""
    return version == asked or version.startswith(asked + "-")


def available(names: Sequence[str]) -> bool:
    """Whether the node's own repositories offer all of ``names``, according to their lists on the node.

    Raises ``CommandError`` if there is neither apt nor dnf.
    """
    if not names:
        return False
    try:
        text = run(["apt-cache", "policy", *names]).stdout
    except NotInstalled:
        pass
    else:
        candidates = [line.split()[1] for line in text.splitlines() if line.strip().startswith("Candidate:")]
        return len(candidates) == len(names) and "(none)" not in candidates
    try:
        # -C: only the cache; reading a node needs no network.
        text = run(["dnf", "-C", "-q", "repoquery", "--qf", "%{name}\n", *names]).stdout
    except NotInstalled:
        raise CommandError("there is neither apt-cache nor dnf") from None
    except CommandError:
        return False  # dnf has fetched no lists yet: they offer nothing
    return set(names) <= set(text.split())
