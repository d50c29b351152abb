"""cufile.json on a machine: the one in force, and its switches that decide a path."""

from __future__ import annotations

import os
import re
from typing import Any, Optional

from ..common.files import read_text
from .cufile_check import ConfigError
from .cufile_check import read_config as parse

CONFIGS = ("/etc/cufile.json", "/usr/local/cuda/gds/cufile.json")
"""Path of cuFile's configuration without CUFILE_ENV_PATH_JSON."""


def read_config(root: str = "/") -> tuple[Optional[str], Any]:
    """Path and content of the configuration in force; None if it is missing or cannot be parsed."""
    for path in CONFIGS:
        text = read_text(os.path.join(root, path.lstrip("/")))
        if text is not None:
            try:
                return path, parse(text)
            except ConfigError:
                return path, None
    return None, None


def setting(config: Any, *keys: str) -> Optional[bool]:
    """A switch of the configuration; None if it is not set."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, bool) else None


def allows_p2pdma(config: Any, through_raid: bool, libcufile: Optional[str]) -> Optional[bool]:
    """Whether P2PDMA is allowed: the general switch, and from libcufile 1.16 on also that of the kind of device."""
    general = setting(config, "properties", "use_pci_p2pdma")
    if not general or libcufile is None or version_key(libcufile) < (1, 16):
        return general
    return bool(setting(config, "block", "raid" if through_raid else "nvme", "use_pci_p2pdma"))


def version_key(version: str) -> tuple[int, ...]:
    """A dotted version as numbers, for comparisons."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,18}", version))
