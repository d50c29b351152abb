"""Programs of this checkout that start as those of an installed package do: with their compiled files."""

from __future__ import annotations

import os
from pathlib import Path


def keep_compiled(folder: Path) -> None:
    """Processes that start from now on keep compiled files in ``folder``, whatever the environment said."""
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
