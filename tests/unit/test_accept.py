"""``tunetool accept``: how a goal is judged, what is measured and when, what is kept, and what is shown."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shown_records
from builders import PROVEN, check, measurement, record, sampled
from calls import TUNETOOL, call
from shown_records import on_screen
from staged import Quiet
from tunetool import record as records
from tunetool.accept import program
from tunetool.accept.goal import Goal, Pick
from tunetool.accept.judge import HELD, MISSED, OPEN, SKIPPED, further_rounds, judged, skipped, verdict_over
from tunetool.accept.progress_file import Kept
from tunetool.accept.run import Request, accept, judge_records
from tunetool.cli.accept import read_goals
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.measure.session import Result, Run
from tunetool.measure.statistics import LOOKS
from tunetool.record import Evidence, GoalResult, Measurement, Record, Status, Verdict
from tunetool.report.junit import junit
from tunetool.report.kinds import page_text

COUNTS = [count for count, _ in LOOKS]
READ = Pick("bandwidth", {"direction": "read"})
WRITE = Pick("bandwidth", {"direction": "write"})
FAST = (50e9, 51e9, 52e9, 53e9, 54e9, 55e9)


def goal(bound: float = 50e9, **fields: object) -> Goal:
    plain = Goal(("verify",), READ, None, "at least", bound, "B/s")
    return replace(plain, **fields)  # type: ignore[arg-type]


def read(*values: float, **fields: object) -> Measurement:
    return sampled("sequential.read", *values, evidence=PROVEN, **fields)


def write(*values: float) -> Measurement:
    return sampled("sequential.write", *values, evidence=PROVEN)


def with_verdict(status: Status, *reasons: tuple[str, str], figures: Sequence[Measurement] = (read(*FAST),)) -> Record:
    verdict = {
        "status": status,
        "reasons": [line for line, _ in reasons],
        "kinds": [kind for _, kind in reasons] or None,
    }
    return record(*figures, verdict=Verdict.model_validate(verdict))


# -- the judge


@pytest.mark.parametrize(
    ("bound", "sense", "word"),
    [
        (50e9, "at least", HELD),
        (50.1e9, "at least", OPEN),
        (55.1e9, "at least", MISSED),
        (55e9, "at most", HELD),
        (54e9, "at most", OPEN),
        (49.9e9, "at most", MISSED),
    ],
)
def test_the_whole_interval_decides(bound: float, sense: str, word: str) -> None:
    result = judged(goal(bound, sense=sense), [record(read(*FAST))])
    assert (result.verdict, result.value, result.rounds) == (word, 52.5e9, 6)


def test_rounds_of_further_runs_count_with_the_first() -> None:
    first = record(read(10e9, 10e9, 10e9))
    assert judged(goal(1e9), [first]).reason == "3 rounds: fewer than 5 decide nothing"
    assert further_rounds(goal(1e9), [first], COUNTS) == 3
    both = judged(goal(1e9), [first, record(read(11e9, 11e9, 11e9), id="1" * 32)])
    assert (both.verdict, both.rounds, both.record_ids) == (HELD, 6, ["0" * 32, "1" * 32])
    assert further_rounds(goal(1e9), [record(read(*FAST))], COUNTS) is None


def test_a_share_is_taken_within_rounds() -> None:
    # The machine is faster from round to round: the ratio is the same in each.
    shares = record(read(*(8e9 * n for n in range(1, 7))), write(*(10e9 * n for n in range(1, 7))))
    result = judged(goal(0.8, of=WRITE, unit="1"), [shares])
    assert (result.verdict, result.value) == (HELD, pytest.approx(0.8))
    uneven = record(read(*FAST), write(1e9))
    assert "make no pairs" in judged(goal(0.8, of=WRITE, unit="1"), [uneven]).reason
    still = record(read(*FAST), write(*[0.0] * 6))
    assert "is 0 in a round" in judged(goal(0.8, of=WRITE, unit="1"), [still]).reason


def test_a_figure_of_an_interval_alone_is_judged_by_it() -> None:
    interval = {"level": 0.97, "low": 1.9, "high": 2.1, "method": "x"}
    made = measurement("tune.gain.read", 2.0, "ratio", confidence=interval, parameters={"pairs": 6})
    wanted = goal(1.5, pick=Pick(made.figure, {}), unit="1")
    assert judged(wanted, [record(made)]).verdict == HELD
    assert further_rounds(goal(2.0, pick=Pick(made.figure, {}), unit="1"), [record(made)], COUNTS) is None


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (record(), "`bandwidth direction=read` was not measured"),
        (with_verdict("error", ("fio died", "error"), figures=()), "was not measured: fio died"),
        (record(read(*FAST), sampled("array.read", *FAST)), "fits 2 figures"),
        (with_verdict("unproven", ("vda counted half", "unproven")), "unproven: vda counted half"),
        (record(read(1e9, parameters={"tester_ceiling": 1.1e9})), "1 round: fewer than 5"),
    ],
)
def test_what_cannot_be_judged_is_not_decided(kept: Record, reason: str) -> None:
    result = judged(goal(), [kept])
    assert result.verdict == OPEN
    assert reason in result.reason


def test_a_slow_tester_is_no_slow_drive() -> None:
    slow = judged(goal(), [record(read(*[1e9] * 6, parameters={"tester_ceiling": 1.1e9}))])
    assert (slow.verdict, "near the tester's limit" in slow.reason) == (OPEN, True)


def volumes(slow: float, **parameters: float) -> Record:
    """What two volumes of a drive each read at once, and their sum, which is the same whatever the slow one gives."""
    whole = read(*FAST, parameters={"drives": "S1, S2", **parameters})
    figures = [whole]
    for name, drive, share in (("drive0", "S1", 1 - slow), ("drive1", "S2", slow)):
        own = read(*(share * value for value in FAST), parameters={"drives": drive})
        labels = {**own.labels, "volume": name}
        figures.append(own.model_copy(update={"name": f"{own.name}.{name}", "labels": labels}))
    return record(*figures)


def test_a_slow_volume_misses_the_goal_of_all() -> None:
    assert judged(goal(), [volumes(0.5)]).verdict == HELD
    assert judged(goal(), [volumes(0.46)]).verdict == HELD, "what another one took of what they have in common"
    missed = judged(goal(), [volumes(0.3)])
    assert (missed.verdict, missed.value) == (MISSED, 52.5e9)
    assert missed.reason.startswith("volume `drive1` (drive `S2`): 15.75 GB/s")
    assert "is below 22.5 GB/s (20.95 GiB/s), 90% of its share (1 drive of 2) of 50 GB/s" in missed.reason
    both = judged(goal(), [volumes(0.43)])
    assert (both.verdict, "over 6 rounds on both sides of" in both.reason) == (OPEN, True)
    assert judged(goal(sense="at most", bound=60e9), [volumes(0.3)]).verdict == HELD
    assert judged(goal(), [volumes(0.3, tester_ceiling=53e9)]).verdict == OPEN


def test_an_engine_whose_bytes_differ_holds_no_goal() -> None:
    figure = read(*FAST)
    named = figure.model_copy(update={"labels": {**figure.labels, "engine": "direct"}})
    differs = check("checkpoint.direct", "fail", "3 tensors differ", "equal")
    other = differs.model_copy(update={"labels": {"engine": "other"}})
    assert judged(goal(), [record(named, checks=[other])]).verdict == HELD
    differs = differs.model_copy(update={"labels": {"engine": "direct"}})
    assert "3 tensors differ" in judged(goal(), [record(named, checks=[differs])]).reason


def test_what_a_run_found_wrong_falls_short_with_goals_held() -> None:
    held = judged(goal(), [record(read(*FAST))])
    wrong = Verdict(status="fail", reasons=["drives.balance: slow"], kinds=["check"])
    assert verdict_over([held], [("verify", wrong)]).status == "fail"
    expected = Verdict(status="fail", reasons=["read is slow"], kinds=["expectation"])
    assert verdict_over([held], [("verify", expected)]).status == "pass"


def test_skipped_goals_are_no_pass() -> None:
    held, lacking = judged(goal(), [record(read(*FAST))]), skipped(goal(), "it needs root")
    assert verdict_over([lacking]).status == "unproven"
    both = verdict_over([held, lacking])
    assert (both.status, both.reasons) == ("pass", ["bandwidth direction=read: skipped, it needs root"])


VALUES = st.lists(st.floats(1.0, 1e12), min_size=1, max_size=20)


@given(VALUES, st.floats(1.0, 1e12))
def test_no_goal_is_held_and_missed(values: list[float], bound: float) -> None:
    kept = [record(read(*values))]
    least, most = (judged(goal(bound, sense=sense), kept).verdict for sense in ("at least", "at most"))
    assert {least, most} in ({HELD, MISSED}, {OPEN}, {HELD}, {HELD, OPEN})
    if least == HELD:
        assert min(values) >= bound or len(values) >= 12
    if len(values) < 5:
        assert {least, most} == {OPEN}


@given(VALUES, st.floats(1.0, 1e12), st.floats(1.0, 1e12))
def test_a_lower_bound_is_never_harder(values: list[float], one: float, other: float) -> None:
    kept, order = [record(read(*values))], [MISSED, OPEN, HELD]
    low, high = sorted((one, other))
    assert order.index(judged(goal(low), kept).verdict) >= order.index(judged(goal(high), kept).verdict)


@given(st.lists(st.sampled_from([HELD, MISSED, OPEN, SKIPPED])))
def test_the_exit_code_follows_the_contract(words: list[str]) -> None:
    blank = judged(goal(), [record(read(*FAST))])
    goals = [GoalResult.model_validate({**dict(blank), "verdict": word}) for word in words]
    expected = 1 if MISSED in words else 3 if OPEN in words or HELD not in words else 0
    assert Result(record(goals=goals, verdict=verdict_over(goals))).code == expected


# -- running


GOALS = """
schema = "tunetool.goals/1"
title = "A node"
[values]
target = "/"
[[goal]]
run = "bench experts --target {target} --rounds 3"
figure = {figure = "p99", place = "target"}
at_most = "1s"
[[goal]]
run = "bench experts --target {target} --rounds 3"
figure = {figure = "p50", place = "target"}
at_most = "1s"
[[goal]]
run = "verify --target {target}"
figure = {figure = "bandwidth", direction = "read"}
at_least = "1GBps"
why = "the seller's page"
"""


class Commands:
    """Stand for the commands: each leaves a record, and what was called is kept."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.called, self.asked = runs, list[str](), list[str]()
        self.before: Callable[[], None] = lambda: None
        self.wrong: dict[str, Exception] = {}
        self.speeds = itertools.repeat(2e9)
        self._ids = itertools.count(1)

    def announced(self, line: Sequence[str]) -> list[str]:
        self.asked.append(line[1])
        if line[0] in self.wrong:
            raise self.wrong[line[0]]
        return ["writes 5 GB, about 70 s"]

    def measure(self, line: Sequence[str], runs_dir: Path, more: Sequence[str] = ()) -> Kept:
        self.before()
        self.called.append(" ".join([*line[:2], *more]))
        rounds = 3 if line[0] == "bench" else 6
        speeds = list(itertools.islice(self.speeds, rounds))
        times = [
            sampled(f"experts.target.direct.{each}", *[0.5] * rounds, quantity="latency", unit="s", better="lower",
                    figure=each, labels={"subject": "experts", "place": "target"})
            for each in ("p50", "p99")
        ]  # fmt: skip
        left = record(
            *(times if line[0] == "bench" else [read(*speeds)]),
            kind="bench.experts" if line[0] == "bench" else "verify",
            id=f"{next(self._ids):032x}",
            verdict=Verdict(status="pass", reasons=[]),
        )
        path = records.write(left, runs_dir)
        return Kept(records.read(path), path.parent.name)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands(tmp_path)
    monkeypatch.setattr(program, "announced", made.announced)
    monkeypatch.setattr(program, "measure", made.measure)
    return made


