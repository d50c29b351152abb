"""Go the way of a new user by the documents alone: from the wheel to the page of a virtual node, without the checkout.

    .venv/bin/python tools/dev/newcomer.py DIR    the lines of README.md: install, then the door without hardware
      --four       then those of the tutorial without hardware: four nodes on one page, the bad one on top
      --pictures   screenshots of the pages into docs/pictures/, by Chromium
      --cold       with an empty cache: the image of the nodes is built, and pip downloads everything

The wheel is built anew. The lines run as they are written, one shell for all, in DIR, which must not exist yet and is
also HOME: the environment, the inventory, the nodes and Ansible's files are all in it. Records go where records go. At
the end the nodes are removed; DIR stays, with the pages and, in printed.txt, all that was printed. QEMU and mmdebstrap
must be there (`tunetool doctor lab`), and 2.5 GiB of free memory, or 10 with --four.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import dist
import steps
from steps import ROOT

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs/tutorials/no-hardware.md"
FIRST = ((README, "## Install"), (README, "**No hardware**"))
FOUR = ((TUTORIAL, "## 4. Four nodes on one page"),)
"""A document, and the words after which its next block of commands comes."""
MOST_SECONDS = 3 * 3600
"""One node took 18 minutes beside other work, and three more share the same processors."""
NODE_BYTES = 5 * 2**29
"""Of memory: 2 GiB of the node and, without KVM, 0.5 for the code that QEMU translates."""
PRINTED = "printed.txt"
PAGE = re.compile(r"^page: (\S+)$", re.MULTILINE)
ROW = re.compile(r'<tr data-status="(\w+)"[^>]*><td>([^<]+)</td>')
"""A node of a fleet's page, the first ones on top."""
WIDTH, HEIGHT = 1200, 1180
"""Of the pictures, in pixels: the beginning of a page."""


def lines_after(document: Path, words: str) -> list[str]:
    """The command lines of the first block after ``words`` in a document."""
    _, there, rest = document.read_text().partition(words)
    block = re.search(r"^```console\n(.*?)^```$", rest, re.MULTILINE | re.DOTALL)
    if not there or block is None:
        raise SystemExit(f"error: `{document.name}` has no commands after `{words}`")
    return [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]


def script(places: Sequence[tuple[Path, str]]) -> str:
    """A shell script of the lines, each with its time before it; a verdict of FAIL is one of the answers."""
    parts = ["set -eo pipefail", 'step() { printf \'\\n== %s (%d s)\\n\' "$1" "$SECONDS"; }']
    for document, words in places:
        for line in lines_after(document, words):
            command = line.partition("  #")[0].rstrip()
            judged = f"{{ {command} || [ $? = 1 ]; }}" if command.startswith("tunetool verify") else command
            parts += [f"step {shlex.quote(command)}", judged]
    return "\n".join([*parts, "step end"]) + "\n"


