"""The manifest, /etc/tunetool/node.json: what was built (contract 1). Only this module reads, checks and writes it."""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any, Mapping

from . import documents
from .files import replace_file
from .io_settings import manifest_schema
from .raid_levels import BUILT_LEVELS
from .refusal import Expected, on_one_line

MANIFEST_PATH = "/etc/tunetool/node.json"
VOLUME_NAME = "^[a-z][a-z0-9-]*$"
"""What one of several volumes may be called: it is a directory, and part of a unit's name and of an array's."""
SCHEMA_NAME = "tunetool.manifest/1"
SCHEMA_OF_SEVERAL = "tunetool.manifest/2"
"""Of a node with several volumes: a version that knows one refuses it, and does not take the first for all. One volume
is written as before, so that other versions of a fleet go on reading it."""
SCHEMA_VERSION = 2
EDITED_HINT = (
    "run `tunetool provision` for this node, which writes it again; what is to change belongs into the inventory"
)

_TEXT: dict[str, Any] = {"type": "string"}
_TEXT_OR_NULL: dict[str, Any] = {"type": ["string", "null"]}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL: dict[str, Any] = {"type": ["integer", "null"], "minimum": 0}
_RATE: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _map(values: dict[str, Any]) -> dict[str, Any]:
    """An object with names of any kind."""
    return {"type": "object", "properties": {}, "required": [], "additionalProperties": values}


_TRAINING: dict[str, Any] = {
    "python": dict(_TEXT, description="Interpreter with torch, DeepSpeed and, where it was built, tunetool"),
    "source": {
        "type": "string",
        "enum": ["built", "named"],
        "description": "built: from the lock; named: the owner's, only checked",
    },
    "directory": dict(_TEXT, description="What belongs to the role training_environment"),
    "lock_sha256": dict(_TEXT, description="Of constraints.txt"),
    "packages": dict(_map(_TEXT), description="Version by package"),
    "accelerator": {"type": "string", "enum": ["cuda", "cpu"]},
    "cuda": dict(_TEXT, description="Version that torch was built for; absent: none"),
    "ops": dict(_map(_TEXT), description="DeepSpeed's compiled ops: `ready`, or `missing: ` and why"),
    "ops_directory": dict(_TEXT, description="Directory with the compiled ops (TORCH_EXTENSIONS_DIR)"),
    "environment": dict(_map(_TEXT), description="Variables that a command with this Python must set"),
    "trainers": {"type": "array", "items": {"type": "string", "enum": ["deepspeed", "lightning"]}},
}