def accepted(runs: Path, text: str = GOALS, progress: Quiet | None = None, **more: object) -> Result:
    request = Request(read_goals(text, "node.toml"), run=Run(runs), takes_rounds=lambda line: "--rounds" in line)
    return accept(replace(request, **more), progress or Quiet())  # type: ignore[arg-type]


def test_each_run_is_made_once_and_open_goals_get_rounds(commands: Commands, tmp_path: Path) -> None:
    progress = Quiet()
    result = accepted(tmp_path, progress=progress)
    assert commands.called == ["bench experts", "verify --target", "bench experts --rounds 3"]
    assert result.record is not None
    assert [(each.verdict, each.rounds) for each in result.record.goals or []] == [(HELD, 6)] * 3
    assert [each.name for each in result.record.parts or []].count("verify --target /") == 1
    assert result.code == ExitCode.OK
    assert progress.lines.index("  writes 5 GB, about 70 s") < progress.lines.index(
        "1 of 2: tunetool bench experts --target / --rounds 3"
    )


def test_without_time_left_no_further_rounds_begin(commands: Commands, tmp_path: Path) -> None:
    progress = Quiet()
    result = accepted(tmp_path, progress=progress, seconds=-1.0)
    assert commands.called == ["bench experts", "verify --target"]
    assert any(line.startswith("the time is up") for line in progress.lines)
    assert result.code == ExitCode.NOT_JUDGED


