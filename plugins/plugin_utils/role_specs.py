# Copyright: the tunetool authors
# Apache License 2.0 (see LICENSE)
"""The variables of this collection's roles, as their meta/argument_specs.yml declare them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ansible.parsing.dataloader import DataLoader

COLLECTION = Path(__file__).resolve().parents[2]


@cache
def role_options(role: str = "*") -> dict[str, dict[str, Any]]:
    """Options of the entry point ``main`` by role: of one, or of all."""
    loader = DataLoader()
    options = {}
    for path in sorted(COLLECTION.glob(f"roles/{role}/meta/argument_specs.yml")):
        document = loader.load_from_file(str(path))
        options[path.parents[1].name] = document["argument_specs"]["main"].get("options") or {}
    return options
