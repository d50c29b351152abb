"""Whole ds_configs: computed, rendered, checked by DeepSpeed itself, then written, with a reason for each value."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from tunetool import regular_files
from tunetool.advise import zero
from tunetool.advise.ds_config import NVME_KINDS, plan
from tunetool.advise.ds_config_plan import Job, Node, Plan
from tunetool.advise.precision import Asked, Precision, choose
from tunetool.advise.read_model import load_model
from tunetool.errors import UsageProblem
from tunetool.measure.aio.driver import memlock
from tunetool.measure.direct_addresses import Addresses, addresses
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import free_bytes
from tunetool.node.common.files import read_text, replace_file
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.memory import memory_total
from tunetool.node.units import format_size, format_size_binary
from tunetool.tune.check import Accepted, Classes, Facts, check_config, ready
from tunetool.tune.settings import NAMES, AioSettings, from_block

TEMPLATES = Path(__file__).resolve().parents[1] / "templates/ds_config"
PUBLISHED_70B = {"model": "70b", "micro_batch": 2, "batch": 2048}
"""Defaults of the kind `zero3-nvme-70b`, as it was published."""


@dataclass(frozen=True)
class Request:
    """The options of the call; None: the value of the kind or of this machine."""

    kind: str
    output: Path
    target: Path
    python: Path
    model: str | None = None
    world: int = 8
    nodes: int = 1
    micro_batch: int | None = None
    batch: int | None = None
    precision: Asked = "auto"
    memory_bytes: int | None = None
    space_bytes: int | None = None
    address_bytes: int | None = None
    """Alignment that direct I/O needs of an address on the job's node; None: a read in ``target`` shows it."""


@dataclass(frozen=True)
class Written:
    """The files that were written, and DeepSpeed's answer."""

    config: Path
    explained: Path
    accepted: Accepted
    plan: Plan


def read_settings(path: Path) -> AioSettings:
    """The `aio` block in a JSON file, such as `tunetool tune` writes. Raises ``UsageProblem``."""
    try:
        document = regular_files.read_json(path)
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "`--aio` takes a JSON file") from None
    except ValueError as error:
        raise UsageProblem(f"`{path}` is not JSON: {error}", "comments are not JSON either") from None
    block = document.get("aio", document) if isinstance(document, dict) else None
    if not isinstance(block, dict):
        raise UsageProblem(f"`{path}` holds no `aio` block", 'such as {"aio": {"block_size": 1048576, ...}}')
    unknown, missing = sorted(set(block) - set(NAMES)), sorted(set(NAMES) - set(block) - {"use_gds"})
    if unknown or missing:
        what = f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}"
        raise UsageProblem(f"`{path}`: {what}", f"DeepSpeed reads {', '.join(NAMES)} and ignores anything else")
    for name in NAMES[:3]:
        if isinstance(block[name], bool) or not isinstance(block[name], int) or block[name] < 1:
            raise UsageProblem(f"`{path}`: `{name}` is `{block[name]!r}`", "it must be a whole number, 1 or more")
    for name in NAMES[3:]:
        if not isinstance(block.get(name, False), bool):
            raise UsageProblem(f"`{path}`: `{name}` is `{block[name]!r}`", "it must be true or false, without quotes")
    return from_block({"use_gds": False, **block})


def write_config(request: Request, aio: AioSettings, environment: Mapping[str, str], progress: Progress) -> Written:
    """Compute a configuration, check it and write it. An error is raised before anything is written."""
    defaults: Mapping[str, Any] = PUBLISHED_70B if request.kind == "zero3-nvme-70b" else {}
    model = load_model(request.model or str(defaults.get("model", "70b")))
    job = Job(
        kind=request.kind,
        model=model,
        aio=aio.block(),
        nvme_path=str(request.target.absolute()),
        world=request.world,
        nodes=request.nodes,
        micro_batch=request.micro_batch or int(defaults.get("micro_batch", 1)),
        batch=request.batch or defaults.get("batch"),
    )
    installed = ready(request.python, environment, job.aio)
    with progress.step("asking DeepSpeed what it computes on", 10), Classes(request.python, environment) as classes:
        facts = classes.facts()
        reached = _addresses(request)
        node = Node(
            memory_bytes=request.memory_bytes or memory_total() - hugepages_bytes(),
            memlock=memlock(),
            free_bytes=request.space_bytes or free_bytes(request.target),
            address_bytes=reached.alignment,
            address_why=reached.why,
            gpu=facts.accelerator != "cpu",
            precision=precision_of(request.precision, facts),
        )
        planned = plan(job, node)
        document = render(planned)
        accepted = check_config(document, job.world, classes, installed, request.target, environment, progress)
    explained = request.output.with_suffix(".md")
    text = explanation(planned, document, accepted, request.output.name)
    replace_file(str(explained), text)
    replace_file(str(request.output), json.dumps(document, indent=2) + "\n")
    if any(path.endswith("offload_optimizer.device") for path, _ in leaves(document)) and not installed.has("cpu_adam"):
        progress.say("DeepSpeed's op `cpu_adam` is not built: the job would compile it, `tunetool build-ops` does now")
    return Written(request.output, explained, accepted, planned)


