"""The nodes of a chain: those that still take part, and those that were left out, with time and reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tunetool.bench.reference.request import VERIFY, Complete
from tunetool.fleet.capacity import ask_hosts
from tunetool.fleet.playbook import HostSelection
from tunetool.measure.progress import Progress
from tunetool.node.machine.capacity import Capacity
from tunetool.record import FleetHost, Part, Record, Status, Verdict
from tunetool.training.workload import Cluster

_TOGETHER = ("staging", "strategies")
"""Parts in which the ranks of all nodes work together."""


def cannot_train(capacities: Mapping[str, Capacity], cluster: Cluster) -> dict[str, str]:
    """Hosts whose manifest names a Python that is damaged or gone, where no other is named; with the reason."""
    if cluster.inventory is None or cluster.python is not None:
        return {}
    return {host: node.python_problem for host, node in capacities.items() if node.python_problem}


class Gate:
    """Decides whether a part is run on this machine: after a FAIL of ``verify``, none is."""

    def __init__(self, anyway: bool) -> None:
        self._anyway = anyway

    def before(self, name: str, parts: Sequence[Part]) -> str | None:
        """The reason why the part is not run; None if it is run."""
        failed = any(part.name == VERIFY and part.status == "fail" for part in parts)
        if not self._anyway and failed and name != VERIFY:
            return f"not run after the FAIL of {VERIFY}: mend that first, or pass `--anyway`"
        return None

    def after(self, name: str, record: Record) -> None:
        """Called after each part with its record."""


@dataclass
class Nodes(Gate):
    """The same for the hosts of an inventory: only hosts that fail ``verify`` or do not answer are left out."""

    request: Complete
    capacities: dict[str, Capacity]
    """Capacities of the nodes that still take part, in the inventory's order."""
    progress: Progress
    hosts: dict[str, FleetHost] = field(default_factory=dict)
    """Hosts for the record: those that were left out, with the reason, and the others as ``verify`` judged them."""
    lost: list[str] = field(default_factory=list)
    """Nodes that were left out because they did not answer: no part's verdict includes them."""
    _looked: bool = True
    """Whether the nodes were asked after the last part."""

    @property
    def names(self) -> list[str]:
        """The nodes that still take part."""
        return list(self.capacities)

    @property
    def current(self) -> Complete:
        """The request for the nodes that still take part."""
        return replace(self.request, limit=",".join(self.names))

    def leave_out(self, host: str, status: Status, when: str, reasons: Sequence[str], lost: bool = False) -> None:
        """Let the chain continue without ``host``."""
        lines = [f"left out {when}: {reason}" for reason in reasons or ["no reason was given"]]
        known = self.hosts.get(host)
        identity = known.record_id if known is not None else None
        self.hosts[host] = FleetHost(host=host, record_id=identity, status=status, reasons=lines)
        self.capacities.pop(host, None)
        if lost:
            self.lost.append(host)
        self.progress.say(f"{host}: {lines[0]}")

    def before(self, name: str, parts: Sequence[Part]) -> str | None:
        """See ``Gate``. Asks the nodes again whether they can take part."""
        if self.names and not self._looked:
            self._look(name)
        self._looked = False
        if name in _TOGETHER:
            self._need_training(name)
        out = [host for host in self.hosts if host not in self.names]
        if out and self.request.all_or_nothing:
            return f"not run: `--all-or-nothing`, and `{out[0]}` was left out"
        if not self.names:
            return f"not run: no node is left; the first was `{out[0]}`, {self.hosts[out[0]].reasons[0]}"
        return None

    def _look(self, name: str) -> None:
        request = self.request
        selection = HostSelection(
            request.cluster.inventory,  # type: ignore[arg-type]  # a chain over hosts has an inventory
            ",".join(self.names),
            ansible=request.cluster.ansible,
        )
        answers = ask_hosts(selection, str(request.target), str(request.memory), self.progress)
        for host, why in {**answers.silent, **cannot_train(answers.capacities, request.cluster)}.items():
            self.leave_out(host, "error", f"before {name}", [why], lost=True)

    def _need_training(self, name: str) -> None:
        """Leave out nodes without a training environment: their ranks would fail, and end those of all other nodes."""
        with_one = [host for host, node in self.capacities.items() if node.python]
        if with_one and self.request.cluster.python is None:
            for host in [host for host in self.names if host not in with_one]:
                why = f"it has no training environment, and `{with_one[0]}` has one"
                self.leave_out(host, "error", f"before {name}", [why], lost=True)

    def after(self, name: str, record: Record) -> None:
        """See ``Gate``. Leaves out the nodes on which ``verify`` failed."""
        if name != VERIFY:
            return
        self.hosts.update({host.host: host for host in record.hosts or []})
        for host in record.hosts or []:
            tolerated = self.request.anyway and host.record_id is not None
            if host.status in ("fail", "error") and not tolerated:
                self.leave_out(host.host, host.status, f"after {VERIFY}", host.reasons)

    def verdicts(self) -> list[tuple[str, Verdict]]:
        """The verdict on the nodes that no part's verdict includes."""
        return [(host, Verdict(status="error", reasons=self.hosts[host].reasons)) for host in self.lost]
