"""cufile.json as it lies on a machine: the one in force, and the switches that decide a path."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Optional

from .files import read_text

CONFIGS = ("/etc/cufile.json", "/usr/local/cuda/gds/cufile.json")
"""Where cuFile looks for its configuration when CUFILE_ENV_PATH_JSON does not say."""


def read_config(root: str = "/") -> tuple[Optional[str], Any]:
    """Path and content of the configuration in force; None for what is not there or cannot be parsed."""
    for path in CONFIGS:
        text = read_text(os.path.join(root, path.lstrip("/")))
        if text is not None:
            try:
                return path, json.loads(without_comments(text))
            except ValueError:
                return path, None
    return None, None


def without_comments(text: str) -> str:
    """cufile.json without its ``//`` comments, which JSON does not know; those inside a string stay."""
    return re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*', lambda match: match.group(1) or "", text)


def setting(config: Any, *keys: str) -> Optional[bool]:
    """A switch of the configuration; None where it is not set."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, bool) else None
