"""Records with something to show on their pages: a node whose ladder has a loss, a fleet with bad nodes, hostile texts."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

import builders
from tunetool import record as records
from tunetool.accept.goal import Goal, Pick
from tunetool.accept.judge import judged, skipped, verdict_over
from tunetool.fleet.verify import name_outliers
from tunetool.measure import Direction
from tunetool.measure.evidence import Counted
from tunetool.measure.figures import ceiling_figure
from tunetool.measure.ladder.causes import DriveFacts as LadderDrive
from tunetool.measure.ladder.causes import Facts
from tunetool.measure.ladder.plan import conclude
from tunetool.node.machine.block_stack import BlockStack, Leaf
from tunetool.record import (
    CheckResult,
    DriveFacts,
    Evidence,
    Expectation,
    FleetHost,
    Link,
    Measurement,
    Node,
    Part,
    Record,
    Scalar,
    Tool,
    Verdict,
)
from tunetool.report.kinds import print_record
from tunetool.report.page import WIDTH
from tunetool.tune.outcome import Work
from tunetool.tune.outcome import conclude as conclude_search
from tunetool.tune.request import Request
from tunetool.tune.samples import Move, Sample, Samples
from tunetool.tune.search import Plan, Search
from tunetool.tune.settings import DEFAULTS, SWEEP, AioSettings, settings_of
from tunetool.verdict import CEILING, judge

GB = 10**9
FEW = [AioSettings(2**20, depth, threads, False, True) for depth, threads in ((32, 1), (8, 8), (32, 8))]
MEDIUM = "md RAID0 (8 x nvme)"
COUNTED = Evidence(kind="block", device="md0", claimed_bytes=10**12, counted_bytes=10**12 + 10**8, ratio=1.0001)
TOOL = Tool(version="0.1.0", commit="c" * 40, source_sha256="5" * 64)


def node(host: str = "node1", kernel: str = "6.8.0", drives: int = 8) -> Node:
    return Node(
        host=host,
        kernel=kernel,
        machine="Supermicro AS-8125GS",
        cpu="AMD EPYC 9654",
        cpu_count=192,
        memory_bytes=2 * 2**40,
        driver="580.65",
        drives=[
            DriveFacts(
                name=f"nvme{n}n1",
                serial=f"S{n:03d}",
                model="KCD8XPUG7T68",
                firmware="0106",
                size_bytes=7_680_000_000_000,
                pci_address=f"0000:{n:02x}:00.0",
                link=Link(current_speed_gts=32.0, current_width=4, max_speed_gts=32.0, max_width=4),
            )
            for n in range(drives)
        ],
    )


def figure(name: str, value: float, spread: float = 0.03, **fields: Any) -> Measurement:
    source = random.Random(name)
    samples = [value * (1 + spread * (source.random() - 0.5)) for _ in range(6)]
    return builders.sampled(name, *samples, **{"medium": MEDIUM, "evidence": COUNTED, **fields})


def rates() -> list[Measurement]:
    sizes = (("1m", 45_000, 2**20), ("64k", 600_000, 2**16), ("4k", 5_200_000, 2**12))
    return [
        figure(
            f"random.read.{size}",
            rate,
            quantity="rate",
            unit="1/s",
            percentiles={"p50": 9e-5, "p99": 0.0012, "p99.9": 0.011},
            parameters={"direction": "read", "block_bytes": block, "jobs": 16, "queue_depth": 64},
        )
        for size, rate, block in sizes
    ]


def verified(slow: float = 2.1) -> Record:
    """One node at level full, whose sixth drive reads ``slow`` GB/s."""
    speeds = [7.0, 6.98, 7.02, 6.99, 7.01, slow, 7.0, 6.97]
    alone = [
        figure("drive.read", speed * GB, medium="nvme disk", parameters={"serial": f"S{n:03d}", "device": f"nvme{n}n1"})
        for n, speed in enumerate(speeds)
    ]
    stripe = 8 * min(speeds)
    together = [
        figure(
            f"drives.read.{count}",
            min(speeds[:count]) * count * 0.98 * GB,
            parameters={"drives": count, "sum_alone": sum(speeds[:count]) * GB},
        )
        for count in (2, 4, 8)
    ]
    upper = {
        "array.read": 0.99 * stripe,
        "sequential.read": 0.97 * stripe,
        "sequential.write": 0.5 * stripe,
        "sequential.read.io_uring": 0.96 * stripe,
        "sequential.write.io_uring": 0.5 * stripe,
        "sustained.write": 0.48 * stripe,
    }
    above = [
        figure(name, value * GB, parameters={"direction": "write" if "write" in name else "read"})
        for name, value in upper.items()
    ]
    measured = [*alone, *together, *above, *rates()]
    known = [LadderDrive(f"S{n:03d}", f"nvme{n}n1", speed * GB) for n, speed in enumerate(speeds)]
    ladder = conclude(measured, {"checkpoint.load": "no torch"}, {}, lambda: Facts(known, cores=192))
    fails = slow < 6
    reason = "sequential read 16.3 GB/s [16.1 to 16.5] is below 50.0 GB/s: `S005` reads 2.1 GB/s alone; replace it"
    return builders.record(
        builders.measurement(CEILING, 63 * GB, layer="link", parameters={"drives": 8}),
        *measured,
        node=node(),
        tool=TOOL,
        command=["tunetool", "verify", "--level", "full", "--expect", "50GBps"],
        target="/mnt/nvme_raid0",
        tolerance=0.05,
        expectations=builders.wanted_read("fail" if fails else "pass"),
        checks=[
            *(check(f"array.{name}", "pass") for name in ("assembled", "state", "members", "chunk", "initramfs")),
            check("drives.balance", "fail" if fails else "pass", "`S005` 3.4x slower to read than the others"),
            check("training.environment", "skip", "the role is off"),
        ],
        ladder=ladder,
        verdict=Verdict(status="fail" if fails else "pass", reasons=[reason] if fails else []),
    )


def check(name: str, status: str, found: str = "as it was built") -> CheckResult:
    remedy = "look at `/dev/nvme5n1`: `nvme smart-log`; replace it if it stays slow" if status == "fail" else ""
    fields = {"id": name, "status": status, "expected": "what the manifest has", "found": found, "remedy": remedy}
    return CheckResult.model_validate(fields)


def fleet(count: int = 40) -> tuple[Record, dict[str, Node], dict[str, list[str]]]:
    """A fleet with one failed node, one that gave no record, and some slow ones; its machines, and its racks."""
    source = random.Random(7)
    hosts: list[tuple[FleetHost, Record | None]] = []
    nodes = {}
    for number in range(1, count + 1):
        name = f"node{number:04d}"
        if number == 9:
            hosts.append(
                (FleetHost(host=name, status="error", reasons=["Failed to connect to the host via ssh"]), None)
            )
            continue
        speed = (51 + source.random()) * GB * (0.6 if number in (7, 23) else 1)
        reasons = ["array.state: degraded, expected clean: replace `S003`"] if number == 17 else []
        status = "fail" if reasons else "pass"
        nodes[name] = node(name, "6.8.0-odd" if number == 5 else "6.8.0", 7 if number == 17 else 8)
        figures = [
            figure(f"sequential.{direction}", speed * share, parameters={"direction": direction})
            for direction, share in (("read", 1.0), ("write", 0.5))
        ]
        made = builders.record(*figures, node=nodes[name], verdict=Verdict(status=status, reasons=reasons))
        hosts.append((FleetHost(host=name, record_id=made.id, status=status, reasons=reasons), made))
    named = name_outliers(hosts)
    figures = [
        each.model_copy(update={"host": host.host})
        for host, made in named
        for each in (made.measurements if made else [])
    ]
    reasons = [f"{host.host}: {host.reasons[0]}" for host, _ in named if host.status != "pass"]
    whole = builders.record(
        *figures,
        kind="fleet",
        tool=TOOL,
        command=["tunetool", "verify", "-i", "inventory/mycluster"],
        expectations=[Expectation(name="sequential.read", value=50e9, source="--expect")],
        hosts=[host for host, _ in named],
        verdict=Verdict(status="fail", reasons=reasons),
    )
    return whole, nodes, {host.host: [f"rack{number % 4 + 1}"] for number, (host, _) in enumerate(hosts)}


TEXTS = {
    *("found", "expected", "remedy", "medium", "engine", "host", "target", "model", "firmware", "kernel", "machine"),
    *("cpu", "driver", "title", "method", "serial", "source", "below", "commit", "name", "rung", "device"),
    *("mix", "goal", "checksum", "source_medium", "binds"),
}
"""Keys of a record whose values are texts of other programs or of people."""


def spoiled(value: Any, text: str, keys: Collection[str], key: str = "") -> Any:
    """A document whose texts under these keys end with ``text``."""
    if isinstance(value, dict):
        return {name: spoiled(inner, text, keys, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [spoiled(inner, text, keys, key) for inner in value]
    return f"{value}{text}" if isinstance(value, str) and key in keys else value


def hostile(record: Record, text: str, names: bool = False) -> Record:
    """The record with ``text`` after the beginning of whatever a stranger could have written; with ``names``, in
    names of figures and in labels that are no numbers too."""

    document = records.to_document(record)
    del document["sha256"]
    kept = [each["name"] for each in document.get("measurements", [])]
    document = spoiled(document, text, {*TEXTS, "reasons", "command"})
    for each, name in zip(document.get("measurements", []), kept, strict=True):
        # The ends of a figure's name choose what is shown of it.
        first, *between, last = name.split(".")
        each["name"] = ".".join([first, *(f"{part}{text}" for part in between), last]) if names else name
        if names:
            each["labels"] = {
                key: value if key == "subject" or value.isdecimal() else f"{value}{text}"
                for key, value in each["labels"].items()
            }
    return Record.model_validate(document)


@dataclass
class SimulatedHandle:
    """Speeds that grow with block, depth and threads up to what the drives give; a clock; and every sample."""

    io_bytes: int = 2**28
    engine: str = "aio_handle (deepspeed 0.19.8, torch 2.11.0)"
    now: float = 0.0
    kept: dict[AioSettings, dict[Direction, list[Sample]]] = field(default_factory=dict)
    random: random.Random = field(default_factory=lambda: random.Random(11))

    def take(self, settings: AioSettings, direction: Direction) -> float:
        limit = (48.0 if direction == "read" else 26.0) * GB
        alone = 30 * GB * settings.intra_op_parallelism * settings.queue_depth / (settings.queue_depth + 6)
        alone *= 0.8 if settings.single_submit else 1.0
        rate = limit * alone / (limit + alone) * math.exp(0.02 * self.random.gauss(0, 1))
        self.now += self.io_bytes / rate + 0.02
        sample = Sample(rate, self.io_bytes, Counted(self.io_bytes, self.io_bytes + 4096, {}), self.now)
        self.kept.setdefault(settings, {}).setdefault(direction, []).append(sample)
        return rate

    def move(self, settings: AioSettings, direction: Direction) -> Move:
        raise AssertionError("the samples are taken by `take`")


STACK = BlockStack(
    *("/mnt/nvme_raid0", None, "xfs", "md127", "9:127", MEDIUM),
    tuple(Leaf(f"nvme{n}n1", "nvme", f"S{n:03d}", True, (f"nvme{n}n1",)) for n in range(8)),
    redundant=False,
    in_memory=False,
)
LINKS = ceiling_figure(STACK, 63 * GB)


@cache
def tuned(*space: AioSettings) -> Record:
    """A whole search over these settings, by default all of ds_nvme_tune's, on a simulated machine."""
    request = Request(Path(STACK.directory), [*space] or settings_of(SWEEP))
    handle = SimulatedHandle()
    found = Search(Plan(request.space, request.mix, 45.0), handle.take, lambda: handle.now).run()
    samples = Samples(handle, STACK, lambda: handle.now, kept=handle.kept)
    read_back = check("tune.block", "pass", "deepspeed 0.19.8 understood all 7 settings as written")
    case = conclude_search(request, STACK, Work(samples, found, [read_back])).case
    return builders.record(
        *case.measurements,
        LINKS,
        kind="tune",
        node=node(),
        tool=TOOL,
        command=["tunetool", "tune", "--target", STACK.directory, "-o", "aio.json"],
        target=STACK.directory,
        checks=list(case.checks),
        verdict=judge(case),
    )


