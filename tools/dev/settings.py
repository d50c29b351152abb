"""This machine's settings of package clients, for another machine that is made here: pip's, apt's and certificates.

Nothing of it is ever written into the checkout: it goes from this machine into a container or a virtual node.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
OWN_CERTIFICATES = Path("/usr/local/share/ca-certificates")
_PASSED = re.compile(r"PIP_\w+|(https?|ftp|no|all)_proxy|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE", re.IGNORECASE)
_APT = re.compile(r"Acquire::(https?|ftp|socks|Retries|Check-|ForceIP|Max-ValidTime|Queue-Mode)")
OF_PLACES = ("find-links", "index-url", "extra-index-url")
"""Settings of pip that may name folders."""


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that pip, apt and their libraries read."""
    given = os.environ if variables is None else variables
    return {name: value for name, value in given.items() if _PASSED.fullmatch(name)}


def pip_settings() -> dict[str, str]:
    """pip's settings here, from its files and its variables; later ones win, as in pip."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    return parse_pip(done.stdout)


def parse_pip(text: str) -> dict[str, str]:
    """The output of `pip config list`: SECTION.NAME='VALUE' a line; of a name in several sections the last."""
    values = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            values[name.rsplit(".", 1)[-1]] = value.strip().strip("'\"")
    return values


def folders(values: Mapping[str, str]) -> list[Path]:
    """Folders of this machine that pip's settings name: of an index also the folder around it, where its files are."""
    paths = []
    for name in OF_PLACES:
        for word in values.get(name, "").replace("\\n", " ").split():
            path = Path(unquote(urlsplit(word).path)) if word.startswith("file:") else Path(word)
            if path.is_absolute() and path.exists():
                paths.append(path.parent if "index" in name and len(path.parts) > 2 else path)
    return list(dict.fromkeys(paths))


def files(variables: Mapping[str, str]) -> list[Path]:
    """Files that the variables name, but for the certificates of the distribution, which are brought as a whole."""
    named = (Path(value) for name, value in variables.items() if name.upper().endswith(("CERT", "_FILE", "_BUNDLE")))
    return list(dict.fromkeys(path for path in named if path.is_file() and path != CERTIFICATES))


def mounts() -> list[tuple[Path, str]]:
    """What a container sees of this machine: the path here and the path inside."""
    home = Path.home()
    pairs = [(path, str(path)) for path in (*folders(pip_settings()), *files(environment()))]
    pairs += [(Path("/etc/pip.conf"), "/etc/pip.conf")]
    pairs += [(home / path, f"/root/{path}") for path in (".config/pip", ".pip")]
    pairs += [(OWN_CERTIFICATES, str(OWN_CERTIFICATES))]
    return [(path, inside) for path, inside in pairs if path.exists()]


def apt_lines(dump: str) -> str:
    """What `apt-config dump` says of the way to the archive; nothing of hooks and of what is kept."""
    return "".join(f"{line}\n" for line in dump.splitlines() if _APT.match(line))


def apt_sources(suite: str, root: Path = Path("/")) -> Iterable[Path]:
    """Debian's own sources here, where they are for that suite: what others offer has keys that nobody has there."""
    for name in ("sources.list", "sources.list.d/debian.sources"):
        path = root / "etc/apt" / name
        if path.is_file() and re.search(rf"\b{suite}\b", path.read_text()):
            yield path


def write(folder: Path, suite: str) -> None:
    """Write the files for that machine: ca-certificates.crt, and apt/ to be laid over its /etc/apt."""
    apt = folder / "apt"
    (apt / "apt.conf.d").mkdir(parents=True)
    if CERTIFICATES.is_file():
        shutil.copy(CERTIFICATES, folder)
    if shutil.which("apt-config"):
        dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
        (apt / "apt.conf.d/95tunetool-host").write_text(apt_lines(dump))
    sources = list(apt_sources(suite))
    if sources:
        # With the same line in both, apt would warn about it.
        (apt / "sources.list").write_text("")
    for path in sources:
        destination = apt / path.relative_to("/etc/apt")
        destination.parent.mkdir(exist_ok=True)
        shutil.copy(path, destination)
    for path in Path("/etc/apt").glob("auth.conf*"):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, apt / path.name)
