"""Files that have fewer bytes stored than were written to them."""

from __future__ import annotations

import os
from pathlib import Path

from tunetool.measure.evidence import incomplete

SIZE = 2**20


def test_whole_sparse_short_and_missing_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(os.urandom(SIZE))
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(SIZE)
    (tmp_path / "short").write_bytes(os.urandom(SIZE // 2))
    for name in ("whole", "short"):
        with (tmp_path / name).open("rb") as stream:
            os.fsync(stream.fileno())  # until then the file system may not have given it blocks
    assert incomplete(tmp_path, ["whole"], SIZE) == []
    sparse, short, missing = incomplete(tmp_path, ["sparse", "short", "missing"], SIZE)
    assert sparse.startswith("`sparse` holds 0 B of the 1.049 MB")
    assert short.startswith("`short` holds 524.3 kB")
    assert missing == "`missing` is gone: No such file or directory"
