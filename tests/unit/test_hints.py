"""What the program says names nothing that only a clone has: whoever installed the wheel has no clone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import printed

pytestmark = pytest.mark.any_python
ROOT = Path(__file__).parents[2]
FOLDERS = "docs|inventory|molecule|perf|playbooks|plugins|roles|templates|tests|tools"
NAMED = re.compile(
    rf"(?<![\w./{printed.GAP}-])(?:(?:{FOLDERS})/[\w./*-]*[\w*]|[\w-]+\.md\b|(?:site|galaxy)\.yml\b|Makefile\b)"
)
MADE_BY_READERS = ("inventory/lab", "inventory/mycluster")
"""What `tunetool init` and `tunetool lab up` write."""
SHOWN = ("inventory/h100", "inventory/h200")
"""Examples that the wheel carries."""


def said(path: Path) -> Iterator[str]:
    """The texts of a module in which words are apart, and the docstrings of its commands, which are their help."""
    tree = ast.parse(path.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in statements:
            yield printed.text_of(node)
        elif isinstance(node, ast.FunctionDef) and any("command" in ast.dump(each) for each in node.decorator_list):
            yield ast.get_docstring(node) or ""


def of_a_clone(text: str) -> list[str]:
    """The paths in a text that a machine without a clone does not have."""
    paths = NAMED.findall(text) if " " in text.strip() else []
    return [path for path in paths if not path.startswith((*MADE_BY_READERS, *SHOWN))]


def test_no_message_names_what_only_a_clone_has() -> None:
    paths = [path for folder in printed.FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(path, text) for path in paths for text in said(path)]
    wrong = {f"{path.relative_to(ROOT)}: {name}: {text}" for path, text in texts for name in of_a_clone(text)}
    assert sorted(wrong) == []
    assert len(texts) > 5000


def test_nothing_in_the_wheel_names_the_documents_by_path() -> None:
    folders = [ROOT / name for name in ("inventory", "meta", "playbooks", "roles")]
    files = [
        ROOT / "ansible.cfg",
        *(path for folder in folders for path in folder.rglob("*") if path.suffix in (".yml", ".md")),
    ]
    assert [str(path.relative_to(ROOT)) for path in sorted(files) if re.search(r"\bdocs/", path.read_text())] == []
    assert len(files) > 50


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hint: docs/reference/roles.md lists every variable", ["docs/reference/roles.md"]),
        ("run `site.yml` on this node", ["site.yml"]),
        ("replace it (`playbooks/replace_drive.yml`)", ["playbooks/replace_drive.yml"]),
        ("writes inventory/lab/hosts.yml where it can", []),
        ("run `ansible-playbook tunetool.node.teardown` first", []),
        ("see /usr/share/docs/x and my-tests/y", []),
        ("templates/report", []),
    ],
)
def test_a_path_of_a_clone_is_seen(text: str, named: list[str]) -> None:
    assert of_a_clone(text) == named
