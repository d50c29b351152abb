"""Files that were damaged, edited or made up: their readers refuse them in one line, and never hang or judge wrongly."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from damaged import no_hang, places
from doors import DOORS, MODEL, REFUSALS, VISION, a_manifest, a_plan, property_of, refused_well
from machines import lay_out
from readers_of_trees import TREES, property_of_tree
from tunetool.errors import ExitCode
from tunetool.node.gds.cufile_check import check_config
from tunetool.node.plan import plan_file


@pytest.mark.parametrize("name", DOORS)
def test_whatever_a_file_holds_its_reader_answers_or_refuses(name: str) -> None:
    property_of(DOORS[name])()


@pytest.mark.parametrize("name", [name for name, door in DOORS.items() if door.sound[0].startswith("{")])
def test_no_value_brings_a_line_or_a_command_into_a_message(name: str, tmp_path: Path) -> None:
    door = DOORS[name]
    for sound in door.sound:
        for *above, last in places(json.loads(sound)):
            document = json.loads(sound)
            parent = document
            for key in above:
                parent = parent[key]
            parent[last] = "a\n\x1b[2Jb"
            if door.seal is not None:
                door.seal(document)
            path = tmp_path / door.name
            path.write_text(json.dumps(document))
            try:
                door.read(path)
            except REFUSALS as error:
                refused_well(error, door.hinted)


def test_a_cufile_json_that_is_cut_after_a_comma_is_named() -> None:
    (problem,) = check_config('{"logging": {"level": "ERROR"},')
    assert "correct line 1" in str(problem)


@pytest.mark.parametrize("name", TREES)
def test_whatever_became_of_a_machines_files_it_is_read(name: str, tmp_path: Path) -> None:
    property_of_tree(name, tmp_path / "node")()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DOORS, *TREES])
def test_an_hour_of_damaged_files(name: str, tmp_path: Path) -> None:
    """An hour for all readers together, with other files in every run; `TUNETOOL_FUZZ_SECONDS` is another time."""
    holds = property_of(DOORS[name]) if name in DOORS else property_of_tree(name, tmp_path / "node")
    end = time.monotonic() + float(os.environ.get("TUNETOOL_FUZZ_SECONDS", "3600")) / (len(DOORS) + len(TREES))
    holds()
    while time.monotonic() < end:
        holds()


def laid_down(name: str, folder: Path, text: str) -> Path:
    path = folder / DOORS[name].name
    path.write_text(text)
    return path


def refusal(name: str, path: Path) -> Exception:
    with pytest.raises(REFUSALS) as caught:
        DOORS[name].read(path)
    refused_well(caught.value, hinted=DOORS[name].hinted)
    return caught.value


@pytest.mark.parametrize("name", ["record", "plan", "manifest", "manifest of a staged copy"])
def test_what_was_edited_by_hand_is_named(name: str, tmp_path: Path) -> None:
    """Each number and each text, one after another."""
    document = json.loads(DOORS[name].sound[0])
    edits = 0
    for *above, last in places(document):
        changed = json.loads(DOORS[name].sound[0])
        parent = changed
        for key in above:
            parent = parent[key]
        if not isinstance(parent[last], (int, float, str)):
            continue
        parent[last] = parent[last] + "x" if isinstance(parent[last], str) else parent[last] + 1
        path = laid_down(name, tmp_path, json.dumps(changed))
        assert str(path) in str(refusal(name, path))
        edits += 1
    assert edits > 15


@pytest.mark.parametrize("name", sorted(set(DOORS) - {"fio's result", "cufile.json", "manifest of a newer version"}))
def test_a_fifo_in_its_place_does_not_hold_the_reader(name: str, tmp_path: Path) -> None:
    path = tmp_path / DOORS[name].name
    os.mkfifo(path)
    with no_hang():
        refusal(name, path)


def test_an_earlier_manifest_without_a_checksum_is_read(tmp_path: Path) -> None:
    document = json.loads(DOORS["manifest"].sound[0])
    signed = DOORS["manifest"].read(laid_down("manifest", tmp_path, json.dumps(document)))
    del document["sha256"]
    assert DOORS["manifest"].read(laid_down("manifest", tmp_path, json.dumps(document))) == signed


@pytest.mark.parametrize("changed", ["no checksum", "edited"])
def test_a_manifest_without_its_checksum_is_named(changed: str, tmp_path: Path) -> None:
    root = lay_out("built", tmp_path / "root")
    document = json.loads(a_manifest())
    if changed == "edited":
        document["expect"]["read"] = 1
    else:
        del document["sha256"]
    path = root / "etc/tunetool/node.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    verified = call(
        *TUNETOOL, "verify", "--level", "config", "--manifest", path, "--runs-dir", tmp_path / "runs", "--json", "-"
    )
    inspected = call(*TUNETOOL, "inspect", "--root", root)
    if changed == "edited":
        assert verified.returncode == ExitCode.USAGE
        assert f"`{path}` was edited after it was written" in verified.stderr
        assert "was edited after it was written" in " ".join(inspected.stdout.split())
    else:
        found = [check for check in json.loads(verified.stdout)["checks"] if check["id"] == "manifest.checksum"]
        assert [(check["status"], "is unsigned" in check["found"]) for check in found] == [("skip", True)]
        assert "edited" not in inspected.stdout


# What Hypothesis and its kin found, by name.


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_an_expectation_that_is_no_number_is_no_expectation(value: str, tmp_path: Path) -> None:
    """Nothing is below NaN: every node would have passed."""
    document = json.loads(a_manifest())
    del document["sha256"]
    document["expect"]["read"] = "@"
    path = laid_down("manifest", tmp_path, json.dumps(document).replace('"@"', value))
    assert "number" in str(refusal("manifest", path))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("plan", lambda plan: plan.update(job=["provision"])),
        ("plan", lambda plan: plan["hosts"]["node1"]["drives"][0].update(serial=["S1"])),
        ("plan", lambda plan: plan.update(hosts={"node1": {"drives": 1}})),
    ],
)
def test_a_plan_that_somebody_made_up_is_refused(name: str, edit: Callable[[Any], object], tmp_path: Path) -> None:
    plan = a_plan()
    edit(plan)
    plan["sha256"] = plan_file.seal(plan)
    refusal(name, laid_down(name, tmp_path, json.dumps(plan)))


@pytest.mark.parametrize("name", sorted(set(DOORS) - {"cufile.json", "manifest of a newer version"}))
@pytest.mark.parametrize(
    "part", ["[" * 3000, '{"a":' * 3000, "[" * 500 + "]" * 500], ids=["lists", "objects", "closed"]
)
def test_what_is_nested_too_deeply_is_refused(name: str, part: str, tmp_path: Path) -> None:
    refusal(name, laid_down(name, tmp_path, part))


@pytest.mark.parametrize("text", ['"\\ud800"', "1e999", "9" * 400, '{"a": 1, "a": 2}'])
def test_what_no_record_can_hold_is_refused(text: str, tmp_path: Path) -> None:
    whole = DOORS["record"].sound[0].replace('"6.8"', text)
    assert text in whole
    refusal("record", laid_down("record", tmp_path, whole))


@pytest.mark.parametrize(
    "sizes", [{"num_hidden_layers": 2**63}, {"hidden_size": 10**400}, {"vocab_size": float("inf")}]
)
@pytest.mark.parametrize("model", [MODEL, VISION], ids=["decoder", "vision"])
def test_a_model_larger_than_any_is_refused_at_once(
    model: dict[str, Any], sizes: dict[str, Any], tmp_path: Path
) -> None:
    name = "a model's configuration"
    with no_hang():
        refusal(name, laid_down(name, tmp_path, json.dumps({**model, **sizes})))


def test_a_vision_tower_without_end_is_refused_at_once(tmp_path: Path) -> None:
    name = "a model's configuration"
    model = {**VISION, "vision_config": {**VISION["vision_config"], "depth": 2**62}}  # type: ignore[dict-item]
    with no_hang():
        refusal(name, laid_down(name, tmp_path, json.dumps(model)))


def test_a_search_that_would_not_end_is_refused(tmp_path: Path) -> None:
    name = "space of a search"
    space = {"block_size": [4096 * each for each in range(1, 200)], "queue_depth": list(range(1, 200))}
    with no_hang():
        refusal(name, laid_down(name, tmp_path, json.dumps(space)))


def test_the_name_of_a_key_cannot_break_the_line_of_its_problem() -> None:
    for name in ("a\nb", "\x1b[2J", "a.b", ""):
        (problem,) = check_config(json.dumps({name: 1}))
        assert str(problem).isprintable()