_TUNING = manifest_schema()
_OF_A_VOLUME = ("array", "filesystem", "offload_dir")
"""The keys that each volume has of its own; at the top where there is one volume."""
_ARRAY: dict[str, Any] = _object(
    {
        "uuid": _TEXT,
        "name": _TEXT,
        "level": {"type": "string", "enum": [*BUILT_LEVELS]},
        "chunk_bytes": _COUNT,
        "members": {
            "type": "array",
            "description": "By slot",
            "items": _object(
                {
                    "serial": _TEXT,
                    "model": _TEXT,
                    "by_id": _TEXT_OR_NULL,
                    "size_bytes": _COUNT,
                    "pci_address": _TEXT_OR_NULL,
                    "numa_node": _COUNT_OR_NULL,
                }
            ),
        },
    }
)
_FILESYSTEM: dict[str, Any] = _object(
    {
        "uuid": dict(_TEXT, description="Empty where an owner's volume has none"),
        "type": dict(_TEXT, description="xfs where it was built"),
        "mount_point": _TEXT,
        "data_su_bytes": _COUNT,
        "data_sw": dict(_COUNT, description="Data members in a stripe"),
        "log_su_bytes": _COUNT,
        "mount_options": {"type": "array", "items": _TEXT},
        "root": dict(
            _TEXT,
            description="Directory of an owner's file system that is mounted there; absent: all of one "
            "that was built, or not noted by an earlier version",
        ),
    },
    optional=("root",),
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": SCHEMA_OF_SEVERAL,
    "title": "What tunetool built on this node",
    **_object(
        {
            "schema": {"enum": [SCHEMA_NAME, SCHEMA_OF_SEVERAL], "type": "string"},
            "profile": dict(_TEXT, description="Name of the inventory's hardware profile, such as h100"),
            "array": dict(
                _ARRAY,
                type=["object", "null"],
                description="null: the volume is its owner's, and no array was built",
            ),
            "filesystem": _FILESYSTEM,
            "volumes": {
                "type": "array",
                "minItems": 1,
                "description": "In place of `array`, `filesystem` and `offload_dir` on a node with several (schema /2)",
                "items": _object(
                    {
                        "name": dict(
                            _TEXT, pattern=VOLUME_NAME, description="Its directory under the common mount point"
                        ),
                        "array": _ARRAY,
                        "filesystem": _FILESYSTEM,
                        "offload_dir": _TEXT_OR_NULL,
                    }
                ),
            },
            "memory": _object(
                {
                    "hugepages": {
                        "type": "array",
                        "items": _object({"size_kib": _COUNT, "numa_node": _COUNT_OR_NULL, "count": _COUNT}),
                    },
                    "shm_bytes": dict(_COUNT_OR_NULL, description="null: left as the distribution has it"),
                    "shm_huge": {
                        "type": "string",
                        "enum": ["always", "within_size", "advise", "never"],
                        "description": "huge= of /dev/shm; absent: left as it was",
                    },
                    "memlock": dict(_TEXT_OR_NULL, description="unlimited, or KiB; null: left as it was"),
                },
                optional=("shm_huge",),
            ),
            "tuning": dict(
                _object(_TUNING, optional=tuple(_TUNING)),
                description="I/O settings that were asked for and exist on this node; absent: none",
            ),
            "gds": _object(
                {
                    "mode": {"type": "string", "enum": ["nvidia-fs", "p2pdma", "compat", "off"]},
                    "reasons": {"type": "array", "items": _TEXT},
                }
            ),
            "offload_dir": _TEXT_OR_NULL,
            "offload": dict(
                _object({"uid": _COUNT, "gid": _COUNT, "mode": dict(_TEXT, description="Four octal digits")}),
                description="Owner, group and mode of offload_dir; absent: not noted, by an earlier version",
            ),
            "expect": dict(
                _object({"read": _RATE, "write": _RATE}, optional=("read", "write")),
                description="Bytes per second; a direction that is not judged is left out",
            ),
            "reboot_required": {"type": "boolean"},
            "tool_version": _TEXT,
            "aio": dict(
                _object(
                    {
                        "path": _TEXT,
                        "block": _object(
                            {
                                "block_size": _COUNT,
                                "queue_depth": _COUNT,
                                "intra_op_parallelism": _COUNT,
                                "single_submit": {"type": "boolean"},
                                "overlap_events": {"type": "boolean"},
                                "use_gds": {"type": "boolean"},
                            }
                        ),
                        "hardware": _object(
                            {
                                "kernel": _TEXT,
                                "cpu": _TEXT_OR_NULL,
                                "cpu_count": _COUNT_OR_NULL,
                                "memory_bytes": _COUNT_OR_NULL,
                                "driver": _TEXT_OR_NULL,
                                "drives": {"type": "array", "items": _TEXT},
                                "medium": _TEXT_OR_NULL,
                                "mount": {"type": ["array", "null"], "items": _TEXT},
                                "file_system": _TEXT_OR_NULL,
                            }
                        ),
                    }
                ),
                description="DeepSpeed's block by `tunetool tune`, and what it was tuned on; left out: not tuned",
            ),
            "training": dict(
                _object(_TRAINING, optional=("cuda",)),
                description="The environment that trains on this node, proven to work; absent: none",
            ),
            documents.CHECKSUM: dict(
                _TEXT, description="Over the canonical JSON without this key; absent: unsigned, of an earlier version"
            ),
        },
        # Absent in manifests of earlier versions.
        optional=(*_OF_A_VOLUME, "volumes", "offload", "tuning", "aio", "training", documents.CHECKSUM),
    ),
    "oneOf": [{"required": [*_OF_A_VOLUME]}, {"required": ["volumes"]}],
}


class ManifestError(Expected):
    """The manifest cannot be used. ``hint`` says what to do."""

    def __init__(self, message: str, hint: str) -> None:
        self.message = on_one_line(message)
        super().__init__(self.message)
        self.hint = on_one_line(hint)


