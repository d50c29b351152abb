"""The command lines of README and of the tutorials, as they are written: a new user's shell, HOME and environment.

The wheel is built anew and installed by pip. Only names of directories and of the Python that trains are exchanged for
what is here. Whatever the machine is, no call may be wrong; what it lacks is said.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import dist
import newcomer
import skips
from documented_lines import HERE, PAGES, RENTED, TORCH_OR_3, lines_of
from made_weights import safetensors
from waiting import PATIENCE

pytestmark = pytest.mark.slow
ENDED = re.compile(r"^== (\d+) (\d+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    dist.build(directory, ["wheel"])
    (made,) = directory.iterdir()
    return made


@pytest.fixture
def memory() -> Iterator[Path]:
    """Where the pages have /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="tunetool-documents-", dir="/dev/shm") as made:
        yield Path(made)


def exchanged(line: str, places: Mapping[str, Path | str]) -> str:
    for name, place in places.items():
        line = line.replace(name, str(place))
    return line


def script(lines: list[str], places: Mapping[str, Path | str]) -> str:
    """One shell for all; after each line its number and its exit code."""
    parts = []
    for number, line in enumerate(lines):
        parts += [exchanged(line, places), f'printf "\\n== %s %s\\n" {number} "$?"']
    return "\n".join(parts) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_lines_of_a_page_run_as_they_are_written(page: Path, wheel: Path, memory: Path, tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    for folder in (home, scratch / "models/qwen"):
        folder.mkdir(parents=True)
    safetensors(scratch / "models/qwen/model.safetensors", {"model.embed.weight": [64, 64], "lm_head.weight": [64, 64]})
    shutil.copy(wheel, home)
    places: dict[str, Path | str] = {
        "/mnt/data": scratch,
        "/mnt/scratch": scratch,
        "/dev/shm": memory,
        "/opt/venv/bin/python": sys.executable,
        "tunetool-0.1.0-py3-none-any.whl": wheel.name,
    }
    lines = [line for line in lines_of(page) if line in HERE]
    environment = {**newcomer.environment(home, cold=False), "XDG_STATE_HOME": str(home / "state")}
    done = subprocess.run(
        ["bash", "-c", script(lines, places)],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20 * PATIENCE,
        check=False,
    )
    ended = list(ENDED.finditer(done.stdout))
    assert len(ended) == len(lines), done.stdout[-4000:]
    begin = 0
    for line, end in zip(lines, ended, strict=True):
        said, code = done.stdout[begin : end.start()], int(end[2])
        begin = end.end()
        row = HERE[line]
        assert code in row.codes, f"{shlex.quote(line)} ended with {code}:\n{said[-3000:]}"
        assert "Traceback" not in said
        assert "a fault of tunetool itself" not in said
        if row.says != TORCH_OR_3:
            assert re.search(row.says, said), f"{line}:\n{said[-3000:]}"
        elif code:
            assert "hint: " in said or "no record" in said, f"{line}:\n{said[-3000:]}"
        if line.startswith("tunetool ds-config ") and code == 0:
            assert (home / "ds_config.json").exists()
    if page == RENTED and not skips.without_deepspeed():
        assert (home / "ds_config.json").stat().st_size
