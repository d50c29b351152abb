"""The check ``gds.config``: does cufile.json say what it means, and did libcufile take it so?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunetool.measure.gds.spec import Mode
from tunetool.node.common.check_result import Check
from tunetool.node.gds.cufile_check import check_config, flatten, read_config
from tunetool.node.gds.facts import read_gds_facts

CHECK_ID = "gds.config"
DEFAULT = "/etc/cufile.json"
VARIABLE = "CUFILE_ENV_PATH_JSON"
_EXPECTED = "libcufile reads every setting in cufile.json, with the value in the file"

PARAMETERS: Mapping[str, str] = {
    "profile.cufile_stats": "PROFILE_STATS",
    "execution.max_io_queue_depth": "EXECUTION_MAX_IO_QUEUE_DEPTH",
    "execution.max_io_threads": "EXECUTION_MAX_IO_THREADS",
    "execution.min_io_threshold_size_kb": "EXECUTION_MIN_IO_THRESHOLD_SIZE_KB",
    "execution.max_request_parallelism": "EXECUTION_MAX_REQUEST_PARALLELISM",
    "execution.parallel_io": "EXECUTION_PARALLEL_IO",
    "properties.max_direct_io_size_kb": "PROPERTIES_MAX_DIRECT_IO_SIZE_KB",
    "properties.max_device_cache_size_kb": "PROPERTIES_MAX_DEVICE_CACHE_SIZE_KB",
    "properties.per_buffer_cache_size_kb": "PROPERTIES_PER_BUFFER_CACHE_SIZE_KB",
    "properties.max_device_pinned_mem_size_kb": "PROPERTIES_MAX_DEVICE_PINNED_MEM_SIZE_KB",
    "properties.io_batchsize": "PROPERTIES_IO_BATCHSIZE",
    "properties.poll_mode_max_size_kb": "POLLTHRESHOLD_SIZE_KB",
    "properties.max_batch_io_timeout_msecs": "PROPERTIES_BATCH_IO_TIMEOUT_MS",
    "properties.use_poll_mode": "PROPERTIES_USE_POLL_MODE",
    "properties.allow_compat_mode": "PROPERTIES_ALLOW_COMPAT_MODE",
    "properties.force_compat_mode": "FORCE_COMPAT_MODE",
    "properties.allow_system_memory": "PROPERTIES_ALLOW_SYSTEM_MEMORY",
    "properties.use_pci_p2pdma": "USE_PCIP2PDMA",
    "properties.prefer_iouring": "PREFER_IO_URING",
    "properties.force_odirect_mode": "FORCE_ODIRECT_MODE",
    "properties.gds_fallback_io": "GDS_FALLBACK_IO",
    "miscellaneous.api_check_aggressive": "FS_MISC_API_CHECK_AGGRESSIVE",
    "miscellaneous.skip_topology_detection": "SKIP_TOPOLOGY_DETECTION",
    "miscellaneous.stream_memops_bypass": "STREAM_MEMOPS_BYPASS",
    "logging.level": "LOGGING_LEVEL",
    "logging.dir": "LOG_DIR",
}
"""Of ``cuFileGetParameter*``, by the key that sets it (cufile.h). The other keys cannot be read back."""


def config_path(environment: Mapping[str, str]) -> Path:
    """The file that libcufile takes, as it would be for any program started from here."""
    return Path(environment.get(VARIABLE) or DEFAULT)


def default_mode(manifest: Mapping[str, Any] | None) -> Mode:
    """The default mode: a node that was built for GPUDirect must prove it, others need not."""
    return "require" if manifest is not None and manifest["gds"]["mode"] in ("nvidia-fs", "p2pdma") else "off"


def static_check(mode: Mode, environment: Mapping[str, str]) -> list[Check]:
    """The configuration file alone, for a level that moves nothing."""
    if mode == "off":
        return []
    facts = read_gds_facts("/")
    return [check(config_path(environment), facts.libcufile, None, "level config moves nothing")]


def differences(config: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Settings that libcufile holds otherwise than the file gives them."""
    return [
        f"`{key}` is {wanted!r} in the file, libcufile holds {values[name]!r}"
        for key, wanted in config.items()
        for name in [PARAMETERS.get(key, "")]
        if name in values and values[name] != wanted
    ]


def check(path: Path, version: str | None, values: Mapping[str, Any] | None, untried: str = "") -> Check:
    """``values`` are what libcufile answered; None where it could not be asked, for the reason ``untried``."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return _result("skip", f"no `{path}`: libcufile uses its defaults")
    except (OSError, ValueError) as error:
        return _result("unknown", f"`{path}` cannot be read: {error}", "make it a readable text file")
    problems = check_config(text, version)
    if problems:
        shown = [f"{each.message} ({_where(each.line)})" for each in problems]
        return _result("fail", f"`{path}`: " + _listed(shown), _listed([each.remedy for each in problems]))
    # What has no problem can be read.
    config = flatten(read_config(text))
    return _taken(path, config, values, untried)


def _taken(path: Path, config: Mapping[str, Any], values: Mapping[str, Any] | None, untried: str) -> Check:
    if values is None:
        return _result("pass", f"`{path}`: {len(config)} settings, each in its place; not read back, {untried}")
    different = differences(config, values)
    if different:
        remedy = f"unset `CUFILE_*` variables, which win over the file; else leave the setting out of `{path}`"
        return _result("fail", f"`{path}`: " + _listed(different), remedy)
    read = sum(PARAMETERS.get(key, "") in values for key in config)
    return _result(
        "pass", f"`{path}`: {len(config)} settings, each in its place; {read} read back from libcufile and equal"
    )


def _where(line: int) -> str:
    return f"line {line}" if line else "somewhere in it"


def _listed(lines: Sequence[str], most: int = 4) -> str:
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "; ".join([*dict.fromkeys(lines[:most]), *more])


def _result(status: str, found: str, remedy: str = "") -> Check:
    return Check(CHECK_ID, status, _EXPECTED, found, remedy)
