"""The record, contract 2: what was measured, with its proof. Every later command reads this, never text.

``python -m tunetool.record`` prints the JSON Schema; docs/reference/record.schema.json is that output.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tunetool import record_v1
from tunetool.errors import UsageProblem
from tunetool.node.common import documents
from tunetool.node.common.check_result import Check
from tunetool.node.common.temporary import new_directory, prefix_of_this_host, remove_stale_directories
from tunetool.regular_files import below

if TYPE_CHECKING:
    from typing_extensions import Self

SCHEMA_NAME: Literal["tunetool.record/2"] = "tunetool.record/2"
FIRST_SCHEMA = "tunetool.record/1"
FILE = "record.json"
"""The name of a record in its directory."""

LABELS = (
    *("subject", "direction", "engine", "io_engine", "block", "goal", "drive", "drives", "layout", "place", "state"),
    *("memory", "way", "mode", "pattern", "cached", "scenario", "path", "phase", "stage", "part", "collective"),
    *("gpus", "ranks", "layer", "group", "call", "check", "tokens", "volume"),
)
"""The labels that figures and checks may have; docs/reference/record.md says what each means."""

Scalar = str | int | float | bool
CheckStatus = Literal["pass", "fail", "skip", "unknown"]
Status = Literal["pass", "fail", "unstable", "unproven", "error"]
Unit = Literal["B/s", "s", "1/s", "B", "1"]


def _below(path: str) -> str:
    if path.startswith("/") or "\0" in path or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"`{ascii(path)[1:-1]}` is no path below the record's directory")
    return path


def _beside(name: str) -> str:
    if "/" in name or name != _below(name):
        raise ValueError(f"`{ascii(name)[1:-1]}` is no name of a directory beside the record's")
    return name


def _with_subject(labels: dict[str, str]) -> dict[str, str]:
    if not labels.get("subject"):
        raise ValueError("it has no label `subject`")
    return labels


Below = Annotated[str, AfterValidator(_below)]
"""A file below the record's directory. Links are looked at when it is read."""
Beside = Annotated[str, AfterValidator(_beside)]
"""The name of another record's directory, beside this one's."""


class Document(BaseModel):
    """A part of a document that others read."""

    # Unknown keys are refused: a misspelt key that is silently dropped would be a figure that silently vanishes.
    # Each validator is built at its first use: all of them together take longer than a small copy does.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def from_fields_of(cls, read: object, **more: Any) -> Self:
        """The fields of the same name of what was read, and ``more`` for the others."""
        same = {name: getattr(read, name) for name in cls.model_fields if name not in more and hasattr(read, name)}
        return cls.model_validate({**same, **more})


class Link(Document):
    """A PCIe link as negotiated and as possible."""

    current_speed_gts: float | None = None
    current_width: int | None = None
    max_speed_gts: float | None = None
    max_width: int | None = None


class DriveFacts(Document):
    """A drive of the node."""

    name: str
    serial: str
    model: str
    firmware: str | None = None
    size_bytes: int | None = None
    pci_address: str | None = None
    link: Link | None = None


class Node(Document):
    """The machine that was measured."""

    host: str
    kernel: str | None = None
    machine: str | None = Field(None, description="Vendor and product, as the firmware reports them")
    cpu: str | None = None
    cpu_count: int | None = None
    memory_bytes: int | None = None
    driver: str | None = Field(None, description="Version of the loaded NVIDIA kernel driver")
    gpus: list[str] | None = Field(None, description="Models of the GPUs, one for each")
    drives: list[DriveFacts] | None = None
    speed_hash: str | None = Field(None, description="One hash of what affects speed; equal hashes, comparable records")


class Expectation(Document):
    """What was asked for."""

    name: str = Field(description="Name of the measurement that it applies to")
    value: float
    unit: Literal["B/s", "1/s"] = "B/s"
    source: str = Field(description="--expect, or the path of the manifest")
    status: Status | None = Field(None, description="Result: pass, fail, unstable, unproven or error")


