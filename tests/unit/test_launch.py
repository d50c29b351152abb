"""Launching ranks: outcomes of a run, the rank to blame, files for ssh and DeepSpeed, cleaning up."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import call
from damaged import VALUES
from doors import refused_well
from programs import need_program
from tunetool.errors import UsageProblem
from tunetool.fleet.playbook import HostSelection
from tunetool.launch.agent import first
from tunetool.launch.choose import launcher
from tunetool.launch.decision import Decision, Limits, Moments, Report, decide, first_cause
from tunetool.launch.deepspeed import command, hostfile, ssh_settings
from tunetool.launch.job import Host, from_inventory, host_of
from tunetool.launch.shm_cleanup import ShmCleanup
from tunetool.launch.spec import SPEC, VERDICT, Failure, NodeSpec, Verdict, read_spec, read_verdict, write
from tunetool.launch.ssh import unpack
from tunetool.launch.watchdog import Beat, Compilers, Stuck, innermost, to_blame
from tunetool.measure.marked_processes import end_marked, has_mark, marked, naming
from waiting import PATIENCE, stopped, until

ROOT = Path(__file__).parents[2]
TWO = Limits(("a", "b"), 2, timeout=100, stall=30)


def report(node: int, *ages: float, count: int = 5, **more: Any) -> Report:
    return Report(node, beats={2 * node + at: Beat(count, age) for at, age in enumerate(ages)}, **more)


def both(*reports: Report) -> dict[int, Report]:
    return {each.node: each for each in reports}


def test_a_run_goes_on_while_one_rank_makes_progress() -> None:
    moments = Moments()
    assert decide(TWO, both(report(0, 80, 90), report(1, 85, 3)), {}, 95, moments) == Decision("go")
    assert decide(TWO, both(report(0, 80, 90, state="done"), report(1, 1, 1)), {}, 95, moments) == Decision("go")
    done = both(report(0, 80, 90, state="done"), report(1, 85, 3, state="done"))
    assert decide(TWO, done, {1: 0.1}, 95, moments) == Decision("end")


def test_ranks_that_stand_still_tell_who_is_behind() -> None:
    moments = Moments()
    assert decide(TWO, both(report(0, 31, 32), report(1, 33, 34)), {}, 50, moments).do == "dump"
    waits, sleeps = Stuck("train.py:7 in step", True), Stuck("data.py:3 in read", False)
    some = both(report(0, 31, 32, stuck={0: waits, 1: waits}), report(1, 33, 34))
    assert decide(TWO, some, {}, 50.2, moments).do == "dump"
    every = both(report(0, 31, 32, stuck={0: waits, 1: waits}), report(1, 33, 34, stuck={2: waits, 3: sleeps}))
    failure = decide(TWO, every, {}, 50.4, moments).failure
    assert failure is not None
    assert failure.message == (
        "no rank made progress for 30 s: rank 3 on `b` is behind, after 5 beats, and is at data.py:3 in read"
    )
    assert (failure.rank, failure.host) == (3, "b")
    assert "rank 0 on a: 5 beats, the last 31 s ago, train.py:7 in step" in failure.raw


def test_stacks_that_do_not_come_are_not_waited_for() -> None:
    moments = Moments()
    silent = both(report(0, 31, 32), report(1, 33, 34))
    assert decide(TWO, silent, {}, 50, moments).do == "dump"
    ended = decide(TWO, silent, {}, 56, moments)
    assert ended.do == "end"
    assert ended.failure is not None
    assert "did not dump its stack" in ended.failure.message


def test_ranks_that_go_on_while_they_are_asked_are_left_alone() -> None:
    moments = Moments()
    assert decide(TWO, both(report(0, 31, 32), report(1, 33, 34)), {}, 50, moments).do == "dump"
    assert decide(TWO, both(report(0, 0, 32), report(1, 33, 34)), {}, 50.2, moments).do == "go"
    assert decide(TWO, both(report(0, 31, 32), report(1, 33, 34)), {}, 81, moments).do == "dump"


def test_a_run_goes_on_until_its_compilers_stand_still() -> None:
    moments = Moments()
    assert decide(TWO, both(report(0, 31, 32), report(1, 33, 34, compiling=2.0)), {}, 50, moments).do == "go"
    assert decide(TWO, both(report(0, 90, 91), report(1, 92, 93, compiling=30.5)), {}, 99, moments).do == "dump"
    assert moments.why == "no rank made progress for 30 s"


def test_only_a_compiler_that_computes_is_progress(tmp_path: Path) -> None:
    compiler, other = tmp_path / "clang-16", tmp_path / "train"
    for program in (compiler, other):
        shutil.copy("/bin/sh", program)
    compilers, loop = Compilers(), ["-c", "while :; do :; done"]
    with subprocess.Popen([str(other), *loop]) as rank, subprocess.Popen([str(compiler), *loop]) as compiling:
        try:
            until(lambda: used(rank.pid) > 5, "the rank to compute", rank)
            compilers.look([rank.pid])
            assert compilers.age() is None
            until(lambda: used(compiling.pid) > 5, "the compiler to compute", compiling)
            compilers.look([rank.pid, compiling.pid])
            first = compilers.age()
            assert first is not None
            compiling.send_signal(signal.SIGSTOP)
            until(lambda: stopped(compiling.pid), "the compiler to stop", compiling)
            compilers.look([rank.pid, compiling.pid])  # what it did until it stopped
            before = compilers.age()
            compilers.look([rank.pid, compiling.pid])
            after = compilers.age()
            assert before is not None
            assert after is not None
            assert after >= before, "it stands still"
        finally:
            compiling.kill()
            rank.kill()
    compilers.look([rank.pid, compiling.pid])


def used(pid: int) -> int:
    """A process's time in the kernel's ticks."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_a_rank_that_never_started_is_behind_all_others() -> None:
    moments = Moments()
    assert decide(TWO, both(report(0, 31, 32), report(1, 33)), {}, 50, moments).do == "dump"
    failure = decide(TWO, both(report(0, 31, 32, stuck={}), report(1, 33, stuck={})), {}, 51, moments).failure
    assert failure is not None
    assert "rank 3 on `b` is behind, after 0 beats, and has not started" in failure.message


