# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""Send a node the wheels that it lacks, and bring compiled ops from one node to its equals."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from ..module_utils.common.file_lock import FileLock
from ..module_utils.common.refusal import Refusal
from ..module_utils.training import lock, wheel_files

MODULE = "tunetool.node.training_environment"
OWN = ("source", "archive", "cache_dir")
"""Options for this machine: they do not go to the module unchanged."""
PART_BYTES = 64 * 2**20
"""Bytes of a wheel that go in one round trip: they are held in memory, and a cut connection loses at most that much."""
_KEY = re.compile(r"^[0-9a-f]{16}$")


class ActionModule(ActionBase):  # type: ignore[misc]  # Ansible ships no types
    """One round trip is enough for a node that has everything."""

    TRANSFERS_FILES = False  # else a directory is made and removed there, on every run: three round trips

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the node, send what it lacks, let it build, compile and prove."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        try:
            with tempfile.TemporaryDirectory(prefix="tunetool-") as directory:
                result.update(self._run(dict(self._task.args), Path(directory), task_vars))
        except Refusal as error:
            result.update(failed=True, changed=False, msg=str(error))
        return result

    def _run(self, given: dict[str, Any], directory: Path, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        local_options = {name: given.pop(name, None) for name in OWN}
        settings = dict(given.get("settings") or {})
        house = str(settings.get("wheelhouse") or "")
        check = self._task.check_mode
        here: dict[str, Path] = {}
        try:
            texts = [
                (Path(str(local_options["source"])) / name).read_text()
                for name in ("constraints.txt", "pyproject.toml")
            ]
        except OSError as error:
            raise Refusal(f"`{error.filename}`: {error.strerror}. hint: it is not a copy of this collection") from None
        given["lock"] = lock.whole(*texts)
        if not settings.get("python"):
            # In check mode the archive may not be built yet.
            here = (
                unpacked_tool(str(local_options["archive"]), directory)
                if Path(str(local_options["archive"])).is_file()
                else {}
            )
            given["tool_files"] = [described(path) for path in here.values()]
            if house:
                document = wheel_files.read(house)
                given["wheelhouse_manifest"] = document
                here.update({name: Path(house) / name for name in document["files"]})

        def call(**more: Any) -> dict[str, Any]:
            return dict(self._execute_module(module_name=MODULE, module_args={**given, **more}, task_vars=task_vars))

        self._task.check_mode = True
        try:
            asked = call()
        finally:
            self._task.check_mode = check
        if check or asked.get("failed") or not asked.get("changed"):
            return asked
        root = str(settings.get("directory") or "/opt/tunetool-training")
        given.update(self._send(asked["send"], here, given, root, directory))
        if not asked["environment"]:
            asked = call(step="environment")
            if asked.get("failed"):
                return asked
        if not asked["ops_missing"] or settings.get("ops") == []:
            return call()
        return self._with_ops(asked, call, root, cache_of(local_options["cache_dir"]))

    def _with_ops(self, asked: Mapping[str, Any], call: Any, root: str, cache: Path) -> dict[str, Any]:
        """The last step on a node without ops: take them from the cache, or compile them there and keep them."""
        key = str(asked["ops_key"])
        if not _KEY.match(key):
            raise Refusal(f"the node names its ops `{key[:40]}`. hint: this is a fault of tunetool")
        archive = cache / f"{key}.tar"
        with only_one_of(cache, key):
            if not archive.is_file():
                result: dict[str, Any] = call()
                if not result.get("failed") and result.get("ops_archive"):
                    fetched = archive.with_suffix(".new")
                    self._connection.fetch_file(str(result["ops_archive"]), str(fetched))
                    fetched.replace(archive)
                return result
        # Nobody waits for the others here: each node's proof takes a while.
        result = call(ops_archive=self._send_file(archive, f"{root}/ops/{key}.tar", fresh=True))
        # The archive may be damaged, here or on the way: the node compiles the ops instead.
        return call() if "archive of compiled ops" in str(result.get("msg")) else result

    def _send(
        self, names: list[str], here: Mapping[str, Path], given: Mapping[str, Any], root: str, directory: Path
    ) -> dict[str, str]:
        """Send wheels, each checked here first: large ones by themselves, the others as one archive.

        Return the module's options that say where they are, if not in ROOT/wheels.
        """
        entries = {entry["name"]: entry for entry in given.get("tool_files", ())}
        entries.update((given.get("wheelhouse_manifest") or {}).get("files", {}))
        told, small = {}, []
        for name in names:
            wheel_files.check(str(here[name]), entries[name])
            if here[name].stat().st_size <= PART_BYTES:
                small.append(name)
                continue
            sent = self._send_file(here[name], f"{root}/wheels/{name}")
            if sent != f"{root}/wheels/{name}":
                told["received"] = os.path.dirname(sent)
        if small:
            # Its name is its content's, so that what a cut run left is continued by the same alone.
            key = hashlib.sha256(repr([(name, entries[name]["sha256"]) for name in small]).encode()).hexdigest()[:16]
            archive = directory / f"{key}.tar"
            wheel_files.pack(str(archive), [str(here[name]) for name in small])
            told["bundle"] = self._send_file(archive, f"{root}/wheels/{archive.name}")
        return told

    def _send_file(self, path: Path, remote: str, fresh: bool = False) -> str:
        """Send one file in parts, continuing an interrupted run. Returns its path on the node, usually ``remote``.

        The module checks the hash of every file there before it uses it.
        """
        if not self._is_pipelining_enabled("new"):
            # A sudo that wants a terminal, or a connection plugin without standard input.
            directory = self._connection._shell.tmpdir or self._make_tmp_path()
            there = self._connection._shell.join_path(directory, path.name)
            self._transfer_file(str(path), there)
            return str(there)
        quoted, part = shlex.quote(remote), shlex.quote(remote + ".part")
        folder = shlex.quote(os.path.dirname(remote))
        size = path.stat().st_size
        begin = f"install -d -o root -g root -m 0755 {folder}" + (f" && rm -f {part}" if fresh else "")
        if size <= PART_BYTES:
            # Most wheels are small: one round trip sends them.
            self._shell(f"{begin} && (umask 022 && cat > {part}) && mv -f {part} {quoted}", path.read_bytes())
            return remote
        offset = int(self._shell(f"{begin} && {{ stat -c %s {part} 2>/dev/null || echo 0; }}") or 0)
        if offset > size:
            self._shell(f"rm -f {part}")
            offset = 0
        with path.open("rb") as stream:
            stream.seek(offset)
            while data := stream.read(PART_BYTES):
                self._shell(f"(umask 022 && cat >> {part})", data)
        self._shell(f"touch {part} && mv -f {part} {quoted}")
        return remote

    def _shell(self, command: str, data: bytes | None = None) -> str:
        done = self._low_level_execute_command(command, in_data=data)
        if done["rc"] != 0:
            said = " ".join(str(done["stderr"] or done["stdout"]).split())
            raise Refusal(f"the wheels cannot be sent: {said}. hint: is the disk full?")
        return str(done["stdout"]).strip()


def unpacked_tool(archive: str, directory: Path) -> dict[str, Path]:
    """By name, the wheels of tunetool and pip, unpacked from the archive that the role tunetool installs from."""
    wheels = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.isfile() and member.name.startswith(("tunetool-", "pip-")) and member.name.endswith(".whl"):
                stream = tar.extractfile(member)
                path = directory / os.path.basename(member.name)
                if stream is not None:
                    path.write_bytes(stream.read())
                    wheels[path.name] = path
    return wheels


def described(path: Path) -> dict[str, Any]:
    """The entry of a wheel in the module's options."""
    with zipfile.ZipFile(path) as wheel:
        unpacked = sum(entry.file_size for entry in wheel.infolist())
    return {
        "name": path.name,
        "sha256": wheel_files.sha256_of(str(path)),
        "size_bytes": path.stat().st_size,
        "unpacked_bytes": unpacked,
    }


def cache_of(given: str | None) -> Path:
    """The directory of the archives of ops on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(given or os.path.join(cache, "tunetool", "ops"))


@contextlib.contextmanager
def only_one_of(cache: Path, key: str) -> Iterator[None]:
    """A lock for equal nodes: the first compiles the ops, the others wait and get them from it."""
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock.file(cache / f"{key}.lock") as lock:
        lock.take()
        yield