def precision_of(asked: Asked, facts: Facts) -> Precision:
    """The number format of the configuration; what was asked for is taken, since the job may run on other nodes."""
    if asked == "auto" and not facts.capabilities:
        has = "has" if facts.bf16 else "lacks"
        return Precision("bf16" if facts.bf16 else "fp16", f"DeepSpeed's accelerator `{facts.accelerator}` {has} bf16")
    return choose(asked, facts.capabilities)


def _addresses(request: Request) -> Addresses:
    """Where direct I/O reaches on the job's node."""
    if request.kind not in NVME_KINDS:
        return Addresses(zero.SECTOR, "nothing is swapped")
    if request.address_bytes is not None:
        return Addresses(request.address_bytes, f"`--dma-alignment {request.address_bytes}` says so of the job's node")
    return addresses(request.target, read_stack(str(request.target)))


def hugepages_bytes(root: str = "") -> int:
    """Bytes reserved for huge pages, which DeepSpeed does not use."""
    match = re.search(r"^Hugetlb:\s+(\d+) kB$", read_text(f"{root}/proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def render(planned: Plan) -> dict[str, Any]:
    """The configuration from the kind's template and the values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        autoescape=False,  # noqa: S701  (JSON, and values go through `tojson`)
    )
    text = environment.get_template(f"{planned.job.kind}.json.j2").render(planned.values)
    document: dict[str, Any] = json.loads(text)
    return document


def explanation(planned: Plan, document: Mapping[str, Any], accepted: Accepted, name: str) -> str:
    """Markdown: every value with unit, formula and reason; memory and files per rank and per node."""
    job, node = planned.job, planned.node
    ranks = f"{job.world} ranks on {job.nodes} node{'s' if job.nodes > 1 else ''}"
    lines = [
        f"# {name}: {job.kind} for {job.model.name} on {ranks}",
        "",
        f"Model: {job.model.numel:,} parameters in {len(job.model.tensors)} tensors; {job.model.source}. "
        f"The largest is `{job.model.largest.name}`, {job.model.largest.numel:,} elements.",
        f"Node: {format_size_binary(node.memory_bytes)} of memory, "
        f"{'no limit on' if node.memlock is None else format_size_binary(node.memlock) + ' of'} locked memory, "
        f"{'GPU' if node.gpu else 'no GPU'}, {node.precision}.",
        f"Checked: {accepted}.",
        "",
        "## Values",
        "",
        "| key | value | unit | formula | why |",
        "|---|---|---|---|---|",
    ]
    for path, value in leaves(document):
        reason = planned.reasons[path]
        lines.append(f"| `{path}` | `{json.dumps(value)}` | {reason.unit} | {reason.formula} | {reason.why} |")
    lines += ["", "## What it takes", "", "| what | where | per rank | per node |", "|---|---|---|---|"]
    for item in planned.items:
        size, where = _sizes(item.where), {"locked": "memory, locked", "host": "memory"}.get(item.where, item.where)
        node_bytes = item.rank_bytes * job.ranks_per_node
        lines.append(f"| {item.name} | {where} | {size(item.rank_bytes)} | {size(node_bytes)} |")
    total = planned.rank_bytes("host", "locked")
    if total:
        per_node = format_size_binary(total * job.ranks_per_node)
        lines.append(f"| all memory of the node | memory | {format_size_binary(total)} | {per_node} |")
    lines += ["", "DeepSpeed counts elements, not bytes: 2 bytes each for parameters, 4 for the optimizer's states."]
    return "\n".join([*lines, *planned.notes]) + "\n"


def leaves(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted path."""
    for key, value in document.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from leaves(value, inner)
        else:
            yield inner, value


def _sizes(where: str) -> Any:
    return format_size if where == "nvme" else format_size_binary


def check_output(output: Path) -> None:
    """Raises ``UsageProblem`` if the files cannot be written."""
    if output.is_dir() or output.suffix == ".md":
        raise UsageProblem(f"`-o {output}` is not a name for a JSON file", "such as `-o ds_config.json`")
    if not os.access(output.absolute().parent, os.W_OK | os.X_OK):
        raise UsageProblem(f"`{output}` cannot be written", "`-o` takes a file in a directory that exists")
