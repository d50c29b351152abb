"""Documents: links and paths lead to existing files, and every command line has a real command and options.

What runs anywhere is run; a guide with any other command line says what it needs. A quoted message can still be printed.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import printed
import reference
from tunetool.cli.main import cli
from waiting import PATIENCE

pytestmark = pytest.mark.any_python
ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "perf/README.md")),
    *sorted({*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in reference.MADE if name.endswith(".md"))}),
]
GENERATED = ROOT / "docs/reference/commands.md"
"""The page that tools/dev/reference.py makes of the commands."""
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
FIRST_SCREEN = 30
"""Lines of README that a reader sees without scrolling."""
ANYWHERE = (["advise"], ["inspect"], ["init"], ["report", "list"])
"""Commands that need no node, no disk and no GPU."""
ELSEWHERE = re.compile(r"-i|--capture|--page|expect$|[A-Z]{3,}")
"""Words of a call of these that does: an inventory, a file that a reader names, `advise expect`, which needs drives."""
INVENTORIES = re.compile(r"inventory/mycluster(/|$)|inventory$|INVENTORY$|\w+,$")
"""Inventories that a reader has, and a list of hosts."""
ALWAYS_A_TAG = {"all", "always", "never", "tagged", "untagged"}
COMMENTED = [ROOT / "site.yml", *sorted((ROOT / "playbooks").glob("*.yml"))]
"""Playbooks, whose comments show how to call them."""
PLAYS = re.compile(r"`(ansible-playbook [^`]+)`")
PARSER = """
import contextlib, io, json, sys
from ansible.cli.playbook import PlaybookCLI
answers = []
for words in json.load(sys.stdin):
    cli, said = PlaybookCLI(["ansible-playbook"]), io.StringIO()
    cli.init_parser()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            answers.append(vars(cli.parser.parse_args(words)))
    except SystemExit as ended:
        answers.append({"error": said.getvalue().partition("error: ")[2].strip()} if ended.code else {"help": True})
