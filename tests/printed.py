"""What the programs of this repository can print: the texts in their source, with a gap for each value.

A document quotes a message with `...` for the values in it. ``can_be_printed`` says whether a text in the source has all
of its other words, in that order.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
GAP = "\0"
FOLDERS = ("tools/tunetool", "plugins")
SCRIPTS = ("tools/dev/setup.sh",)
FIELD = re.compile(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]|\{[\w.!:]*\}|\$\{?\w+\}?")


def text_of(node: ast.AST) -> str:
    """A string expression with a gap for everything that is no constant."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FIELD.sub(GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        # A brace of an f-string's own text is no field.
        return "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return GAP


@cache
def texts() -> str:
    """All texts of the source, one a line."""
    found: dict[str, None] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                    found[text_of(node).replace("\n", " ")] = None
    for name in SCRIPTS:
        found |= dict.fromkeys(FIELD.sub(GAP, line) for line in (ROOT / name).read_text().splitlines())
    return "\n".join(found)


def can_be_printed(quoted: str) -> bool:
    """Whether a text in the source has the words of a quoted message, in their order."""
    words = (re.escape(part) for part in quoted.strip(" .").split("...") if part.strip())
    return re.search(r"[^\n]*?".join(words), texts()) is not None
