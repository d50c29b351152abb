"""Documents: links and paths lead to existing files, and every command line has a real command and options.

What runs anywhere is run; a guide with any other command line says what it needs. A quoted message can still be printed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import printed
from tunetool.cli.main import cli

pytestmark = pytest.mark.any_python
ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "perf/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
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
SYMPTOM = re.compile(r"^\| (?:`` ?(.+?) ?``|`([^`]+)`) \|", re.MULTILINE)
QUOTING = re.compile(r"^\| (?:it says|the reason contains) \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
"""A table whose first column quotes messages."""
NEEDS = re.compile(r"^# .+\n\nNeeds: \w", re.MULTILINE)
ANYWHERE = (["advise"], ["inspect"], ["init"], ["report", "list"])
"""Commands that need no node, no disk and no GPU."""
ELSEWHERE = re.compile(r"-i|--capture|--page|expect$|[A-Z]{3,}")
"""Words of a call of these that does: an inventory, a file that a reader names, `advise expect`, which needs drives."""


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


def missing(path: list[str], command: click.Command, arguments: list[str]) -> str | None:
    """What a whole line lacks to be a call: a value of an option, a required option, one of the possible values."""
    context = click.Context(command, info_name=path[-1], help_option_names=["-h", "--help"])
    try:
        values, _, _ = command.make_parser(context).parse_args(list(arguments))
        for option in command.get_params(context):
            given = values.get(option.name) if isinstance(option, click.Option) else "an operand"
            if option.required and given is None and "help" not in values:
                return f"`{' '.join(path)}` lacks `{option.opts[0]}`"
            if isinstance(option.type, click.Choice) and given not in (None, "an operand"):
                for value in given if option.multiple else [given]:
                    option.type.convert(value, option, context)
    except click.UsageError as error:
        return f"`{' '.join(path)}`: {error.format_message()}"
    return None


def children(group: click.Group) -> list[click.Command]:
    context = click.Context(group)
    return [child for name in group.list_commands(context) if (child := group.get_command(context, name)) is not None]


def no_option(path: list[str], word: str, known: set[str]) -> str | None:
    name = word.split("=", 1)[0]
    unknown = word.startswith("-") and len(word) > 1 and name not in known
    return f"`{' '.join(path)}` has no option `{name}`" if unknown else None


def problem(words: list[str], whole: bool = False) -> str | None:
    """The problem of a call of tunetool, by the real commands; None if there is none. ``whole``: nothing is left out."""
    command: click.Command = cli
    path = ["tunetool"]
    known = options_of(command)
    for at, word in enumerate(words):
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
            if whole and not isinstance(command, click.Group):
                left = words[at + 1 :]
                unknown = (said for each in left if (said := no_option(path, each, known)))
                return next(unknown, None) or missing(path, command, left)
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
    wrong = [f"{line}: {said}" for line in lines for words in calls(line) if (said := problem(words, whole=True))]
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
        ("tunetool verify --target", "`tunetool verify`: Option '--target' requires an argument."),
        (
            "tunetool verify --level half",
            "`tunetool verify`: Invalid value for '--level': 'half' is not one of 'config', 'quick', 'full'.",
        ),
        ("tunetool ds-config zero2 --target /x", "`tunetool ds-config` lacks `-o`"),
        ("tunetool lab ssh node1 -- lsblk -o NAME", None),
        ("tunetool report list | head -1", None),
    ],
)
def test_a_wrong_command_line_is_seen(line: str, said: str | None) -> None:
    assert [problem(words, whole=True) for words in calls(line)] == [said]


def test_there_are_command_lines_to_look_at() -> None:
    lines = [line for page in PAGES for block in blocks(page) for line in command_lines(block) if "tunetool" in line]
    counted = [words for line in lines for words in calls(line)]
    assert len(counted) > 100


def runs_anywhere(words: list[str]) -> bool:
    return any(words[: len(each)] == each for each in ANYWHERE) and not any(map(ELSEWHERE.match, words))


def typed() -> list[tuple[Path, list[str]]]:
    """Every call of tunetool that a page shows, with its page."""
    pages = [page for page in PAGES if page != GENERATED]
    lines = [(page, line) for page in pages for block in blocks(page) for line in command_lines(block)]
    return [(page, words) for page, line in lines if "tunetool" in line for words in calls(line)]


CHEAP = sorted({" ".join(words) for _, words in typed() if runs_anywhere(words)})


@pytest.mark.parametrize("line", CHEAP)
def test_what_needs_nothing_runs_as_the_documents_show_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("docs", "inventory"):
        (tmp_path / name).mkdir()
    (tmp_path / "docs/machines").symlink_to(ROOT / "docs/machines")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tunetool.user_directories.runs", lambda: tmp_path / "runs")
    done = CliRunner().invoke(cli, shlex.split(line), standalone_mode=False)
    assert done.exception is None, done.output
    assert done.return_value in (None, 0), done.output


def test_something_of_each_kind_is_run() -> None:
    assert all(any(line.split()[: len(each)] == each for line in CHEAP) for each in ANYWHERE)


def test_a_guide_whose_commands_need_something_says_what() -> None:
    folders = {ROOT / "docs/guides", ROOT / "docs/tutorials"}
    pages = {page for page, words in typed() if page.parent in folders and not runs_anywhere(words)}
    assert [str(page.relative_to(ROOT)) for page in sorted(pages) if not NEEDS.search(page.read_text())] == []
    assert len(pages) > 20


def quoted(page: Path) -> list[str]:
    rows = "".join(QUOTING.findall(page.read_text()))
    return [both or plain for both, plain in SYMPTOM.findall(rows)]


def test_every_message_that_a_page_quotes_can_still_be_printed() -> None:
    messages = {f"{page.name}: {message}": message for page in PAGES for message in quoted(page)}
    assert [name for name, message in messages.items() if not printed.can_be_printed(message)] == []
    assert len(messages) > 70


@pytest.mark.parametrize(
    ("message", "there"),
    [
        ("x slower to ... than the median of the other", True),
        ("x slower to ... than the mean of the other", False),
        ("median of the other ... x slower to", False),
        ("busy: another tunetool run is measuring", True),
        ("busy: another tunetool run is resting", False),
    ],
)
def test_a_message_that_nothing_prints_is_seen(message: str, there: bool) -> None:
    assert printed.can_be_printed(message) is there


def test_every_target_of_make_that_a_page_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target
        for page in PAGES
        for text in (*(line for block in blocks(page) for line in command_lines(block)), prose(page))
        for target in re.findall(r"(?:^|[`&] *)make ([a-z-]+)", text)
    }
    assert named - targets == set()
    assert {"setup", "check", "test", "docs", "rehearse"} <= named


def test_the_readme_shows_how_to_test() -> None:
    lines = [line.partition("#")[0].strip() for block in blocks(ROOT / "README.md") for line in command_lines(block)]
    assert {"make check", "make test"} <= set(lines)