def test_the_time_limit_names_the_rank_that_is_behind_too() -> None:
    moments = Moments()
    slow = both(report(0, 1, 1, stuck={}), report(1, 1, 1, count=3, stuck={}))
    assert decide(TWO, slow, {}, 99, moments).do == "go"
    failure = decide(TWO, slow, {}, 101, moments).failure
    assert failure is not None
    assert failure.message.startswith("the 4 ranks did not end within 100 s: rank 2 on `b` is behind, after 3 beats")


@pytest.mark.parametrize("silent", [10.5, math.inf])
def test_a_node_of_which_nothing_is_heard_is_lost_by_its_name(silent: float) -> None:
    running = both(report(0, 1, 1), report(1, 1, 1))
    assert decide(TWO, running, {1: 9.0}, 20, Moments()).do == "go"
    failure = decide(TWO, running, {1: silent}, 20, Moments()).failure
    assert failure is not None
    assert (failure.message, failure.host) == ("host `b` is lost", "b")


def test_a_node_that_never_joined_is_named() -> None:
    limits = Limits(("a", "b"), 2, timeout=1000, stall=500)
    assert decide(limits, both(report(0, 1, 1)), {}, 89, Moments()).do == "go"
    failure = decide(limits, both(report(0, 1, 1)), {}, 91, Moments()).failure
    assert failure is not None
    assert failure.message == "`b` did not join within 90 s"


def test_the_first_cause_is_named_before_its_consequence() -> None:
    moments = Moments()
    follows = Failure("rank 0 on `a` ended with exit status 1: Connection closed by peer", "a", rank=0, exit=1)
    cause = Failure("rank 3 on `b` was ended by SIGKILL: no message", "b", rank=3, exit=-9)
    seen = both(report(0, 1, 1, state="failed", failure=follows), report(1, 1, 1))
    assert decide(TWO, seen, {}, 50, moments).do == "go"
    seen[1] = report(1, 1, 1, state="failed", failure=cause)
    assert decide(TWO, seen, {}, 50.3, moments) == Decision("end", cause)
    alone = both(report(0, 1, 1, state="failed", failure=follows), report(1, 1, 1))
    assert decide(TWO, alone, {}, 51.1, moments) == Decision("end", follows)
    fire = Failure("rank 2 on `b` ended with exit status 1: the disk is on fire", "b", rank=2, exit=1)
    assert first_cause([follows, fire]) == fire


def test_of_dead_ranks_the_cause_is_none_that_torchrun_ended() -> None:
    assert first({0: (5.0, -signal.SIGTERM), 1: (6.0, 1)}) == (1, 1)
    assert first({0: (5.1, 1), 1: (5.9, -signal.SIGKILL)}) == (1, -signal.SIGKILL)
    assert first({0: (5.1, 1), 1: (6.0, -signal.SIGKILL)}) == (0, 1)


