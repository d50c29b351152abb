"""Driving fio: its arguments, its JSON as recorded from 3.33, and programs that pretend to be fio."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tunetool.errors import CannotJudge
from tunetool.measure.fio import Fio, FioFailed, Job, arguments, find_fio, parse, run
from tunetool.measure.worker import preloads
from waiting import PATIENCE, gone, until

DATA = Path(__file__).parents[1] / "data/fio"
FIO = Fio("/usr/bin/fio", "3.33")
WRITE = Job("write", 4, 2**26)
READ = Job("read", 4, 2**26, seconds=3)


def fake(folder: Path, body: str) -> Fio:
    program = folder / "fio"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return Fio(str(program), "3.33")


def recorded(name: str) -> str:
    return (DATA / name).read_text()


def test_recorded_results() -> None:
    read = parse(FIO, READ, recorded("read.json"))
    write = parse(FIO, WRITE, recorded("write.json"))
    for outcome, direction in ((read, "read"), (write, "write")):
        side = json.loads(recorded(f"{direction}.json"))["jobs"][0][direction]
        assert outcome.claimed_bytes == side["io_bytes"] > 0
        assert outcome.bandwidth == pytest.approx(side["bw_bytes"], rel=0.01)
        assert 0 < outcome.percentiles["p50"] <= outcome.percentiles["p99"] < 60


def test_warnings_before_the_json_are_no_harm() -> None:
    assert parse(FIO, READ, "note: something\n" + recorded("read.json")).claimed_bytes > 0


def test_a_full_disk_is_told_in_fio_s_words(tmp_path: Path) -> None:
    body = f"cat {DATA}/enospc.stderr >&2; cat {DATA}/enospc.json; exit 4"
    with pytest.raises(FioFailed, match=r"exit status 4.*No space left on device") as caught:
        run(fake(tmp_path, body), WRITE, tmp_path, {"PATH": "/usr/bin:/bin"}, PATIENCE)
    assert caught.value.hint == "free some space on the target"
    assert "io_u error" in caught.value.raw


def test_a_container_that_forbids_asynchronous_reads_is_named(tmp_path: Path) -> None:
    with pytest.raises(FioFailed, match="get_events") as caught:
        run(
            fake(tmp_path, f"cat {DATA}/seccomp.stderr >&2; exit 1"),
            WRITE,
            tmp_path,
            {"PATH": "/usr/bin:/bin"},
            PATIENCE,
        )
    assert "seccomp" in str(caught.value.hint)


def test_an_error_in_the_json_counts_whatever_the_exit_status() -> None:
    text = recorded("enospc.json")
    with pytest.raises(FioFailed, match="reports an error"):
        parse(FIO, WRITE, text[text.index("\n{") + 1 :])


def test_zero_bytes_are_no_result() -> None:
    # The recorded read moved nothing in the other direction.
    with pytest.raises(FioFailed, match="moved 0 bytes"):
        parse(FIO, WRITE, recorded("read.json"))


@pytest.mark.parametrize("word", ["nan", "-nan", "inf", "NaN"])
def test_a_share_of_no_time_is_no_harm(word: str) -> None:
    # printf(3) writes a quotient by 0 so, which JSON has no word for; within a text it is a text.
    text = re.sub(r'"usr_cpu" *: *[0-9.]+', f'"usr_cpu": {word}, "x": "of nan, inf"', recorded("read.json"))
    assert word in text
    assert parse(FIO, READ, text).claimed_bytes == parse(FIO, READ, recorded("read.json")).claimed_bytes


def test_a_figure_that_is_no_number_is_refused_by_name() -> None:
    with pytest.raises(FioFailed, match="None is not a count"):
        parse(FIO, READ, '{"jobs": [{"error": 0, "jobname": "a", "read": {"io_bytes": nan, "runtime": 10}}]}')
    with pytest.raises(FioFailed, match="printed a result that is no JSON: Expecting"):
        parse(FIO, READ, '{"jobs": [}')


@pytest.mark.parametrize(
    "text",
    [
        recorded("garbage.txt"),
        "",
        "[]",
        "{}",
        '{"jobs": []}',
        '{"jobs": [{}]}',
        '{"jobs": 3}',
        '{"jobs": [{"error": 0, "read": {"io_bytes": "1", "runtime": 1}}]}',
        '{"jobs": [{"error": 0, "read": {"io_bytes": 1e9, "runtime": 1000}}]}',
        '{"jobs": [{"error": 0, "read": {"io_bytes": true, "runtime": 1000}}]}',
        '{"jobs": [{"error": 0, "read": {"io_bytes": 5, "runtime": 0}}]}',
        '{"jobs": [{"error": 0, "read": {"io_bytes": -5, "runtime": 10}}]}',
        recorded("read.json")[:3000],
        recorded("read.json") + "trailing",
    ],
)
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(FioFailed):
        parse(FIO, READ, text)


@pytest.mark.parametrize(("number", "name"), [(25, "SIGXFSZ"), (9, "SIGKILL"), (11, "SIGSEGV")])
def test_a_signal_is_named(tmp_path: Path, number: int, name: str) -> None:
    with pytest.raises(FioFailed, match=f"ended by {name}"):
        run(fake(tmp_path, f"kill -{number} $$"), READ, tmp_path, {"PATH": "/usr/bin:/bin"}, PATIENCE)


def test_a_program_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    program = fake(tmp_path, "trap '' TERM; sleep 6000 & echo $! > child; wait; sleep 6000")
    child = tmp_path / "child"

    def begun() -> None:
        until(lambda: child.exists() and child.read_text().endswith("\n"), "its child")

    with pytest.raises(FioFailed, match="did not end"):
        run(program, READ, tmp_path, {"PATH": "/usr/bin:/bin"}, 0.5, begun)
    assert gone(int(child.read_text()))


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    program = fake(tmp_path, "echo $$ > pid; exec sleep 6000")

    def interrupt() -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(program, READ, tmp_path, {"PATH": "/usr/bin:/bin"}, PATIENCE, interrupt)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_preloaded_code_is_kept_out_and_noticed(tmp_path: Path) -> None:
    environment = {"PATH": "/usr/bin:/bin", "LD_PRELOAD": "/x.so", "LD_AUDIT": "/y.so", "HOME": "/"}
    assert preloads(environment, str(tmp_path)) == ["LD_PRELOAD", "LD_AUDIT"]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.preload").write_text("\n")
    assert preloads({}, str(tmp_path)) == []
    (tmp_path / "etc/ld.so.preload").write_text("/usr/lib/libeatmydata.so\n")
    assert preloads({}, str(tmp_path)) == ["/etc/ld.so.preload"]
    with pytest.raises(FioFailed):
        run(fake(tmp_path, "env > seen"), READ, tmp_path, environment, PATIENCE)
    assert "LD_" not in (tmp_path / "seen").read_text()


def test_arguments() -> None:
    write = arguments(FIO, Job("write", 16, 2**30, seconds=10))
    for wanted in ("--direct=1", "--numjobs=16", "--bs=1048576", "--iodepth=32", "--runtime=10000ms", "--end_fsync=1"):
        assert wanted in write
    assert "--thread=1" in write
    assert not any("ramp_time" in argument for argument in write)
    assert "--end_fsync=1" not in arguments(FIO, READ)
    assert "--time_based=1" not in arguments(FIO, WRITE)


def test_fio_is_found_first_on_path(tmp_path: Path) -> None:
    fake(tmp_path, "echo fio-3.36-28-gdeadbeef")
    program = find_fio({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert program == Fio(str(tmp_path / "fio"), "3.36-28-gdeadbeef")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo fio-3.1", "too old"),
        ("echo fio-2.99", "too old"),
        ("echo hello", "not a fio"),
        ("exit 3", "not a fio"),
        ("echo fio-3.33; exit 1", "not a fio"),
    ],
)
def test_what_is_no_usable_fio(tmp_path: Path, body: str, said: str) -> None:
    fake(tmp_path, body)
    with pytest.raises(CannotJudge, match=said) as caught:
        find_fio({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert caught.value.hint


def test_no_fio(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="`fio` is not on PATH") as caught:
        find_fio({"PATH": str(tmp_path)})
    assert "install" in str(caught.value.hint)
