"""DeepSpeed's compiled ops: a directory for each kind of machine, built by `tunetool build-ops` or from an equal node.

DeepSpeed compiles for the CPU of the machine: on another kind of CPU an op can die of SIGILL. So the directory's key
covers the CPU's flags beside the versions, and ops with another key are not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
from typing import Any, Mapping, Optional, Sequence

from ..common.files import read_text, replace_file
from ..common.refusal import Refusal
from .children import Ended, call
from .proof import clean_environment
from .wheel_files import sha256_of

READY, MISSING = "ready", "missing: "
STAMP = "ops.json"
_TRUSTED = re.compile(r"^[A-Za-z0-9_.][A-Za-z0-9_.+-]*(/[A-Za-z0-9_.+-]+)*$")


def machine_type(root: str = "/") -> dict[str, str]:
    """The properties of the machine that compiled code depends on."""
    text = read_text(os.path.join(root, "proc/cpuinfo")) or ""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "machine": os.uname().machine,
        "flags": " ".join(sorted(flags.group(1).split())) if flags else "",
        "libc": os.confstr("CS_GNU_LIBC_VERSION") or "" if "CS_GNU_LIBC_VERSION" in os.confstr_names else "",
    }


def key_of(beside: str, versions: Mapping[str, Any], ops: Sequence[str], accelerator: str, root: str = "/") -> str:
    """Hash over the kind of machine and the versions.

    ``beside``: the interpreter whose packages have the ops' sources if DeepSpeed compares times with them; else empty.
    """
    parts = (
        "ops/1",
        os.path.dirname(beside),
        versions["python"],
        sorted((name, versions["versions"].get(name)) for name in ("torch", "deepspeed")),
        sorted(ops),
        accelerator,
        sorted(machine_type(root).items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read(directory: str, key: str) -> Optional[dict[str, str]]:
    """Each op with its state; None if the directory is incomplete or has another key."""
    try:
        with open(os.path.join(directory, STAMP), encoding="utf-8") as stream:
            stamp = json.load(stream)
    except (OSError, ValueError):
        return None
    if not isinstance(stamp, dict) or stamp.get("key") != key:
        return None
    states = {str(op): str(state) for op, state in stamp["ops"].items()}
    if stamp.get("tools") != tools() and any(state != READY for state in states.values()):
        # A compiler was installed in the meantime.
        return None
    there = all(
        os.path.exists(os.path.join(directory, op, op + ".so")) for op, state in states.items() if state == READY
    )
    return states if there else None


def tools() -> list[str]:
    """The compilers and headers that are installed: with more of them, an op that was missing may be possible."""
    programs = [name for name in ("c++", "g++", "nvcc") if shutil.which(name)]
    return programs + [path for path in ("/usr/include/libaio.h", "/usr/local/cuda/bin/nvcc") if os.path.exists(path)]


def worth_sharing(states: Mapping[str, str]) -> bool:
    """Whether equal nodes can use these: all ops are ready but `gds`, which few machines can compile."""
    return all(state == READY for op, state in states.items() if op != "gds")


def build(
    program: Sequence[str], python: str, directory: str, key: str, ops: Sequence[str], accelerator: str, seconds: float
) -> dict[str, str]:
    """Compile each op with `tunetool build-ops`. An op that cannot be compiled here is missing, with the reason."""
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    environment = {**clean_environment(python), "TORCH_EXTENSIONS_DIR": directory}
    if accelerator == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    states = {}
    for op in ops:
        if op == "gds" and accelerator != "cuda":
            states[op] = MISSING + "it needs a GPU"
            continue
        argv = [*program, "build-ops", "--python", python, "--op", op]
        try:
            call(argv, environment, seconds, "`%s`" % op)
        except Ended as error:
            states[op] = MISSING + error.reason
            shutil.rmtree(os.path.join(directory, op), ignore_errors=True)
        else:
            states[op] = READY
    _stamp(directory, key, states)
    return states


def _stamp(directory: str, key: str, states: Mapping[str, str]) -> None:
    files = {}
    for base, _folders, names in os.walk(directory):
        for name in names:
            path = os.path.join(base, name)
            if name == ".tunetool-build" or os.path.islink(path):
                continue
            files[os.path.relpath(path, directory)] = sha256_of(path)
    text = (
        json.dumps({"key": key, "ops": dict(states), "tools": tools(), "files": files}, indent=2, sort_keys=True) + "\n"
    )
    replace_file(os.path.join(directory, STAMP), text)


def pack(directory: str, archive: str) -> None:
    """Pack the directory into one tar, for equal nodes."""
    with tarfile.open(archive + ".new", "w") as tar:
        with open(os.path.join(directory, STAMP), encoding="utf-8") as stream:
            names = sorted(json.load(stream)["files"])
        for name in [STAMP, *names]:
            tar.add(os.path.join(directory, name), arcname=name, recursive=False)
    os.chmod(archive + ".new", 0o644)
    os.replace(archive + ".new", archive)


def unpack(archive: str, directory: str, key: str) -> dict[str, str]:
    """Make ``directory`` from an equal node's archive. Raises ``Refusal`` if it is damaged or of another kind."""
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    try:
        stamp = _unpack(archive, directory, key)
        os.rename(os.path.join(directory, STAMP + ".new"), os.path.join(directory, STAMP))
    except (OSError, KeyError, TypeError, ValueError, tarfile.TarError) as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise Refusal("`%s` is not an archive of compiled ops: %s. hint: remove it" % (archive, error)) from None
    except Refusal:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return {str(op): str(state) for op, state in stamp["ops"].items()}


def _unpack(archive: str, directory: str, key: str) -> dict[str, Any]:
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            stream = tar.extractfile(member) if member.isfile() else None
            if stream is None or not _TRUSTED.match(member.name) or ".." in member.name.split("/"):
                raise Refusal("`%s` holds `%s`, which is not a plain file. hint: remove it" % (archive, member.name))
            # The stamp is last by its name: a copy that was cut short does not pass as complete.
            path = os.path.join(directory, member.name + (".new" if member.name == STAMP else ""))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as target:
                shutil.copyfileobj(stream, target)
    with open(os.path.join(directory, STAMP + ".new"), encoding="utf-8") as text:
        stamp: dict[str, Any] = json.load(text)
    if stamp["key"] != key:
        raise Refusal("`%s` was built for another kind of machine. hint: remove it" % archive)
    for name, sha256 in stamp["files"].items():
        path = os.path.join(directory, name)
        if sha256_of(path) != sha256:
            raise Refusal("`%s`: `%s` has another hash than when it was built. hint: remove it" % (archive, name))
    return stamp
