"""The wheelhouse of training environments: a directory of wheels, with a manifest of their hashes and of sets of them.

A set has the wheels for one kind of node: one Python version, one machine type, one build of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tarfile
from typing import Any, Mapping, Sequence

from ..common.refusal import Refusal

SCHEMA_NAME = "tunetool.wheelhouse/1"
MANIFEST = "wheelhouse.json"
_WHEEL = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*\.whl$")


def read(directory: str) -> dict[str, Any]:
    """The manifest of a wheelhouse. Raises ``Refusal`` if it is missing or cannot be used."""
    path = os.path.join(directory, MANIFEST)
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise Refusal(
            "`%s` cannot be read: %s. hint: `tunetool build-wheelhouse %s` fills it" % (path, reason, directory)
        ) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA_NAME:
        raise Refusal(
            "`%s` is not a manifest of this version's wheelhouses (`%s`). hint: fill a new directory by "
            "`tunetool build-wheelhouse`" % (path, SCHEMA_NAME)
        )
    return document


def choose_set(
    document: Mapping[str, Any], python: str, machine: str, build: str, trainers: Sequence[str], lock_sha256: str
) -> dict[str, Any]:
    """The set for such a node. Raises ``Refusal`` with the command that makes it, if it is missing."""
    wanted = "Python %s, %s, torch %s" % (python, machine, build)
    command = "`tunetool build-wheelhouse DIR --python-version %s --machine %s --build %s%s`" % (
        python,
        machine,
        build,
        "".join(" --trainer %s" % name for name in trainers if name != "deepspeed"),
    )
    if document["lock_sha256"] != lock_sha256:
        raise Refusal("the wheelhouse was filled from another lock. hint: on the control machine: %s" % command)
    for each in document["sets"]:
        if (each["python"], each["machine"], each["build"]) == (python, machine, build) and set(trainers) <= set(
            each["trainers"]
        ):
            return dict(each)
    raise Refusal("the wheelhouse has no set for %s. hint: on the control machine: %s" % (wanted, command))


def sha256_of(path: str) -> str:
    """Hash of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def has(path: str, entry: Mapping[str, Any]) -> bool:
    """Whether a file exists with the right size. Its content is hashed when it is used."""
    try:
        return os.path.getsize(path) == int(entry["size_bytes"])
    except OSError:
        return False


def check(path: str, entry: Mapping[str, Any]) -> None:
    """Raise ``Refusal`` if a file is not the one in the manifest."""
    if not os.path.exists(path):
        raise Refusal("`%s` is missing. hint: `tunetool build-wheelhouse` on its directory fetches it" % path)
    actual = sha256_of(path)
    if actual != entry["sha256"]:
        raise Refusal(
            "`%s` has the hash %s..., not %s... as the wheelhouse's manifest has it. hint: run "
            "`tunetool build-wheelhouse` on its directory, which fetches the file again, then `tunetool provision`"
            % (path, actual[:16], str(entry["sha256"])[:16])
        )


def pack(archive: str, paths: Sequence[str]) -> None:
    """One tar of wheels, the same for the same wheels."""
    with tarfile.open(archive, "w") as tar:
        for path in paths:
            member = tarfile.TarInfo(os.path.basename(path))
            member.size = os.path.getsize(path)
            with open(path, "rb") as stream:
                tar.addfile(member, stream)


def unpack(archive: str, directory: str) -> None:
    """Put the wheels of ``archive`` into ``directory``, and remove it. Their hashes are looked at when they are used.

    Raises ``Refusal`` where it is not an archive of wheels.
    """
    os.makedirs(directory, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() and _WHEEL.match(member.name) else None
                if stream is None:
                    raise Refusal("`%s` holds `%s`, which is not a wheel. hint: remove it" % (archive, member.name))
                path = os.path.join(directory, member.name)
                with open(path + ".new", "wb") as target:
                    shutil.copyfileobj(stream, target)
                os.replace(path + ".new", path)
    except tarfile.TarError as error:
        raise Refusal(
            "`%s` is damaged: %s. hint: run `tunetool provision` again, which sends it again" % (archive, error)
        ) from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(archive)


def version_of(name: str) -> str:
    """The version in a wheel's name."""
    return name.split("-")[1]


def distribution_of(name: str) -> str:
    """The package in a wheel's name, in the spelling of package indexes."""
    return name.partition("-")[0].replace("_", "-").lower()
