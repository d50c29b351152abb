"""The keys of cufile.json: each with its place, type, range and the first libcufile that reads it.

Three sources, named for each key:

- ``GUIDE``: NVIDIA's GDS Benchmarking and Configuration Guide, 4.2.2 "GPUDirect Storage Parameters".
- ``SHIPPED``: the cufile.json that the gds-tools and libcufile packages of CUDA 12 install, with its comments.
- ``LIBRARY``: libcufile itself. NVIDIA's wheels ``nvidia-cufile-cu12`` 1.11 to 1.14 and ``nvidia-cufile`` 1.15 to 1.20
  name the key; which JSON types and ranges they take was tried on each (tests/unit/test_cufile_library.py tries again).

``since`` and the ranges of all keys are from ``LIBRARY``; no older library than 1.11 was looked into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

GUIDE, SHIPPED, LIBRARY = "guide", "shipped", "library"
OLDEST, NEWEST = (1, 11), (1, 20)

BOOL, COUNT, INTEGER, TEXT, HEX = (
    "true or false",
    "a whole number",
    "a whole number",
    "a string",
    "a string such as `0x1f`",
)
TEXTS, COUNTS, TABLE = "a list of strings", "a list of whole numbers", "an object"


@dataclass(frozen=True)
class Key:
    """One key. ``since`` is the first minor version of libcufile that reads it, ``until`` the last."""

    path: str
    kind: str
    source: str
    since: tuple[int, int] = OLDEST
    until: Optional[tuple[int, int]] = None
    low: Optional[int] = None
    high: Optional[int] = None
    multiple: int = 1
    choices: tuple[str, ...] = ()
    lenient: bool = False
    """libcufile silently accepts values out of range or of another kind."""

    @property
    def name(self) -> str:
        """The key's name: the last part of its path."""
        return self.path.rsplit(".", 1)[-1]


_U32 = 2**32 - 1
_LEVELS = ("NOTICE", "ERROR", "WARN", "INFO", "DEBUG", "TRACE")
_ROUTES = ("GPU_MEM_NVLINKS", "GPU_MEM", "SYS_MEM", "P2P")
_NETWORK: dict[str, tuple[int, int]] = {
    "beegfs": OLDEST,
    "gpfs": OLDEST,
    "lustre": OLDEST,
    "nfs": OLDEST,
    "panfs": (1, 19),
    "scatefs": (1, 14),
    "weka": OLDEST,
}


def _key(path: str, kind: str, source: str, **more: Any) -> Key:
    return Key(path, kind, source, **more)


def _network() -> list[Key]:
    keys = []
    for name, since in _NETWORK.items():
        shipped = LIBRARY if name in ("panfs", "scatefs", "weka") else SHIPPED
        keys.append(_key("fs.%s.rdma_dev_addr_list" % name, TEXTS, shipped, since=since))
        keys.append(_key("fs.%s.mount_table" % name, TABLE, shipped, since=since))
        if name != "weka":
            source = GUIDE if name in ("lustre", "nfs") else LIBRARY
            keys.append(_key("fs.%s.use_pci_p2pdma" % name, BOOL, source, since=max(since, (1, 16))))
    return keys