def staged(**parameters: Scalar) -> Record:
    """A copy of a model from a file server to memory."""
    moved: dict[str, Scalar] = {
        **{
            "source": "/srv/models/qwen",
            "source_medium": "nfs4",
            "bytes": 16_381_516_776,
            "seconds": 9.42,
            "files": 27,
        },
        **{"direct_bytes": 0, "reading_seconds": 261.3, "checksum_seconds": 1.9, "writing_seconds": 8.4},
        **{"cpu_seconds": 12.6, "cpus": 192, "cpu_busy": 0.07, "binds": "source", "threads": 32, "checksum": "xxh3_64"},
        **parameters,
    }
    copied = builders.measurement("stage.copy", 16_381_516_776 / 9.42, medium="tmpfs", parameters=moved)
    return builders.record(
        copied,
        kind="stage",
        node=node(),
        tool=TOOL,
        command=["tunetool", "stage", "/srv/models/qwen", "/dev/shm/qwen"],
        target="/dev/shm/qwen",
        verdict=Verdict(status="pass", reasons=[]),
    )


def handled(depth: int = 32, threads: int = 1, speed: float = 9.1, direction: Direction = "write") -> Record:
    """One run of DeepSpeed's handle; a write is timed with and without its sync."""
    given: dict[str, Scalar] = {
        **{"direction": direction, "device": "cpu", "block_bytes": 2**20, "queue_depth": depth},
        **{"intra_op_parallelism": threads, "single_submit": False, "overlap_events": True, "file_bytes": 2**30},
    }
    names = {f"ds_io.{direction}": speed} | ({"ds_io.write_durable": 0.92 * speed} if direction == "write" else {})
    figures = [
        figure(name, value * GB, parameters=given, engine=SimulatedHandle.engine) for name, value in names.items()
    ]
    return builders.record(
        *figures,
        LINKS,
        kind="bench.ds-io",
        id=f"{depth:016x}{threads:016x}",
        node=node(),
        tool=TOOL,
        command=["tunetool", "bench", "ds-io", "--target", STACK.directory, "--queue_depth", str(depth)],
        target=STACK.directory,
        verdict=Verdict(status="pass", reasons=[]),
    )


