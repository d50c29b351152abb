"""perf/io_settings.py on this disk: its figures are proven, and settings are put back however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calls import call
from tunetool import record as records
from tunetool.node.machine.block_stack import read_stack
from waiting import until

PROGRAM = Path(__file__).parents[2] / "perf/io_settings.py"
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


def command(runs: Path, *more: object) -> list[object]:
    argv = [sys.executable, PROGRAM, "--target", PLACE, "--runs-dir", runs, "--size-mib", 128, "--duration", 0.2]
    return [*argv, "--rounds", 2, *more]


def candidate(path: Path) -> str:
    return "0" if path.read_text().strip() == "2" else "2"


def test_each_figure_is_proven_and_everything_is_put_back(nomerges: Path, tmp_path: Path) -> None:
    before, setting = nomerges.read_text(), f"nomerges={candidate(nomerges)}"
    done = call(*command(tmp_path, "--set", f"{setting},cpu_governor=nonsense"))
    assert done.returncode == 0, done.stderr
    assert "`cpu_governor=nonsense` is not tried: " in done.stdout
    (file,) = tmp_path.glob("*/record.json")
    shares = records.chosen(records.read(file).measurements, "share", part=setting)
    assert {each.labels["direction"]: len(each.samples or []) for each in shares} == {"read": 2, "write": 2}
    assert nomerges.read_text() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_puts_everything_back(nomerges: Path, tmp_path: Path, number: signal.Signals) -> None:
    before, value = nomerges.read_text(), candidate(nomerges)
    argv = [*map(str, command(tmp_path, "--set", f"nomerges={value}"))]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, text=True) as process:
        until(lambda: nomerges.read_text().strip() == value, "the candidate to be in force", process)
        process.send_signal(number)
    assert process.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    until(lambda: nomerges.read_text() == before, "the setting as it was")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "elevator=none"), "`elevator` is not a setting"),
        (("--set", "nr_requests=1"), "`io_tuning_nr_requests` is `1`"),
        (("--target", "/dev/shm", "--set", "nomerges=2"), "in memory"),
    ],
)
def test_a_wrong_call_changes_nothing(nomerges: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    before = nomerges.read_text()
    done = call(*command(tmp_path, *arguments))
    assert done.returncode not in (0, 1)
    assert message in done.stderr
    assert nomerges.read_text() == before
