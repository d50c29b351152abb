"""Any tree with links: a program sees the same in the copy as in the source."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from staged import beside, stage, verify, view
from tunetool.errors import ExitCode, UsageProblem
from tunetool.stage.pieces import PIECE_BYTES, cut

NAMES = st.sampled_from(["a", "b", "c", "d e", "\u00e9"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
CONTENTS = st.binary(max_size=40) | st.integers(4090, 4100).map(lambda count: b"z" * count)
TARGETS = st.tuples(
    st.sampled_from(["relative", "absolute", "outside", "detour", "dot"]), st.sampled_from(["", "../", "../../"]), PATHS
)
STEPS = st.lists(
    st.tuples(st.just("file"), PATHS, CONTENTS)
    | st.tuples(st.just("directory"), PATHS, st.just(b""))
    | st.tuples(st.just("link"), PATHS, TARGETS),
    max_size=14,
)


def grow(root: Path, outside: Path, steps: list[tuple[str, str, object]]) -> None:
    """Make the tree as far as possible: a path whose parent is a file or a link is left out."""
    for kind, path, what in steps:
        for base in (root, outside):
            full = base / path
            if any(parent.is_symlink() or parent.is_file() for parent in full.parents) or os.path.lexists(full):
                continue
            full.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                full.write_bytes(bytes(what) + base.name.encode())
            elif kind == "directory":
                full.mkdir()
            else:
                full.symlink_to(target(root, outside, base, *what))


def target(root: Path, outside: Path, base: Path, kind: str, climb: str, path: str) -> str:
    if kind == "relative":
        return climb + path
    if kind == "dot":
        return f"./{path}/../{path}"
    if kind == "absolute":
        return f"{root}/{path}"
    if kind == "outside":
        return f"{outside}/{path}"
    # A link that leaves the tree and comes back.
    return f"{climb}../{root.name}/{path}"


# `./a/../a`, where `a` is a file: names alone lead to it, and the kernel does not go through a file.
@example([("file", "a", b""), ("link", "b", ("dot", "", "a"))])
@settings(max_examples=60)
@given(STEPS)
def test_a_copy_looks_as_its_source(steps: list[tuple[str, str, object]]) -> None:
    with tempfile.TemporaryDirectory() as given_base:
        base = Path(os.path.realpath(given_base))
        root, outside, copy = base / "root", base / "outside", base / "copies/copy"
        for made in (root, outside, copy.parent):
            made.mkdir()
        grow(root, outside, steps)
        try:
            result = stage(root, copy, base / "runs")
        except UsageProblem as error:
            event("refused: " + error.message.rpartition("`")[2])
            assert not copy.exists()
            assert beside(copy) == []
            return
        event("copied")
        expected = view(root)
        assert view(copy) == expected
        # The copy is independent: it is the same after a move, and without its source.
        moved = base / "elsewhere/deeper/copy"
        moved.parent.mkdir(parents=True)
        copy.rename(moved)
        root.rename(base / "gone")
        shutil.rmtree(outside)
        assert view(moved) == expected
        moved.rename(copy)
        assert result.code == verify(copy, base / "runs").code == ExitCode.OK


@given(st.lists(st.integers(0, 5 * PIECE_BYTES), max_size=200), st.sampled_from([None, PIECE_BYTES]))
def test_every_byte_is_in_one_piece(sizes: list[int], piece_bytes: int | None) -> None:
    jobs = cut(sizes, piece_bytes)
    pieces = sorted((piece for job in jobs for piece in job), key=lambda piece: (piece.file, piece.number))
    for index, size in enumerate(sizes):
        of_file = [piece for piece in pieces if piece.file == index]
        assert [piece.number for piece in of_file] == list(range(of_file[0].of))
        assert len(of_file) == of_file[0].of
        end = 0
        for piece in of_file:
            assert piece.offset == end
            assert piece.offset % 4096 == 0
            end += piece.length
        assert end == size
    # A batch of small files is no larger than a big piece, and big pieces come first.
    assert all(len(job) == 1 or sum(piece.length for piece in job) <= PIECE_BYTES for job in jobs)
