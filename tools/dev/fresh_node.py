"""The same as fresh.py in a virtual node of the lab: a whole Debian 12 with its own kernel.

The node reaches this machine at one address of its network alone. Folders that pip's settings name here are served
there, read-only, on loopback, for as long as the node is up.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import settings

THIS_MACHINE = "10.0.2.2"
"""The address under which QEMU's user network leads a guest to its host's loopback."""
UP = ("--nodes", "1", "--drives", "1", "--drive-size", "24G", "--memory", "6G")
WORK = "/srv/work"
PREPARE = f"""
set -euo pipefail
drive=$(lsblk -dnpo NAME,SERIAL | sed -n 's/ *LAB1NV1 *$//p')
mkfs.ext4 -q "$drive"
mkdir -p {WORK}
mount "$drive" {WORK}
mkdir {WORK}/tmp {WORK}/cache
"""
STEPS = f"""
set -euo pipefail
export HOME=/root TMPDIR={WORK}/tmp XDG_CACHE_HOME={WORK}/cache
cp -r {WORK}/settings/root/. /
update-ca-certificates >/dev/null 2>&1
cp {WORK}/settings/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
cp -r {WORK}/settings/apt/. /etc/apt/
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends git make python3 python3-venv >/dev/null
git -c safe.directory='*' clone --quiet {WORK}/clone {WORK}/tunetool
cd {WORK}/tunetool
make setup
make check
"""


class Folders(SimpleHTTPRequestHandler):
    """Serves the allowed folders, with listings, at the paths that they have here."""

    allowed: tuple[Path, ...] = ()

    def translate_path(self, path: str) -> str:
        wanted = Path(os.path.normpath(super().translate_path(path)))
        return str(wanted) if any(wanted.is_relative_to(folder) for folder in self.allowed) else "/nonexistent"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the name is the library's)
        """Log nothing: there are thousands of requests."""


@contextlib.contextmanager
def served(folders: Sequence[Path]) -> Iterator[int]:
    """The port on loopback that serves them."""
    allowed = tuple(folders)

    class Handler(Folders):
        pass

    Handler.allowed = allowed
    with ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Handler(*given, directory="/")) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def pip_conf(values: Mapping[str, str], port: int) -> str:
    """pip's settings for the node: folders of this machine become addresses that lead to it."""
    address = f"http://{THIS_MACHINE}:{port}"
    lines = {}
    for name, value in values.items():
        if name in settings.OF_PLACES:
            words = (re.sub(r"^(file://)?(?=/)", address, word) for word in value.replace("\\n", " ").split())
            # As a page of links: a folder's own address ends with a slash.
            lines[name] = " ".join(f"{word}/" if word.startswith(address) else word for word in words)
        else:
            lines[name] = value
    lines["trusted-host"] = f"{lines.get('trusted-host', '')} {THIS_MACHINE}:{port} {THIS_MACHINE}".strip()
    return "[global]\n" + "".join(f"{name} = {value}\n" for name, value in lines.items())


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """The node's variables, without pip's, which are in its file; the node reaches this machine's proxy at another
    address."""
    loopback = re.compile(r"(?<=[/@])(127\.0\.0\.1|localhost)(?=[:/])")
    return {name: loopback.sub(THIS_MACHINE, value) for name, value in given.items() if not name.startswith("PIP_")}


def root_files(folder: Path, port: int) -> None:
    """Files to copy over the node's root directory."""
    certificates = [settings.OWN_CERTIFICATES] if settings.OWN_CERTIFICATES.is_dir() else []
    for path in (*settings.files(settings.environment()), *certificates):
        copy = folder / path.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copy(path, copy)
    (folder / "etc").mkdir(parents=True, exist_ok=True)
    (folder / "etc/pip.conf").write_text(pip_conf(settings.pip_settings(), port))


def in_a_node(directory: Path, suite: str) -> int:
    """Exit status of `make setup && make check` there. ``directory`` has the clone."""
    with tempfile.TemporaryDirectory(prefix="tunetool-fresh-lab-") as lab:
        environment = {**os.environ, "TUNETOOL_LAB_DIR": lab}
        tool = [str(Path(sys.executable).with_name("tunetool")), "lab"]

        def inside(command: Sequence[str], text: bytes) -> int:
            line = [*tool, "ssh", "node1", "--", *command]
            return subprocess.run(line, input=text, env=environment, check=False).returncode

        with served(settings.folders(settings.pip_settings())) as port:
            settings.write(directory / "settings", suite)
            root_files(directory / "settings/root", port)
            packed = subprocess.run(
                ["tar", "-cz", "-C", str(directory), "clone", "settings"], capture_output=True, check=True
            ).stdout
            exports = "".join(
                f"export {name}={shlex.quote(value)}\n" for name, value in variables(settings.environment()).items()
            )
            try:
                subprocess.run([*tool, "up", *UP], env=environment, check=True)
                return (
                    inside(["bash", "-s"], PREPARE.encode())
                    or inside(["tar", "-xz", "--no-same-owner", "-C", WORK], packed)
                    or inside(["bash", "-s"], (exports + STEPS).encode())
                )
            finally:
                subprocess.run([*tool, "down"], env=environment, check=False)
