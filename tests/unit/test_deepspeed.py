"""The DeepSpeed rung without DeepSpeed: checks before it, locks of builds, child processes that fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pythons import bare_python
from tunetool.bench.ds_io.preflight import check_request
from tunetool.bench.ds_io.request import Request
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.aio import Failed, Missing, Probe, Spec, default_io_bytes, need, ops, probe
from tunetool.measure.aio.build_ops import build_environment, clear_lock, only_build, plain_architectures
from tunetool.measure.aio.ops import STAMP, builders
from tunetool.measure.aio.spec import check_limits, check_shape, misfit
from tunetool.measure.ladder.deepspeed_handles import prepare
from tunetool.measure.sequential import Plan
from tunetool.measure.worker import Worker, child_command, describe_end
from tunetool.options.values import parse_io_size
from tunetool.origin import install_hint
from tunetool.report.progress import PlainProgress
from waiting import PATIENCE, gone

MIB = 2**20


# --- what the op does not check -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "parallelism", "sector", "near"),
    [
        (MIB, 1, 512, None),
        (1000, 1, 512, "512 or 1024"),
        (MIB + 512, 4, 512, f"{MIB} or {MIB + 2048}"),
        (3 * 512, 3, 512, None),
        (MIB, 3, 512, f"{MIB // 1536 * 1536} or {MIB // 1536 * 1536 + 1536}"),
        (512, 1, 4096, "4096 bytes"),
        (0, 2, 512, "1024 bytes"),
    ],
)
def test_sizes_that_cannot_be_moved_name_the_nearest(
    size: int, parallelism: int, sector: int, near: str | None
) -> None:
    problem = misfit(size, parallelism, sector)
    if near is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.startswith(near)


@pytest.mark.parametrize("change", [{"queue_depth": 0}, {"block_bytes": 0}, {"intra_op_parallelism": 0}])
def test_shapes_that_the_op_answers_with_silence_or_a_crash(change: dict[str, int]) -> None:
    spec = replace(Spec(Path("/x"), MIB), **change)  # type: ignore[arg-type]
    with pytest.raises(Failed, match="at least 1"):
        check_shape(spec, 512)


def test_a_block_must_fill_whole_sectors() -> None:
    check_shape(Spec(Path("/x"), MIB, block_bytes=4096), 4096)
    with pytest.raises(Failed, match="not a multiple of the device's sector of 4096"):
        check_shape(Spec(Path("/x"), MIB, block_bytes=512), 4096)


def test_limits_are_named_before_anything_is_written() -> None:
    spec = Spec(Path("/x/run"), MIB)
    check_limits(spec, MIB, MIB, MIB)
    check_limits(spec, MIB, None, None)
    for values, said in (
        ((MIB - 1, None, None), "too little space"),
        ((MIB, 65536, None), "RLIMIT_MEMLOCK is 64 KiB"),
        ((MIB, None, 4096), "RLIMIT_FSIZE ends files at 4 KiB"),
    ):
        with pytest.raises(Failed, match=said):
            check_limits(spec, *values)
    check_limits(replace(spec, device="gds"), MIB, 0, None)
    check_limits(replace(spec, device="cuda", pinned_by="cuda"), MIB, 0, None)


def test_the_size_fits_the_storage_and_the_machine() -> None:
    roomy = 10**13
    assert default_io_bytes(roomy, roomy, 8) == 2**30
    assert default_io_bytes(roomy, 4 * 10**9, 4) <= 4 * 10**8
    assert default_io_bytes(5 * 10**9, roomy, 4) <= 5 * 10**8
    assert default_io_bytes(roomy, roomy, 4, bandwidth=1e6) == 64 * MIB
    for parallelism in (1, 3, 8):
        assert misfit(default_io_bytes(roomy, roomy, parallelism, 1e9), parallelism, 4096) is None


def test_sizes_as_ds_io_writes_them() -> None:
    assert parse_io_size("1G") == parse_io_size("1GiB") == 2**30
    assert parse_io_size("4K") == 4096
    assert parse_io_size("1GB") == 10**9
    assert parse_io_size("1000") == 1000
    with pytest.raises(UsageProblem, match="1 gig"):
        parse_io_size("1 gig")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"io_size": 1000}, "cannot be moved exactly"),
        ({"io_parallel": 3}, "cannot be moved exactly"),
        ({"block_size": 1000}, "`--block_size 1000`"),
        ({"io_parallel": 0}, "`--io_parallel 0` is too small"),
        ({"queue_depth": 0}, "`--queue_depth 0` is too small"),
        ({"loops": 0}, "`--loops 0` is too small"),
        ({"use_gds": True}, "`--use_gds` needs `--gpu`"),
    ],
)
def test_calls_that_ds_io_takes_and_answers_wrongly(change: dict[str, int], said: str) -> None:
    request = Request(folder=Path("/x"), io_size=MIB)
    check_request(request, 512)
    with pytest.raises(UsageProblem, match=said):
        check_request(replace(request, **change), 512)  # type: ignore[arg-type]


# --- children -----------------------------------------------------------------------------------------------------


def child(code: str) -> Worker:
    return Worker([sys.executable, "-c", code], "the child", os.environ)


def test_a_child_answers_line_by_line() -> None:
    code = "import json, sys\nfor line in sys.stdin: print(json.dumps({'got': json.loads(line)['n']}), flush=True)"
    with child(code) as process:
        assert [process.ask({"n": n}, PATIENCE)["got"] for n in range(3)] == [0, 1, 2]


def test_a_program_finds_pythons_own_modules_and_may_print(tmp_path: Path) -> None:
    # A module of that name lies beside the server.
    code = (
        "import statistics\ndef answer(order):\n    print('noise')\n    return {'mean': statistics.mean(order['n'])}\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    with Worker(child_command(Path(sys.executable), program), "the child", os.environ) as process:
        assert process.ask({"n": [1, 3]}, PATIENCE) == {"mean": 2}
        with pytest.raises(Failed, match="the child: KeyError: 'n'"):
            process.ask({}, PATIENCE)
        assert process.ask({"n": [4]}, PATIENCE) == {"mean": 4}


def test_what_a_rank_of_a_checkpoint_met_is_told_in_one_line(tmp_path: Path) -> None:
    """As torch raises it: no Exception, and a traceback as its text."""
    program = tmp_path / "program.py"
    program.write_text(
        "class CheckpointException(BaseException):\n"
        "    failures = {3: (ValueError('`w` is damaged'), 'a stack')}\n"
        "    def __str__(self): return 'Traceback ...'\n"
        "def answer(order): raise CheckpointException()\n"
    )
    with Worker(child_command(Path(sys.executable), program), "the child", os.environ) as process:
        for _ in range(2):
            with pytest.raises(Failed, match=r"the child: ValueError: `w` is damaged$"):
                process.ask({}, PATIENCE)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "the child was ended by SIGABRT"),
        ("import sys; sys.stdin.readline(); sys.exit('Assertion failed')", "exit status 1: Assertion failed"),
        ("import sys; sys.stdin.readline(); print('[1]', flush=True); input()", "answered nonsense"),
        ("import sys; sys.stdin.readline(); print('E2E Speed = 65 GB/sec', flush=True); input()", "answered nonsense"),
        ('print(\'{"error": "no memory", "kind": "OSError"}\', flush=True); input()', "OSError: no memory"),
    ],
)
def test_a_child_that_dies_or_talks_nonsense_is_a_finding(code: str, said: str) -> None:
    with child(code) as process, pytest.raises(Failed, match=said):
        process.ask({"do": "open"}, PATIENCE)


def test_a_child_that_hangs_is_ended_with_all_that_it_started() -> None:
    code = "import subprocess, time\np = subprocess.Popen(['sleep', '600'])\n"
    code += "import sys\nprint('stuck with', p.pid, file=sys.stderr, flush=True)\nsys.stdin.readline()\n"
    code += "print('{}', flush=True)\ntime.sleep(6000)"
    with child(code) as process:
        # When it has answered, it hangs.
        process.ask({"do": "open"}, PATIENCE)
        with pytest.raises(Failed, match="said nothing for 1 s") as caught:
            process.ask({"do": "move"}, 1)
    grandchild = int(caught.value.raw.split()[-1])
    assert gone(grandchild)


def test_an_end_is_told_with_its_last_telling_line() -> None:
    said = "loading\npython: deepspeed_py_io_handle.cpp:40: Assertion `x' failed.\n"
    message, hint = describe_end("x", -6, said)
    assert message.startswith("x was ended by SIGABRT: python: deepspeed_py_io_handle.cpp:40: Assertion")
    assert hint is None
    assert "out-of-memory" in str(describe_end("x", -9, "")[1])
    assert "build-ops --rebuild" in str(describe_end("x", -4, "")[1])


def test_an_interpreter_that_cannot_answer(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="does not start"):
        probe(tmp_path / "none", os.environ)
    with pytest.raises(Missing, match="exit status 1"):
        probe(Path("/bin/false"), os.environ)


def test_the_rung_is_left_out_without_deepspeed(tmp_path: Path) -> None:
    rung = prepare(bare_python(tmp_path), 4.0, (), os.environ)
    assert rung.installed is None
    (line,) = rung.announcement(Plan(str(tmp_path), "nvme disk", 1, 2**26, 4.0, None))
    assert "torch is not installed" in line
    assert install_hint("deepspeed") in line


# --- compiled ops -------------------------------------------------------------------------------------------------


@pytest.fixture
def built(tmp_path: Path) -> Probe:
    """A cache with `async_io` and its dependencies, built and stamped."""
    probed = Probe(
        sys.executable,
        "3.11",
        "2.13.0",
        "/v/torch",
        "0.19.8",
        "/v/deepspeed",
        str(tmp_path / "ext"),
        needs_pin_memory=True,
    )
    for op in ("pin_memory", "async_io"):
        probed.folder(op).mkdir(parents=True)
        (probed.folder(op) / f"{op}.so").touch()
        (probed.folder(op) / STAMP).write_text(json.dumps(probed.stamp()))
    return probed


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an op is compiled by is there: otherwise a hint names it first."""
    monkeypatch.setattr(ops, "find", lambda program: program)


