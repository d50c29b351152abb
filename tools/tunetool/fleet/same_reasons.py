"""The hosts of a fleet that did not pass for the same reason. Pure, and quick to import: every table of hosts asks."""

from __future__ import annotations

from collections.abc import Sequence

from tunetool.fleet.outliers import OUTLIER
from tunetool.node.play import reasons
from tunetool.record import FleetHost


def same_reasons(hosts: Sequence[FleetHost]) -> list[reasons.SameReason]:
    """Two hosts or more without a pass, for the same first reason."""
    groups = reasons.by_reason(
        (host.host, host.status.upper(), next((each for each in host.reasons if not each.startswith(OUTLIER)), ""))
        for host in hosts
        if host.status != "pass"
    )
    return [group for group in groups if group.reason and len(group.hosts) > 1]
