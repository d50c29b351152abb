"""An inspection of one node as an HTML page: what to repair, what limits, and its drives and GPUs with their links."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from tunetool.inspect.model import Drive, Gpu, Inspection, PciNode, dumps
from tunetool.measure.made_by import made_by
from tunetool.node.common.files import replace_file
from tunetool.node.units import format_count
from tunetool.report.html import of_tool, render
from tunetool.report.inspection import (
    DRIVE_TITLES,
    RIGHT,
    array_words,
    cpu_words,
    drive_cells,
    driver_words,
    filesystem_words,
    isolation_words,
    job_words,
    machine_words,
    memory_words,
)
from tunetool.report.pcie_tree import link_words, pcie
from tunetool.view.plots import Bar, bars
from tunetool.view.text import number

_CEILING, _BINDS = "#1f6feb", "#d55e00"
_PCIE = "PCIe: root, switches, address"
_DRIVE_TITLES = ("drives", "model", "size", "link", "NUMA", _PCIE, "use")
_CARE_TITLES = ("drives", "serial", "firmware", "health", "temp", "wear", "LBA")
_GPU_TITLES = ("GPUs", "model", "link", "NUMA", _PCIE)


def write_page(shown: Inspection, path: Path, command: Sequence[str], taken: datetime) -> None:
    """Write the page to ``path`` by rename."""
    replace_file(str(path), page(shown, command, taken))


def page(shown: Inspection, command: Sequence[str], taken: datetime) -> str:
    """The text of the page; ``taken``: when the page was made."""
    above = dict(_above(shown.pcie))
    source = "this machine" if shown.source == "machine" else "a recording"
    return render(
        "inspection.html.j2",
        host=shown.host.name or "(no name)",
        summary=format_count(len(shown.findings), "finding") if shown.findings else "no findings",
        taken=taken,
        source=source,
        findings=shown.findings,
        note=shown.note,
        limits=list(_limits(shown)),
        ceilings=_plot(shown),
        drive_titles=[(title, title in RIGHT) for title in _DRIVE_TITLES],
        drives=[
            (drive.link.downgraded, _drive_row(drive, _DRIVE_TITLES, _where(drive.pci_address, above)))
            for drive in shown.drives
        ],
        care_titles=[(title, title in RIGHT) for title in _CARE_TITLES],
        care=[(_is_ill(drive), _drive_row(drive, _CARE_TITLES)) for drive in shown.drives],
        health_note=shown.health_note,
        gpu_titles=[(title, title in RIGHT) for title in _GPU_TITLES],
        gpus=[(gpu.link.downgraded, _gpu_row(gpu, above)) for gpu in shown.gpus],
        driver=driver_words(shown),
        tree="\n".join(line.rstrip() for line in pcie(shown)).strip("\n"),
        facts=[
            ("node", machine_words(shown.host)),
            *(("CPUs", line) for line in cpu_words(shown.host)),
            *(("inside", line) for line in isolation_words(shown.host)),
            *(("memory", line) for line in memory_words(shown)),
            *(("array", line) for line in array_words(shown)),
            *(("mount", line) for line in filesystem_words(shown)),
            *(("job", line) for line in job_words(shown)),
        ],
        gds=shown.gds,
        paths=[path for path in shown.gds.paths if path.mode != "off" or shown.gds.mode == "off"],
        evidence={
            "summary": f"Read from {source}: /sys, /proc and a few files. Nothing was measured; the speed of a link is "
            "what both its ends agreed on.",
            "rows": (),
        },
        command=shlex.join(command),
        provenance=[
            *of_tool(made_by()),
            *([("inspected by", f"tunetool {shown.tool_version}")] if shown.tool_version != made_by().version else []),
            ("hash of the inspection", f"sha256 {hashlib.sha256(dumps(shown).encode()).hexdigest()}"),
            ("source", source + (f": {shown.note}" if shown.note else "")),
        ],
    )


def _limits(shown: Inspection) -> Iterator[str]:
    for ceiling in shown.ceilings:
        if ceiling.binds:
            yield f"{ceiling.id}: {number((ceiling.value or 0.0) / 1e9)} GB/s, {ceiling.of}"
    if shown.ceilings and not any(ceiling.binds for ceiling in shown.ceilings):
        unknown = [f"{ceiling.id} ({ceiling.of})" for ceiling in shown.ceilings if ceiling.value is None]
        yield f"not known: {'; '.join(unknown) or 'no data drives'}"


def _plot(shown: Inspection) -> str:
    known = []
    for ceiling in shown.ceilings:
        if ceiling.value is not None:
            speed = ceiling.value / 1e9
            name, colour = (f"{ceiling.id}: binds", _BINDS) if ceiling.binds else (ceiling.id, _CEILING)
            known.append(Bar(name, speed, speed, speed, colour))
    return bars("ceilings, GB/s, from the speed and width of the links", known) if known else ""


def _is_ill(drive: Drive) -> bool:
    return drive.health is not None and drive.health.status in ("warning", "failing")


def _above(nodes: Sequence[PciNode], path: Sequence[str] = ()) -> Iterator[tuple[str, Sequence[str]]]:
    """By address of a device, the root complex and the switches that its bytes go through."""
    for node in nodes:
        if node.kind in ("root", "switch"):
            name = node.label if node.kind == "root" else f"switch {node.address}"
            yield from _above(node.children, [*path, name])
        else:
            yield node.address, path


def _where(address: str | None, above: Mapping[str, Sequence[str]]) -> str:
    return " / ".join([*above.get(address, ()), address]) if address else "-"


def _drive_row(drive: Drive, titles: Sequence[str], where: str = "") -> list[str]:
    cells = dict(zip(DRIVE_TITLES, drive_cells(drive), strict=True)) | {_PCIE: where}
    return [cells[title] for title in titles]


def _gpu_row(gpu: Gpu, above: Mapping[str, Sequence[str]]) -> list[str]:
    numa = "-" if gpu.numa_node is None else str(gpu.numa_node)
    return [str(gpu.index), gpu.model, link_words(gpu.link), numa, _where(gpu.address, above)]
