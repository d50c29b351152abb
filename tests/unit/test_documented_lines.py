"""Every command line of README and the tutorials is in the table that says what runs it, and the table has no other."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import documented_lines
import newcomer
from documented_lines import ELSEWHERE, HERE, PAGES, README, RENTED, lines_of
from tunetool.advise.ds_config import plan
from tunetool.advise.ds_config_plan import Job, Node
from tunetool.advise.read_model import load_model
from tunetool.tune.settings import DEFAULTS

pytestmark = pytest.mark.any_python


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_line_is_in_one_table(page: Path) -> None:
    lines = lines_of(page)
    assert lines
    missing = [line for line in lines if (line in HERE) + (line in ELSEWHERE) != 1]
    assert missing == [], "add it to tests/documented_lines.py: run it, or say what runs it"


def test_no_table_has_a_line_that_no_page_has() -> None:
    written = {line for page in PAGES for line in lines_of(page)}
    assert sorted({*HERE, *ELSEWHERE} - written) == []


def test_a_new_line_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ tunetool inspect\n$ tunetool new --a \\\n    --b   # why\nit says\n```\n\n    $ no block\n"
    )
    assert lines_of(page) == ["tunetool inspect", "tunetool new --a --b"]
    with pytest.raises(AssertionError, match="run it, or say what runs it"):
        test_every_line_is_in_one_table(page)


def test_what_the_newcomer_is_said_to_run_it_runs() -> None:
    first = [line.partition("  #")[0].rstrip() for place in newcomer.FIRST for line in newcomer.lines_after(*place)]
    four = [line.partition("  #")[0].rstrip() for place in newcomer.FOUR for line in newcomer.lines_after(*place)]
    for line, why in ELSEWHERE.items():
        if why == documented_lines._NEWCOMER and line != "tunetool lab down":
            assert line in first, line
        if why == documented_lines._FOUR:
            assert line in four, line
    assert "`make fresh`" in ELSEWHERE["make check"]
    assert "make check" in (README.parent / "tools/dev/fresh.py").read_text()


def test_the_tutorials_configuration_works_on_a_virtual_disk() -> None:
    (line,) = (line for line in lines_of(RENTED) if line.startswith("tunetool ds-config "))
    words = shlex.split(line)
    name, world = words[words.index("--model") + 1], int(words[words.index("--world-size") + 1])
    # A virtio disk and md RAID0 read to multiples of 512 bytes alone.
    node = Node(memory_bytes=128 * 2**30, free_bytes=10**12, address_bytes=512)
    assert plan(Job("zero3-nvme", load_model(name), DEFAULTS.block(), "/mnt/scratch", world=world), node).values


def test_the_tutorials_packages_are_those_it_needs() -> None:
    (line,) = (line for line in lines_of(RENTED) if "apt-get install" in line)
    packages = {word for word in shlex.split(line)[3:] if not word.startswith("-")}
    listed = [row.split() for row in (README.parent / "tests/programs.txt").read_text().splitlines()]
    known = {row[1] for row in listed if len(row) > 1 and not row[0].startswith("#")}
    assert packages - {"python3-venv", "python3-dev"} <= known
    assert {"fio", "libaio-dev", "g++"} <= packages