DUMPED = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/u/train.py", line 12 in step
  File "/home/u/train.py", line 30 in <module>
"""


def test_a_stack_tells_the_innermost_line_and_who_waits() -> None:
    assert innermost(DUMPED) == Stuck("/home/u/train.py:12 in step", True)
    # A second dump into the same file counts.
    later = DUMPED + 'Current thread 0x2 (most recent call first):\n  File "/home/u/data.py", line 3 in read\n'
    assert innermost(later) == Stuck("/home/u/data.py:3 in read", False)
    unmarked = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in f\n'
    assert innermost(unmarked + unmarked.replace("a.py", "main.py")) == Stuck("main.py:1 in f", False)
    assert innermost("") is None


def test_an_import_is_progress_of_the_rank_and_of_no_child(tmp_path: Path) -> None:
    for name in ("first_module", "second_module"):
        (tmp_path / f"{name}.py").write_text("")
    program = """if True:
        import os, sys
        from pathlib import Path
        from tunetool.launch import rank
        from tunetool.launch.start import Imports
        file = Path(os.environ[rank.NODE]) / rank.BEATS / "0"
        read = lambda: rank.BEAT.unpack(file.read_bytes())
        rank.beat()
        sys.meta_path.insert(0, Imports())
        before = read()
        child = os.fork()
        if child == 0:
            import second_module
            os._exit(0)
        os.waitpid(child, 0)
        assert read() == before
        import first_module
        after = read()
        assert after[0] == before[0] == 1
        assert after[1] > before[1]
    """
    environment = {**os.environ, "TUNETOOL_NODE": str(tmp_path), "RANK": "0"}
    environment["PYTHONPATH"] = f"{ROOT / 'tools'}:{tmp_path}"
    done = call(sys.executable, "-c", program, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_rank_with_fewest_beats_is_to_blame() -> None:
    waits, sleeps = Stuck("x", True), Stuck("y", False)
    beats = {0: Beat(7, 1), 1: Beat(7, 1), 2: Beat(7, 1)}
    assert to_blame(3, beats, {0: waits, 1: waits, 2: sleeps}) == 2
    assert to_blame(3, {**beats, 1: Beat(6, 1)}, {0: waits, 1: waits, 2: sleeps}) == 1
    assert to_blame(3, beats, {0: waits, 1: waits, 2: waits}) == 0


def test_what_a_guard_is_told_and_tells_comes_back_as_it_was(tmp_path: Path) -> None:
    spec = NodeSpec("r", "/d", "/o", ["a", "b"], 1, 2, ["-m", "x"], "/p", {"A": "$b '\""}, ("10.0.0.1", 5), 6)
    write(spec, tmp_path, SPEC)
    assert (tmp_path / SPEC).stat().st_mode & 0o777 == 0o600
    assert read_spec(tmp_path) == spec
    assert (spec.host, list(spec.ranks), spec.world) == ("b", [2, 3], 4)
    verdict = Verdict(1, "b", Failure("m", "b", "h", 2, -9, "raw"), ["x"])
    write(verdict, tmp_path, VERDICT)
    assert read_verdict((tmp_path / VERDICT).read_text()) == verdict
    with pytest.raises(ValueError, match="not a verdict"):
        read_verdict("[]")


HOSTS = [Host("node1", "10.0.0.1"), Host("node2", "10.0.0.2")]


def test_the_hostfile_and_the_command_line_are_deepspeeds() -> None:
    assert hostfile(HOSTS, 4) == "node1 slots=4\nnode2 slots=4\n"
    argv = command("/v/python", Path("/h/hostfile"), "10.0.0.1", 1234, "/tmp/d")
    assert " ".join(argv) == (
        "/v/python -m deepspeed.launcher.runner --hostfile /h/hostfile --master_addr 10.0.0.1 --master_port 1234"
        " --launcher pdsh --force_multi --no_ssh_check --no_local_rank --module tunetool.launch.start /tmp/d"
    )


def test_pdsh_reaches_hosts_as_ansible_does(tmp_path: Path) -> None:
    need_program("ssh")  # it reads itself what is rendered
    mine = tmp_path / "mine"
    mine.write_text("Host *\n  Compression yes\n")
    common = {"ansible_user": "ops", "ansible_ssh_common_args": f"-F {mine} -o UserKnownHostsFile=/k"}
    variables = {
        "node1": {**common, "ansible_host": "10.0.0.1", "ansible_port": 2222},
        "node2": {**common, "ansible_host": "10.0.0.2", "ansible_ssh_private_key_file": "/a b"},
    }
    config, arguments = ssh_settings(HOSTS, variables)
    assert arguments == ["-o", "UserKnownHostsFile=/k"]
    (tmp_path / "config").write_text(config)
    for name, expected in {
        "node1": ["hostname 10.0.0.1", "user ops", "port 2222", "batchmode yes", "compression yes"],
        "node2": ["hostname 10.0.0.2", "user ops", "port 22", "identityfile /a b", "userknownhostsfile /k"],
    }.items():
        settings = call("ssh", "-G", *arguments, "-F", str(tmp_path / "config"), name, check=True).stdout.splitlines()
        assert [line for line in expected if line not in settings] == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"node1": {"ansible_ssh_common_args": "-C"}}, "hosts differ in `ansible_ssh_common_args`"),
        ({key: {"ansible_ssh_common_args": "-o 'ProxyCommand=nc %h'"} for key in ("node1", "node2")}, "has a space"),
        ({"node2": {"ansible_user": "{{ me }}"}}, "`ansible_user` of `node2` is a template"),
    ],
)
def test_what_pdsh_cannot_do_as_ansible_does_is_said(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageProblem, match=message):
        ssh_settings(HOSTS, variables)


class Nothing:
    def say(self, line: str) -> None:
        raise AssertionError(line)

    def step(self, name: str, seconds: float) -> Any:
        raise AssertionError(name)


def test_the_launcher_follows_from_whether_there_is_an_inventory(tmp_path: Path) -> None:
    assert launcher("auto", None, None, Nothing()).name == "local"
    for name, chosen in {"auto": "ssh", "ssh": "ssh", "deepspeed": "deepspeed"}.items():
        assert launcher(name, tmp_path, None, Nothing()).name == chosen
    with pytest.raises(UsageProblem, match="`ssh` needs an inventory"):
        launcher("ssh", None, None, Nothing())
    with pytest.raises(UsageProblem, match="`mpi` is not a launcher"):
        launcher("mpi", None, None, Nothing())
    with pytest.raises(UsageProblem, match="takes no inventory"):
        launcher("local", tmp_path, None, Nothing())


def test_hosts_come_from_the_inventory_in_its_order(tmp_path: Path) -> None:
    pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
    hosts = {"z": {"ansible_host": "10.0.0.9", "tunetool_slots": 8}, "a": {}, "c": {"tunetool_slots": "none"}}
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    assert from_inventory(HostSelection(inventory, "z,a")) == [Host("z", "10.0.0.9", 8), Host("a", "a")]
    apart = {"z": {"ansible_host": "10.0.0.9", "tunetool_address": "192.168.7.1"}}
    reached = tmp_path / "reached.yml"
    reached.write_text(json.dumps({"all": {"hosts": apart}}))
    assert from_inventory(HostSelection(reached)) == [Host("z", "192.168.7.1")]
    with pytest.raises(UsageProblem, match="`tunetool_slots` of `c` is `none`"):
        from_inventory(HostSelection(inventory))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(
                VALUES, st.sampled_from([math.inf, -math.inf, math.nan, 10**400, "8", 8, "-oProxyCommand=x"])
            )
            for name in ("tunetool_slots", "tunetool_address", "ansible_host")
        },
    )
)
def test_whatever_an_inventory_says_a_host_is_one_or_refused(variables: dict[str, Any]) -> None:
    try:
        host = host_of("node1", variables)
    except UsageProblem as error:
        refused_well(error, hinted=True)
        return
    assert host.slots is None or host.slots > 0
    assert host.address.isprintable()
    assert not host.address.startswith("-")
    assert len(host.address.split()) == 1


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(VALUES, st.sampled_from(["-o 'A", "-F", "a\n  ProxyCommand x", 'a" b', 22, 0.5]))
            for name in (
                *("ansible_ssh_common_args", "ansible_user", "ansible_port", "ansible_host"),
                "ansible_ssh_private_key_file",
            )
        },
    )
)
def test_whatever_an_inventory_says_ssh_gets_one_line_for_each(variables: dict[str, Any]) -> None:
    try:
        config, _ = ssh_settings([Host("node1", "node1")], {"node1": variables})
    except UsageProblem as error:
        refused_well(error, hinted=True)
        return
    block = config.split("Host *")[0].splitlines()
    assert block[0] == "Host node1"
    words = [line.split()[0] for line in block[1:]]
    assert len(words) == len(set(words))
    assert set(words) <= {"HostName", "User", "Port", "IdentityFile"}


def test_only_files_of_a_hosts_archive_land_and_only_below(tmp_path: Path) -> None:
    archive, destination = tmp_path / "a.tar", tmp_path / "place"
    with tarfile.open(archive, "w") as tar:
        for name in ("rank-0/x", "../outside", "/tmp/absolute-of-tests"):
            member = tarfile.TarInfo(name)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"ok"))
        link = tarfile.TarInfo("rank-0/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    unpack(archive, destination)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == [
        "a.tar",
        "place/rank-0/x",
    ]
    assert not Path("/tmp/absolute-of-tests").exists()
    unpack(tmp_path / "absent", destination)


MAPS = """
import mmap, sys
mapped = []
for name in sys.argv[1:]:
    with open(name, "r+b") as stream:
        mapped.append(mmap.mmap(stream.fileno(), 4096))
