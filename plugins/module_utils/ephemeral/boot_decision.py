"""Ephemeral mode: decides from facts what a boot does with local drives that may have come back blank."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from ..array.adopt_or_wipe import Consent, Foreign
from ..array.drive_decisions import KEEP, REFUSE, Criteria, Decision
from ..array.drive_selection import select
from ..array.md_arrays import DEAD_STATES, HALTED_STATES, Array, Wanted, find
from ..array.md_arrays import decide as decide_array
from ..common import documents
from ..common.manifest import validate
from ..common.raid_levels import LEVELS, needs_every_member
from ..common.refusal import Expected, on_one_line
from ..machine.drive_contents import RAID_MEMBER, Signature, plain_uuid
from ..machine.drives import Drive

CONFIG_PATH = "/etc/tunetool/ephemeral.json"
BEGUN_PATH = "/etc/tunetool/ephemeral.begun"
"""A file with the array's UUID, which exists from before the array is made until the volume is complete.

Without it, an array without a file system is foreign; with it, it is an interrupted rebuild of ours.
"""

SCHEMA_NAME = "tunetool.ephemeral/1"
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ID = {"type": "integer", "minimum": 0}


def _object(properties: dict[str, Any], kind: Any = "object") -> dict[str, Any]:
    return {"type": kind, "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMA: dict[str, Any] = _object(
    {
        "schema": {"const": SCHEMA_NAME, "type": "string"},
        "drives": _object(
            {
                "model": _TEXT_OR_NULL,
                "size_bytes": {"type": ["integer", "null"], "minimum": 1},
                "transport": _TEXT_OR_NULL,
                "serials": {"type": "array", "items": {"type": "string"}},
            }
        ),
        "label": {"type": "string"},
        # Numbers: at this point of a boot no directory service can resolve names.
        "offload": _object({"uid": _ID, "gid": _ID, "mode": {"type": "string"}}, ["object", "null"]),
        "wait_seconds": {"type": "integer", "minimum": 0},
    }
)
"""Settings that the manifest lacks: how drives are selected, and the volume's label and offload directory."""

ADVICE = "run `tunetool provision` for this node, with a plan if a drive may lose what it holds"


class ConfigError(Expected):
    """The configuration cannot be used. The message is one line with its hint."""

    def __init__(self, message: str) -> None:
        super().__init__(on_one_line(message))


def load(path: str = CONFIG_PATH) -> dict[str, Any]:
    """The configuration, checked. Raises ``ConfigError``."""
    try:
        document = documents.read(path)
    except FileNotFoundError:
        raise ConfigError(
            "`%s` is not there: ephemeral mode is off. hint: set `ephemeral_enabled: true`, then run "
            "`tunetool provision`" % path
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            "`%s` cannot be read: %s. hint: run `tunetool provision` for this node" % (path, error)
        ) from None
    problems = _problems(document)
    if problems:
        raise ConfigError("`%s`: %s. hint: run `tunetool provision` for this node" % (path, problems[0]))
    return dict(document)


def dump(document: Mapping[str, Any]) -> str:
    """The configuration as text. Raises ``ConfigError`` rather than write what ``load`` would refuse."""
    problems = _problems(document)
    if problems:
        raise ConfigError("the configuration would be invalid: %s. hint: this is a fault of tunetool" % problems[0])
    return json.dumps(document, indent=2) + "\n"


def _problems(document: Any) -> list[str]:
    problems = validate(document, SCHEMA, "configuration")
    if not problems and document["offload"] and not re.fullmatch("[0-7]{3,4}", document["offload"]["mode"]):
        problems = ["configuration.offload.mode is not three or four octal digits"]
    return problems


NOTHING, BUILD, RESUME, LEAVE = "nothing", "build", "resume", "leave"


@dataclass(frozen=True)
class Scene:
    """The facts of the node at this moment of the boot."""

    drives: Sequence[Drive]
    contents: Mapping[str, Sequence[Signature]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)
    arrays: Sequence[Array] = ()
    filesystem: bool = False
    """Whether the manifest's file system is visible by its UUID."""
    begun: str = ""
    """The array's UUID in ``BEGUN_PATH``, or empty."""


@dataclass(frozen=True)
class Finding:
    """What to do: ``nothing`` (the array is there), ``build``, ``resume`` or ``leave`` (not ours to touch)."""

    action: str
    line: str
    members: tuple[Drive, ...] = ()
    """Members in slot order, for ``build`` and ``resume``."""


def assembled(manifest: Mapping[str, Any], arrays: Sequence[Array]) -> Array | None:
    """The manifest's array, if it is assembled with all its data and can serve."""
    array = find(arrays, manifest["array"]["uuid"])
    whole = array is not None and array.state not in DEAD_STATES and array.members and not array.lost_data
    return array if whole else None


