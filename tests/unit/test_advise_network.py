"""`tunetool advise network`: the cost of a link between nodes per step. Only this command reads rates in bits."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

import advised
from advised import refused
from tunetool.errors import UsageProblem
from tunetool.node.units import UnitError, parse_bandwidth, parse_link_bandwidth

run = partial(advised.run, "network")


def stages(*arguments: str) -> dict[int, dict[str, Any]]:
    return {each["stage"]: each for each in json.loads(run(*arguments, "--json", "-"))["stages"]}


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1000Mb/s", 125e6), ("1Gb/s", 125e6), ("400Gb/s", 50e9), ("50GB/s", 50e9), ("50GBps", 50e9), ("1.5 kb/s", 187.5)],
)
def test_links_are_read_in_bits_and_in_bytes(text: str, rate: float) -> None:
    assert parse_link_bandwidth(text) == rate


@pytest.mark.parametrize(
    "text", ["1000mb/s", "1000Mbps", "400gbps", "400Gbit/s", "1Gib/s", "400", "0Gb/s", "-1Gb/s", "xGb/s"]
)
def test_what_may_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_link_bandwidth(text)
    with refused(f"`--bandwidth {text}`"):
        run("--bandwidth", text, "--gpus", "16")


def test_bits_are_refused_everywhere_else() -> None:
    with pytest.raises(UnitError, match="in bits"):
        parse_bandwidth("1000Mb/s")
    assert "`b` is a bit, `B` a byte" in " ".join(run("--help").split())


def test_the_published_what_if() -> None:
    """7B with LoRA on 16 GPUs over 1000 Mb/s: docs/concepts/communication.md."""
    by_stage = stages("--bandwidth", "1000Mb/s", "--gpus", "16")
    assert by_stage[2]["sent_bytes"] == pytest.approx(0.114e9, rel=0.01)
    assert by_stage[3]["sent_bytes"] == pytest.approx(27.0e9, rel=0.01)
    assert (by_stage[2]["collectives"], by_stage[3]["collectives"]) == (3, 865)
    assert by_stage[3]["link_seconds"] == pytest.approx(216, rel=0.01)
    assert by_stage[3]["even_seconds"] == pytest.approx(216 / 15, rel=0.01)
    text = " ".join(run("--bandwidth", "1000Mb/s", "--gpus", "16").split())
    assert "0.125 GB/s (0.1164 GiB/s) (1 Gb/s) from node to node" in text
    assert "ZeRO-3 sends 238 times the bytes of ZeRO-2 in 865 collectives" in text


def test_a_steps_time_tells_how_much_longer_an_epoch_takes() -> None:
    by_stage = stages("--bandwidth", "1000Mb/s", "--gpus", "16", "--step", "4.6s")
    low, high = by_stage[3]["epoch_over_one_gpu"]
    # The published three times, of a step that takes 4.6 s on one GPU.
    assert low < 3.0 < high + 0.01
    assert by_stage[2]["epoch_over_one_gpu"][0] == pytest.approx(1 / 16)
    assert by_stage[3]["hiding_bandwidth"] == pytest.approx(27.0e9 / 4.6, rel=0.01)
    assert "whatever is hidden: use a lower stage" in " ".join(
        run("--bandwidth", "1000Mb/s", "--gpus", "16", "--step", "4.6s").split()
    )
    with pytest.raises(UsageProblem, match="above zero"):
        run("--bandwidth", "1Gb/s", "--gpus", "2", "--step", "0s")


def test_with_all_trained_both_stages_send_about_as_much() -> None:
    by_stage = stages("--bandwidth", "1000Mb/s", "--gpus", "16", "--full")
    assert by_stage[3]["sent_bytes"] == pytest.approx(by_stage[2]["sent_bytes"], rel=0.05)


@pytest.mark.parametrize("model", ["tiny", "3b", "70b", "llama2-7b", "phi3-mini"])
def test_every_known_model_has_an_answer(model: str) -> None:
    by_stage = stages("--bandwidth", "100Gb/s", "--gpus", "8", "--model", model)
    assert by_stage[3]["sent_bytes"] >= by_stage[2]["sent_bytes"] > 0