def test_a_dry_run_measures_and_writes_nothing(commands: Commands, tmp_path: Path) -> None:
    progress = Quiet()
    result = accepted(tmp_path, progress=progress, run=Run(tmp_path / "runs", dry_run=True))
    assert (result.record, commands.called, list(tmp_path.iterdir())) == (None, [], [])
    assert progress.lines.count("  writes 5 GB, about 70 s") == 2


def stop_at(commands: Commands, run: int) -> None:
    counter = itertools.count(1)

    def stop() -> None:
        if next(counter) == run:
            raise KeyboardInterrupt

    commands.before = stop


def test_an_interrupted_call_goes_on_where_it_was(commands: Commands, tmp_path: Path) -> None:
    stop_at(commands, 2)
    with pytest.raises(KeyboardInterrupt):
        accepted(tmp_path)
    commands.before = lambda: None
    progress = Quiet()
    assert accepted(tmp_path, progress=progress).code == ExitCode.OK
    assert commands.called == ["bench experts", "verify --target", "bench experts --rounds 3"]
    assert any("1 run of 2 measured before" in line for line in progress.lines)
    # It is done: the next call is another acceptance.
    assert accepted(tmp_path).code == ExitCode.OK
    assert len(commands.called) == 6


def test_another_file_is_not_resumed_silently(commands: Commands, tmp_path: Path) -> None:
    stop_at(commands, 2)
    with pytest.raises(KeyboardInterrupt):
        accepted(tmp_path)
    commands.before = lambda: None
    changed = GOALS.replace('"1GBps"', '"2GBps"')
    with pytest.raises(UsageProblem, match="begun with another goals file") as caught:
        accepted(tmp_path, changed)
    assert "--afresh" in str(caught.value.hint)
    assert accepted(tmp_path, changed, afresh=True).code == ExitCode.OK
    assert commands.called[1] == "bench experts"


