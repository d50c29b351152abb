"""`bench loading` without torch: its figures, its verdict, its tables and page, and wrong calls."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import builders
from shown_records import on_screen
from tunetool.bench.engine_choice import choose
from tunetool.bench.loading import figures, preflight
from tunetool.bench.loading.engines import ENGINES, Engine
from tunetool.bench.loading.request import Request
from tunetool.bench.loading.samples import Load, Matrix, Row, State
from tunetool.bench.loading.view import sections, view
from tunetool.bench.versions import Versions
from tunetool.errors import CannotJudge, ExitCode
from tunetool.measure.evidence import Counted
from tunetool.node.machine.block_stack import read_stack
from tunetool.record import Record
from tunetool.report.kinds import write_any_page
from tunetool.verdict import exit_code, judge
from tunetool.view.model import Table, cell

CONDITIONS: dict[str, Any] = {"model": "tiny", "model_bytes": 10**9, "torch": "2.13", "device": "cpu"}


def loads(seconds: list[float], **more: Any) -> dict[int, Load]:
    return {number: Load(each, 10**9, **{"is_equal": True, **more}) for number, each in enumerate(seconds, 1)}


def matrix(tmp_path: Path, state: State = "tmpfs") -> Matrix:
    made = Matrix(state, replace(read_stack(str(tmp_path)), medium="tmpfs", in_memory=state in ("tmpfs", "huge")))
    made.rows = {
        "direct": Row("direct", first=loads([0.5] * 6), warm=loads([0.4] * 6)),
        "safetensors": Row("safetensors", first=loads([1.0] * 6), warm=loads([1.0] * 6)),
        "kvikio": Row("kvikio", left_out="it needs a GPU"),
    }
    return made


def record_of(made: Matrix) -> Record:
    case = figures.case([made], CONDITIONS)
    return builders.record(
        *case.measurements, kind="bench.loading", target="/dev/shm", checks=list(case.checks), verdict=judge(case)
    )


def shown(made: Matrix) -> str:
    return on_screen(record_of(made), None, 200)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_gpu_that_is_read_into_by_python_is_named(tmp_path: Path, compiled: bool) -> None:
    case = figures.case([matrix(tmp_path)], {**CONDITIONS, "gpu": "H100", "compiled": compiled})
    record = builders.record(*case.measurements, kind="bench.loading", target="/dev/shm", verdict=judge(case))
    assert ("tunetool.checkpoint.build_read_loop" in on_screen(record, None, 200)) != compiled


def test_figures_have_rates_and_ratios_of_one_round(tmp_path: Path) -> None:
    made = matrix(tmp_path)
    made.pinned = dict.fromkeys(range(1, 7), 4e9)
    by_name = {each.name: each for each in figures.measurements(made, CONDITIONS)}
    assert by_name["loading.tmpfs.direct.first"].value == pytest.approx(2e9)
    assert by_name["loading.tmpfs.direct.warm"].value == pytest.approx(2.5e9)
    assert by_name["loading.tmpfs.direct.warm_of_pinned"].value == pytest.approx(0.625)
    versus = by_name["loading.tmpfs.direct.first_versus_best_other"]
    assert (versus.value, versus.parameters["against"], versus.parameters["decided"]) == (2.0, "safetensors", True)
    assert by_name["loading.tmpfs.pinned"].value == 4e9


def test_only_equal_bytes_are_judged(tmp_path: Path) -> None:
    made = matrix(tmp_path)
    assert judge(figures.case([made], CONDITIONS)).status == "pass"
    made.rows["kvikio"] = Row("kvikio", failed="`kvikio` ended with exit status 1")
    assert exit_code([judge(figures.case([made], CONDITIONS)).status]) == ExitCode.NOT_JUDGED
    made.rows["safetensors"].warm = loads([1.0] * 6, is_equal=False)
    verdict = judge(figures.case([made], CONDITIONS))
    assert verdict.status == "fail"
    assert "`safetensors` from a tmpfs gives other bytes than the files hold" in verdict.reasons[0]


def test_a_cold_load_that_the_drives_did_not_see_proves_nothing(tmp_path: Path) -> None:
    made = matrix(tmp_path, "cold")
    made.stack = replace(made.stack, in_memory=False)
    for row in made.rows.values():
        row.first = {number: replace(load, counted=Counted(10**9, 10**8, {})) for number, load in row.first.items()}
        row.warm = {}
    reasons = figures.unproven_reasons(made)
    assert any("counted only 0.100" in reason for reason in reasons)
    assert judge(figures.case([made], CONDITIONS)).status == "unproven"


def test_a_load_from_memory_that_drives_answered_proves_nothing(tmp_path: Path) -> None:
    made = matrix(tmp_path, "cached")
    made.stack = replace(made.stack, in_memory=False, medium="disk")
    assert figures.unproven_reasons(made) == []
    whole = Load(0.5, 10**9, is_equal=True, fetched=10**9)
    why = figures.past_the_cache(made, whole)
    assert (
        why == "it fetched 1 GB from the drives for 1 GB: it reads past the page cache, or that does not hold the files"
    )
    half = replace(whole, fetched=5 * 10**8)
    assert figures.past_the_cache(made, half) is None
    assert figures.past_the_cache(replace(made, state="cold"), whole) is None
    made.rows["direct"].warm[3] = half
    (reason,) = figures.unproven_reasons(made)
    assert reason.startswith("`direct` from the page cache: it fetched 500 MB from the drives for 1 GB;")
    assert judge(figures.case([made], CONDITIONS)).status == "unproven"


def test_a_table_and_a_page_say_which_to_use(tmp_path: Path) -> None:
    made = matrix(tmp_path)
    text = shown(made)
    assert "1 process, from a tmpfs: use `direct`, 2 GB/s" in text
    assert "kvikio: left out, it needs a GPU" in text
    made.rows["safetensors"].first = loads([0.4, 0.6] * 3)
    assert "no difference was decided between `safetensors` and `direct`" in shown(made)
    for row in made.rows.values():
        row.first = loads([0.5 if row.name == "direct" else 1.0] * 2)
    assert "no difference was decided" in shown(made), "two rounds are too few"
    page = write_any_page(record_of(made), tmp_path / "record.json")
    assert "first load of a process" in page.read_text()


def test_more_processes_than_memory_has_room_for_are_refused(tmp_path: Path) -> None:
    request = Request(model="tiny", target=tmp_path, device="cpu", gpus=(1, 2))
    preflight.check_gpus(request)
    with pytest.raises(CannotJudge, match="`--gpus 999999`: as many processes, each with the whole model, take 3"):
        preflight.check_gpus(replace(request, gpus=(1, 999_999)))


def test_a_cold_load_is_compared_with_fio(tmp_path: Path) -> None:
    made = matrix(tmp_path, "cold")
    made.fio = dict.fromkeys(range(1, 7), 4e9)
    by_name = {each.name: each for each in figures.measurements(made, CONDITIONS)}
    assert by_name["loading.cold.direct.first_of_fio"].value == pytest.approx(0.5)
    assert by_name["loading.cold.fio"].value == 4e9
    text = shown(made)
    assert "of fio's read" in text
    assert "50%" in text
    assert "fio's read of the same files, past the page cache: 4 GB/s" in text


def test_the_last_words_say_which_loader_for_how_many_gpus(tmp_path: Path) -> None:
    """Of what the rounds decide alone; the slower ones are named where the fastest two are not told apart."""
    cold, one, two = matrix(tmp_path, "cold"), matrix(tmp_path), matrix(tmp_path)
    cold.rows["direct"].warm = cold.rows["safetensors"].warm = {}
    two.gpus = 2
    two.rows["instanttensor"] = Row("instanttensor", first=loads([0.4, 0.6] * 3), warm=loads([0.1] * 6))
    one.rows["instanttensor"] = Row("instanttensor", first=loads([0.8] * 6), warm=loads([0.1] * 6))
    case = figures.case([cold, one, two], {**CONDITIONS, "gpu": "H100"})
    record = builders.record(*case.measurements, kind="bench.loading", checks=list(case.checks), verdict=judge(case))
    assert view(record).advice == [
        "1 GPU, from the drives, out of the page cache: use `direct`, 2 GB/s (1.863 GiB/s) at the first load of a process, "
        "2.00 times `safetensors` (2.00 to 2.00)",
        "1 GPU, from a tmpfs: use `direct`, 2 GB/s (1.863 GiB/s) at the first load of a process, 1.60 times "
        "`instanttensor` (1.60 to 1.60); for the next loads `instanttensor`",
        "2 GPUs, from a tmpfs: no difference was decided between `instanttensor` and `direct` at the first load of a "
        "process; `safetensors`: slower",
    ]


def test_each_number_of_gpus_has_a_table(tmp_path: Path) -> None:
    one, two = matrix(tmp_path), matrix(tmp_path)
    two.gpus = 2
    one.pinned = two.pinned = dict.fromkeys(range(1, 7), 4e9)
    two.rows["direct"].first = loads([2.0] * 6)
    case = figures.case([one, two], CONDITIONS)
    record = builders.record(
        *case.measurements, kind="bench.loading", target="/dev/shm", checks=list(case.checks), verdict=judge(case)
    )
    tables = [
        (section.title, cell(block.rows[0][0]).text)
        for section in view(record).sections
        for block in section.blocks
        if isinstance(block, Table)
    ]
    assert tables == [("from a tmpfs", "direct"), ("from a tmpfs, 2 at the same time", "safetensors")]
    # Each table has its own checks, not those of the last number.
    rows = [
        row
        for section in view(record).sections
        for block in section.blocks
        if isinstance(block, Table)
        for row in block.rows
    ]
    assert [cell(row[-1]).text for row in rows] == ["yes"] * len(rows)
    assert [each.engines[0].is_equal for each in sections(record)] == [True, True]
    # A part comes from the other GPU, and not from pinned memory.
    alone, shared = (str(section) for section in view(record).sections[:2])
    assert "which no loader can exceed" in alone
    assert "into one GPU; those that share may exceed it" in shared
    assert "no loader can exceed" not in shared


@pytest.mark.parametrize(
    ("found", "below", "said"),
    [
        ("0.16.1", "", "needs loader >= 0.17, found 0.16.1: "),
        ("0.9", "", "needs loader >= 0.17, found 0.9: "),
        ("0.17.0", "", None),
        ("0.17.0+cu130", "2", None),
        ("1.0", "", None),
        ("2.0.1", "2", "needs loader >= 0.17 and < 2, found 2.0.1: "),
        ("", "", None),
    ],
)
def test_a_loader_of_another_version_is_left_out(
    found: str, below: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is that of the metadata, which pip writes; a library without any is taken as it is."""
    if found:
        metadata = tmp_path / f"loader-{found}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: loader\nVersion: {found}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = Engine("runai.RunAi", "json", "'loader>=0.17'", versions=Versions("loader", "0.17", below))
    expected = f"{said}{sys.executable} -m pip install 'loader>=0.17'" if said else None
    assert engine.unavailable(gpu=False) == expected


