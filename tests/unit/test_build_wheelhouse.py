"""`tunetool build-wheelhouse` from its command line: real pip over an index of tiny wheels in a directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_wheels

BACKEND = """
def build_wheel(directory, settings=None, metadata=None):
    import shutil
    return shutil.copy(WHEEL, directory).rsplit("/", 1)[1]
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "tunetool"\nversion = "0.1.0"\n'
PYPROJECT += tiny_wheels.PYPROJECT


class House:
    """An index, a copy of those parts of the collection that the command reads, and the directory to fill."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.index = base / "index"
        self.source = base / "source"
        self.directory = base / "house"

    def make(self) -> None:
        self.source.mkdir()
        (self.source / "constraints.txt").write_text(tiny_wheels.LOCK)
        (self.source / "pyproject.toml").write_text(PYPROJECT)
        tool = tiny_wheels.tool(self.base / "tool")[0]
        (self.source / "backend.py").write_text(f"WHEEL = {str(tool)!r}\n{BACKEND}")
        self.publish(tiny_wheels.libraries(self.base / "published"))

    def publish(self, wheels: list[Path], wrong: str = "") -> None:
        """Put wheels into the index with their hashes; ``wrong`` gets the hash of another file."""
        for path in wheels:
            name = path.name.split("-", maxsplit=1)[0]
            folder = self.index / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).write_bytes(path.read_bytes())
            digest = tiny_wheels.entry(path)["sha256"] if name != wrong else "0" * 64
            (folder / "index.html").write_text(f'<a href="{path.name}#sha256={digest}">{path.name}</a>')

    def call(self, *more: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return subprocess.run(
            [
                *(sys.executable, "-m", "tunetool", "build-wheelhouse", str(self.directory)),
                *("--source", str(self.source), "--index-url", self.index.as_uri(), *more),
            ],
            env={**environment, "PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    @property
    def manifest(self) -> dict[str, object]:
        document: dict[str, object] = json.loads((self.directory / "wheelhouse.json").read_text())
        return document


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    house.make()
    return house


@pytest.fixture(scope="module")
def filled_once(tmp_path_factory: pytest.TempPathFactory) -> House:
    house = House(tmp_path_factory.mktemp("filled"))
    house.make()
    done = house.call()
    assert (done.returncode, "9 files" in done.stdout) == (0, True), done.stderr
    return house


@pytest.fixture
def filled(filled_once: House, tmp_path: Path) -> House:
    """A house that one call has filled."""
    shutil.copytree(filled_once.base, tmp_path / "copy")
    return House(tmp_path / "copy")


def test_it_is_filled_once_and_the_second_call_fetches_nothing(house: House) -> None:
    done = house.call("--trainer", "lightning")
    assert done.returncode == 0, done.stderr
    assert "10 files" in done.stdout
    # The tenth, DeepSpeed's, is built: the index has only its sources.
    assert "9 fetched" in done.stdout
    files = house.manifest["files"]
    assert isinstance(files, dict)
    assert sorted(files) == sorted(path.name for path in house.directory.glob("*.whl"))
    for name, entry in files.items():
        expected = tiny_wheels.entry(house.directory / name)
        del expected["name"]
        assert entry == expected
    [only] = house.manifest["sets"]  # type: ignore[misc]  # a list, which the line after reads
    assert (only["build"], only["trainers"]) == ("cpu", ["deepspeed", "lightning"])
    times = {path.name: path.stat().st_mtime_ns for path in house.directory.glob("*.whl")}
    # It asks no index: there is none any more, and tunetool's wheel is not built either.
    shutil.rmtree(house.index)
    (house.source / "backend.py").unlink()
    for trainers in (("--trainer", "lightning"), ()):
        again = house.call(*trainers)
        assert "10 files" in again.stdout, again.stderr
        assert "0 fetched" in again.stdout
    assert times == {path.name: path.stat().st_mtime_ns for path in house.directory.glob("*.whl")}


def test_a_set_that_lacks_a_trainer_is_filled_again(filled: House) -> None:
    done = filled.call("--trainer", "lightning")
    assert "10 files" in done.stdout, done.stderr
    assert "1 fetched" in done.stdout


def test_a_changed_extra_is_another_lock(filled: House) -> None:
    before = filled.manifest["lock_sha256"]
    path = filled.source / "pyproject.toml"
    path.write_text(path.read_text().replace('"peft"', '"peft", "lightning"'))
    # What the package is built from asks for it as well.
    tool = tiny_wheels.tool(filled.base / "new", {"finetune": ["peft", "lightning"]})[0]
    (filled.source / "backend.py").write_text(f"WHEEL = {str(tool)!r}\n{BACKEND}")
    done = filled.call()
    assert "the lock has changed" in done.stderr
    assert "1 fetched" in done.stdout
    assert filled.manifest["lock_sha256"] != before
    assert "lightning-1.0-py3-none-any.whl" in filled.manifest["files"]  # type: ignore[operator]  # a dict


def test_a_call_that_was_cut_off_goes_on_where_it_was(house: House) -> None:
    (house.index / "peft/peft-1.0-py3-none-any.whl").unlink()
    done = house.call()
    assert done.returncode == 3
    assert done.stderr.startswith("error: ") or "\nerror: " in done.stderr
    assert "hint: " in done.stderr
    house.publish(tiny_wheels.libraries(house.base / "published"))
    kept = {path.name: path.stat().st_mtime_ns for path in house.directory.glob("*.whl")}
    done = house.call()
    assert done.returncode == 0, done.stderr
    after = {path.name: path.stat().st_mtime_ns for path in house.directory.glob("*.whl")}
    assert kept.items() <= after.items()
    assert "peft-1.0-py3-none-any.whl" in after


def test_a_damaged_file_is_fetched_again_and_named(filled: House) -> None:
    wheel = filled.directory / "torch-2.13.0-py3-none-any.whl"
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:100] + b"x" + whole[101:])
    done = filled.call()
    assert done.returncode == 0, done.stderr
    assert f"`{wheel}` has another hash than the manifest has" in done.stderr
    assert "1 fetched" in done.stdout
    assert wheel.read_bytes() == whole


def test_an_index_that_gives_another_file_is_refused(house: House) -> None:
    house.publish(tiny_wheels.libraries(house.base / "published"), wrong="peft")
    done = house.call()
    assert done.returncode == 3
    assert "peft" in next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert not (house.directory / "peft-1.0-py3-none-any.whl").exists()


def test_a_dry_run_fetches_nothing(house: House) -> None:
    done = house.call("--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would be fetched" in done.stdout
    assert not house.directory.exists()


def test_a_torch_of_the_wrong_kind_is_noticed(house: House) -> None:
    done = house.call("--build", "cu130")
    assert done.returncode == 3
    assert "the index gives a torch with no CUDA where `cu130` was asked for" in done.stderr
