"""The tree of a machine after damage: files and directories that hold something else, are something else, or are gone."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from damaged import bounded_memory, no_hang

NUMBERS = ["", "-1", "0", "1", "255", "65536", "4294967296", "9999999999999999999", "18446744073709551616", "9" * 5000]
NUMBERS += ["9" * 400, "1e999", "nan", "inf", "0x10", "\u00b2", "\u0663", "1.2.3", "-0", "1_0", "(null)"]
WORDS = [
    "",
    " ",
    "-",
    ":",
    "/",
    "..",
    "0:0",
    "md127",
    "nvme1n1",
    "a\0b",
    "\x1b[2J",
    "[red]",
    "\ud800",
    "none",
    "x" * 5000,
]
LINES = [
    "",
    "MemAvailable:",
    "MemTotal:  kB",
    "::",
    "0",
    "a b",
    "Name:",
    " - ",
    "1 2 3:4 / / rw - xfs",
    "\x0c",
    "\u2028",
]
LINES += [
    "29 1 259:99 / /mnt/nvme_raid0 rw - xfs /dev/x rw",
    "40 1 0:5 / /mnt\\ rw - tmpfs \\0 size=99999999999999999k",
]
NAMES = [
    "nvme99n1",
    "nvme",
    "md",
    "md0",
    "rd-1",
    "rd99",
    "node",
    "nodex",
    "node\u00b2",
    "hugepages-kB",
    "cpu",
    "0:0",
    "x\nb",
]
MOST = 1 << 24
"""Bytes of a file of which the contents are damaged. One that another damage made huge has terabytes."""
WHOLES = [b"", b"\0", b"\xff\xfe", b"\n" * 5000, b"9" * 5000, b"a b " * 5000, b"%s %d {} \\"]
CONTENTS = ["whole", "number", "word", "line", "cut"]
HOWS = [*CONTENTS, "gone", "fifo", "directory", "loop", "elsewhere", "beside", "huge"]


@dataclass(frozen=True)
class Damage:
    """``how`` is one of ``HOWS``; ``number`` and ``other`` choose the place within the file, and another file."""

    path: str
    how: str
    number: int
    other: str

    def content(self, before: bytes) -> bytes:
        """What the file holds afterwards."""
        text = before.decode("utf-8", "surrogateescape")
        if self.how == "whole":
            return WHOLES[self.number % len(WHOLES)]
        if self.how == "cut":
            return before[: self.number % (len(before) + 1)]
        if self.how == "line":
            whole = text.splitlines(keepends=True)
            whole.insert(self.number % (len(whole) + 1), LINES[self.number % len(LINES)] + "\n")
            text = "".join(whole)
        else:
            pattern, values = (r"\d+", NUMBERS) if self.how == "number" else (r"[^\s,:]+", WORDS)
            spans = [match.span() for match in re.finditer(pattern, text)] or [(0, 0)]
            start, end = spans[self.number // len(values) % len(spans)]
            text = text[:start] + values[self.number % len(values)] + text[end:]
        return text.encode("utf-8", "surrogatepass")


def inflict(damage: Damage, root: Path) -> Callable[[], object] | None:
    """Damage a tree. Returns what mends it; None where there is nothing to damage."""
    path = root / damage.path
    if not os.path.lexists(path) or root.resolve() not in path.parent.resolve().parents:
        return None
    if damage.how == "beside":
        added = path.parent / NAMES[damage.number % len(NAMES)]
        if os.path.lexists(added):
            return None
        # A link to a directory above makes a tree without end.
        target = path.parent if path.is_symlink() or path.is_dir() else path
        added.symlink_to(os.path.relpath(target, added.parent))
        return added.unlink
    if damage.how in CONTENTS and (path.is_symlink() or not path.is_file() or path.stat().st_size > MOST):
        return None
    kept = Path(tempfile.mkdtemp(dir=root.parent), "kept")
    content = damage.content(path.read_bytes()) if damage.how in CONTENTS else b""
    path.rename(kept)
    if damage.how in CONTENTS:
        path.write_bytes(content)
    elif damage.how == "fifo":
        os.mkfifo(path)
    elif damage.how == "directory":
        path.mkdir()
    elif damage.how in ("loop", "elsewhere"):
        path.symlink_to(path.name if damage.how == "loop" else os.path.relpath(root / damage.other, path.parent))
    elif damage.how == "huge":
        path.touch()
        os.truncate(path, 2**42)

    def mend() -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        kept.rename(path)
        kept.parent.rmdir()

    return mend


@contextmanager
def damaged(damages: list[Damage], root: Path) -> Iterator[None]:
    """The tree under ``root`` with the damage, which is mended afterwards."""
    mends = []
    try:
        for damage in damages:
            mend = inflict(damage, root)
            if mend is not None:
                mends.append(mend)
        yield
    finally:
        for mend in reversed(mends):
            mend()


def damages(root: Path) -> st.SearchStrategy[list[Damage]]:
    """One to three damages of a tree: of its files, links and directories."""
    places = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    one = st.builds(
        Damage, st.sampled_from(places), st.sampled_from(HOWS), st.integers(0, 2**32), st.sampled_from(places)
    )
    return st.lists(one, min_size=1, max_size=3)


def property_of(read: Callable[[Path], object], root: Path) -> Callable[[], None]:
    """A test by Hypothesis: whatever became of the tree at ``root``, ``read`` gives an answer.

    Nothing else may lie beside ``root``.
    """

    @given(damages(root))
    def holds(drawn: list[Damage]) -> None:
        with damaged(drawn, root), no_hang(), bounded_memory():
            read(root)

    return holds