def test_the_line_that_installs_a_loader_suits_its_version() -> None:
    bound = {name: each for name, each in ENGINES.items() if each.versions}
    assert {*bound} >= {"runai", "transformers"}
    for each in bound.values():
        assert each.versions is not None
        assert f"'{each.versions.package}>={each.versions.least}'" in each.packages


def test_a_loader_that_is_not_there_says_what_installs_it(tmp_path: Path) -> None:
    absent = Engine("kvikio.KvikIo", "no_such_loader.part", "no-such-loader")
    reason = absent.unavailable(gpu=True)
    assert reason == f"not installed: {sys.executable} -m pip install no-such-loader"
    assert replace(absent, module="json", needs_gpu=True).unavailable(gpu=False) == "it needs a GPU"
    assert replace(absent, module="json", needs_gpu=True).unavailable(gpu=True) is None
    made = matrix(tmp_path)
    made.rows["kvikio"] = Row("kvikio", left_out=reason)
    by_id = {check.id: check.status for check in figures.checks(made)}
    assert by_id["loading.tmpfs.kvikio"] == "skip"
    # Lines are cut within a long path too.
    assert "-mpipinstallno-such-loader" in "".join(shown(made).split())


def test_every_loader_is_in_the_guide_with_what_installs_it() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/bench-loading.md").read_text()
    rows = [
        row.split("|") for row in guide.partition("| engine | what it is |")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    assert [row[1].strip(" `") for row in rows] == list(ENGINES)
    assert all(engine.packages in row[3] for engine, row in zip(ENGINES.values(), rows, strict=True))


def test_engines_are_chosen_by_globs() -> None:
    assert choose(ENGINES, []) == choose(ENGINES, ["*"]) == list(ENGINES)
    assert choose(ENGINES, ["*safetensors"]) == ["fastsafetensors", "safetensors"]


def test_what_a_run_will_read_counts_the_engines_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = {**ENGINES, "direct": Engine("direct.Direct", "json", "")}
    monkeypatch.setattr(preflight, "ENGINES", engines)
    request = Request(model="tiny", memory_targets=(tmp_path,), device="cpu")
    medium = preflight.Medium(tmp_path, read_stack(str(tmp_path)), ("tmpfs",), is_made=True)
    lines = preflight.announcement(request, 10**9, ["direct", "instanttensor"], [medium])
    assert any("by each engine that is here (direct); about" in line for line in lines)
