"""What several unit tests begin with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from refusals import Refusals
from tunetool.lab.state import Lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab without nodes, whose path has a space."""
    # Sockets go to TMPDIR; tempfile remembers it, so it is set where the lab looks.
    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: str(tmp_path))
    lab = Lab(tmp_path / "state dir")
    lab.prepare()
    return lab


@pytest.fixture
def refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refusals]:
    """Wrong calls from an empty directory; this process goes on as it was."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    yield Refusals(tmp_path, monkeypatch, capsys)
    signal.signal(signal.SIGTERM, before)
