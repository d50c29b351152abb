"""What the causes must know of the machine, read where machines are read, put together with the figures."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tunetool.measure.ladder.causes import DriveFacts, Facts, SharedLink, Step
from tunetool.measure.ladder.raw import ALONE
from tunetool.node.array.stripe import NoStripe, read_stripe
from tunetool.node.machine.block_stack import BlockStack, active_scheduler
from tunetool.node.machine.drives import Drive
from tunetool.node.machine.file_system import BUILT
from tunetool.node.machine.pcie_links import link_bandwidth, shared_ports
from tunetool.record import Measurement, Rung


def read_facts(
    stack: BlockStack, drives: Sequence[Drive], measurements: Sequence[Measurement], root: str = "/"
) -> Facts:
    """Facts of what lies under the stack."""
    below = [drive for drive in drives if drive.name in {leaf.name for leaf in stack.leaves}]
    alone = {str(m.parameters["device"]): m for m in measurements if m.name == ALONE}
    ports = shared_ports(below, root)
    geometry = BUILT.mounted_stripe(stack.mount.options) if stack.mount else None
    return Facts(
        drives=[_drive(drive, alone.get(drive.name), root) for drive in below],
        shared=[
            SharedLink(
                port.address,
                link_bandwidth(port.link) or 0.0,
                f"{port.link.current_speed_gts:g} GT/s x{port.link.current_width}",
                port.serials,
            )
            for port in ports
        ],
        cores=os.cpu_count() or 1,
        chunk_bytes=_chunk(stack, root),
        stripe_unit_bytes=geometry[0] if geometry else None,
        stripe_width_bytes=geometry[1] if geometry else None,
        mount_options=stack.mount.options if stack.mount else (),
    )


def _chunk(stack: BlockStack, root: str) -> int | None:
    try:
        return read_stripe(stack.device, root).chunk_bytes if stack.device else None
    except NoStripe:
        return None


def _drive(drive: Drive, alone: Measurement | None, root: str) -> DriveFacts:
    return DriveFacts(
        serial=drive.serial or drive.name,
        name=drive.name,
        alone=alone.value if alone else None,
        best=alone.confidence.high if alone and alone.confidence else None,
        link=drive.link,
        scheduler=active_scheduler(drive.name, root),
    )


def step_of(rung: Rung, measurements: Sequence[Measurement]) -> Step:
    """What the diagnosis needs to know about a rung that loses."""
    measurement = next(m for m in measurements if m.name == rung.name)
    parameters = measurement.parameters
    trend = measurement.trend
    serials = str(parameters.get("serials", "")) if rung.kind == "together" else ""
    single = rung.kind == "checkpoint"
    return Step(
        title=rung.title,
        kind=rung.kind,
        value=rung.value or 0.0,
        share=rung.share or 0.0,
        below=rung.below or "",
        direction=str(parameters.get("direction", "read")),
        serials=serials.split(", ") if serials else (),
        cores_used=float(parameters.get("cores_used", 0.0)),
        threads=1 if single else None,
        files=1 if single or measurement.name.startswith("deepspeed.") else None,
        falling=trend is not None and trend.significant and (trend.change or 0.0) < 0,
    )