class Confidence(Document):
    """Between which values the truth lies, and how that was found."""

    level: float | None = Field(None, description="Probability that the true median lies between low and high")
    low: float
    high: float
    method: str


class Trend(Document):
    """Whether the samples drift."""

    slope_per_second: float
    significant: bool
    change: float | None = Field(None, description="First to last sample, as a fraction of the median")


class Evidence(Document):
    """A program's claim against what the drives counted."""

    kind: Literal["block", "memory", "none"]
    device: str | None = None
    claimed_bytes: int | None = None
    counted_bytes: int | None = None
    ratio: float | None = None
    worst_ratio: float | None = Field(
        None, description="Of the sample that is farthest from 1, where one proves nothing"
    )


class Measurement(Document):
    """One figure."""

    name: str = Field(description="Made from the figure and its labels, for people and `--figure`; never read back")
    figure: str = Field(description="bandwidth, stall, p99 ...: what is measured")
    labels: Annotated[dict[str, str], AfterValidator(_with_subject)] = Field(
        description="What it was measured of: `subject`, and engine, state, place, direction ... where they apply"
    )
    layer: str = Field(description="filesystem, device, link ...")
    engine: str = Field(description="Program that produced it, with its version")
    medium: str = Field(description="md RAID0 (8 x nvme), disk, tmpfs ...")
    quantity: Literal["bandwidth", "duration", "rate", "latency", "memory", "ratio"]
    unit: Unit
    better: Literal["higher", "lower"]
    value: float = Field(description="Median of the samples")
    samples: list[float] | None = None
    confidence: Confidence | None = None
    trend: Trend | None = None
    percentiles: dict[str, float] | None = None
    parameters: dict[str, Scalar] = Field(default_factory=dict)
    rank: int | None = None
    host: str | None = None
    evidence: Evidence | None = None


class Series(Document):
    """A curve, in a file beside the record."""

    name: str
    unit: str
    rank: int | None = None
    file: Below


class CheckResult(Document):
    """One question about the configuration, with its answer."""

    id: str
    labels: dict[str, str] = Field(
        default_factory=dict, description="As those of a measurement, where several checks differ in them alone"
    )
    status: CheckStatus
    expected: str
    found: str
    remedy: str = ""


ReasonKind = Literal["check", "error", "part", "unproven", "expectation", "note", "outlier", "unknown"]
_KINDS = "Of each reason, what it is about; `expectation`: how a figure compares with what is expected of it"


GoalVerdict = Literal["held", "missed", "not decided", "skipped"]


class GoalResult(Document):
    """A goal, and what was found; without a value where nothing was measured."""

    name: str = Field("", description="For people, from the goals file; without one the figure with its labels")
    run: str = Field(description="The command line that measures it, without `tunetool`")
    figure: str
    labels: dict[str, str] = Field(default_factory=dict)
    of: dict[str, str] | None = Field(None, description="Figure and labels that it is a share of, within each round")
    sense: Literal["at least", "at most"]
    bound: float
    unit: Unit
    why: str = Field("", description="Where the promise comes from")
    verdict: GoalVerdict
    reason: str = Field("", description="Why it is not decided, or was skipped")
    value: float | None = Field(None, description="Median over the rounds")
    confidence: Confidence | None = None
    rounds: int | None = None
    program: str | None = Field(None, description="That measured it, with its version")
    medium: str | None = None
    evidence: list[Evidence] = Field(default_factory=list, description="Of each run whose rounds count")
    record_ids: list[str] = Field(default_factory=list, description="Of these runs")
    host: str | None = None


class Verdict(Document):
    """The judgement. ``reasons`` say what is slow or could not be judged, why, and what to do."""

    status: Status
    reasons: list[str]
    kinds: list[ReasonKind] | None = Field(None, description=_KINDS)


