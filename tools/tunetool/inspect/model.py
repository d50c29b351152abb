"""The document of ``tunetool inspect``. Its JSON Schema, a page of the reference, is made from this module."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from tunetool.node.machine.pcie_links import downgraded
from tunetool.node.units import format_size_binary
from tunetool.record import Document

SCHEMA_NAME: Literal["tunetool.inspect/1"] = "tunetool.inspect/1"


class Link(Document):
    """A PCIe link as it runs, and the best that the device and the port above it allow. Speeds in GT/s."""

    speed_gts: float | None = None
    width: int | None = None
    possible_speed_gts: float | None = None
    possible_width: int | None = None
    bandwidth: float | None = Field(
        None, description="Raw bytes per second of the link at its present speed, in one direction"
    )

    @property
    def downgraded(self) -> bool:
        """Whether the link runs slower or narrower than both ends allow."""
        return downgraded(self.speed_gts, self.width, self.possible_speed_gts, self.possible_width)


class NumaNode(Document):
    """A NUMA node and its CPUs."""

    node: int
    cpus: str


class Host(Document):
    """The machine, its operating system and its CPUs."""

    name: str | None = None
    kernel: str | None = None
    distribution: str | None = None
    machine: str | None = Field(None, description="Vendor and product, as the firmware reports them")
    cpu: str | None = None
    sockets: int | None = None
    cpus: int | None = None
    numa: list[NumaNode] = Field([])
    virtual: bool = Field(False, description="A virtual machine: its PCIe links are what the hypervisor shows")
    container: str | None = Field(None, description="Runtime of the container in which the command ran")
    container_evidence: str | None = None


class Health(Document):
    """A drive's health log; absent where it could not be read."""

    status: Literal["ok", "warning", "failing", "silent"]
    temperature: int | None = Field(None, description="Degrees Celsius")
    used_percent: int | None = None
    media_errors: int | None = None


class Drive(Document):
    """An NVMe namespace."""

    name: str
    serial: str
    model: str
    firmware: str
    size_bytes: int
    lba_bytes: int
    metadata_bytes: int
    transport: str
    pci_address: str | None = None
    numa_node: int | None = None
    link: Link
    health: Health | None = None
    use: str = Field(
        description="The array that it is a member of, its volume, where it is mounted, what it holds, or `free`"
    )
    data: bool = Field(description="Counts towards the ceilings: member of an array, or free where there is none")


class Disk(Document):
    """A disk that is no NVMe drive, such as a cloud's virtual one: it has no link and no health log to show."""

    name: str
    kind: str = Field(description="Vendor and model, or `virtio disk`")
    size_bytes: int
    mounted: list[str] = Field([], description="Where it, or what lies on it, is mounted")


class Gpu(Document):
    """An NVIDIA GPU."""

    index: int
    address: str
    model: str
    numa_node: int | None = None
    link: Link


class Driver(Document):
    """The loaded NVIDIA kernel driver."""

    version: str
    open: bool


class PciNode(Document):
    """A node of the PCIe tree. A port with one device below it is merged into that device."""

    kind: Literal["root", "switch", "drive", "gpu", "nic"]
    address: str
    label: str
    numa_node: int | None = None
    link: Link | None = None
    bandwidth: float | None = Field(None, description="Bytes per second of the narrowest link up to the parent node")
    children: list[PciNode] = Field([])


class Array(Document):
    """An md array."""

    device: str
    name: str | None = None
    uuid: str | None = None
    level: str
    chunk_bytes: int
    state: str
    serves: bool
    members: list[str | None] = Field(description="Serial numbers by slot; null where the drive is missing")
    rebuild: str | None = Field(default=None, description="How far the filling of a drive is, and the minutes left")


class Filesystem(Document):
    """A mounted file system of a block device."""

    mount_point: str
    type: str
    device: str
    medium: str
    options: list[str]
    stripe_unit_bytes: int | None = None
    stripe_width_bytes: int | None = None
    aligned: bool | None = Field(
        None, description="Whether it is aligned with its array; null where it is not on an array"
    )
    size_bytes: int | None = None
    free_bytes: int | None = Field(None, description="Free for users other than root")


class JobScratch(Document):
    """A job's directory on the scratch volume (role job_scratch)."""

    job: str
    user: str
    bytes: int | None = Field(None, description="What counts for it; null where it has no limit, since nothing counts")
    limit_bytes: int | None = None


class HugePages(Document):
    """A pool of huge pages."""

    size_kib: int
    count: int
    free: int | None = None
    numa_node: int | None = None


class Memory(Document):
    """Memory and its limits, in bytes."""

    total: int | None = None
    available: int | None = None
    cgroup_limit: int | None = None
    shm: int | None = None
    shm_huge: str | None = Field(
        None, description="Huge pages of /dev/shm (`huge=`); null: no tmpfs there, or a kernel without them"
    )
    memlock: str | None = Field(None, description="unlimited, or bytes")
    hugepages: list[HugePages] = Field([])

    @property
    def memlock_in_words(self) -> str | None:
        """The limit on locked memory for people."""
        return format_size_binary(int(self.memlock)) if self.memlock and self.memlock.isdigit() else self.memlock


class Blocker(Document):
    """A reason why a path is not available."""

    id: str
    found: str
    remedy: str
    curable: bool = Field(description="Whether the role gpudirect_storage can remove it")


class Path(Document):
    """A path between files and GPU memory."""

    mode: str
    blockers: list[Blocker]
    notes: list[str] = Field([])


class Gds(Document):
    """The path that I/O between files and GPU memory takes now."""

    mode: Literal["nvidia-fs", "p2pdma", "compat", "off"]
    reasons: list[str]
    paths: list[Path]


class Setting(Document):
    """A setting of the kernel that affects the speed of I/O."""

    name: str
    values: dict[str, int] = Field(description="Number of places, such as drives or CPUs, with each value")


class Ceiling(Document):
    """An upper limit for any measurement on this node, in bytes per second."""

    id: Literal["drives", "links", "gpu", "gpus"]
    of: str
    value: float | None = None
    binds: bool = Field(False, description="Whether it is the lowest ceiling between drives and all GPUs")
    note: str | None = None


class Finding(Document):
    """One problem and its remedy."""

    id: str
    found: str
    remedy: str


class Inspection(Document):
    """Everything that ``tunetool inspect`` reads of a node."""

    schema_: Literal["tunetool.inspect/1"] = Field(SCHEMA_NAME, alias="schema")
    tool_version: str
    source: Literal["machine", "recording"]
    note: str | None = Field(None, description="A note in the recording, such as that it is synthetic")
    host: Host
    drives: list[Drive]
    health_note: str | None = Field(None, description="Why the drives' health is not known")
    disks: list[Disk] = Field([])
    gpus: list[Gpu]
    driver: Driver | None = None
    cuda: str | None = Field(None, description="Version of the CUDA toolkit at /usr/local/cuda")
    pcie: list[PciNode]
    arrays: list[Array]
    filesystems: list[Filesystem]
    jobs: list[JobScratch] = Field([], description="Directories of jobs; empty where another user than root looks")
    memory: Memory
    gds: Gds
    settings: list[Setting] = Field([])
    manifest: dict[str, Any] | None = Field(None, description="What was built: /etc/tunetool/node.json")
    ceilings: list[Ceiling]
    findings: list[Finding]

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)


def dumps(inspection: Inspection) -> str:
    """The inspection as JSON text, without the fields that are null."""
    return inspection.model_dump_json(by_alias=True, exclude_none=True, indent=2) + "\n"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the document that ``dumps`` writes."""
    schema = Inspection.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_NAME, **schema}