@pytest.mark.parametrize("key", ["machine", "tunetool"])
def test_another_machine_is_not_resumed_silently(commands: Commands, tmp_path: Path, key: str) -> None:
    stop_at(commands, 2)
    with pytest.raises(KeyboardInterrupt):
        accepted(tmp_path)
    (state,) = tmp_path.glob(".accept-*")
    begun = json.loads(state.read_text())
    begun["identity"][key] = "other"
    state.write_text(json.dumps(begun))
    with pytest.raises(UsageProblem, match=f"another {key}"):
        accepted(tmp_path)
    state.write_text("{")
    with pytest.raises(UsageProblem, match="is damaged"):
        accepted(tmp_path)


def test_a_lost_record_is_measured_again(commands: Commands, tmp_path: Path) -> None:
    stop_at(commands, 2)
    with pytest.raises(KeyboardInterrupt):
        accepted(tmp_path)
    commands.before = lambda: None
    next(tmp_path.glob("*-bench.experts-*/record.json")).write_text("{")
    assert accepted(tmp_path).code == ExitCode.OK
    assert commands.called[:2] == ["bench experts", "bench experts"]


def test_what_cannot_run_here_leaves_its_goals_open(commands: Commands, tmp_path: Path) -> None:
    commands.wrong = {"verify": CannotJudge("fio is missing", "install it")}
    result = accepted(tmp_path)
    assert result.record is not None
    assert [each.reason for each in result.record.goals or []] == ["", "", "fio is missing; install it"]
    assert result.code == ExitCode.NOT_JUDGED
    commands.wrong = {"verify": UsageProblem("no such directory", "name another")}
    with pytest.raises(UsageProblem, match="`tunetool verify --target /`: no such directory"):
        accepted(tmp_path)