def load(path: str = MANIFEST_PATH) -> dict[str, Any]:
    """The manifest, checked against its schema.

    Raises ``FileNotFoundError`` when there is none, ``ManifestError`` when it is damaged, of another version, or was
    edited after it was written. Manifests of earlier versions have no checksum: ``unsigned`` says so.
    """
    try:
        document = documents.read(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "`%s` cannot be read: %s" % (path, error.strerror)
        raise ManifestError(reason, "run `tunetool provision` for this node") from error
    except ValueError as error:
        raise ManifestError("`%s` is not JSON: %s" % (path, error), "run `tunetool provision` for this node") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema not in (SCHEMA_NAME, SCHEMA_OF_SEVERAL):
        raise ManifestError(
            "`%s` has schema `%s`, this version reads `%s`" % (path, schema, SCHEMA_OF_SEVERAL),
            "use the tunetool version that wrote it, or run `tunetool provision` of this version for the node",
        )
    if documents.CHECKSUM in document and document[documents.CHECKSUM] != documents.checksum(document):
        raise ManifestError("`%s` was edited after it was written: its checksum does not match" % path, EDITED_HINT)
    problems = validate(document)
    if problems:
        raise ManifestError(
            "`%s` is not a manifest: %s" % (path, problems[0]), "run `tunetool provision` for this node"
        )
    return {key: value for key, value in document.items() if key != documents.CHECKSUM}


def each_volume(manifest: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every volume of a node by name, each as the manifest of a node that has it alone.

    The only volume of a node has no name: what people read of such a node names none.
    """
    if "volumes" not in manifest:
        return [("", dict(manifest))]
    common = {key: value for key, value in manifest.items() if key not in ("volumes", *_OF_A_VOLUME)}
    return [
        (volume["name"], {**common, **{key: volume[key] for key in _OF_A_VOLUME}}) for volume in manifest["volumes"]
    ]


def common_mount_point(manifest: Mapping[str, Any]) -> str:
    """Where the volume is mounted, or the directory in which each of several is."""
    name, first = each_volume(manifest)[0]
    point = str(first["filesystem"]["mount_point"])
    return posixpath.dirname(point) if name else point


def built_members(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The members of everything that was built on the node, volume by volume; none of a volume of the owner's."""
    arrays = [volume["array"] for _, volume in each_volume(manifest)]
    return [member for array in arrays if array is not None for member in array["members"]]


def unsigned(path: str = MANIFEST_PATH) -> bool:
    """Whether the manifest at ``path`` can be read and has no checksum: whether it was edited is not known then."""
    try:
        return load(path) is not None and documents.CHECKSUM not in documents.read(path)
    except (OSError, ValueError, ManifestError):
        return False


def refuse_newer(path: str = MANIFEST_PATH) -> None:
    """Raises ``ManifestError`` if a newer tunetool wrote the manifest, which this version must not change.

    A damaged manifest is no error here: it can be made again from the node.
    """
    try:
        document = documents.read(path)
    except (OSError, ValueError):
        return
    schema = document.get("schema") if isinstance(document, dict) else None
    match = re.match(r"^tunetool\.manifest/([0-9]+)$", schema) if isinstance(schema, str) else None
    if match and int(match.group(1)[:20]) > SCHEMA_VERSION:
        raise ManifestError(
            "`%s` has schema `%s`, newer than this version's `%s`" % (path, schema, SCHEMA_OF_SEVERAL),
            "use the tunetool version that wrote it; nothing was changed",
        )


def damage(path: str = MANIFEST_PATH) -> str | None:
    """The reason why a manifest cannot be used; None if it can be used, or if there is none."""
    try:
        load(path)
    except FileNotFoundError:
        return None
    except ManifestError as error:
        return error.message
    return None


def dump(document: Mapping[str, Any]) -> str:
    """The manifest as text, keys in the schema's order, its checksum last."""
    body = {key: value for key, value in document.items() if key != documents.CHECKSUM}
    return json.dumps(dict(body, **{documents.CHECKSUM: documents.checksum(body)}), indent=2) + "\n"


def write(document: Mapping[str, Any], path: str = MANIFEST_PATH) -> None:
    """Write it by rename, mode 0644. Raises ``ManifestError`` rather than write what ``load`` would refuse."""
    problems = validate(document)
    if problems:
        raise ManifestError("the manifest would be invalid: %s" % problems[0], "this is a fault of tunetool")
    replace_file(path, dump(document), mode=0o644)


def validate(document: object, schema: Mapping[str, Any] = SCHEMA, name: str = "manifest") -> list[str]:
    """Problems of a document against a schema, each with its place; empty if it is valid."""
    return _problems(document, schema, name)


_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def _problems(value: Any, schema: Mapping[str, Any], path: str) -> list[str]:
    """Violations of the schema. Supports the part of JSON Schema that ``SCHEMA`` uses: nodes have no library for it."""
    allowed = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(_is(value, name) for name in allowed):
        return ["%s is not of type %s" % (path, " or ".join(allowed))]
    problems = []
    if "const" in schema and value != schema["const"]:
        problems.append("%s is not `%s`" % (path, schema["const"]))
    if "oneOf" in schema and isinstance(value, dict):
        ways = [each["required"] for each in schema["oneOf"]]
        if sum(all(name in value for name in way) for way in ways) != 1:
            shown = "; or ".join(", ".join("`%s`" % name for name in way) for way in ways)
            problems.append("%s does not have one of these: %s" % (path, shown))
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        problems.append("%s has fewer than %d" % (path, schema["minItems"]))
    problems += _text_problems(value, schema, path)
    if "minimum" in schema and value is not None and value < schema["minimum"]:
        problems.append("%s is below %s" % (path, schema["minimum"]))
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        problems.append("%s is not above %s" % (path, schema["exclusiveMinimum"]))
    if isinstance(value, dict):
        problems += _object_problems(value, schema, path)
    if isinstance(value, list):
        for index, item in enumerate(value):
            problems += _problems(item, schema["items"], "%s[%d]" % (path, index))
    return problems


def _text_problems(value: Any, schema: Mapping[str, Any], path: str) -> list[str]:
    if "enum" in schema and value not in schema["enum"]:
        return ["%s is `%s`, not one of %s" % (path, value, ", ".join(schema["enum"]))]
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        return ["%s is `%s`, which does not match `%s`" % (path, value, schema["pattern"])]
    return []


def _object_problems(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> list[str]:
    properties = schema["properties"]
    problems = ["%s.%s is missing" % (path, name) for name in schema["required"] if name not in value]
    others = schema.get("additionalProperties")
    for name, item in value.items():
        known = properties.get(name, others)
        if not known:
            problems.append("%s.%s is unknown" % (path, name))
        else:
            problems += _problems(item, known, "%s.%s" % (path, name))
    return problems


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name])