class Rung(Document):
    """One rung of the ladder of level full: a figure, and what it keeps of the one below."""

    name: str = Field(description="Name of the measurement; `drive.read` means all drives together")
    title: str
    kind: str = Field(description="What may be lost here: a key of the ladder's expected shares")
    value: float | None = Field(None, description="Bytes per second")
    below: str | None = Field(None, description="Title of the rung that it is compared with")
    share: float | None = Field(None, description="Value of that rung")
    least: float | None = Field(None, description="Share that is expected")
    loses: bool = Field(False, description="True if none of its samples reaches that share")
    skipped: str | None = Field(None, description="Why it was not measured")


class Loss(Document):
    """The first rung that loses more than expected, and why."""

    rung: str
    cause: Literal[
        "link",
        "slow-drive",
        "shared-link",
        "misalignment",
        "scheduler",
        "mount-options",
        "cpu",
        "one-inode",
        "write-cache",
        "unknown",
    ]
    found: str
    remedy: str


class Ladder(Document):
    """From the bare drives up to a checkpoint."""

    rungs: list[Rung]
    loss: Loss | None = None


class FleetHost(Document):
    """One host of a fleet record; ``record_id`` is left out where the host delivered no record."""

    host: str
    record_id: str | None = None
    status: Status
    reasons: list[str] = Field(default_factory=list)
    kinds: list[ReasonKind] | None = Field(None, description=_KINDS)


class Part(Document):
    """One part of a chain of benchmarks; ``record_id`` and ``run`` are left out where it made no record."""

    name: str
    record_id: str | None = None
    run: Beside | None = Field(None, description="Its record's directory, beside this one's")
    status: Status | Literal["skip"]
    reasons: list[str] = Field(default_factory=list)


class Tool(Document):
    """The tunetool that made a record."""

    version: str
    commit: str | None = Field(None, description="Of the clone that it ran from, or that pip installed")
    source_sha256: str | None = Field(None, description="One hash over the Python files of the package that ran")


class Record(Document):
    """What one run found."""

    schema_name: Literal["tunetool.record/2"] = Field(SCHEMA_NAME, alias="schema")
    kind: str = Field(description="verify, fleet, tune, bench.checkpoint ...")
    id: str
    started: datetime
    finished: datetime
    node: Node
    tool: Tool | None = None
    command: list[str]
    target: str | None = None
    expectations: list[Expectation] = Field(default_factory=list)
    tolerance: float = Field(0.0, description="Fraction of an expectation that may be missing")
    measurements: list[Measurement] = Field(default_factory=list)
    series: list[Series] = Field(default_factory=list)
    checks: list[CheckResult] = Field(default_factory=list)
    ladder: Ladder | None = Field(None, description="Only at level full")
    hosts: list[FleetHost] | None = None
    parts: list[Part] | None = Field(None, description="Of bench.reference and of acceptance: the runs")
    goals: list[GoalResult] | None = Field(None, description="Of acceptance, and of benchmarks with --expect")
    verdict: Verdict | None = None
    sha256: str | None = None

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True, title="tunetool record"
    )


def chosen(measurements: Iterable[Measurement], figure: str | None = None, **labels: str | None) -> list[Measurement]:
    """Those that are of ``figure``, if one is given, and have each of ``labels``; None: that have no such label."""
    return [
        each
        for each in measurements
        if figure in (None, each.figure) and all(each.labels.get(key) == value for key, value in labels.items())
    ]


def new_id() -> str:
    """An id no other run has."""
    return uuid.uuid4().hex


def utc_now() -> datetime:
    """Now, to the millisecond, with its zone."""
    now = datetime.now(timezone.utc)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def to_document(record: Record) -> dict[str, Any]:
    """The record as JSON values, with its checksum; what does not apply is left out."""
    document: dict[str, Any] = record.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["sha256"] = documents.checksum(document)
    return document


