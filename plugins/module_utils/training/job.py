"""Brings one environment to the requested state: the venv, its ops, the proof, then the switch and the manifest."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Sequence

from ..common.files import content, replace_file
from ..common.manifest import ManifestError, load, write
from ..common.venv import STAMP as ENVIRONMENT_STAMP
from ..common.venv import point
from . import installed_ops
from . import ops as compiled
from .children import Ended
from .environment import Wish, build, is_complete, planned_packages, prune, used_files
from .lock import digest
from .proof import ask_versions, fingerprint, prove

BUILT, NAMED = "built", "named"
STATE = "state.json"
CURRENT = "current"


@dataclass(frozen=True)
class Request:
    """The request, on this node."""

    directory: str
    lock: str
    trainers: Sequence[str]
    ops: Sequence[str]
    accelerator: str
    driver: str
    program: str
    """Python of tunetool, which compiles ops for an environment that the inventory names."""
    proof_seconds: float
    ops_seconds: float
    wish: Optional[Wish] = None
    """The environment to build; None if the inventory names one."""
    named: str = ""
    manifest: str = ""
    received: Sequence[str] = field(default_factory=tuple)

    @property
    def python(self) -> str:
        """Path of the interpreter that does not change during a running job."""
        return self.wish.python if self.wish else self.named

    @property
    def state_path(self) -> str:
        """File to which the last finished run wrote its result."""
        return os.path.join(self.directory, STATE)


@dataclass(frozen=True)
class Status:
    """The state of the environment on the node."""

    environment: bool
    versions: dict[str, Any]
    """Empty if the environment does not exist."""
    ops_key: str
    ops: Optional[dict[str, str]]
    state: dict[str, Any]
    """Result of the last finished run; empty if there was none."""
    key: str
    """Key of a finished run for exactly this request; empty while it is unknown."""
    manifest_training: Optional[dict[str, Any]]
    manifest_there: bool
    linked: bool

    @property
    def done(self) -> bool:
        """Whether nothing has to be done."""
        return bool(
            self.environment
            and self.ops is not None
            and self.linked
            and self.key
            and self.state.get("key") == self.key
            and (not self.manifest_there or self.manifest_training == self.state.get("training"))
        )


def look(request: Request) -> Status:
    """Read the state. The only process that it starts is the environment's Python, for versions."""
    there = is_complete(request.wish.path) if request.wish else True
    versions: dict[str, Any] = {}
    try:
        versions = ask_versions(request.python) if there else {}
    except Ended:
        if request.wish is None:
            raise
        # It is damaged, or its base Python is gone: the environment is built again.
        there = False
    # An environment that was built here loads them as installed ops, also those that an earlier environment compiled.
    beside = "" if request.wish else request.python
    ops_key = compiled.key_of(beside, versions, request.ops, request.accelerator) if versions else ""
    ops = compiled.read(ops_directory(request, ops_key), ops_key) if ops_key else None
    state = read_state(request.state_path)
    manifest = read_manifest(request.manifest)
    key = _state_key(request, versions, ops_key, ops) if ops is not None else ""
    link = os.path.join(request.directory, CURRENT)
    linked = request.wish is None or (
        os.path.islink(link) and os.path.realpath(link) == os.path.realpath(request.wish.path)
    )
    training = manifest.get("training") if manifest else None
    return Status(there, versions, ops_key, ops, state, key, training, manifest is not None, linked)


def ops_directory(request: Request, key: str) -> str:
    """Directory of the ops with that key."""
    return os.path.join(request.directory, "ops", key)


def ops_archive(request: Request, key: str) -> str:
    """Path of the archive of ops for equal nodes, which need not exist."""
    return ops_directory(request, key) + ".tar"


def read_state(path: str) -> dict[str, Any]:
    """Result of the last finished run; empty if there was none."""
    try:
        document = json.loads(content(path) or "{}")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def read_manifest(path: str) -> Optional[dict[str, Any]]:
    """The node's manifest; None if it has none."""
    try:
        return load(path)
    except (FileNotFoundError, ManifestError):
        return None


