"""Fills the wheelhouse of training environments on the control machine, for nodes without a package index."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.fleet.collection import find_collection
from tunetool.measure.progress import Progress
from tunetool.node.common.commands import CommandError, captured
from tunetool.node.common.file_lock import FileLock
from tunetool.node.common.files import replace_file
from tunetool.node.common.node_wheel import package_wheel, platform_options
from tunetool.node.common.refusal import Refusal
from tunetool.node.training import accelerator, lock, wheel_files

PLATFORMS = ("manylinux2014_%s", *(f"manylinux_2_{minor}_%s" for minor in range(5, 35)), "linux_%s")
"""Up to the glibc of RHEL 9, the oldest that nodes have; older pips name each tag by itself."""
SOURCES_ONLY = ("deepspeed",)
"""Packages that are published as sources only: their wheels, the same for every machine, are built here."""
BATCH = 12
"""Number of files per call of pip: files of earlier calls are kept if the next one is interrupted."""
_ALONE = ("torch-", "triton-", "nvidia_", "deepspeed-")
_PIP_SECONDS = 7200.0
_LOCK_NAME = ".lock"
_EXPECTED_SECONDS = 60.0


@dataclass(frozen=True)
class Target:
    """One kind of node."""

    python: str
    machine: str
    build: str
    """Build of torch: ``cpu``, or such as ``cu130``."""

    def __str__(self) -> str:
        return f"Python {self.python}, {self.machine}, torch {self.build}"


@dataclass(frozen=True)
class Request:
    """The contents to put into the wheelhouse."""

    directory: Path
    source: Path
    targets: Sequence[Target]
    trainers: Sequence[str]
    index_url: str | None = None
    torch_index_url: str | None = None


@dataclass(frozen=True)
class Filled:
    """One set: its number of files, and how many of them were fetched now."""

    target: Target
    files: int
    fetched: int
    size_bytes: int


def find_source(given: Path | None) -> Path:
    """The directory of the collection, with the lock. Raises ``UsageProblem``."""
    root = given or find_collection().root
    if root is None or not all((root / name).is_file() for name in ("constraints.txt", "pyproject.toml")):
        raise UsageProblem(f"`{root or Path.cwd()}` is not a copy of the collection", "name one with `--source`")
    return root


def _lock_of(source: Path) -> str:
    """See ``lock.whole``. Raises ``UsageProblem``."""
    try:
        return lock.whole((source / "constraints.txt").read_text(), (source / "pyproject.toml").read_text())
    except Refusal as error:
        message, _, hint = str(error).partition(". hint: ")
        raise UsageProblem(f"`{source}`: {message}", hint) from None


def fill(request: Request, progress: Progress, dry_run: bool = False) -> list[Filled]:
    """Fetch the missing files, set by set. Files with the right hash are kept."""
    text = _lock_of(request.source)
    with _only_one(request.directory, dry_run), tempfile.TemporaryDirectory(prefix="tunetool-") as temporary:
        return _Filling(request, text, Path(temporary), progress, dry_run).all()


class _Filling:
    """One run over a wheelhouse."""

    def __init__(self, request: Request, text: str, temporary: Path, progress: Progress, dry_run: bool) -> None:
        self.request = request
        self.temporary = temporary
        self.progress = progress
        self.dry_run = dry_run
        self.lock = text
        self.document = self._read()

    def _read(self) -> dict[str, Any]:
        empty = {"schema": wheel_files.SCHEMA_NAME, "lock_sha256": lock.digest(self.lock), "sets": [], "files": {}}
        if not (self.request.directory / wheel_files.MANIFEST).exists():
            return empty
        try:
            document = wheel_files.read(str(self.request.directory))
        except Refusal as error:
            message, _, hint = str(error).partition(". hint: ")
            raise UsageProblem(message, hint) from None
        if document["lock_sha256"] != empty["lock_sha256"]:
            self.progress.say("the lock has changed: the sets are made anew, files that are still in it stay")
            document.update(sets=[], lock_sha256=empty["lock_sha256"])
        return document

    def all(self) -> list[Filled]:
        if not self.dry_run:
            self._drop_wrong()
        there = {target: self._there(target) for target in self.request.targets}
        wheel = self._tool() if None in there.values() else ""
        for name in SOURCES_ONLY if wheel else ():
            self._build(name)
        filled = [there[target] or self._fill(target, wheel) for target in self.request.targets]
        if not self.dry_run:
            self._remove_strangers()
        return filled

    def _there(self, target: Target) -> Filled | None:
        """A set of this lock whose files are all there: no index is asked. None where something is missing."""
        for each in self.document["sets"]:
            same = (each["python"], each["machine"], each["build"]) == (target.python, target.machine, target.build)
            files = self.document["files"]
            if (
                same
                and set(self.request.trainers) <= set(each["trainers"])
                and all(name in files and (self.request.directory / name).exists() for name in each["files"])
            ):
                return Filled(target, len(each["files"]), 0, sum(files[name]["size_bytes"] for name in each["files"]))
        return None

    def _tool(self) -> str:
        with self.progress.step("building tunetool's wheel", _EXPECTED_SECONDS):
            try:
                return package_wheel(str(self.request.source), str(self.temporary))
            except CommandError as error:
                raise CannotJudge(f"tunetool's wheel cannot be built: {error}", _INDEX_HINT) from None

    def _drop_wrong(self) -> None:
        """Remove files that differ from the manifest, with their entries, so that they are fetched again."""
        for name, entry in list(self.document["files"].items()):
            path = self.request.directory / name
            if not path.exists():
                del self.document["files"][name]
            elif wheel_files.sha256_of(str(path)) != entry["sha256"]:
                self.progress.say(f"`{path}` has another hash than the manifest has: it is fetched again")
                path.unlink()
                del self.document["files"][name]

    def _build(self, name: str) -> None:
        """Build the wheel of a package that is published as sources, and add it to the wheelhouse's files."""
        version = lock.pin(self.lock, name)
        if version is None or any(
            wheel_files.distribution_of(each) == name and wheel_files.version_of(each).split("+")[0] == version
            for each in self.document["files"]
        ):
            return
        folder = self.temporary / "built"
        with self.progress.step(f"building the wheel of {name} {version}", _EXPECTED_SECONDS):
            # Its ops are compiled on the nodes, for their CPU.
            self._pip(["wheel", "--no-deps", "--wheel-dir", str(folder), f"{name}=={version}"], {"DS_BUILD_OPS": "0"})
        path = next(folder.glob("*.whl"))
        self._keep(path, wheel_files.sha256_of(str(path)))

    def _fill(self, target: Target, wheel: str) -> Filled:
        wanted = self._resolve(target, wheel)
        missing = {name: each for name, each in wanted.items() if not self._has(name, each["sha256"])}
        fetched = 0
        if not self.dry_run:
            for batch in _batches(sorted(missing)):
                title = f"{target}: {fetched + len(batch)} of {len(missing)} files, {batch[0]}"
                with self.progress.step(title, _EXPECTED_SECONDS):
                    self._fetch(target, {name: missing[name] for name in batch})
                fetched += len(batch)
            entry = {
                "python": target.python,
                "machine": target.machine,
                "build": target.build,
                "trainers": sorted(self.request.trainers),
                "files": sorted(wanted),
            }
            same = ("python", "machine", "build")
            others = [each for each in self.document["sets"] if any(each[key] != entry[key] for key in same)]
            self.document["sets"] = [*others, entry]
            self._write()
        size = sum(self.document["files"].get(name, {}).get("size_bytes", 0) for name in wanted)
        return Filled(target, len(wanted), len(missing), size)

    def _resolve(self, target: Target, wheel: str) -> dict[str, dict[str, str]]:
        """The wheels of a set by name, each with its requirement and hash: pip's choice under the lock."""
        report = self.temporary / "report.json"
        requirements = [f"{wheel}[{','.join(lock.extras(list(self.request.trainers)))}]"]
        if self._other_torch(target):
            torch = (lock.pin(self.lock, "torch") or "").split("+")[0]
            requirements.append(f"torch=={torch}+{target.build}")
        constraints = self.temporary / "constraints.txt"
        constraints.write_text(lock.constraints(self.lock, not self._other_torch(target)))
        with self.progress.step(f"{target}: what the lock asks for", _EXPECTED_SECONDS):
            self._pip(
                [
                    *("install", "--dry-run", "--ignore-installed", "--report", str(report)),
                    *("--target", str(self.temporary / "target"), *_kind(target)),
                    *("--constraint", str(constraints)),
                    *("--find-links", str(self.request.directory), "--find-links", str(self.temporary / "built")),
                    *self._torch_index(target),
                    *requirements,
                ]
            )
        files = {}
        for each in json.loads(report.read_text())["install"]:
            name, version = str(each["metadata"]["name"]), str(each["metadata"]["version"])
            if name == "tunetool":
                continue
            info = each["download_info"]
            hashes = info.get("archive_info", {}).get("hashes", {})
            if "sha256" not in hashes:
                raise CannotJudge(f"the index has no sha256 of `{name}`", "use an index that has hashes")
            file = Path(unquote(urlsplit(info["url"]).path)).name
            files[file] = {"requirement": f"{name}=={version}", "sha256": hashes["sha256"]}
        self._need_build(target, files)
        return files

    def _need_build(self, target: Target, files: Mapping[str, Mapping[str, str]]) -> None:
        """Raise ``CannotJudge`` for a torch with another CUDA than requested: only the nodes would notice it."""
        cuda = any(name.startswith(("nvidia_cublas", "cuda_toolkit")) for name in files)
        if cuda == (target.build == accelerator.CPU):
            has = "CUDA" if cuda else "no CUDA"
            raise CannotJudge(
                f"the index gives a torch with {has} where `{target.build}` was asked for",
                "name an index with that build in `--torch-index-url`, such as one with `{build}` in its address",
            )

    def _other_torch(self, target: Target) -> bool:
        default = accelerator.Build(lock.cuda(self.lock), default=True)
        return bool(self.request.torch_index_url) and target.build != default.tag

    def _torch_index(self, target: Target) -> list[str]:
        url = self.request.torch_index_url
        return ["--extra-index-url", url.replace("{build}", target.build)] if url else []

    def _fetch(self, target: Target, files: Mapping[str, Mapping[str, str]]) -> None:
        """Download by requirement and hash: pip refuses a file with other content."""
        folder = self.temporary / "fetched"
        shutil.rmtree(folder, ignore_errors=True)
        requirements = self.temporary / "requirements.txt"
        lines = [f"{each['requirement']} --hash=sha256:{each['sha256']}\n" for each in files.values()]
        requirements.write_text("".join(lines))
        self._pip(
            [
                *("download", "--no-deps", "--require-hashes", "--dest", str(folder), *_kind(target)),
                *("--find-links", str(self.request.directory), "--find-links", str(self.temporary / "built")),
                *(*self._torch_index(target), "--requirement", str(requirements)),
            ]
        )
        for name, each in files.items():
            self._keep(folder / name, each["sha256"])

    def _keep(self, path: Path, sha256: str) -> None:
        """Move a file into the wheelhouse, then enter it in the manifest."""
        if not path.exists():
            raise CannotJudge(f"pip brought no `{path.name}`", "call again with `--debug`")
        if self.dry_run:
            return
        self.request.directory.mkdir(parents=True, exist_ok=True)
        wheel_files.check(str(path), {"sha256": sha256})
        with zipfile.ZipFile(path) as wheel:
            unpacked = sum(entry.file_size for entry in wheel.infolist())
        unfinished = self.request.directory / f"{path.name}.part"
        shutil.copyfile(path, unfinished)
        unfinished.rename(self.request.directory / path.name)
        self.document["files"][path.name] = {
            "sha256": sha256,
            "size_bytes": path.stat().st_size,
            "unpacked_bytes": unpacked,
        }
        self._write()

    def _has(self, name: str, sha256: str) -> bool:
        entry = self.document["files"].get(name)
        return entry is not None and entry["sha256"] == sha256 and (self.request.directory / name).exists()

    def _remove_strangers(self) -> None:
        """Remove wheels that no set names any more."""
        named = {name for each in self.document["sets"] for name in each["files"]}
        for name in [name for name in self.document["files"] if name not in named]:
            del self.document["files"][name]
            (self.request.directory / name).unlink(missing_ok=True)
        self._write()

    def _write(self) -> None:
        ordered = {**self.document, "files": dict(sorted(self.document["files"].items()))}
        replace_file(str(self.request.directory / wheel_files.MANIFEST), json.dumps(ordered, indent=2) + "\n")

    def _pip(self, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        index = ["--index-url", self.request.index_url] if self.request.index_url else []
        argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input"]
        try:
            command = [*argv, *arguments[:1], *index, *arguments[1:]]
            done = captured(command, _PIP_SECONDS, env={**os.environ, **(variables or {})})
        except subprocess.TimeoutExpired:
            raise CannotJudge(
                f"pip did not end within {_PIP_SECONDS:.0f} s", "call again: what is there stays"
            ) from None
        if done.returncode:
            raise CannotJudge(*_why(done.stderr or done.stdout))


_INDEX_HINT = "it needs a package index: see `pip config list`, or name one with `--index-url`"


def _why(text: str) -> tuple[str, str]:
    """pip's message about a failure as one line, and a hint."""
    wrong = re.search(r"^\s+(\S+) from .*\n?\s*Expected sha256", text, re.MULTILINE)
    if "DO NOT MATCH THE HASHES" in text:
        name = wrong[1] if wrong else "a file"
        return f"the index gives `{name}` with another hash than it names", "do not use it; ask who runs the index"
    errors = [line.strip() for line in text.splitlines() if line.startswith("ERROR:")]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "No space left" in text:
        return "the disk is full", "free space there and call again: what is there stays"
    return f"pip failed: {(errors or lines or ['it said nothing'])[-1]}", _INDEX_HINT


def _kind(target: Target) -> list[str]:
    """Options of pip for nodes that are not this machine."""
    return [
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", target.python),
        *platform_options(target.machine, PLATFORMS),
    ]


def _batches(names: Sequence[str]) -> Iterator[list[str]]:
    """Groups of wheels for one call of pip: large wheels alone, small ones together."""
    small = [name for name in names if not name.startswith(_ALONE)]
    yield from (small[at : at + BATCH] for at in range(0, len(small), BATCH))
    yield from ([name] for name in names if name.startswith(_ALONE))


@contextlib.contextmanager
def _only_one(directory: Path, dry_run: bool) -> Iterator[None]:
    """A lock, so that two runs never fill one wheelhouse at the same time."""
    if dry_run:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock.file(directory / _LOCK_NAME) as lock:
        if not lock.take(patience=0):
            raise CannotJudge(f"another run fills `{directory}`", "wait for it to end")
        yield