def dumps(record: Record, *, compact: bool = False) -> str:
    """The record as text; ``compact`` on one line, ten times as quick, for the many that a fleet keeps."""
    indent = None if compact else 2
    return json.dumps(to_document(record), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def parse(text: str, name: str) -> Record:
    """The record in ``text``; ``name`` says in errors where it came from. Raises ``UsageProblem``."""
    hint = "take the record from the runs directory again, or measure again"
    try:
        document = documents.parse(text)
    except ValueError as error:
        raise UsageProblem(f"`{name}` is not JSON: {error}", hint) from None
    if not isinstance(document, dict):
        raise UsageProblem(f"`{name}` is not a record", hint)
    schema = document.get("schema")
    if schema not in (SCHEMA_NAME, FIRST_SCHEMA):
        raise UsageProblem(
            f"`{name}` has schema `{schema}`, this version reads `{SCHEMA_NAME}`",
            "use the tunetool version that wrote it",
        )
    if document.get("sha256") != documents.checksum(document):
        raise UsageProblem(f"`{name}` is damaged: its checksum does not match", hint)
    if schema == FIRST_SCHEMA:
        document = record_v1.upgraded(document)
    try:
        return Record.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UsageProblem(f"`{name}` is not a record: {field}: {first['msg']}", hint) from None


def read(path: Path) -> Record:
    """The record at ``path`` (the file, or its directory), checksum verified. Raises ``UsageProblem``."""
    file = path / FILE if path.is_dir() else path
    try:
        text = documents.read_bytes(file).decode()
    except OSError as error:
        raise UsageProblem(f"`{file}` cannot be read: {error.strerror}", "name a record or its directory") from None
    except UnicodeDecodeError:
        raise UsageProblem(f"`{file}` is damaged: it is not UTF-8", "measure again") from None
    return parse(text, str(file))


def write(record: Record, runs_dir: Path, raw: Mapping[str, str | bytes] | None = None) -> Path:
    """Keep the record and its raw files; return the record's path. The directory appears whole or not at all."""
    stamp = record.started.astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    host = re.sub(r"[^A-Za-z0-9._-]", "_", record.node.host)
    runs_dir.mkdir(parents=True, exist_ok=True)
    prefix = prefix_of_this_host(".tunetool-record")
    remove_stale_directories(prefix, str(runs_dir))
    handle, path = new_directory(prefix, str(runs_dir))
    temporary = Path(path)
    try:
        temporary.chmod(0o755)
        for name, content in {**(raw or {}), FILE: dumps(record)}.items():
            file = temporary / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as stream:
                stream.write(content.encode() if isinstance(content, str) else content)
                stream.flush()
                os.fsync(stream.fileno())
        final = _claim(temporary, runs_dir, f"{stamp}-{record.kind}-{host}")
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(runs_dir)  # a write names no file
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(handle)
    return final / FILE


def _claim(temporary: Path, runs_dir: Path, name: str) -> Path:
    # Two runs in one second: rename onto a directory that holds something fails, so nobody's record is lost.
    for attempt in range(1, 1000):
        final = runs_dir / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            return temporary.rename(final)
        except OSError:
            if not final.exists():
                raise
    raise FileExistsError(17, "too many records of one second", str(runs_dir / name))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the record."""
    schema = Record.model_json_schema(by_alias=True)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_NAME}
    return {**head, **schema}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")


REPORT = "report.html"
"""File name of the HTML page beside a record."""


def host_file(host: str) -> str:
    """Where a host's own record lies, below the directory of the fleet's."""
    return f"hosts/{re.sub(r'[^A-Za-z0-9._-]', '_', host)}.json"


def newest_beside(runs_dir: Path, kind: str, most: int) -> Iterator[tuple[str, Record]]:
    """Name and record of the newest ``most`` of a kind, as their directories are named; damaged ones are left out."""
    try:
        names = sorted((path.name for path in runs_dir.glob(f"[!.]*-{kind}-*")), reverse=True)
    except OSError:
        return
    for name in names[:most]:
        try:
            record = read(below(runs_dir, f"{name}/{FILE}"))
        except UsageProblem:
            continue
        if record.kind == kind:
            yield name, record


def as_result(check: Check) -> CheckResult:
    """The check for a record."""
    status: Any = check.status
    return CheckResult(id=check.id, status=status, expected=check.expected, found=check.found, remedy=check.remedy)
