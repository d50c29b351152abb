"""The venv of the training environment: built beside the old one, and either complete or absent."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence

from ..common.commands import run
from ..common.file_lock import FileLock
from ..common.files import exact_text, replace_file
from ..common.refusal import Refusal
from ..common.venv import STAMP, damage, make_venv, noted, pip_of
from ..units import format_size
from .accelerator import Build
from .children import Ended, call
from .lock import constraints, digest, extras, pin
from .proof import clean_environment
from .wheel_files import check, distribution_of, version_of

INSTALL_SECONDS = 3600.0
_FROM_INDEX_BYTES = {"cpu": 3 * 10**9, "cuda": 12 * 10**9}
"""Space for an environment from an index, whose sizes are unknown beforehand: that of torch 2.13 with the downloads
beside it, rounded up."""
_SPARE = 1.1

PINNED = """\
import os, sys
real = os.path.realpath(sys.prefix)
try:
    import fcntl
    held = os.open(os.path.join(real, "environment.json"), os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
except (ImportError, OSError):
    pass
if real != sys.prefix:
    def pinned(path):
        inside = path == sys.prefix or path.startswith(sys.prefix + os.sep)
        return real + path[len(sys.prefix):] if inside else path
    sys.path[:] = [pinned(path) for path in sys.path]
    sys.executable = pinned(sys.executable)
    sys.exec_prefix = pinned(sys.exec_prefix)
    sys.prefix = real
"""
"""A job that was started through `current` imports from the environment of its start until it ends, and it
holds a lock on the stamp, so that this environment stays. That Python does not have ``FileLock``."""


@dataclass(frozen=True)
class Interpreter:
    """The Python that makes the venv."""

    path: str
    version: str
    """Such as 3.11."""
    full: str
    """Such as 3.11.2."""


@dataclass(frozen=True)
class Wish:
    """The environment that the role asks for."""

    directory: str
    interpreter: Interpreter
    build: Build
    lock: str
    trainers: Sequence[str]
    tool: Sequence[Mapping[str, Any]]
    """The wheels of tunetool and pip: name, sha256, size_bytes."""
    tool_key: str
    index_url: str = ""
    torch_index_url: str = ""
    wheels: Optional[Sequence[Mapping[str, Any]]] = None
    """All other wheels, from a wheelhouse; None for an index."""
    bytecode: bool = True
    """Whether all modules are compiled at once. No part of the key: the environment holds the same."""

    @property
    def key(self) -> str:
        """Hash of everything that determines the contents of the environment."""
        parts = (
            "environment/1",
            digest(self.lock),
            self.tool_key,
            os.path.realpath(self.interpreter.path),
            self.interpreter.full,
            os.uname().machine,
            self.build.tag,
            self.build.default,
            sorted(self.trainers),
            sorted((each["name"], each["sha256"]) for each in self.wheels or ()),
            hashlib.sha256(PINNED.encode()).hexdigest(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    @property
    def path(self) -> str:
        """Directory of the venv."""
        return os.path.join(self.directory, "environments", self.key)

    @property
    def python(self) -> str:
        """Path of its interpreter, not through ``current``."""
        return os.path.join(self.path, "bin/python")

    @property
    def files(self) -> list[Mapping[str, Any]]:
        """All wheels that the node needs for it."""
        return [*self.tool, *(self.wheels or ())]


def interpreter(path: str) -> Interpreter:
    """Ask the node's Python for its version. Raises ``Refusal`` if it is missing or too old."""
    text = run([path, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"]).stdout.strip()
    parts = text.split(".")
    if (int(parts[0]), int(parts[1])) < (3, 10):
        raise Refusal(
            "`%s` is Python %s, older than 3.10. hint: name a newer one in `training_environment_base_python`"
            % (path, text)
        )
    return Interpreter(path, ".".join(parts[:2]), text)


def is_complete(path: str) -> bool:
    """Whether the build of a venv was completed and no file is missing since. The stamp is written last."""
    return os.access(os.path.join(path, "bin/python"), os.X_OK) and not damage(path)


def build(wish: Wish, received: Sequence[str], needed_beside: int = 0) -> None:
    """Make the venv. Raises ``Refusal`` or ``CommandError``, and then leaves nothing behind."""
    wheels = {str(each["name"]): _place(each, received) for each in wish.files}
    for each in wish.files:
        _check(wheels[str(each["name"])], each)
    if _is_locked(os.path.join(wish.path, STAMP)):
        raise Refusal(
            "%s, and a job still runs in this environment. hint: run `tunetool provision` again when the job has ended"
            % (damage(wish.path) or "`%s` does not answer" % wish.python)
        )
    shutil.rmtree(wish.path, ignore_errors=True)
    need_space(wish, needed_beside)
    try:
        make_venv(wish.interpreter.path, wish.path)
        written = _install(wish, wheels)
        stamp = {"key": wish.key, **noted(wish.path, written)}
        replace_file(os.path.join(wish.path, STAMP), json.dumps(stamp) + "\n")
        # The link, which is made later, can reach the disk before the files that it leads to.
        run(["sync", "--file-system", wish.path])
    except BaseException:
        shutil.rmtree(wish.path, ignore_errors=True)
        raise


def _check(path: str, entry: Mapping[str, Any]) -> None:
    try:
        check(path, entry)
    except Refusal:
        # Otherwise its size would let it count as sent for ever.
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _place(entry: Mapping[str, Any], received: Sequence[str]) -> str:
    for directory in received:
        path = os.path.join(directory, str(entry["name"]))
        if os.path.exists(path):
            return path
    return os.path.join(received[0], str(entry["name"]))


def need_space(wish: Wish, needed_beside: int = 0) -> None:
    """Raise ``Refusal`` if there is too little space for the environment."""
    if wish.wheels is None:
        needed = _FROM_INDEX_BYTES[wish.build.accelerator]
    else:
        needed = int(_SPARE * sum(int(each["unpacked_bytes"]) for each in wish.files))
    needed += needed_beside
    directory = wish.directory
    while not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise Refusal(
            "`%s` has %s free and the environment takes %s. hint: free space there, or name another disk in "
            "`training_environment_directory`" % (directory, format_size(free), format_size(needed))
        )


def _install(wish: Wish, wheels: Mapping[str, str]) -> list[str]:
    """Run pip. The files that were written beside the packages'."""
    tool, pip = (
        next(path for name, path in wheels.items() if name.startswith(start)) for start in ("tunetool-", "pip-")
    )
    temporary = os.path.join(wish.path, "tmp")
    os.makedirs(temporary)
    install = [
        *pip_of(wish.path, pip),
        "install",
        "--quiet",
        "--no-input",
        "--no-cache-dir",
        # Compiled below on all CPUs: pip uses one.
        "--no-compile",
        "--root-user-action=ignore",
    ]
    # DeepSpeed's ops are compiled in a step of their own; a small /tmp has no room for pip's downloads.
    environment = {**clean_environment(wish.python), "DS_BUILD_OPS": "0", "TMPDIR": temporary, "PYTHONNOUSERSITE": "1"}
    lock = os.path.join(temporary, "lock.txt")
    replace_file(lock, constraints(wish.lock, wish.build.default))
    if wish.wheels is not None:
        # Without pip, which runs from its wheel: an environment is changed by its lock only.
        named = [(wheels[str(each["name"])], each["sha256"]) for each in wish.files if wheels[str(each["name"])] != pip]
        text = "".join("%s --hash=sha256:%s\n" % each for each in named)
        replace_file(os.path.join(temporary, "wheels.txt"), text)
        install += [
            "--no-index",
            "--no-deps",
            "--require-hashes",
            "--requirement",
            os.path.join(temporary, "wheels.txt"),
        ]
        what, hint = "the wheels of the wheelhouse cannot be installed", "`tunetool build-wheelhouse` fills it"
    else:
        install += ["--retries", "2", "--timeout", "30", "--constraint", lock]
        install += ["--index-url", wish.index_url] if wish.index_url else []
        torch = pin(wish.lock, "torch") or ""
        requirements = ["%s[%s]" % (tool, ",".join(extras(list(wish.trainers))))]
        if wish.torch_index_url:
            install += ["--extra-index-url", wish.torch_index_url.replace("{build}", wish.build.tag)]
            requirements += [] if wish.build.default else ["torch==%s+%s" % (torch.split("+")[0], wish.build.tag)]
        install += requirements
        what = "%s does not give what the lock asks for" % (
            "the index `%s`" % re.sub("//[^/@]*@", "//", wish.index_url)
            if wish.index_url
            else "the package index of this node"
        )
        hint = "set `training_environment_index_url`, or fill a wheelhouse by `tunetool build-wheelhouse`"
    try:
        call(install, environment, INSTALL_SECONDS, what, hint)
    except Ended as error:
        if "No space left" in str(error):
            raise Refusal("`%s` is full. hint: free space there" % wish.directory) from None
        raise
    site = glob.glob(os.path.join(wish.path, "lib/python3*/site-packages"))[0]
    if wish.bytecode:
        # As with pip, a file that does not compile (a template, one for another Python) is left as it is.
        compile_all = "import compileall, sys; compileall.compile_dir(sys.argv[1], quiet=2, workers=0)"
        call([wish.python, "-c", compile_all, site], environment, INSTALL_SECONDS, "the packages cannot be compiled")
    pinned = {"_tunetool_pinned.py": PINNED, "_tunetool_pinned.pth": "import _tunetool_pinned\n"}
    for name, text in pinned.items():
        replace_file(os.path.join(site, name), text)
    shutil.rmtree(temporary, ignore_errors=True)
    return [os.path.join(site, name) for name in pinned]


def prune(directory: str, folder: str, keep: Sequence[str], spare: int, in_use: Sequence[str]) -> list[str]:
    """Remove what ``folder`` holds, but for ``keep``, for what is in use, and for the ``spare`` newest complete ones.

    Incomplete ones are removed first. Returns the names of those that were removed.
    """
    base = os.path.join(directory, folder)
    try:
        names = sorted(os.listdir(base), key=lambda name: -os.stat(os.path.join(base, name)).st_mtime)
    except OSError:
        return []
    removed = []
    for name in names:
        path = os.path.join(base, name)
        if (
            name in keep
            or _is_locked(os.path.join(path, STAMP))
            or any(used == path or used.startswith(path + "/") for used in in_use)
        ):
            continue
        complete = any(os.path.exists(os.path.join(path, stamp)) for stamp in (STAMP, "ops.json"))
        if complete and spare > 0:
            spare -= 1
            continue
        if os.path.isdir(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(name)
    return removed


def _is_locked(stamp: str) -> bool:
    """Whether a process that was started in this environment still runs."""
    try:
        lock = FileLock.on(stamp)
    except OSError:
        return False
    with lock:
        try:
            return not lock.take(patience=0)
        except OSError:
            return True


def used_files(directory: str, root: str = "/") -> list[str]:
    """Files below ``directory`` that processes map, work in, or name in their arguments or environment."""
    files = set()
    prefix = directory.rstrip("/") + "/"
    for process in glob.glob(os.path.join(root, "proc/[0-9]*")):
        if int(os.path.basename(process)) == os.getpid():
            continue
        for line in exact_text(os.path.join(process, "maps")).split("\n"):
            at = line.find("/")
            if at >= 0 and line[at:].startswith(prefix):
                files.add(line[at:])
        arguments = exact_text(os.path.join(process, "cmdline")).split("\0")
        variables = exact_text(os.path.join(process, "environ")).split("\0")
        paths = arguments + [value for each in variables for value in each.partition("=")[2].split(":")]
        with contextlib.suppress(OSError):
            paths.append(os.readlink(os.path.join(process, "cwd")))
        files.update(os.path.realpath(path) for path in paths if path.startswith(prefix))
    return sorted(files)


def planned_packages(wish: Wish) -> dict[str, str]:
    """Versions that are known before the installation."""
    if wish.wheels is not None:
        names = {distribution_of(str(each["name"])): version_of(str(each["name"])) for each in wish.wheels}
        return {name: names[name] for name in ("torch", "deepspeed") if name in names}
    return {name: version for name in ("torch", "deepspeed") for version in [pin(wish.lock, name)] if version}