@pytest.mark.usefixtures("compilers")
def test_an_op_fits_the_versions_that_it_was_built_for(built: Probe) -> None:
    need(built, "async_io")
    for other in (replace(built, torch="2.14.0"), replace(built, deepspeed="0.20.0")):
        with pytest.raises(Missing, match="is not built for torch"):
            need(other, "async_io")
    (built.folder("pin_memory") / "pin_memory.so").unlink()
    with pytest.raises(Missing, match="is not built") as caught:
        need(built, "async_io")
    assert caught.value.hint == "run `tunetool build-ops`"


def test_deepspeeds_own_op_is_known_by_its_recipe(built: Probe, tmp_path: Path) -> None:
    torch, deepspeed = tmp_path / "v/torch", tmp_path / "v/deepspeed"
    for folder, name in ((torch, "version.py"), (deepspeed, "git_version_info_installed.py")):
        folder.mkdir(parents=True)
        (folder / name).touch()
    self_built = replace(built, torch_path=str(torch), deepspeed_path=str(deepspeed))
    for op in ("pin_memory", "async_io"):
        (self_built.folder(op) / STAMP).unlink()
        (self_built.folder(op) / "build.ninja").write_text(f"-isystem {torch}/include {deepspeed}/ops/csrc/x.cpp\n")
        later = time.time() + 60
        os.utime(self_built.folder(op) / f"{op}.so", (later, later))
    assert self_built.has("async_io")
    assert not replace(self_built, torch_path="/elsewhere/torch").has("async_io")
    os.utime(self_built.folder("async_io") / "async_io.so", (1, 1))  # torch was upgraded in the meantime
    assert not self_built.has("async_io")


