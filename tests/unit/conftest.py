"""What several unit tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunetool.lab.state import Lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab without nodes, whose path has a space."""
    # Sockets go to TMPDIR; tempfile remembers it, so it is set where the lab looks.
    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: str(tmp_path))
    lab = Lab(tmp_path / "state dir")
    lab.prepare()
    return lab
