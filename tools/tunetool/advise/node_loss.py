"""What one lost node costs a job, by what is drained to shared storage alone and with replicas on other nodes. Pure.

Times are in seconds, sizes in bytes. The formulas and their sources: docs/guides/advise-checkpoint.md. First order: no
second loss falls into the rework of the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tunetool.advise.checkpoint import DALY, RULE, Job, State

DAY = 86400.0
MONTH = 365.25 / 12 * DAY
DEFAULT_NODE_MTBF = 2048 * 54 * DAY / 419
"""Mean time between failures of one node of eight H100, seconds: 419 unexpected interruptions of 16,384 GPUs in 54 days
(The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.4 and table 5). Each is counted as a lost node."""
KEPT = 2
"""Whole replicas of a node that its peer keeps; one more is being made beside them."""
LONGEST_DRAIN = DAY
"""Scratch is no archive: with replicas, too, a step leaves the nodes at least this often."""


@dataclass(frozen=True)
class Copies:
    """Where copies of a checkpoint go."""

    shared: float
    """Speed at which shared storage takes the drains of all nodes together."""
    network: float | None
    """Speed of a node's link to the node that keeps its replicas; None: there are no replicas."""
    parts: int
    """Nodes that hold a part of the state."""


@dataclass(frozen=True)
class Cost:
    """What the loss of one node costs."""

    mean: float
    """Training time that one loss costs on average."""
    most: float
    month: float
    """Training time that the losses of a month cost on average."""
    drain_every: float
    """Seconds from one drain to the next."""
    shared_busy: float
    """Share of the time in which shared storage takes drains."""
    replicate_every: float | None = None
    replica: float | None = None
    """Seconds until a replica is there."""
    network_busy: float | None = None
    """Share of the time in which the link sends replicas, and as much receives some."""
    peer_bytes: int | None = None
    """Room that the replicas take on the other node."""


@dataclass(frozen=True)
class LostNode:
    """The cost by drains alone, and with replicas; None where they are not asked for."""

    drained: Cost
    replicated: Cost | None
    part: int
    """Bytes of one node's part of a checkpoint."""
    period: float
    """Seconds from one save to the next."""

    @property
    def is_worth_it(self) -> bool:
        """Whether replicas are there sooner than drains."""
        return self.replicated is not None and self.replicated.replicate_every is not None

    @property
    def written_a_day(self) -> float:
        """Bytes that a node's drives take a day: its saves, and the replicas of another one."""
        incoming = self.replicated.replicate_every if self.replicated is not None else None
        return self.part * DAY * (1 / self.period + (1 / incoming if incoming is not None else 0.0))


def lost_node(job: Job, state: State, copies: Copies) -> LostNode:
    """The cost for one kind of checkpoint, saved as often as Daly has it, else the rule of thumb."""
    chosen = state.choice(DALY) or state.choice(RULE)
    if chosen is None:
        raise ValueError("a state has the choice of the rule")
    restart = job.restart + state.size / (job.read_bandwidth or job.bandwidth)
    mtbf = DEFAULT_NODE_MTBF if job.node_mtbf is None else job.node_mtbf
    return costs(state.size, state.write, chosen.interval, copies, mtbf, job.nodes, restart)


def costs(
    size: int, write: float, interval: float, copies: Copies, node_mtbf: float, nodes: int, restart: float
) -> LostNode:
    """The cost for a state of ``size`` that is saved in ``write`` seconds, every ``interval`` seconds of training."""
    period, part = interval + write, math.ceil(size / copies.parts)
    drain, losses = size / copies.shared, nodes * MONTH / node_mtbf
    # A copy that takes longer than from one save to the next is made of fewer saves.
    drain_every = period * max(1, math.ceil(drain / period))
    mean = write + drain + drain_every / 2
    drained = Cost(mean, mean + drain_every / 2, losses * mean, drain_every, drain / drain_every)
    if copies.network is None:
        return LostNode(drained, None, part, period)
    replica = part / copies.network
    every = period * max(1, math.ceil(replica / period))
    by_replica = write + replica + every / 2
    if by_replica >= mean:
        return LostNode(drained, drained, part, period)
    # Its peer, or the node of which it kept the replica, is lost before the next replica is there: drains serve then.
    both = min(1.0, 2 * (restart + write + replica + every) / node_mtbf)
    alike = 2 * ((mean - (1 - both) * by_replica) / both - write - drain)
    seldom = max(drain_every, min(alike, LONGEST_DRAIN))
    then = (1 - both) * by_replica + both * (write + drain + seldom / 2)
    replicated = Cost(
        mean=then,
        most=by_replica + every / 2,
        month=losses * then,
        drain_every=seldom,
        shared_busy=drain / seldom,
        replicate_every=every,
        replica=replica,
        network_busy=replica / every,
        peer_bytes=(KEPT + 1) * part,
    )
    return LostNode(drained, replicated, part, period)
