"""Commands for Slurm and its answers: outputs recorded from slurm-wlm 22.05."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from staged import Quiet
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch.choose import launcher
from tunetool.launch.job import Host, Job
from tunetool.launch.slurm import (
    UNREACHABLE,
    JobState,
    SlurmLauncher,
    SlurmOptions,
    down_nodes,
    parse_options,
    parse_sacct,
    parse_scontrol,
    refused,
    render,
)

_RECORDED = Path(__file__).parents[1] / "data/slurm"
_PLAIN = SlurmOptions()
_JOB = Job(("-m", "some.module"), 8, {}, Path("/results"), timeout=3600)


def _state(name: str) -> JobState:
    state = parse_scontrol((_RECORDED / f"job-{name}.txt").read_text())
    assert state is not None
    return state


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("running", "job 7 running on node1"),
        ("pending-resources", "job 7 waits: Resources (its nodes are in use)"),
        ("held", "job 7 waits: JobHeldUser (it is held: `scontrol release 7`)"),
    ],
)
def test_a_job_that_has_not_ended_in_a_line(name: str, words: str) -> None:
    assert not _state(name).ended
    assert _state(name).words("7") == words


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("completed", "job 7 ended well (COMPLETED)", None),
        ("failed", "job 7 ended with exit status 3 (FAILED)", None),
        ("signalled", "job 7 ended with exit status 0 by signal 9 (FAILED)", None),
        ("cancelled", "job 7 was cancelled, and not by tunetool (CANCELLED)", "ask who ran `scancel 7`"),
        ("timeout", "job 7 reached its time limit (TIMEOUT)", "give it more: `--slurm time=HH:MM:SS`"),
        ("node-fail", "job 7 lost a node (NODE_FAIL)", "`sinfo -R` says why nodes are down"),
    ],
)
def test_a_job_that_ended_in_plain_words(name: str, message: str, hint: str | None) -> None:
    assert _state(name).ended
    assert _state(name).verdict("7") == (message, hint)


def test_a_new_job_and_an_absent_controller_have_words() -> None:
    assert JobState("PENDING", "None").words("7") == "job 7 waits: Slurm has not looked at it yet"
    assert "does not answer" in JobState(UNREACHABLE).words("7")


def test_memory_and_every_other_end_have_words() -> None:
    for state in ("OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED", "LAUNCH_FAILED"):
        message, _ = JobState(state).verdict("7")
        assert message.endswith(f"({state})")
        assert JobState(state).ended
    assert "--ranks-per-node" in str(JobState("OUT_OF_MEMORY").verdict("7")[1])


@pytest.mark.parametrize(("name", "never"), [("pending-config", True), ("held", True), ("pending-resources", False)])
def test_waiting_that_time_does_not_end(name: str, never: bool) -> None:
    assert (_state(name).hopeless is not None) is never


def test_accounting_tells_what_the_controller_forgot() -> None:
    # sacct(1): the state of a cancelled job has the user's id.
    assert parse_sacct("CANCELLED by 1000|0:15|node[1-2]|None\n") == JobState("CANCELLED", "None", "node[1-2]", 0, 15)
    assert parse_sacct("OUT_OF_MEMORY|0:125|node1|None\n") == JobState("OUT_OF_MEMORY", "None", "node1", 0, 125)
    assert parse_sacct("") is None
    # A reason is anybody's text.
    assert parse_sacct("FAILED|1:0|node1|gone\u2028away\n") == JobState("FAILED", "gone\u2028away", "node1", 1, 0)
    assert parse_scontrol("slurm_load_jobs error: Invalid job id specified") is None


def test_the_node_that_is_down_is_found_among_the_jobs_nodes() -> None:
    assert down_nodes((_RECORDED / "nodes.txt").read_text()) == [("node2", "Not responding")]


@pytest.mark.parametrize(
    ("name", "kind", "message", "hint"),
    [
        ("partition", UsageProblem, "`sbatch` refuses the job: invalid partition specified: nope", "sinfo -s"),
        ("memory", UsageProblem, "`sbatch` refuses the job: Memory specification can not be satisfied", "sinfo -N -l"),
        ("gpus", UsageProblem, "`sbatch` refuses the job: Invalid generic resource (gres) specification", "sinfo -o"),
        ("constraint", UsageProblem, "`sbatch` refuses the job: Invalid feature specification", "sinfo -o"),
        ("bad-option", UsageProblem, "`sbatch` refuses the job: unrecognized option '--nonsense=1'", "sbatch --help"),
        ("node-name", UsageProblem, "`sbatch` refuses the job: Invalid node name specified", "sinfo -N"),
        (
            "down",
            CannotJudge,
            "`sbatch` does not reach Slurm: Unable to contact slurm controller (connect failure)",
            "check that slurmctld runs",
        ),
    ],
)
def test_what_sbatch_says_when_it_takes_no_job(name: str, kind: type[Exception], message: str, hint: str) -> None:
    error = refused((_RECORDED / f"refused-{name}.txt").read_text())
    assert type(error) is kind
    assert error.message == message
    assert hint in str(error.hint)


def test_options_of_a_call() -> None:
    asked = parse_options(["work-dir=/shared", "image=a.sqsh", "exclusive=no", "partition=gpu", "--reboot"])
    assert asked == SlurmOptions(None, Path("/shared"), "a.sqsh", False, ("--partition=gpu", "--reboot"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=x",
        "partition=",
        "a b=1",
        "x=1\ny",
        "output=/x",
        "nodes=two",
        "nodes=0",
        "work-dir=here",
        "exclusive=maybe",
    ],
)
def test_options_that_cannot_be(text: str) -> None:
    with pytest.raises(UsageProblem):
        parse_options([text])


def _script(options: SlurmOptions = _PLAIN, job: Job = _JOB, work: str = "/shared/work") -> str:
    script = render(job, options, Path(work))
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    return script


def _asked(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_the_script_asks_for_whole_nodes_with_one_task_each() -> None:
    asked = _asked(_script(SlurmOptions(lines=("--partition=gpu", "--gpus-per-node=8"))))
    assert {"--nodes=1", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--time=65", "--no-requeue"} <= asked
    assert {"--partition=gpu", "--gpus-per-node=8", "--output=/shared/work/slurm.log"} <= asked


def test_time_and_memory_are_left_to_call_and_partition() -> None:
    days = Job(_JOB.program, 8, {}, _JOB.directory, timeout=7 * 86400)
    assert not [line for line in _asked(_script(job=days)) if line.startswith("--time")]
    asked = _asked(_script(SlurmOptions(time="10:00", lines=("--mem=64G",)), days))
    assert {"--time=10:00", "--mem=64G", "--exclusive"} <= asked
    assert "--mem=0" not in asked
    assert not {"--exclusive", "--mem=0"} & _asked(_script(SlurmOptions(exclusive=False)))


def test_the_jobs_hosts_are_its_nodes() -> None:
    job = Job(_JOB.program, 8, {}, _JOB.directory, (Host("a1", "10.0.0.1"), Host("a2", "10.0.0.2")))
    assert {"--nodes=2", "--nodelist=a1,a2"} <= _asked(_script(job=job))


def test_an_image_and_names_with_spaces_are_quoted() -> None:
    job = Job(_JOB.program, 8, {}, _JOB.directory, python="/opt/my python")
    script = _script(SlurmOptions(image="registry#a b"), job)
    assert "--container-image='registry#a b' --container-mounts=/shared/work:/shared/work" in script
    assert "python='/opt/my python'" in script
    assert "--container" not in _script()


@pytest.mark.parametrize("work", ["/with space", "/a%j", '/quo"te', "/dollar$HOME"])
def test_a_directory_that_a_script_would_misread_is_refused(work: str) -> None:
    with pytest.raises(UsageProblem, match="batch script"):
        render(_JOB, SlurmOptions(), Path(work))


def test_without_slurm_the_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageProblem) as caught:
        SlurmLauncher(SlurmOptions(), Quiet())
    assert caught.value.message == "`sbatch` is not on PATH"
    assert "login node" in str(caught.value.hint)


def test_its_options_are_for_no_other_launcher() -> None:
    with pytest.raises(UsageProblem, match="`--slurm partition=gpu` is not for the launcher `local`"):
        launcher("auto", None, None, Quiet(), ["partition=gpu"])