KEYS: tuple[Key, ...] = (
    _key("logging.dir", TEXT, SHIPPED),
    _key("logging.level", TEXT, SHIPPED, choices=_LEVELS, lenient=True),
    _key("logging.max_file_size_mb", INTEGER, GUIDE, since=(1, 18), low=-1),
    _key("profile.nvtx", BOOL, SHIPPED, until=(1, 15)),
    _key("profile.cufile_stats", COUNT, SHIPPED, high=3, lenient=True),
    _key("execution.max_io_queue_depth", COUNT, SHIPPED, low=1, high=256),
    _key("execution.max_io_threads", COUNT, SHIPPED, high=128),
    _key("execution.parallel_io", BOOL, SHIPPED),
    _key("execution.min_io_threshold_size_kb", COUNT, SHIPPED, low=4, high=_U32),
    _key("execution.max_request_parallelism", COUNT, SHIPPED, high=8),
    _key("properties.max_direct_io_size_kb", COUNT, SHIPPED, low=64, high=16384, multiple=64),
    _key("properties.max_device_cache_size_kb", COUNT, SHIPPED, low=4, multiple=4),
    _key("properties.per_buffer_cache_size_kb", COUNT, GUIDE, low=4, multiple=4),
    _key("properties.max_device_pinned_mem_size_kb", COUNT, SHIPPED, low=64, multiple=4),
    _key("properties.gpu_bounce_buffer_slab_config.slab_size_kb", COUNTS, GUIDE, since=(1, 17), low=4, multiple=4),
    _key("properties.gpu_bounce_buffer_slab_config.slab_count", COUNTS, GUIDE, since=(1, 17), low=1),
    _key("properties.posix_pool_slab_size_kb", COUNTS, GUIDE, low=4, multiple=4),
    _key("properties.posix_pool_slab_count", COUNTS, GUIDE, low=1),
    _key("properties.use_poll_mode", BOOL, SHIPPED),
    _key("properties.poll_mode_max_size_kb", COUNT, SHIPPED, low=4, multiple=4),
    _key("properties.use_pci_p2pdma", BOOL, GUIDE, since=(1, 13)),
    _key("properties.allow_compat_mode", BOOL, SHIPPED),
    _key("properties.force_compat_mode", BOOL, GUIDE),
    _key("properties.force_odirect_mode", BOOL, LIBRARY),
    _key("properties.allow_system_memory", BOOL, LIBRARY),
    _key("properties.prefer_iouring", BOOL, LIBRARY),
    _key("properties.vanilla_posix_io_mode", BOOL, LIBRARY, since=(1, 19)),
    _key("properties.gds_fallback_io", BOOL, LIBRARY, since=(1, 19)),
    _key("properties.compat_odirect_unaligned_read_split", BOOL, LIBRARY, since=(1, 19)),
    _key("properties.compat_odirect_unaligned_read_split_min_size_kb", COUNT, LIBRARY, since=(1, 19), multiple=4),
    _key("properties.gds_rdma_write_support", BOOL, SHIPPED),
    _key("properties.io_batchsize", COUNT, SHIPPED, low=1, high=256),
    _key("properties.max_batch_io_timeout_msecs", COUNT, LIBRARY, low=1, high=1000),
    _key("properties.io_priority", TEXT, SHIPPED, choices=("default", "low", "med", "high"), lenient=True),
    _key("properties.rdma_dev_addr_list", TEXTS, SHIPPED),
    _key("properties.rdma_load_balancing_policy", TEXT, SHIPPED),
    _key("properties.rdma_dc_key", HEX, SHIPPED),
    _key("properties.rdma_access_mask", HEX, SHIPPED),
    _key("properties.rdma_dynamic_routing", BOOL, SHIPPED),
    _key("properties.rdma_dynamic_routing_order", TEXTS, SHIPPED, choices=_ROUTES, lenient=True),
    _key("properties.rdma_peer_type", TEXT, LIBRARY, choices=("dmabuf", "nvidia_peermem")),
    _key("properties.rdma_service_level", INTEGER, LIBRARY, low=0),
    _key("properties.rdma_topN_ranks", INTEGER, LIBRARY),
    _key("properties.rdma_transport_type", TEXT, LIBRARY, since=(1, 19)),
    _key("properties.allow_rdma_token_reset", BOOL, LIBRARY, since=(1, 19)),
    _key("properties.rdma_multipath_enabled", BOOL, LIBRARY, since=(1, 18)),
    _key("properties.rdma_failback_enabled", BOOL, LIBRARY, since=(1, 18)),
    _key("properties.rdma_async_event_monitoring", BOOL, LIBRARY, since=(1, 18)),
    _key("properties.rdma_failback_delay_ms", COUNT, LIBRARY, since=(1, 18), high=_U32),
    _key("properties.rdma_health_check_interval_ms", COUNT, LIBRARY, since=(1, 18), high=_U32),
    _key("properties.rdma_io_retry_count", COUNT, LIBRARY, since=(1, 18), high=_U32),
    _key("properties.rdma_io_retry_delay_ms", COUNT, LIBRARY, since=(1, 18), high=_U32),
    _key("properties.rdma_max_backup_devices", COUNT, LIBRARY, since=(1, 18), high=_U32),
    _key("properties.rdma_unhealthy_threshold", COUNT, LIBRARY, since=(1, 18), high=_U32),
    _key("fs.generic.posix_unaligned_writes", BOOL, SHIPPED),
    _key("fs.beegfs.posix_gds_min_kb", COUNT, SHIPPED, high=_U32),
    _key("fs.lustre.posix_gds_min_kb", COUNT, SHIPPED, high=_U32),
    _key("fs.scatefs.posix_gds_min_kb", COUNT, LIBRARY, since=(1, 14), high=_U32),
    _key("fs.gpfs.gds_write_support", BOOL, SHIPPED),
    _key("fs.gpfs.gds_async_support", BOOL, GUIDE, since=(1, 13)),
    _key("fs.weka.rdma_write_support", BOOL, SHIPPED),
    _key("fs.virtiofs.use_pci_p2pdma", BOOL, LIBRARY, since=(1, 16)),
    *_network(),
    _key("block.nvme.use_pci_p2pdma", BOOL, GUIDE, since=(1, 16)),
    _key("block.nvmeof.use_pci_p2pdma", BOOL, GUIDE, since=(1, 16)),
    _key("block.raid.use_pci_p2pdma", BOOL, GUIDE, since=(1, 16)),
    _key("block.raid1.use_pci_p2pdma", BOOL, LIBRARY, since=(1, 19)),
    _key("block.raid10.use_pci_p2pdma", BOOL, LIBRARY, since=(1, 19)),
    _key("denylist.drivers", TEXTS, SHIPPED),
    _key("denylist.devices", TEXTS, SHIPPED),
    _key("denylist.mounts", TEXTS, SHIPPED),
    _key("denylist.filesystems", TEXTS, SHIPPED),
    _key("denylist.fsids", TEXTS, LIBRARY),
    _key("miscellaneous.api_check_aggressive", BOOL, SHIPPED),
    _key("miscellaneous.skip_topology_detection", BOOL, GUIDE),
    _key("miscellaneous.stream_memops_bypass", BOOL, LIBRARY),
    _key("miscellaneous.rcu_library_used", TEXT, LIBRARY),
    _key("miscellaneous.enable_static_routing", BOOL, GUIDE, since=(1, 17)),
    _key("miscellaneous.static_routing_filepath", TEXT, GUIDE, since=(1, 17)),
    _key("miscellaneous.enable_static_config", BOOL, LIBRARY, since=(1, 20)),
    _key("miscellaneous.static_config_filepath", TEXT, LIBRARY, since=(1, 20)),
    _key("miscellaneous.rdma_token_reset_timeout_secs", COUNT, LIBRARY, since=(1, 19)),
)

BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}

PRINTED: dict[str, str] = {
    "use_compat_mode": "properties.allow_compat_mode",
    "max_batch_io_size": "properties.io_batchsize",
    "rdma_peer_affinity_policy": "properties.rdma_load_balancing_policy",
    "gpu_bounce_buffer_slab_size_kb": "properties.gpu_bounce_buffer_slab_config.slab_size_kb",
    "gpu_bounce_buffer_slab_count": "properties.gpu_bounce_buffer_slab_config.slab_count",
    "posix_io_mode": "properties.vanilla_posix_io_mode",
    "blacklist": "denylist",
}
"""Names that `gdscheck -p` prints, or that old releases had, and that no libcufile from 1.11 on reads."""
