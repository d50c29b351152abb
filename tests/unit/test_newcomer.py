"""The way of a new user (tools/dev/newcomer.py) is what the documents show: each line as it is written, whole."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import newcomer

pytestmark = pytest.mark.any_python


def test_its_lines_are_those_of_the_documents() -> None:
    first = [line for place in newcomer.FIRST for line in newcomer.lines_after(*place)]
    four = [line for place in newcomer.FOUR for line in newcomer.lines_after(*place)]
    named = [line.split()[1:3] for line in first if line.startswith("tunetool ")]
    assert [words[0] for words in named] == ["doctor", "init", "lab", "provision", "verify"]
    assert any(".whl[control]" in line for line in first)
    assert not any("make " in line or "ansible-playbook" in line for line in [*first, *four])
    assert any(line.startswith("tunetool lab up --nodes 4") for line in four)
    assert any(line.startswith("tunetool lab fault node3 ") for line in four)
    tutorial = newcomer.lines_after(newcomer.TUTORIAL, "## 2.")
    assert tutorial == newcomer.lines_after(*newcomer.FIRST[1])


def test_a_place_without_commands_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```console\n$ true\n```\n")
    assert newcomer.lines_after(page, "# A page") == ["true"]
    with pytest.raises(SystemExit, match=r"`page.md` has no commands after `## B`"):
        newcomer.lines_after(page, "## B")


@pytest.mark.parametrize(("verify", "other", "code"), [(0, 0, 0), (1, 0, 0), (3, 0, 1), (0, 1, 1)])
def test_a_verdict_of_fail_is_an_answer_and_an_error_is_not(verify: int, other: int, code: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```console\n$ tunetool provision   # why\n$ tunetool verify -i x\n$ echo reached\n```\n")
    text = newcomer.script([(page, "# A")])
    double = f"tunetool() {{ case $1 in verify) return {verify} ;; *) return {other} ;; esac; }}\n"
    done = subprocess.run(["bash", "-c", double + text], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert ("\nreached\n" in done.stdout) is (code == 0)
    assert ("== tunetool verify -i x (" in done.stdout) is (other == 0)


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ("fail node3, pass node2, pass node1, pass node4", False),
        ("pass node1, fail node3, pass node2, pass node4", True),
        ("fail node3, pass node2, pass node1, fail node4", True),
        ("fail node3, pass node2, pass node1", True),
    ],
)
def test_a_page_without_the_bad_node_on_top_is_seen(rows: str, wrong: bool, tmp_path: Path) -> None:
    for name, shown in (("node", ""), ("one", "pass node1"), ("four", rows)):
        cells = [each.split() for each in shown.split(", ") if each]
        text = "".join(f'<tr data-status="{status}"><td>{host}</td></tr>' for status, host in cells)
        (tmp_path / f"{name}.html").write_text(text)
    copies = [tmp_path / f"{name}.html" for name in ("node", "one", "four")]
    assert bool(newcomer.judge(copies, four=True)) is wrong
    assert newcomer.judge(copies[:2], four=False) == []
    assert newcomer.judge(copies[:2], four=True) == ["there is no page `four.html`"]


def test_what_the_machine_lacks_is_known_before_the_first_node() -> None:
    assert any("10.0 GiB" in each for each in newcomer.lacks(True, False, 9 * 2**30))
    assert not any("GiB" in each for each in newcomer.lacks(True, False, 10 * 2**30))
    assert not any("GiB" in each for each in newcomer.lacks(False, False, 9 * 2**30))


def test_a_line_that_fails_leaves_what_was_printed(tmp_path: Path) -> None:
    said, code = newcomer.run(tmp_path, dict(os.environ), "echo 'page: /there/report.html'; exit 3")
    assert (said, code) == ("page: /there/report.html\n", 3)
    assert (tmp_path / newcomer.PRINTED).read_text() == said
    assert newcomer.pages(tmp_path, dict(os.environ), "nothing") == []