def decide(manifest: Mapping[str, Any], config: Mapping[str, Any], scene: Scene) -> Finding:
    """Decide. Builds only if every requested drive is blank and their number is exactly the array's."""
    wanted = manifest["array"]
    array = assembled(manifest, scene.arrays)
    if array is not None:
        return _decide_assembled(array, wanted, scene)
    name = wanted["name"]
    count = len(wanted["members"])
    asked = config["drives"]
    chosen = select(
        scene.drives,
        scene.contents,
        Criteria(count, asked["model"], asked["size_bytes"], asked["transport"], tuple(asked["serials"])),
        name,
        scene.unreadable,
        Consent(level=wanted["level"], foreign=_strangers(wanted, scene)),
    )
    kept = [row for row in chosen.decisions if row.verdict == KEEP]
    if kept:
        return _leave(
            "%d of %d drives are members of an array `%s` that is not assembled: %s"
            % (len(kept), count, name, ", ".join("`%s`" % row.drive.serial for row in kept)),
            "drives went missing or came back blank beside them%s; %s" % (_lost(wanted["level"]), ADVICE),
        )
    if chosen.problem:
        return _leave("; ".join([chosen.problem, *_reasons(chosen.decisions)]), ADVICE)
    target = Wanted(name, wanted["level"], wanted["chunk_bytes"], tuple(drive.name for drive in chosen.selected))
    step = decide_array(target, {}, scene.arrays)
    if step.action != "create":
        return _leave("; ".join(step.reasons), ADVICE)
    return Finding(BUILD, "all %d drives are blank" % count, chosen.selected)


def _lost(level: str) -> str:
    return ", and %s keeps nothing then" % LEVELS[level] if needs_every_member(level) else ""


def _strangers(wanted: Mapping[str, Any], scene: Scene) -> tuple[Foreign, ...]:
    """Other arrays that have the name of ours: an array is known by its UUID, which a rebuild keeps."""
    uuids = {
        plain_uuid(signature.uuid)
        for signatures in scene.contents.values()
        for signature in signatures
        if signature.type == RAID_MEMBER
    }
    others = sorted(uuids - {plain_uuid(wanted["uuid"])})
    return tuple(Foreign(uuid, wanted["name"], level="", chunk_bytes=0, raid_disks=0) for uuid in others)


def _unlike(array: Array, wanted: Mapping[str, Any]) -> list[str]:
    """What an array with the UUID of the manifest has otherwise: it is another one, or a copy."""
    parts = (
        ("level", wanted["level"], array.level),
        ("chunk", wanted["chunk_bytes"], array.chunk_bytes),
        ("members", len(wanted["members"]), len(array.members)),
    )
    return ["%s: expected %s, found %s" % part for part in parts if part[1] != part[2]]


def _decide_assembled(array: Array, wanted: Mapping[str, Any], scene: Scene) -> Finding:
    name = wanted["name"]
    differences = _unlike(array, wanted)
    if differences:
        return _leave("`%s` has the UUID of array `%s`, and %s" % (array.device, name, "; ".join(differences)), ADVICE)
    if array.state in HALTED_STATES:
        # A mount of a suspended array would wait without end, and so would the boot.
        return _leave("array `%s` is %s" % (name, array.state), HALTED_STATES[array.state])
    if scene.begun == wanted["uuid"]:
        by_name = {drive.name: drive for drive in scene.drives}
        members = tuple(by_name[str(member)] for member in array.members if member in by_name)
        return Finding(RESUME, "array `%s` is there, a rebuild of it was cut off: going on" % name, members)
    if not scene.filesystem:
        return _leave("array `%s` is there without the file system of the manifest" % name, ADVICE)
    return Finding(NOTHING, "array `%s` and its file system are there: nothing to do" % name)


def _leave(what: str, hint: str) -> Finding:
    return Finding(LEAVE, "nothing was written: %s. hint: %s" % (what, hint))


def _reasons(decisions: Sequence[Decision]) -> list[str]:
    """Each refused drive with its reason; those in use elsewhere (a boot drive of the same kind) only if alone."""
    refused = [row for row in decisions if row.verdict == REFUSE]
    idle = [row for row in refused if not row.drive.claims]
    return ["`%s` (%s) %s" % (row.drive.serial, row.drive.name, row.reason) for row in idle or refused]


def with_members(manifest: Mapping[str, Any], members: Sequence[Drive]) -> dict[str, Any]:
    """The manifest with these members by slot; everything else stays unchanged."""
    rows = [drive.member for drive in members]
    return dict(manifest, array=dict(manifest["array"], members=rows))
