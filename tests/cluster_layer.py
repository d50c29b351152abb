"""Packages that the tests' cluster needs and this machine lacks. They are unpacked, not installed: no service starts.

``python tests/cluster_layer.py`` fetches it ahead of time (tools/dev/setup.sh --cluster).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from calls import call
from programs import packages

_INSTALLED = Path("/var/lib/dpkg/status")
_MERGED = ("bin", "sbin", "lib", "lib64")
"""Links into usr/ on current systems. A folder with such a name in a layer would hide everything behind the link."""
_ALTERNATIVES = ("slurmctld", "slurmd", "slurmstepd")
"""Debian unpacks them as NAME-wlm, and a script at installation makes the link."""
_FETCH_SECONDS = 300


class NoLayer(Exception):
    """The packages are not available here; the message has the reason."""


def layer(group: str = "cluster") -> Path:
    """The folder with the files of a group's packages, laid out as a root. It is fetched once for each set of installed
    packages."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise NoLayer(f"no apt-get: the {group}'s programs are taken from Debian's packages")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunetool" / group
    names = packages(group)
    key = hashlib.sha256(" ".join(names).encode() + _INSTALLED.read_bytes()).hexdigest()[:16]
    directory = caches / key
    if directory.is_dir():
        return directory
    caches.mkdir(parents=True, exist_ok=True)
    with _alone(caches / ".lock"):
        if not directory.is_dir():
            for old in caches.glob("[0-9a-f]*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=caches, prefix=".new-") as new:
                root = Path(new, "root")
                _unpack(_fetch(names, Path(new)), root)
                root.rename(directory)
    return directory


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _fetch(names: tuple[str, ...], folder: Path) -> list[Path]:
    """The packages with their dependencies that are not installed."""
    # Lists may be missing (a fresh container) or older than the archive, which then has other versions.
    for refresh in (False, True):
        if refresh:
            _run(["apt-get", "update", "-qq"], folder)
        with contextlib.suppress(subprocess.CalledProcessError):
            plan = _run(["apt-get", "install", "--simulate", "--no-install-recommends", *names], folder)
            wanted = [f"{name}={version}" for name, version in _planned(plan)]
            _run(["apt-get", "download", "-o", "APT::Sandbox::User=root", *wanted], folder)
            return sorted(folder.glob("*.deb"))
    raise NoLayer(f"`apt-get download` fails: see `apt-get install --simulate {' '.join(names)}`")


def _planned(plan: str) -> list[tuple[str, str]]:
    # Inst NAME [OLD] (NEW ORIGIN [ARCHITECTURE])
    return re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", plan, re.MULTILINE)


def _run(argv: list[str], folder: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = call(*argv, cwd=folder, env=environment, timeout=_FETCH_SECONDS, check=True)
    except subprocess.TimeoutExpired:
        raise NoLayer(f"`{' '.join(argv[:2])}` did not end within {_FETCH_SECONDS} s") from None
    return done.stdout


def _unpack(packages: list[Path], root: Path) -> None:
    root.mkdir()
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    for name in _MERGED:
        if (root / name).is_dir() and Path("/", name).is_symlink():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)
    for name in _ALTERNATIVES:
        if (root / f"usr/sbin/{name}-wlm").exists():
            (root / f"usr/sbin/{name}").symlink_to(f"{name}-wlm")


if __name__ == "__main__":
    try:
        print(layer())
    except NoLayer as error:
        sys.exit(f"error: {error}\nhint: tests that need the two-node cluster will be skipped")