def test_a_preinstalled_op_needs_no_build(built: Probe) -> None:
    preinstalled = replace(built, root="/nowhere", installed={"async_io": "/v/a.so", "pin_memory": "/v/p.so"})
    need(preinstalled, "async_io")
    assert preinstalled.find("async_io") == Path("/v/a.so")


@pytest.mark.usefixtures("compilers")
def test_a_stale_lock_is_named_instead_of_waited_for(built: Probe) -> None:
    (built.folder("async_io") / "lock").touch()
    with pytest.raises(Missing, match="a build that died left it") as caught:
        need(built, "async_io")
    assert caught.value.hint == "run `tunetool build-ops`"


def test_a_lock_that_somebody_holds_is_left_alone(built: Probe) -> None:
    lock = built.folder("async_io") / "lock"
    with lock.open("w"):
        assert os.getpid() in builders(lock)
        with pytest.raises(Missing, match="builds it"):
            need(built, "async_io")
        with pytest.raises(CannotJudge, match=f"process {os.getpid()} still builds"):
            clear_lock(lock, PlainProgress(), patience=0.3)
        assert lock.exists()


def test_a_build_waits_for_another_of_the_same_op(built: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    lock = built.folder("async_io") / "lock"
    hold = "import os, sys\nfd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        timer = threading.Timer(1, other.stdin.close)
        timer.start()
        clear_lock(lock, PlainProgress())
        assert other.stdin.closed  # it came back because the other one ended, not before
    assert f"process {other.pid} builds in `{lock.parent}`: waiting" in capsys.readouterr().err
    assert not lock.exists()


def test_one_builds_at_a_time_and_others_wait_within_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with only_build(tmp_path, PlainProgress()):
        with (
            pytest.raises(CannotJudge, match=f"process {os.getpid()} still builds in `{tmp_path}`"),
            only_build(tmp_path, PlainProgress(), patience=0.3),
        ):
            pytest.fail("both build")
        assert f"process {os.getpid()} builds in `{tmp_path}`: waiting" in capsys.readouterr().err
    with only_build(tmp_path, PlainProgress(), patience=0):
        assert capsys.readouterr().err == ""


def test_a_compiler_that_outlived_its_build_still_builds(built: Probe, tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    for pid, cwd in ((41, built.folder("async_io")), (42, tmp_path)):
        (proc / str(pid) / "fd").mkdir(parents=True)
        (proc / str(pid) / "cwd").symlink_to(cwd)
    (proc / "self").mkdir()
    lock = built.folder("async_io") / "lock"
    assert builders(lock, str(proc)) == [41]


def test_a_lock_that_nobody_holds_is_removed_and_told(built: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    lock = built.folder("async_io") / "lock"
    lock.touch()
    clear_lock(lock, PlainProgress())
    assert not lock.exists()
    assert f"removed `{lock}`" in capsys.readouterr().err
    assert built.has("async_io")


def test_the_compilers_get_as_much_as_there_is_memory_for() -> None:
    python = Path("/venv/bin/python")
    given = {"PATH": "/usr/bin", "TORCH_CUDA_ARCH_LIST": "8.0 9.0a 9.0", "LD_PRELOAD": "/x.so"}
    variables = build_environment(given, python, 64, 8 * 2**30)
    assert variables["MAX_JOBS"] == "4"
    assert variables["PATH"] == "/venv/bin:/usr/bin"
    assert variables["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0"
    assert "LD_PRELOAD" not in variables
    assert build_environment({"MAX_JOBS": "3"}, python, 64, 2**40)["MAX_JOBS"] == "3"


def test_architectures_that_the_builder_refuses() -> None:
    assert plain_architectures("9.0a") == "9.0"
    assert plain_architectures("8.0;9.0a;9.0a+PTX") == "8.0;9.0;9.0+PTX"
