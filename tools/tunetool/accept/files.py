"""Goals files that come with tunetool."""

from __future__ import annotations

from pathlib import Path

NAMES = ("rented", "nvme8", "fleet")


def path_of(name: str) -> Path:
    """Where the file of this name lies."""
    return Path(__file__).parent / "goals" / f"{name}.toml"