def _state_key(request: Request, versions: Mapping[str, Any], ops_key: str, ops: Optional[Mapping[str, str]]) -> str:
    """Hash of everything that the proof depends on."""
    parts = (
        "state/1",
        request.wish.key if request.wish else request.named,
        sorted(versions["versions"].items()),
        ops_key,
        sorted((ops or {}).items()),
        request.driver,
        request.accelerator,
        sorted(request.trainers),
        digest(request.lock),
        fingerprint(),
        # An environment that was built again is proven again.
        _made(os.path.join(request.wish.path, ENVIRONMENT_STAMP)) if request.wish else 0,
        _made(os.path.join(ops_directory(request, ops_key), compiled.STAMP)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _made(stamp: str) -> int:
    return os.stat(stamp).st_mtime_ns


def make_environment(request: Request, status: Status) -> None:
    """Build the venv if it does not exist."""
    if request.wish is not None and not status.environment:
        build(request.wish, request.received)


def make_ops(request: Request, status: Status, archive: str) -> dict[str, str]:
    """Take the ops from an equal node's archive, or compile them here."""
    directory = ops_directory(request, status.ops_key)
    if status.ops is not None:
        return status.ops
    if archive:
        return compiled.unpack(archive, directory, status.ops_key)
    if request.wish is not None:
        installed_ops.forget(request.wish.path)
    program = [request.python, "-m", "tunetool"] if request.wish else [request.program]
    return compiled.build(
        program, request.python, directory, status.ops_key, request.ops, request.accelerator, request.ops_seconds
    )


def finish(request: Request, status: Status, ops: Mapping[str, str]) -> dict[str, Any]:
    """Prove the environment, switch to it, write the manifest's part and return it.

    Nothing in use is changed before the proof has succeeded.
    """
    directory = ops_directory(request, status.ops_key)
    # An environment that was proven, and only lost its link or its part of the manifest, needs no second proof.
    key = _state_key(request, status.versions, status.ops_key, ops)
    if status.state.get("key") == key:
        training = dict(status.state["training"])
    else:
        if request.wish is not None:
            installed_ops.register(request.wish.path, directory, status.versions, request.accelerator)
        registered = request.wish is not None and installed_ops.package(request.wish.path) is not None
        facts = prove(
            request.python, request.trainers, request.wish is not None, ops, directory, request.accelerator,
            request.proof_seconds, registered,
        )  # fmt: skip
        training = describe(request, status.versions, facts, ops, directory)
    if request.wish is not None:
        point(os.path.join(request.directory, CURRENT), os.path.join("environments", request.wish.key))
    replace_file(request.state_path, json.dumps({"key": key, "training": training}, indent=2) + "\n")
    write_part(request.manifest, training)
    _tidy(request, status.ops_key)
    return training


def describe(
    request: Request, versions: Mapping[str, Any], facts: Mapping[str, Any], ops: Mapping[str, str], directory: str
) -> dict[str, Any]:
    """The part ``training`` of the manifest."""
    part: dict[str, Any] = {
        "python": os.path.join(request.directory, CURRENT, "bin/python") if request.wish else request.named,
        "source": BUILT if request.wish else NAMED,
        "directory": request.directory,
        "lock_sha256": digest(request.lock),
        "packages": dict(sorted(versions["versions"].items())),
        "accelerator": request.accelerator,
    }
    if facts["cuda"]:
        part["cuda"] = str(facts["cuda"])
    part["ops"] = dict(ops)
    part["ops_directory"] = directory
    part["environment"] = {"TORCH_EXTENSIONS_DIR": directory}
    part["trainers"] = list(request.trainers)
    return part


def planned(request: Request) -> dict[str, Any]:
    """As much of the part as is known before anything is made, for check mode."""
    part: dict[str, Any] = {
        "python": os.path.join(request.directory, CURRENT, "bin/python") if request.wish else request.named,
        "source": BUILT if request.wish else NAMED,
        "directory": request.directory,
        "lock_sha256": digest(request.lock),
        "accelerator": request.accelerator,
        "trainers": list(request.trainers),
    }
    if request.wish is not None:
        part["packages"] = planned_packages(request.wish)
        if request.wish.build.cuda:
            part["cuda"] = request.wish.build.cuda
    return part


def write_part(path: str, training: Optional[Mapping[str, Any]]) -> None:
    """Write the part into the manifest, if there is one, and leave the rest as it is. None removes the part."""
    document = read_manifest(path)
    if document is None or document.get("training") == training:
        return
    document.pop("training", None)
    if training is not None:
        document["training"] = dict(training)
    write(document, path)


def _tidy(request: Request, ops_key: str) -> None:
    """Remove environments and ops that nobody uses; one old environment stays, as a way back."""
    in_use = used_files(request.directory)
    if request.wish is not None:
        prune(request.directory, "environments", [request.wish.key], 1, in_use)
    prune(request.directory, "ops", [ops_key], 1, in_use)
    for path in glob.glob(os.path.join(request.directory, "ops", "*.tar")):
        if path != ops_archive(request, ops_key):
            os.unlink(path)
    wheels = os.path.join(request.directory, "wheels")
    wanted = {str(each["name"]) for each in request.wish.files} if request.wish else set()
    for name in os.listdir(wheels) if os.path.isdir(wheels) else []:
        if name not in wanted:
            os.unlink(os.path.join(wheels, name))
