"""DeepSpeed's own handle, as `make setup` compiled it, on the disk under the temporary directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import proven, undisturbed
from pythons import python_that
from tunetool.measure.aio import Probe
from tunetool.record import parse
from waiting import PATIENCE, until

pytest_plugins = ["disks"]
pytestmark = pytest.mark.usefixtures("ready")


def command(folder: Path, *arguments: str) -> list[str]:
    runs = str(folder.parent / "runs")
    return [*TUNETOOL, "bench", "ds-io", "--folder", str(folder), "--runs-dir", runs, "--allow-busy", *arguments]


def ds_io(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return call(*command(folder, *arguments), env={**os.environ, **environment})


def figures(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    record = parse(done.stdout, "stdout")
    assert record.kind == "bench.ds-io"
    return {measurement.name: measurement for measurement in record.measurements}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--io_parallel", "4"),
        pytest.param(("--read", "--io_parallel", "2", "--single_submit"), marks=pytest.mark.slow),
        pytest.param(("--sequential_requests", "--block_size", "256K"), marks=pytest.mark.slow),
    ],
)
def test_it_moves_what_it_says_and_leaves_nothing(disk: Path, arguments: tuple[str, ...]) -> None:
    (disk / "theirs").write_text("keep")
    done = ds_io(disk, "--io_size", "64M", "--loops", "6", *arguments, "--json", "-")
    alone = undisturbed(done.returncode, parse(done.stdout, "stdout"))
    measured = figures(done)
    name = "ds_io.read" if "--read" in arguments else "ds_io.write"
    figure = measured[name]
    proven(figure, alone)
    assert figure.evidence.claimed_bytes == 6 * 64 * 2**20
    assert len(figure.samples or []) == 6
    assert figure.engine.startswith("aio_handle (deepspeed ")
    if name == "ds_io.write":
        assert measured["ds_io.write_durable"].value <= figure.value
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]


def test_calls_that_cannot_be_done_exactly_do_nothing(disk: Path) -> None:
    done = ds_io(disk, "--io_size", "1000")
    assert done.returncode == 2
    assert "`--io_size 1000` cannot be moved exactly" in done.stderr
    assert "hint: 512 or 1024 bytes are possible" in done.stderr
    assert not (disk.parent / "runs").exists()


def test_a_transfer_that_a_limit_cut_short_is_no_success(disk: Path, tmp_path: Path) -> None:
    # The limit holds for the child alone, so nothing can be known before. The op reports success all the same.
    liar = python_that(tmp_path, "ulimit -f 20000")
    done = ds_io(disk, "--io_size", "64M", "--python", str(liar))
    assert done.returncode == 3, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "`aio_handle` reported success, but `aio.data` holds" in said
    assert "Speed" not in done.stdout
    assert done.stdout.rstrip().endswith("ERROR")
    assert list(disk.iterdir()) == []


def test_a_limit_of_our_own_is_named_beforehand(disk: Path) -> None:
    done = call("prlimit", "--fsize=20000000", *command(disk, "--io_size", "64M"))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "RLIMIT_FSIZE ends files at 19.07 MiB" in done.stdout
    assert list(disk.iterdir()) == []


LITTLE = ["prlimit", "--memlock=65536:65536"]


def test_a_user_who_may_lock_little(disk: Path, tmp_path: Path, ready: Probe) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    python, environment = python_of_nobody(ready)
    arguments = command(disk, "--io_size", "64M")[1:]
    with copied_ops(ready) as extensions:
        for folder in (disk, tmp_path, tmp_path.parent, tmp_path.parent.parent):
            folder.chmod(0o777 if folder in (disk, tmp_path) else 0o755)
        done = call(
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *LITTLE, python, *arguments),
            env={**os.environ, **environment, "TORCH_EXTENSIONS_DIR": str(extensions), "HOME": "/nonexistent"}
            | {"TUNETOOL_LOCK_DIR": ""},  # the Python of the tests belongs to root
        )
    assert done.returncode == 3, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "RLIMIT_MEMLOCK is 64 KiB, DeepSpeed's buffer locks 64 MiB" in said
    assert list(disk.iterdir()) == []


def python_of_nobody(ready: Probe) -> tuple[str, dict[str, str]]:
    """A Python that every user can start, with the packages of this one; pyenv's is in root's home."""
    if all(parent.stat().st_mode & 0o005 == 0o005 for parent in Path(sys.executable).resolve().parents):
        return sys.executable, {}
    system = shutil.which(f"python{ready.python_version}", path="/usr/bin")
    if system is None:
        pytest.skip(f"no Python {ready.python_version} here that `nobody` may start")
    return system, {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path.endswith(("tools", "site-packages")))
    }


@pytest.mark.slow
def test_the_op_aborts_where_it_cannot_lock(disk: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give up a capability for the child alone")
    # Root without the capability, for the child alone: so the limit is not known before.
    program = tmp_path / "python"
    given_up = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", *LITTLE]
    program.write_text(f'#!/bin/sh\nexec {" ".join(given_up)} {sys.executable} "$@"\n')
    program.chmod(0o755)
    done = ds_io(disk, "--io_size", "64M", "--python", str(program))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "was ended by SIGABRT" in " ".join(done.stdout.split())
    assert list(disk.iterdir()) == []


@contextlib.contextmanager
def copied_ops(ready: Probe) -> Iterator[Path]:
    """The compiled ops in a directory that every user can read."""
    directory = Path(tempfile.mkdtemp(prefix="tunetool-ops-", dir="/var/tmp"))
    try:
        directory.chmod(0o755)
        for part in ready.parts("async_io"):
            library = ready.find(part)
            assert library is not None
            (directory / part).mkdir()
            shutil.copy(library, directory / part / f"{part}.so")
            (directory / part / "tunetool.json").write_text(json.dumps(ready.stamp()))
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.mark.slow
def test_a_disk_that_is_full(disk: Path, ready: Probe) -> None:
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("needs root and loop devices")
    image = disk.parent / "image"
    script = f"truncate -s 200M {image}; mkfs.ext4 -q -F {image}; mount -o loop {image} {disk}; exec "
    done = call("unshare", "--mount", "sh", "-euc", script + " ".join(command(disk, "--io_size", "256M")))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "has too little space" in done.stdout


def test_an_unbuilt_op_is_named_and_nothing_compiled(disk: Path, tmp_path: Path) -> None:
    empty = tmp_path / "extensions"
    done = ds_io(disk, "--io_size", "64M", TORCH_EXTENSIONS_DIR=str(empty))
    assert done.returncode == 3
    assert "DeepSpeed's op `async_io` is not built for torch" in done.stderr
    assert "hint: run `tunetool build-ops`" in done.stderr
    assert not empty.exists()


def test_what_is_built_is_not_built_again(ready: Probe) -> None:
    library = ready.find("async_io")
    assert library is not None
    before = library.stat()
    done = call(*TUNETOOL, "build-ops", "--op", "async_io")
    assert done.returncode == 0, done.stderr
    assert "async_io  already built: " in done.stdout
    after = library.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.slow
def test_a_build_from_nothing_and_one_that_is_interrupted(ready: Probe, tmp_path: Path) -> None:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    build = [*TUNETOOL, "build-ops", "--op", "utils"]
    with subprocess.Popen(build, stderr=subprocess.PIPE, text=True, env=environment) as process:
        until((tmp_path / "utils/lock").exists, "the lock of a build", process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
    assert not (tmp_path / "utils/lock").exists()
    (tmp_path / "utils/lock").touch()
    done = call(*build, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"removed `{tmp_path}/utils/lock`" in done.stderr
    assert "utils: 3 of 3 objects" in done.stderr
    assert "utils     built in " in done.stdout
