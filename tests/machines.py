"""Recorded machines: documents of tools/dev/record_tree.py laid out as trees that the readers take as root."""

from __future__ import annotations

import json
from pathlib import Path

RECORDED = Path(__file__).parent / "data/machines"


def lay_out(name: str, root: Path) -> Path:
    """The recorded machine ``name`` under ``root``, links as links."""
    document = json.loads((RECORDED / f"{name}.json").read_text())
    for path, text in document["files"].items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for path, target_path in document["links"].items():
        link = root / path.lstrip("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(target_path)
    return root