print("mapped", flush=True)
sys.stdin.read()
"""


def mapping(*paths: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", MAPS, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


def test_what_a_run_left_in_memory_goes_and_what_others_have_not(tmp_path: Path) -> None:
    def file(name: str) -> Path:
        path = tmp_path / name
        path.write_bytes(bytes(4096))
        return path

    buffer = f"deepspeed_allreduce_buffer_{os.getuid()}"
    ours, theirs = file("nccl-ours"), file("nccl-theirs")
    # Of ranks that a rank started, which meet at a port of their own.
    inner = file(f"{buffer}_10.0.0.1_777_0")
    staged, shared = file("model.safetensors"), file(f"{buffer}_10.0.0.1_500_1")
    (tmp_path / "torch_1_a_0").mkdir()
    with mapping(ours, inner, staged, shared) as rank, mapping(theirs, shared) as foreign:
        for name in (f"{buffer}_10.0.0.1_500_0", f"torch_{rank.pid}_77_0"):
            file(name)
        kept = [f"{buffer}_10.0.0.1_501_0", f"{buffer}_10.0.0.1_500_2", f"torch_{foreign.pid}_77_0", "torch_2_1_0"]
        for name in kept:
            file(name)
        cleanup = ShmCleanup(tmp_path)
        cleanup.look([rank.pid])
        cleanup.expect_buffers("10.0.0.1", "500", world=2)
        rank.kill()
        rank.wait()
        assert cleanup.remove() == [shared.name]
        foreign.communicate()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*kept, theirs.name, staged.name, shared.name, "torch_1_a_0"}
    assert cleanup.remove() == []
    assert not shared.exists()


LEADS = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def leader(environment: dict[str, str], *arguments: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LEADS, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_processes_are_known_by_their_mark_over_sessions() -> None:
    ours, grandchild = leader({"TUNETOOL_TESTS": f"us-{os.getpid()}"}, f"a-{os.getpid()}")
    other, others_child = leader({"TUNETOOL_TESTS": f"us-{os.getpid()}0"})
    with ours, other:
        assert sorted(marked("TUNETOOL_TESTS", f"us-{os.getpid()}")) == sorted([ours.pid, grandchild])
        assert naming(f"a-{os.getpid()}") == [ours.pid]
        assert end_marked("TUNETOOL_TESTS", f"us-{os.getpid()}") == []
        assert ours.wait(PATIENCE) == -signal.SIGKILL
        assert has_mark(others_child, "TUNETOOL_TESTS", f"us-{os.getpid()}0")
        os.kill(others_child, signal.SIGKILL)
        assert other.wait(PATIENCE) == 0


SWEPT = """
import subprocess, sys, time
from tunetool.measure.marked_processes import swept_away
with swept_away("TUNETOOL_TESTS", sys.argv[1], sys.argv[3]):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={"TUNETOOL_TESTS": sys.argv[1], "PATH": "/bin:/usr/bin"})
    print(child.pid, flush=True)
    if sys.argv[2] == "raise":
        raise SystemExit
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_what_a_killed_starter_started_is_swept_away(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    mark = f"{how}-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", SWEPT, mark, how, str(folder)], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        if how == "kill":
            starter.kill()
        starter.wait()
    until(lambda: not has_mark(pid, "TUNETOOL_TESTS", mark), "the end of what was started")
    until(lambda: not folder.exists(), "the folder to go")
