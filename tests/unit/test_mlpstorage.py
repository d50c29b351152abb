"""`tunetool report mlpstorage`: the result layout of MLPerf Storage's tool, and the rules that a record does not meet."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import builders
from builders import PROVEN, check
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.node.common import documents
from tunetool.record import FIRST_SCHEMA, Evidence, Measurement, Node, Record, Tool, Verdict, parse, to_document
from tunetool.report.mlpstorage import Result as Written
from tunetool.report.mlpstorage import results, write
from tunetool.report.mlpstorage_rules import WORKLOADS, Rule

GIB = 2**30
STATE = 105 * GIB
PASS = Verdict(status="pass", reasons=[])
TEN = tuple(float(number * GIB) for number in range(1, 11))


def rates(name: str, *samples: float, engine: str = "direct", place: str | None = None, **fields: Any) -> Measurement:
    parameters = {"model": "llama/8b", "ranks": 8, "state_bytes": STATE, "cold": "dropped", **fields}
    labels = {"subject": "checkpoint", "engine": engine, **({"place": place} if place else {})}
    dotted = f"checkpoint.{f'{place}.' if place else ''}{engine}.{name}"
    figure = builders.sampled(dotted, *samples, evidence=PROVEN)
    return figure.model_copy(update={"figure": name, "labels": labels, "parameters": parameters})


def record(*figures: Measurement, **fields: Any) -> Record:
    engines = {each.labels["engine"] for each in figures}
    fixed = {
        "kind": "bench.checkpoint",
        "node": Node(host="n 1", memory_bytes=256 * GIB, cpu_count=96),
        "checks": [check(f"checkpoint.{engine}", "pass") for engine in sorted(engines)],
        "verdict": Verdict(status="pass", reasons=[]),
        "tool": Tool(version="9"),
    }
    return builders.record(*figures, **{**fixed, **fields})


def whole(**parameters: Any) -> Record:
    return record(rates("durable", *TEN, **parameters), rates("restore", *TEN, **parameters))


def tokens(count: int) -> Record:
    labels = {"subject": "dataset", "state": "cold", "engine": "mmap-shuffled"}
    figure = builders.sampled("dataset.cold.mmap-shuffled.read", *TEN[:6], evidence=PROVEN)
    figure = figure.model_copy(update={"figure": "read", "labels": labels, "parameters": {"tokens": count}})
    return record(figure, kind="bench.dataset", checks=[])


def found(rules: list[Rule], asks: str) -> Rule:
    (rule,) = (each for each in rules if asks in each.asks)
    return rule


def only_result(made: Record) -> Written:
    (result,) = results(made, "it")
    return result


def only(made: Record) -> tuple[dict[str, Any], list[Rule], str]:
    result = only_result(made)
    return {name: json.loads(text) for name, text in result.files.items()}, result.rules, result.directory


def test_a_result_is_where_mlpstorage_looks_for_it() -> None:
    files, _, directory = only(whole())
    assert directory == "n_1-direct/checkpointing/tunetool-llama_8b/20260102_030405"
    assert list(files) == [
        "summary.json",
        "0_per_epoch_stats.json",
        "rules.json",
        "checkpointing_20260102_030405_metadata.json",
    ]


def test_rates_are_gib_and_means_as_dlio_writes_them() -> None:
    files, *_ = only(whole())
    summary = files["summary.json"]
    metric = summary["metric"]
    assert metric["checkpoint_size_GB"] == 105
    assert metric["save_checkpoint_io_mean_GB_per_second"] == 5.5
    assert metric["load_checkpoint_io_stdev_GB_per_second"] == pytest.approx(math.sqrt(8.25))
    assert metric["save_checkpoint_duration_mean_seconds"] == pytest.approx(sum(105 / n for n in range(1, 11)) / 10)
    assert (summary["num_accelerators"], summary["num_hosts"], summary["host_memory_GB"]) == (8, 1, [256])
    assert files["0_per_epoch_stats.json"]["1"]["save_ckpt2"] == {"duration": 52.5, "throughput": 2}


@given(st.lists(st.floats(1e3, 1e13), min_size=1, max_size=12), st.integers(1, 2**50))
def test_every_checkpoint_s_rate_and_seconds_give_its_size(samples: list[float], size: int) -> None:
    files, *_ = only(record(rates("durable", *samples, state_bytes=size)))
    metric = files["summary.json"]["metric"]
    each = files["0_per_epoch_stats.json"]["1"].values()
    assert len(each) == len(samples)
    assert all(one["duration"] * one["throughput"] == pytest.approx(size / GIB) for one in each)
    low, high = min(samples) / GIB, max(samples) / GIB
    assert low * (1 - 1e-9) <= metric["save_checkpoint_io_mean_GB_per_second"] <= high * (1 + 1e-9)
    assert not any(name.startswith("load_") for name in metric)


def test_no_result_is_ever_a_valid_submission() -> None:
    files, rules, _ = only(whole())
    metadata = files["checkpointing_20260102_030405_metadata.json"]
    assert metadata["verification"] == files["rules.json"]["verification"] == "invalid"
    assert metadata["issues"][0] == "1: mlpstorage itself ran the benchmark: tunetool 9 did"
    assert found(rules, "mlpstorage itself").status == "not met"


@pytest.mark.parametrize("model", WORKLOADS)
def test_a_result_has_never_a_workload_s_name(model: str) -> None:
    files, _, directory = only(whole(model=model))
    metadata = files["checkpointing_20260102_030405_metadata.json"]
    assert metadata["model"] == metadata["parameters"]["model"]["name"] == f"tunetool-{model}"
    assert f"/tunetool-{model}/" in directory


@pytest.mark.parametrize(
    ("parameters", "asks", "status"),
    [
        ({}, "four workloads", "not known"),
        ({"state_bytes": 4 * GIB}, "four workloads", "not met"),
        ({}, "number of processes", "met"),
        ({"ranks": 4}, "number of processes", "not met"),
        ({"state_bytes": 4 * GIB}, "number of processes", "not met"),
        ({"ranks": 5}, "on a host", "met"),
        ({"ranks": 4}, "on a host", "not met"),
    ],
)
def test_the_state_and_its_ranks_are_held_against_the_rules(parameters: dict[str, Any], asks: str, status: str) -> None:
    assert found(only(whole(**parameters))[1], asks).status == status


@pytest.mark.parametrize("count", [9, 10])
def test_ten_writes_and_ten_reads_meet_the_rule(count: int) -> None:
    _, rules, _ = only(record(rates("durable", *TEN), rates("restore", *TEN[:count])))
    assert (found(rules, "10 writes").status, found(rules, "10 writes").found) == ("met", "10")
    assert found(rules, "10 reads").status == ("met" if count == 10 else "not met")


def test_memory_and_engines_that_restore_wrong_are_left_out() -> None:
    figures = [rates("durable", *TEN, engine=engine) for engine in ("direct", "bad")]
    figures.append(rates("durable", *TEN, engine="direct", place="memory"))
    checks = [check("checkpoint.direct", "pass"), check("checkpoint.bad", "fail")]
    made = results(record(*figures, checks=checks, verdict=Verdict(status="fail", reasons=["it differs"])), "it")
    assert [each.what for each in made] == ["checkpoints by `direct`"]


def test_a_figure_without_counters_is_not_stable_storage() -> None:
    durable = rates("durable", *TEN).model_copy(update={"evidence": Evidence(kind="none")})
    assert found(only(record(durable))[1], "stable storage").status == "not met"


def test_a_fault_of_one_engine_hides_no_unproven_figure() -> None:
    verdict = Verdict(status="fail", reasons=["a differs", "b was in the page cache"], kinds=["check", "unproven"])
    with pytest.raises(UsageProblem, match="`it` has figures that nothing proves, beside its verdict `fail`"):
        results(record(rates("durable", *TEN), verdict=verdict), "it")


@pytest.mark.parametrize("changes", [{"kind": "none"}, {"ratio": 0.1}, {"ratio": None}, {"worst_ratio": 0.5}])
def test_what_no_drive_counted_meets_no_rule(changes: dict[str, Any]) -> None:
    proof = PROVEN.model_copy(update=changes)
    figures = [rates(name, *TEN).model_copy(update={"evidence": proof}) for name in ("durable", "restore")]
    _, rules, _ = only(record(*figures))
    assert found(rules, "stable storage").status == "not met"
    assert found(rules, "cleared cache").status == "not known"


@pytest.mark.parametrize(("count", "status"), [(640 * GIB, "met"), (1000, "not met")])
def test_training_data_have_rules_and_no_result(count: int, status: str) -> None:
    files, rules, directory = only(tokens(count))
    assert list(files) == ["rules.json"]
    assert directory == "n_1/training/tunetool-dataset/run/20260102_030405"
    assert found(rules, "emulated accelerators").status == "not met"
    assert found(rules, "times the memory").status == status


@pytest.mark.parametrize("host", ["..", ".", "", "/", "../..", "a\nb", "x" * 300])
def test_a_host_s_name_leads_nowhere_else(host: str) -> None:
    for made in (tokens(1000), whole(model=host)):
        _, _, directory = only(made.model_copy(update={"node": Node(host=host)}))
        parts = directory.split("/")
        assert len(parts) == (5 if "training" in parts else 4)
        assert all(re.fullmatch(r"[\w.-]{1,255}", each) and each.strip(".") for each in parts)


def test_records_that_prove_nothing_or_lack_facts_are_refused() -> None:
    older = to_document(record(rates("durable", *TEN)))
    older["schema"] = FIRST_SCHEMA
    for figure in older["measurements"]:
        del figure["figure"], figure["labels"], figure["parameters"]["model"]
    for each in older["checks"]:
        del each["labels"]
    older["sha256"] = documents.checksum(older)
    cases = {
        "a record of `verify`": record(kind="verify"),
        "has the verdict `none`": record(rates("durable", *TEN), verdict=None),
        "has the verdict `unproven`": record(
            rates("durable", *TEN), verdict=Verdict(status="unproven", reasons=["the page cache"])
        ),
        "no engine on drives": record(rates("durable", *TEN, place="memory")),
        "does not say its model": parse(json.dumps(older), "older"),
    }
    for words, made in cases.items():
        with pytest.raises(UsageProblem, match=re.escape(words)):
            results(made, "it")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": [0.0]}, "has the rate `0` B/s"),
        ({"samples": [-5.0, 1e9]}, "has the rate `-5` B/s"),
        ({"samples": [5e-324]}, "has the rate `4.94066e-324` B/s"),
        ({"unit": "s"}, "has the unit `s`"),
        ({"state_bytes": "abc"}, "has the state_bytes `abc`"),
        ({"state_bytes": 1e300}, "has the state_bytes `1e+300`"),
        ({"state_bytes": 0}, "has the state_bytes `0`"),
        ({"ranks": -8}, "has the ranks `-8`"),
        ({"ranks": True}, "has the ranks `True`"),
        ({"labels": {"subject": "checkpoint"}}, "has no engine on drives"),
    ],
)
@pytest.mark.parametrize("name", ["durable", "restore"])
def test_what_no_benchmark_writes_is_refused(changes: dict[str, Any], words: str, name: str) -> None:
    fields = {key: value for key, value in changes.items() if key in Measurement.model_fields}
    parameters = {key: value for key, value in changes.items() if key not in fields}
    made = {each: rates(each, *TEN, **parameters) for each in ("durable", "restore")}
    if "labels" in fields:
        name = "durable"
    checks = [check("checkpoint.direct", "pass")]
    made[name] = made[name].model_copy(update=fields)
    with pytest.raises(UsageProblem, match=re.escape(words)):
        results(builders.record(*made.values(), kind="bench.checkpoint", checks=checks, verdict=PASS), "it")


@pytest.mark.parametrize("twice", ["durable", "restore"])
def test_a_figure_that_is_there_twice_is_named(twice: str) -> None:
    figures = [rates(name, *TEN) for name in ("durable", "restore", twice)]
    with pytest.raises(UsageProblem) as caught:
        results(record(*figures), "it")
    assert caught.value.message == f"`it` has `checkpoint.direct.{twice}` more than once"
    assert caught.value.hint == "measure again: no benchmark writes that"


def test_only_shuffled_reads_have_a_random_order() -> None:
    shuffled = tokens(1000)
    (figure,) = shuffled.measurements
    other = figure.model_copy(update={"labels": {**figure.labels, "engine": "mmap-sequential"}})
    for figures, status in (([figure], "met"), ([figure, other], "not known"), ([], "not known")):
        made = shuffled.model_copy(update={"measurements": figures})
        assert found(only(made)[1], "another random order").status == status


@pytest.mark.parametrize("memory", [0, -1])
def test_no_memory_is_not_known_rather_than_met(memory: int) -> None:
    made = tokens(1000).model_copy(update={"node": Node(host="n", memory_bytes=memory)})
    assert found(only(made)[1], "times the memory").status == "not known"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["report", "mlpstorage", *arguments], standalone_mode=False)


def test_the_command_writes_once_and_replaces_nothing(tmp_path: Path) -> None:
    source, to = tmp_path / "record.json", tmp_path / "to"
    source.write_text(json.dumps(to_document(whole())))
    done = call(str(source), "--to", str(to), "--json", str(tmp_path / "said.json"))
    (summary,) = to.rglob("summary.json")
    assert "INVALID as a submission" in done.stdout
    assert str(summary.parent) in done.stdout
    (said,) = json.loads((tmp_path / "said.json").read_text())["results"]
    assert (to / said["directory"] / "summary.json", said["verification"]) == (summary, "invalid")
    before = summary.stat().st_mtime_ns
    for names, where, words in (
        ([source], to, "is there already"),
        ([source] * 2, tmp_path / "other", "would hold two results"),
    ):
        again = call(*map(str, names), "--to", str(where))
        assert isinstance(again.exception, UsageProblem)
        assert words in again.exception.message
    assert summary.stat().st_mtime_ns == before
    assert not (tmp_path / "other").exists()


def test_all_results_are_written_or_none(tmp_path: Path) -> None:
    first = only_result(whole())
    (tmp_path / "a").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageProblem, match="is there already"):
        write([first, replace(first, directory="a")], tmp_path)
    (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for to in (tmp_path, tmp_path / "mine", tmp_path / "new/er"):
        with pytest.raises(OSError, match="too long"):
            write([first, replace(first, directory="b/c", files={"x" * 300: ""})], to)
        with pytest.raises(OSError, match="too long"):
            write([replace(first, directory=f"b/{'x' * 300}/c")], to)
    assert sorted(tmp_path.rglob("*")) == before
    write([first], tmp_path)
