"""perf/io_tuning.py on this disk: its figures are proven, and settings are restored however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from put_back import STATE
from tunetool.node.machine.block_stack import read_stack
from waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(ROOT / "perf/io_tuning.py")]
PLACE = Path(os.environ.get("TUNETOOL_TEST_DISK", "/var/tmp"))


@pytest.fixture
def nomerges() -> Iterator[Path]:
    """A setting of the disk whose change for a few seconds is harmless."""
    leaves = read_stack(str(PLACE)).leaves
    path = Path(f"/sys/block/{leaves[0].name}/queue/nomerges") if leaves else Path("/nowhere")
    if os.geteuid() != 0 or not os.access(path, os.W_OK):
        pytest.skip("settings of a disk can be changed by root alone, where /sys can be written")
    before = path.read_text()
    yield path
    path.write_text(before)
    STATE.unlink(missing_ok=True)


def command(*more: str) -> list[str]:
    return [*PROGRAM, "--target", str(PLACE), "--size-mib", "128", "--duration", "0.2", "--allow-busy", *more]


def candidate(path: Path) -> str:
    return "0" if path.read_text().strip() == "2" else "2"


def started(path: Path, value: str) -> subprocess.Popen[str]:
    """A run that measures while its candidate is set."""
    process = subprocess.Popen(command("--set", f"nomerges={value}"), stderr=subprocess.PIPE, text=True)
    until(lambda: path.read_text().strip() == value, "the candidate to be in force", process)
    return process


def test_each_figure_is_proven_and_everything_is_put_back(nomerges: Path, tmp_path: Path) -> None:
    before, value = nomerges.read_text(), candidate(nomerges)
    files = (tmp_path / "table.json", tmp_path / "table.md")
    done = subprocess.run(
        command(
            "--set",
            f"nomerges={value}",
            "--set",
            "cpu_governor=nonsense",
            "--json",
            str(files[0]),
            "--markdown",
            str(files[1]),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(files[0].read_text())
    assert [(row["setting"], row["workload"]) for row in document["rows"]] == [
        ("nomerges", "read"),
        ("nomerges", "write"),
        ("nomerges", "randread"),
    ]
    for row in document["rows"]:
        assert len(row["defaults"]) == len(row["candidates"]) == 6
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["conclusion"] in ("faster", "slower", "no difference shown") or row["conclusion"].startswith(
            "unproven"
        )
    assert document["left_out"][0].startswith("`cpu_governor=nonsense`: ")
    assert "| nomerges |" in files[1].read_text()
    assert nomerges.read_text() == before
    assert not STATE.exists()


def test_a_terminated_run_puts_everything_back(nomerges: Path) -> None:
    before = nomerges.read_text()
    process = started(nomerges, candidate(nomerges))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "everything is put back" in errors
    assert nomerges.read_text() == before
    assert not STATE.exists()


def test_a_killed_run_is_put_back_from_its_file(nomerges: Path) -> None:
    before, value = nomerges.read_text(), candidate(nomerges)
    process = started(nomerges, value)
    process.kill()
    process.communicate(timeout=PATIENCE)
    assert nomerges.read_text().strip() == value
    again = subprocess.run(command(), capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr.count("--restore")) == (2, 1)
    done = subprocess.run([*PROGRAM, "--restore"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "put back: 1 values\n")
    assert nomerges.read_text() == before
    assert not STATE.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--set", "elevator=none"), 2, "`elevator` is not a setting"),
        (("--set", "nr_requests=1"), 2, "`io_tuning_nr_requests` is `1`"),
        (("--target", "/dev/shm", "--set", "nomerges=2"), 3, "in memory"),
    ],
)
def test_a_wrong_call_changes_nothing(nomerges: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    before = nomerges.read_text()
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert nomerges.read_text() == before


def test_without_root_it_says_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("this test gives root up")
    code = (
        "import os\n"
        "from pathlib import Path\n"
        "from io_settings import Options, run\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "run(Options(Path('/var/tmp')), print)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "perf"), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 1
    assert "settings can be changed by root alone" in done.stderr