def environment(directory: Path, cold: bool) -> dict[str, str]:
    """That of a user who has this machine and no checkout."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ANSIBLE_", "TUNETOOL_"))
    }
    folders = os.environ["PATH"].split(os.pathsep)
    kept["PATH"] = os.pathsep.join(each for each in folders if not each.startswith(str(ROOT / ".venv")))
    for name in ("VIRTUAL_ENV", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        kept.pop(name, None)
    # The image of the nodes: minutes that a second run need not take.
    cache = directory / ".cache" if cold else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {**kept, "HOME": str(directory), "XDG_CACHE_HOME": str(cache), "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"}


def lacks(four: bool, pictures: bool, available: int) -> list[str]:
    """What this machine lacks for the way, to be said at once and not after an hour. ``available``: bytes of memory."""
    programs = ["qemu-system-x86_64", "qemu-img", "mke2fs", "ssh", *(["chromium"] if pictures else [])]
    problems = [f"`{name}` is not installed" for name in programs if shutil.which(name) is None]
    needed = NODE_BYTES * (4 if four else 1)
    if available < needed:
        problems.append(f"{available / 2**30:.1f} GiB of memory are free, the nodes take {needed / 2**30:.1f} GiB")
    return problems


def available_memory() -> int:
    """Bytes that programs can get without swapping."""
    found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def run(directory: Path, variables: Mapping[str, str], text: str) -> tuple[str, int]:
    """Run the script, show what it prints, and return that with its exit code."""
    said = []
    given = [f"{name}={value}" for name, value in variables.items()]
    with (directory / PRINTED).open("w") as kept:

        def take(line: str) -> None:
            said.append(line)
            kept.write(line)
            print(line, end="", flush=True)

        command = ["env", "--ignore-environment", f"--chdir={directory}", *given, "bash", "-c", text]
        code = steps.finish(steps.run(command, MOST_SECONDS, take))
    return "".join(said), code


def pages(directory: Path, variables: Mapping[str, str], said: str) -> list[Path]:
    """Copies of the pages in DIR: of each `verify -i`, and of the node's own record behind the first."""
    written = [Path(each) for each in PAGE.findall(said)]
    if not written:
        return []
    tunetool = str(directory / "tunetool/bin/tunetool")
    own = str(written[0].parent / "hosts/node1.json")
    shown = subprocess.run(
        [tunetool, "report", "page", own], env=dict(variables), stdout=subprocess.PIPE, text=True, check=False
    )
    copies = [(page, name) for page, name in zip(written, ("one", "four"), strict=False)]
    if shown.returncode == 0:
        copies.insert(0, (Path(shown.stdout.strip()), "node"))
    return [Path(shutil.copyfile(page, directory / f"{name}.html")) for page, name in copies]


def judge(copies: Sequence[Path], four: bool) -> list[str]:
    """What is not as the documents promise it."""
    problems = []
    wanted = {"one": [("pass", "node1")]}
    if four:
        wanted["four"] = [("fail", "node3"), ("pass", "node1"), ("pass", "node2"), ("pass", "node4")]
    there = {page.stem: page for page in copies}
    problems += [f"there is no page `{name}.html`" for name in ("node", *wanted) if name not in there]
    for name in sorted(there.keys() & wanted.keys()):
        rows, shown = wanted[name], ROW.findall(there[name].read_text())
        # The order of those that pass is that of their figures.
        if shown[:1] != rows[:1] or sorted(shown) != sorted(rows):
            problems.append(f"`{name}.html` has {json.dumps(shown)} in place of {json.dumps(rows)}")
    return problems


def take_pictures(copies: Sequence[Path]) -> None:
    """The beginnings of pages, in few colours."""
    from PIL import Image

    sys.path.insert(0, str(ROOT / "tests"))
    from browser import Browser

    with tempfile.TemporaryDirectory(prefix="tunetool-pictures-") as temporary:
        browser = Browser(Path(temporary))
        try:
            for page in copies:
                browser.open(page, width=WIDTH)
                taken = Path(temporary) / "taken.png"
                browser.picture(taken, {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1})
                target = ROOT / f"docs/pictures/page-{page.stem}.png"
                with Image.open(taken) as picture:
                    picture.convert("RGB").quantize(48).save(target, optimize=True)
                print(f"{target.stat().st_size / 1e3:5.0f} kB  {target}")
        finally:
            browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    for option in ("--four", "--pictures", "--cold"):
        parser.add_argument(option, action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    problems = lacks(given.four, given.pictures, available_memory())
    if problems:
        raise SystemExit("\n".join(f"error: {each}" for each in problems))
    directory = given.directory.absolute()
    directory.mkdir()
    dist.build(directory, ["wheel"])
    variables = environment(directory, given.cold)
    try:
        said, code = run(directory, variables, script([*FIRST, *(FOUR if given.four else ())]))
    finally:
        tunetool = directory / "tunetool/bin/tunetool"
        if tunetool.exists():
            subprocess.run([tunetool, "lab", "down"], cwd=directory, env=variables, check=False)
    problems = [f"the line after the last `==` ended with {code}"] if code else []
    copies = pages(directory, variables, said)
    problems += judge(copies, given.four)
    for line in [
        *re.findall(r"^== .*", said, re.MULTILINE),
        *map(str, copies),
        *(f"error: {each}" for each in problems),
    ]:
        print(line)
    if given.pictures:
        # A fleet of one node says less than the node's own page.
        take_pictures([page for page in copies if page.stem != "one"])
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
