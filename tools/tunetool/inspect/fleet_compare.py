"""What differs between the nodes of a fleet that should be equal, the most severe first. Pure.

Of each fact the most common value is what the others are held against; nothing says that it is the right one. Numbers
count as equal across gaps that are small for their kind: hosts that lie apart from the rest are odd, those that are
merely spread are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tunetool.inspect.fleet_facts import ABSENT, Fact, facts, parent
from tunetool.inspect.fleet_model import Difference
from tunetool.inspect.model import Inspection
from tunetool.node.common.io_settings import ARRAY, SETTINGS, of_target


@dataclass(frozen=True)
class Kind:
    """Facts of one kind. ``pattern`` matches the whole name, and its group is part of the title."""

    pattern: str
    title: str
    remedy: str | None = None
    gap: float = 0.0
    """Of numbers: values that are no further apart belong together."""
    share: float = 0.0
    """The same, as a share of the larger value."""


_OF_ARRAYS = frozenset(f"settings.{name}" for name in of_target(ARRAY))
_SITE = "run `tunetool provision` with `--limit` on it"
KINDS: Sequence[Kind] = (
    Kind(r"drives\.count", "number of data drives", "find the lost drive by the serial numbers of `tunetool inspect`"),
    Kind(
        r"gpus\.count", "number of GPUs", "look for the lost GPU in the kernel's log (`dmesg`, Xid 79), then reseat it"
    ),
    Kind(r"arrays\.([^|]+)", "array `{}`", _SITE),
    Kind(
        r"arrays\.([^|]+)\|drives",
        "drives in array `{}`",
        "replace the lost one: `ansible-playbook tunetool.node.replace_drive`",
    ),
    Kind(
        r"arrays\.([^|]+)\|state", "state of array `{}`", "`tunetool verify --level config` there says what is broken"
    ),
    Kind(r"mounts\.([^|]+)", "mount `{}`", "`tunetool verify --level config` there says what is missing below it"),
    Kind(
        r"drives\.health",
        "health of the data drives",
        "replace a failing drive: `ansible-playbook tunetool.node.replace_drive`",
    ),
    Kind(r"ceilings\.(.+)", "ceiling of the {}, from their links", "the links that differ are the cause", share=0.001),
    Kind(
        r"drives\.link",
        "links of the data drives",
        "reseat the drive, then its cable or riser; the firmware may also limit the slot's speed",
    ),
    Kind(
        r"gpus\.link",
        "links of the GPUs",
        "inspect again under load: an idle GPU may slow its link down; if it stays slow, reseat it",
    ),
    Kind(r"gds\.mode", "path of GPUDirect Storage", "`tunetool inspect --gds` there names each blocker"),
    Kind(
        r"drives\.model",
        "model of the data drives",
        "replace the drive that differs: `ansible-playbook tunetool.node.replace_drive`",
    ),
    Kind(
        r"drives\.size",
        "size of the data drives",
        "replace the drive that differs: `ansible-playbook tunetool.node.replace_drive`",
    ),
    Kind(r"drives\.firmware", "firmware of the data drives", "`nvme fw-download` and `nvme fw-commit`, then a reset"),
    Kind(r"drives\.lba", "block size of the data drives"),
    Kind(r"drives\.numa", "NUMA nodes of the data drives", "compare which slots are used"),
    Kind(r"gpus\.model", "model of the GPUs"),
    Kind(r"gpus\.numa", "NUMA nodes of the GPUs"),
    Kind(r"host\.machine", "machine"),
    Kind(r"host\.cpu", "CPU"),
    Kind(r"host\.sockets", "number of CPU sockets"),
    Kind(r"host\.cpus", "number of CPUs", "compare the firmware's settings of cores and SMT"),
    Kind(r"host\.numa", "CPUs of the NUMA nodes", "compare the firmware's setting of NUMA nodes per socket"),
    Kind(r"host\.(virtual)", "kind of machine"),
    Kind(r"host\.(container)", "container"),
    Kind(r"memory\.total", "memory", "look for a lost memory module in the firmware's log", share=0.01),
    Kind(r"host\.kernel", "kernel", "install and boot the same kernel"),
    Kind(r"driver\.version", "NVIDIA driver", "install the same driver, then reboot"),
    Kind(r"driver\.open", "NVIDIA kernel module", "install the same driver; GPUDirect Storage needs the open module"),
    Kind(r"cuda", "CUDA toolkit at /usr/local/cuda", "install the same toolkit"),
    Kind(r"host\.distribution", "distribution", "update its packages"),
    Kind(r"arrays\.([^|]+)\|level", "RAID level of array `{}`"),
    Kind(r"arrays\.([^|]+)\|chunk", "chunk of array `{}`"),
    Kind(r"mounts\.([^|]+)\|type", "file system of `{}`"),
    Kind(r"mounts\.([^|]+)\|medium", "device below `{}`"),
    Kind(r"mounts\.([^|]+)\|aligned", "alignment of `{}`"),
    Kind(r"mounts\.([^|]+)\|options", "mount options of `{}`"),
    Kind(r"mounts\.([^|]+)\|size", "size of `{}`", share=0.01),
    Kind(
        rf"settings\.({'|'.join(SETTINGS)})",
        "setting `{}`",
        f"{_SITE} (role io_tuning)",
    ),
    Kind(r"settings\.(.+)", "setting `{}`"),
    Kind(r"memory\.hugepages", "huge pages", f"{_SITE} (role host_memory)"),
    Kind(r"memory\.shm", "size of /dev/shm", f"{_SITE} (role host_memory)", share=0.01),
    Kind(r"memory\.shm_huge", "huge pages of /dev/shm", f"{_SITE} (role host_memory)"),
    Kind(r"memory\.memlock", "limit of locked memory", f"{_SITE} (role host_memory), then log in again"),
    Kind(r"memory\.cgroup_limit", "memory limit of the cgroup", share=0.01),
    Kind(r"manifest", "manifest", f"{_SITE}: it was not built, or the manifest cannot be read"),
    Kind(r"manifest\.(.+)", "`{}` in the manifest", f"{_SITE}, with the inventory of the others"),
    Kind(r"mounts\.([^|]+)\|free", "free space of `{}`", "look for what only this host holds, and remove it", gap=0.1),
    Kind(r"tool_version", "version of tunetool", f"{_SITE} (role tunetool)"),
    Kind(r".+", "{}"),
)
"""The most severe first: what is lost, then what slows I/O, then what was set, then what is in use."""


@dataclass(frozen=True)
class Comparison:
    """What differs, the most severe first, and how many facts were compared."""

    differences: list[Difference]
    facts: int


@dataclass(frozen=True)
class _Known:
    """A fact's kind, with its rank among all kinds, and the fact's title."""

    rank: int
    kind: Kind
    title: str


def compare(inspections: Mapping[str, Inspection]) -> Comparison:
    """What differs between these hosts. The order of hosts does not matter."""
    return compare_facts({host: facts(shown) for host, shown in inspections.items()})


def compare_facts(given: Mapping[str, Mapping[str, Fact]]) -> Comparison:
    """The same of facts by host."""
    by_host = {host: given[host] for host in sorted(given, key=natural)}
    names = dict.fromkeys(name for host_facts in by_host.values() for name in host_facts)
    known = {name: _known(name) for name in names}
    result = []
    for name in sorted(names, key=lambda name: (known[name].rank, natural(name))):
        values = {host: host_facts.get(name) for host, host_facts in by_host.items() if _applies(name, host_facts)}
        result += _differences(name, known[name], values)
    return Comparison(result, len(names))


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts n2 before n10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part)


def _known(name: str) -> _Known:
    for rank, kind in enumerate(KINDS):
        match = re.fullmatch(kind.pattern, name)
        if match:
            return _Known(rank, kind, kind.title.format(match.group(1) if match.groups() else name))
    raise AssertionError(name)  # the last pattern matches all


def _applies(name: str, host_facts: Mapping[str, Fact]) -> bool:
    """Whether this host could have the fact: a host without GPUs is not named for their model."""
    if name in host_facts:
        return True
    if name in _OF_ARRAYS and not any(each.startswith("arrays.") for each in host_facts):
        return False
    above = parent(name)
    while above is not None:
        if above not in host_facts or host_facts[above].value == "0":
            return False
        above = parent(above)
    return True


def _differences(name: str, known: _Known, values: Mapping[str, Fact | None]) -> list[Difference]:
    """One for each value that not most hosts have."""
    classes = _classes(values, known.kind)
    if len(set(classes.values())) < 2:
        return []
    hosts_by_class: dict[str, list[str]] = {}
    for host, label in classes.items():
        hosts_by_class.setdefault(label, []).append(host)
    most = max(map(len, hosts_by_class.values()))
    common = [label for label, hosts in hosts_by_class.items() if len(hosts) == most]
    majority = common[0] if len(common) == 1 else None
    majority_fact = None if majority is None else values[hosts_by_class[majority][0]]
    usual = set(_part_values(majority_fact))
    odd = sorted(
        (
            label
            for label, hosts in hosts_by_class.items()
            if label != majority and not _only_fewer(values[hosts[0]], majority_fact)
        ),
        key=lambda label: (len(hosts_by_class[label]), label),
    )
    return [
        Difference(
            fact=name,
            title=known.title,
            hosts=hosts_by_class[label],
            value=_shown(hosts_by_class[label], values),
            parts=_odd_parts(hosts_by_class[label], values, usual) if majority is not None else {},
            majority=None if majority is None else _shown(hosts_by_class[majority], values),
            majority_hosts=most,
            compared=len(values),
            remedy=known.kind.remedy if majority is not None else None,
        )
        for label in odd
    ]


def _classes(values: Mapping[str, Fact | None], kind: Kind) -> dict[str, str]:
    """Hosts whose values belong together have the same label."""
    numbers = sorted({fact.value for fact in values.values() if fact is not None and isinstance(fact.value, float)})
    of_number: dict[float, str] = {}
    group = 0
    for before, number in zip([None, *numbers], numbers, strict=False):
        if before is not None and number - before > max(kind.gap, kind.share * number):
            group += 1
        of_number[number] = f"{group:06d}"
    return {
        host: ABSENT if fact is None else of_number[fact.value] if isinstance(fact.value, float) else fact.value
        for host, fact in values.items()
    }


def _shown(hosts: Sequence[str], values: Mapping[str, Fact | None]) -> str:
    """The value of hosts of one class: of numbers the one in the middle."""
    present = [fact for host in hosts if (fact := values[host]) is not None]
    numbers = {fact.value: fact.shown for fact in present if isinstance(fact.value, float)}
    if numbers:
        middle = median([fact.value for fact in present if isinstance(fact.value, float)])
        return numbers[min(numbers, key=lambda number: (abs(number - middle), number))]
    return str(present[0].value) if present else ABSENT


def _part_values(fact: Fact | None) -> list[str]:
    return [value for _, value in fact.parts] if fact is not None else []


def _only_fewer(fact: Fact | None, usual: Fact | None) -> bool:
    """Whether a host only has another number of devices than most, which is a fact of its own."""
    values, usual_values = _part_values(fact), _part_values(usual)
    return len(values) != len(usual_values) and bool(values) and set(values) <= set(usual_values)


def _odd_parts(hosts: Sequence[str], values: Mapping[str, Fact | None], usual: set[str]) -> dict[str, list[str]]:
    """By host, its devices with a value that no device of the majority has."""
    odd_parts = {}
    for host in hosts:
        fact = values[host]
        odd = [f"{name}: {value}" for name, value in fact.parts if value not in usual] if fact is not None else []
        if odd:
            odd_parts[host] = odd
    return odd_parts


def counts(differences: Sequence[Difference]) -> Counter[str]:
    """Number of facts in which each host differs from the majority."""
    return Counter(host for each in differences if each.majority is not None for host in each.hosts)