def over_time(count: int = 12, host: str = "node1") -> list[Record]:
    """Records of a node whose seventh and later ones are slower."""
    made = []
    for number in range(count):
        day = builders.NOW + timedelta(days=7 * number)
        speed = (51 if number < 6 else 44) * GB
        figures = [figure("sequential.read", speed * (1 + 0.002 * (number % 3)), 0.04)]
        times = {"started": day, "finished": day + timedelta(seconds=60)}
        status = Verdict(status="pass" if number < 6 else "fail", reasons=[])
        made.append(builders.record(*figures, id=f"{number:032x}", node=node(host), tool=TOOL, verdict=status, **times))
    return made


def all_kinds() -> Sequence[Record]:
    """A record of each kind whose page needs nothing else."""
    return [verified(), fleet(12)[0], tuned(DEFAULTS, *FEW), staged(), handled(), evicted(), accepted()]


def accepted() -> Record:
    """Goals of one node: held, missed, of which too few rounds were made, and skipped."""
    read = builders.sampled("sequential.read", *(n * GB for n in (50, 51, 52, 53, 54, 55)), evidence=builders.PROVEN)
    write = builders.sampled("sequential.write", 20 * GB, 21 * GB, evidence=builders.PROVEN)
    measured = [builders.record(read, write, verdict=Verdict(status="pass", reasons=[]))]
    picks = [Pick("bandwidth", {"direction": direction}) for direction in ("read", "read", "write")]
    run = ("verify", "--target", "/mnt/nvme_raid0")
    bounds = (48 * GB, 60 * GB, 26 * GB)
    goals = [
        Goal(run, pick, None, "at least", bound, "B/s", "the seller's offer of May")
        for pick, bound in zip(picks, bounds, strict=True)
    ]
    memory = Goal(
        ("bench", "loading", "--model", "7b"), Pick("warm", {"engine": "direct"}), None, "at least", 1e9, "B/s"
    )
    results = [*(judged(each, measured) for each in goals), skipped(memory, "it needs root")]
    return builders.record(
        kind="acceptance",
        node=node(),
        tool=Tool(version="0.1.0", commit="0" * 40),
        goals=results,
        parts=[Part(name="verify --target /mnt/nvme_raid0", record_id="0" * 32, run="verify-node1", status="pass")],
        verdict=verdict_over(results),
    )


def evicted() -> Record:
    """A record without a figure."""
    return builders.record(kind="stage", checks=[check("stage.evicted", "pass")])


def on_screen(record: Record, path: Path | None = None, width: int = WIDTH) -> str:
    """What a terminal shows of a record."""
    stream = io.StringIO()
    print_record(record, path, Console(file=stream, width=width, highlight=False))
    return stream.getvalue()
