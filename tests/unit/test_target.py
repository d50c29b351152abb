"""A directory on an array that answers no I/O is refused by facts of /proc and /sys alone: nothing of it is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machines import lay_out
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.target import check_target

POINT = Path("/mnt/nvme_raid0")
CURES = [
    ("broken", "tunetool.node.replace_drive"),
    ("clear", "mdadm --assemble --scan"),
    ("inactive", "mdadm --assemble --scan"),
    ("readonly", "mdadm --readwrite"),
    ("suspended", "a RAID0 has neither"),
]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A recorded node, whose array is mounted at a path that this machine does not have."""
    return lay_out("built", tmp_path / "node")


@pytest.fixture(autouse=True)
def _nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a suspended array any of these would wait for ever: here they fail instead."""
    assert tmp_path.is_dir()  # made, and what an earlier run left removed, before anything is replaced

    def guarded(name: str) -> None:
        real = getattr(os, name)

        def call(path: object, *arguments: object, **options: object) -> object:
            text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            assert not str(text).startswith(f"{POINT}/"), f"{name} of `{text}`"
            return real(path, *arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("stat", "lstat", "readlink", "open", "access", "statvfs", "listdir", "scandir"):
        guarded(name)


def state(built: Path, word: str) -> None:
    (built / "sys/devices/virtual/block/md127/md/array_state").write_text(word + "\n")


@pytest.mark.parametrize(("word", "cure"), CURES)
@pytest.mark.parametrize("inside", ["", "job/data"])
def test_an_array_that_answers_nothing_is_named_with_its_cure(built: Path, word: str, cure: str, inside: str) -> None:
    state(built, word)
    with pytest.raises(CannotJudge) as caught:
        check_target(POINT / inside, str(built))
    assert caught.value.message == f"`{POINT / inside}` was not touched: array `md127` is {word}"
    assert cure in str(caught.value.hint)
    assert "\n" not in caught.value.line


def test_a_lost_drive_is_named_although_md_still_says_clean(tmp_path: Path) -> None:
    lost = lay_out("lost-drive", tmp_path)
    with pytest.raises(CannotJudge, match="array `md127` has lost a member"):
        check_target(POINT / "job", str(lost))


def test_a_link_to_it_is_followed_without_touching_it(built: Path, tmp_path: Path) -> None:
    state(built, "suspended")
    (tmp_path / "second").symlink_to(POINT / "job")
    (tmp_path / "first").symlink_to("second")
    with pytest.raises(CannotJudge, match="`md127` is suspended"):
        check_target(tmp_path / "first/data", str(built))


def test_links_that_go_round_end(built: Path, tmp_path: Path) -> None:
    state(built, "suspended")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises((UsageProblem, OSError)):
        check_target(tmp_path / "a/x", str(built))


@pytest.mark.parametrize("word", ["clean", "active", "suspended"])
def test_another_file_system_is_none_of_its_business(built: Path, tmp_path: Path, word: str) -> None:
    state(built, word)
    check_target(tmp_path, str(built))