json.dump(answers, sys.stdout, default=str)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its lines."""

    language: str
    text: str


def made(page: Path) -> bool:
    """Whether the page is made and not in git."""
    return page.is_relative_to(ROOT) and str(page.relative_to(ROOT)) in reference.MADE


def text_of(page: Path) -> str:
    return reference.page(str(page.relative_to(ROOT))) if made(page) else page.read_text()


def blocks(page: Path) -> list[Block]:
    return [Block(match[2], match[3]) for match in FENCE.finditer(text_of(page))]


def prose(page: Path) -> str:
    """A page without its fenced blocks, paragraphs unwrapped."""
    return re.sub(r"\n(?=[^\n])", " ", FENCE.sub("", text_of(page)))


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
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not (made(file) or file.exists()) or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_the_repository_that_a_page_names_is_there(page: Path) -> None:
    # Links are checked above, relative to the page's folder.
    text = re.sub(r"\]\([^)]*\)", "]", text_of(page))
    named = {path for path in PATH.findall(text) if not path.startswith(MADE_BY_READERS)} - set(reference.MADE)
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
    monkeypatch.setattr("tunetool.user_directories.default_runs_dir", lambda: tmp_path / "runs")
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


def play_lines(page: Path) -> Iterator[str]:
    """The calls of ansible-playbook that a page shows, in blocks and in the text; variables of the shell replaced."""
    shown = [line for block in blocks(page) for line in command_lines(block)]
    values = {name: value for line in shown for name, value in re.findall(r"^(\w+)=\"([^\"]*)\"$", line)}
    for line in [*shown, *(span.rstrip(".,:") for span in PLAYS.findall(prose(page)))]:
        if line.startswith("ansible-playbook "):
            yield re.sub(r"\$(\w+)", lambda match: values[match[1]], line)


def commented_lines(playbook: Path) -> list[str]:
    return re.findall(r"^# +(ansible-playbook .+)$", playbook.read_text(), re.MULTILINE)


def parsed(calls_of_ansible: list[list[str]]) -> list[dict[str, Any]]:
    """What Ansible's own parser makes of the words after `ansible-playbook`, or its ``error``. One process for all: Ansible
    changes the streams of the process that imports it."""
    pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")
    done = subprocess.run(
        [sys.executable, "-c", PARSER],
        input=json.dumps(calls_of_ansible),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@cache
def playbook_files(name: str) -> tuple[Path, ...]:
    """The file of a playbook by its path in the clone or its name in the collection, with those that it imports."""
    collection = re.fullmatch(r"tunetool\.node\.(\w+)", name)
    path = ROOT / (f"playbooks/{collection[1]}.yml" if collection else name)
    if not path.is_file():
        return ()
    imported = re.findall(r"import_playbook: (\S+)", path.read_text())
    below = [str((path.parent / each).resolve().relative_to(ROOT)) for each in imported]
    return (path, *(file for each in below for file in playbook_files(each)))


def tags_of(document: Any) -> set[str]:
    """Every tag in a playbook: of plays, roles, tasks and imports."""
    if isinstance(document, list):
        return {tag for each in document for tag in tags_of(each)}
    if not isinstance(document, dict):
        return set()
    tags = document.get("tags", [])
    return {*([tags] if isinstance(tags, str) else tags), *(tag for each in document.values() for tag in tags_of(each))}


@cache
def known_variables() -> frozenset[str]:
    """Variables that a role takes, and those that a playbook reads by itself."""
    yaml = pytest.importorskip("yaml")
    specs = [yaml.safe_load(path.read_text()) for path in (ROOT / "roles").glob("*/meta/argument_specs.yml")]
    roles = {name for spec in specs for name in spec["argument_specs"]["main"]["options"]}
    # A play's variable has a default there; these two name files, and are explained in its comment.
    read = {name for path in COMMENTED for name in re.findall(r"\b(\w+)\s+\| default\(", path.read_text())}
    return frozenset(roles | read | {"apply_plan", "plan_file"})


def play_problem(given: dict[str, Any]) -> str | None:
    """The problem of a parsed call of ansible-playbook; None if there is none."""
    yaml = pytest.importorskip("yaml")
    if "error" in given or "help" in given:
        return given.get("error")
    for inventory in given["inventory"] or []:
        if not INVENTORIES.match(inventory) and not (ROOT / inventory).exists():
            return f"there is no inventory `{inventory}`"
    files = [file for name in given["args"] for file in playbook_files(name)]
    if not files:
        return f"there is no playbook `{' '.join(given['args'])}`"
    # Ansible splits values at commas later.
    wanted = {tag for each in [*given["tags"], *given["skip_tags"]] for tag in each.split(",")} - ALWAYS_A_TAG
    unknown = wanted - {tag for file in files for tag in tags_of(yaml.safe_load(file.read_text()))}
    if unknown:
        return f"no part of `{given['args'][0]}` has the tag `{sorted(unknown)[0]}`"
    texts = [each for each in given["extra_vars"] if not each.startswith("@")]
    pairs = [each for text in texts if not text.startswith("{") for each in shlex.split(text)]
    names = {each.partition("=")[0] for each in pairs}
    names |= {name for text in texts if text.startswith("{") for name in yaml.safe_load(text)}
    unknown = names - known_variables()
    return f"nothing reads the variable `{sorted(unknown)[0]}`" if unknown else None


def play_problems(lines: list[str]) -> list[str | None]:
    return [play_problem(given) for given in parsed([shlex.split(line, comments=True)[1:] for line in lines])]


def test_every_call_of_ansible_playbook_names_what_is_there() -> None:
    # `example.yml` is the example above that line, in a role's README.md.
    readmes = sorted((ROOT / "roles").glob("*/README.md"))
    shown = {page: [*play_lines(page)] for page in [*PAGES, *readmes]}
    shown |= {playbook: commented_lines(playbook) for playbook in COMMENTED}
    lines = [(page, line) for page, found in shown.items() for line in found if " example.yml " not in line]
    problems = zip(lines, play_problems([line for _, line in lines]), strict=True)
    assert [f"{page.name}: {line}: {said}" for (page, line), said in problems if said] == []
    assert len(lines) > 30


def test_a_wrong_call_of_ansible_playbook_is_seen() -> None:
    expected = {
        "site.yaml -i inventory/lab": "there is no playbook `site.yaml`",
        "tunetool.node.sight -i inventory/lab": "there is no playbook `tunetool.node.sight`",
        "site.yml -i inventory/labs": "there is no inventory `inventory/labs`",
        "site.yml --tag-list verify": "unrecognized arguments: --tag-list verify",
        "site.yml --tags verify,tunning": "no part of `site.yml` has the tag `tunning`",
        "playbooks/teardown.yml -t drives": "no part of `playbooks/teardown.yml` has the tag `drives`",
        "site.yml -e raid_array_nam=x": "nothing reads the variable `raid_array_nam`",
        "site.yml -e '{\"plan\": 1}'": "nothing reads the variable `plan`",
        "site.yml -bK -e 'raid_array_name=x plan_file=y' -e @z.yml --tags=all,array # why": None,
        "tunetool.node.replace_drive -i n1, --limit n1 -e provision_serial=25%": None,
    }
    lines = [f"ansible-playbook {words}" for words in expected]
    assert dict(zip(expected, play_problems(lines), strict=True)) == expected


def test_what_follows_two_dashes_are_options_of_ansible_playbook() -> None:
    # `lab ssh NODE -- COMMAND` alone has something else there.
    lines = [line for page in PAGES for block in blocks(page) for line in command_lines(block)]
    behind = [line.partition(" -- ")[2] for line in lines if re.match(r"tunetool (?!lab ).* -- ", line)]
    answers = parsed([["site.yml", *shlex.split(words, comments=True)] for words in behind])
    assert [(words, given["error"]) for words, given in zip(behind, answers, strict=True) if "error" in given] == []
    assert len(behind) > 3


def quoted(page: Path) -> list[str]:
    rows = "".join(QUOTING.findall(text_of(page)))
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


def test_the_first_screen_has_two_commands_for_a_bare_machine() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:FIRST_SCREEN])
    (block,) = FENCE.finditer(first)
    commands = [line.partition("#")[0].split() for line in command_lines(Block(block[2], block[3]))]
    assert commands == [["make", "rehearse"], ["make", "test"]]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"rehearse", "test"} <= set(targets)
    words = " ".join(FENCE.sub("", first).split())
    for needed in ("Debian 12", "git", "make", "Python 3.11", "root or sudo", "GiB of memory"):
        assert needed in words, f"what they need: {needed}"
    for target in ("rehearse", "test"):
        assert re.search(rf"`make {target}`[^.]*? \d+ minutes", words), f"how long `make {target}` takes"