def test_a_goal_without_its_needs_is_skipped_with_words(commands: Commands, tmp_path: Path) -> None:
    text = GOALS + 'needs = ["gpus:4096", "program:no-such", "package:no_such"]\n'
    result = accepted(tmp_path, text)
    assert "verify --target" not in commands.called
    assert result.record is not None
    last = (result.record.goals or [])[-1]
    assert last.verdict == SKIPPED
    for words in ("it needs 4096", "the program no-such is not installed", "no_such is not installed"):
        assert words in last.reason


# -- what is shown


def test_the_page_has_machine_goals_and_proof(commands: Commands, tmp_path: Path) -> None:
    result = accepted(tmp_path)
    assert result.record is not None
    page = page_text(result.record, result.path)
    digest = result.record.sha256
    for words in ("Acceptance of", "the seller&#39;s page", "1.0003 of the bytes", "no forgery", "3 held", digest):
        assert str(words) in page
    screen = on_screen(result.record, result.path, 100)
    assert "3 goals: 3 held" in screen
    assert "PASS" in screen


def test_the_worst_goal_stands_first() -> None:
    kept = [record(read(*FAST))]
    goals = [judged(goal(bound), kept) for bound in (1e9, 50.1e9, 99e9)]
    page = page_text(record(kind="acceptance", goals=goals, verdict=verdict_over(goals)), None)
    assert page.index("at least 99.00 GB/s") < page.index("at least 50.10 GB/s") < page.index("at least 1.00 GB/s")


def test_records_of_before_are_judged_by_their_commands(tmp_path: Path) -> None:
    goals = read_goals(GOALS, "node.toml").goals
    kept = record(read(*FAST), verdict=Verdict(status="pass", reasons=[]))
    words = [(each.verdict, each.reason) for each in judge_records(goals, [kept], []).goals or []]
    assert words == [(OPEN, "no record has its figure")] * 2 + [(HELD, "")]
    other = record(read(*FAST), node={"host": "n2"})
    assert "of 2 machines" in (judge_records(goals, [kept, other], []).goals or [])[2].reason


def test_report_judge_ends_by_the_verdict(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(GOALS[: GOALS.index("[[goal]]")] + GOALS[GOALS.rindex("[[goal]]") :])
    kept = records.write(record(read(*FAST), verdict=Verdict(status="pass", reasons=[])), tmp_path)
    done = call(*TUNETOOL, "report", "judge", kept, file, "--page", tmp_path / "page.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Acceptance of n1" in (tmp_path / "page.html").read_text()
    file.write_text(file.read_text().replace("1GBps", "99GBps"))
    assert call(*TUNETOOL, "report", "judge", kept, file).returncode == 1


def test_each_goal_is_a_case_of_junit() -> None:
    suite = ElementTree.fromstring(junit(shown_records.accepted()))[0]
    marks = [[mark.tag for mark in case] for case in suite if case.attrib["classname"] == "tunetool.goals"]
    assert marks == [[], ["failure"], ["error"], ["skipped"]]


def test_memory_is_no_proof_by_drives() -> None:
    memory = read(*FAST).model_copy(update={"evidence": Evidence(kind="memory"), "medium": "tmpfs"})
    goals = [judged(goal(), [record(memory)])]
    page = page_text(record(kind="acceptance", goals=goals, verdict=verdict_over(goals)), None)
    assert "in memory: no drive counts, tmpfs" in page
