"""Documents: links and paths lead to existing files, and every command line has a real command and options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from tunetool.cli.main import cli

pytestmark = pytest.mark.any_python
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ROOT / "docs/reference/commands.md"
"""Pages that tools/dev/docs.py generates from the commands."""
FOLDERS = "docs|inventory|molecule|perf|playbooks|plugins|roles|templates|tests|tools"
MADE_BY_READERS = ("inventory/mycluster", "inventory/lab/hosts.yml")
"""Paths of a copy that a reader makes, and of files that `tunetool lab` writes: they are not in the repository."""
FENCE = re.compile(r"^ *(`{3,})(\w*)\s*\n(.*?)^ *\1\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*/]")
SPAN = re.compile(r"`(tunetool [^`]+)`")
SHELL = ("", "console", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its lines."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(match[2], match[3]) for match in FENCE.finditer(page.read_text())]


def prose(page: Path) -> str:
    """A page without its fenced blocks, paragraphs unwrapped."""
    return re.sub(r"\n(?=[^\n])", " ", FENCE.sub("", page.read_text()))


def command_lines(block: Block) -> Iterator[str]:
    """The lines that a reader types: after `$ `, or whole lines of a shell block without any `$ `; continued lines joined."""
    lines = re.sub(r" *\\\n\s*", " ", block.text).splitlines()
    typed = [line.strip()[2:] for line in lines if line.strip().startswith("$ ")]
    if not typed and block.language in SHELL:
        typed = [line.strip() for line in lines]
    yield from typed


def calls(line: str) -> Iterator[list[str]]:
    """The calls of tunetool in a line, each as its words after `tunetool`."""
    words = shlex.split(line, comments=True)
    for index, word in enumerate(words):
        starts = (
            index == 0 or words[index - 1] in ("|", "&&", ";") or "=" in words[index - 1] or word.endswith("/tunetool")
        )
        if starts and Path(word).name == "tunetool":
            rest = words[index + 1 :]
            ends = [at for at, each in enumerate(rest) if each in ("|", "&&", ";", "--", ">", "&")]
            yield rest[: min(ends, default=len(rest))]


def options_of(command: click.Command) -> set[str]:
    context = click.Context(command, help_option_names=["-h", "--help"])
    return {name for parameter in command.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)}


def children(group: click.Group) -> list[click.Command]:
    context = click.Context(group)
    return [child for name in group.list_commands(context) if (child := group.get_command(context, name)) is not None]


def no_option(path: list[str], word: str, known: set[str]) -> str | None:
    name = word.split("=", 1)[0]
    unknown = word.startswith("-") and len(word) > 1 and name not in known
    return f"`{' '.join(path)}` has no option `{name}`" if unknown else None


def problem(words: list[str]) -> str | None:
    """The problem of a call of tunetool, by the real commands; None if there is none."""
    command: click.Command = cli
    path = ["tunetool"]
    known = options_of(command)
    for word in words:
        if said := no_option(path, word, known):
            return said
        if not word.startswith("-") and isinstance(command, click.Group):
            child = command.get_command(click.Context(command), word)
            if child is None and not re.fullmatch(r"[a-z][a-z-]*", word):
                # An operand: a group may choose one of its commands by itself, as `stage SRC DST` copies.
                known |= {name for each in children(command) for name in options_of(each)}
                return next((no_option(path, each, known) for each in words if no_option(path, each, known)), None)
            if child is None:
                return f"`{' '.join(path)}` has no command `{word}`"
            command = child
            path.append(word)
            known = known | options_of(command)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_that_is_there(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    # Links are checked above, relative to the page's folder.
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text())
    named = {path for path in PATH.findall(text) if not path.startswith(MADE_BY_READERS)}
    missing = sorted(path for path in named if not any(ROOT.glob(path.rstrip("/"))))
    assert not missing


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != GENERATED], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_line_names_a_command_and_its_options(page: Path) -> None:
    lines = [line for block in blocks(page) for line in command_lines(block) if "tunetool" in line]
    wrong = [f"{line}: {said}" for line in lines for words in calls(line) if (said := problem(words))]
    spans = [span.rstrip(".,:") for span in SPAN.findall(prose(page))]
    wrong += [f"{span}: {said}" for span in spans for words in calls(span) if (said := problem(words))]
    assert not wrong


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tunetool verfy", "`tunetool` has no command `verfy`"),
        ("tunetool report lst", "`tunetool report` has no command `lst`"),
        ("tunetool verify --gsd require", "`tunetool verify` has no option `--gsd`"),
        ("A=b tunetool verify --gds=require --nothing", "`tunetool verify` has no option `--nothing`"),
        ("tunetool lab ssh node1 -- lsblk -o NAME", None),
        ("tunetool report list | head -1", None),
    ],
)
def test_a_wrong_command_line_is_seen(line: str, said: str | None) -> None:
    assert [problem(words) for words in calls(line)] == [said]


def test_there_are_command_lines_to_look_at() -> None:
    lines = [line for page in PAGES for block in blocks(page) for line in command_lines(block) if "tunetool" in line]
    counted = [words for line in lines for words in calls(line)]
    assert len(counted) > 100
