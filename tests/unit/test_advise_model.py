"""`tunetool advise model`: what a model needs under each ZeRO stage and offload, beside a published table."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import advised
from calls import ROOT
from tunetool.advise import needs, zero
from tunetool.advise.ds_config import plan
from tunetool.advise.ds_config_plan import Job, Node
from tunetool.advise.needs import Machines, Need, Saving
from tunetool.advise.read_model import load_model
from tunetool.cli import advise_model
from tunetool.tune.settings import DEFAULTS

GUIDE = ROOT / "docs/guides/advise-model.md"
KNOWN = ("llama2-7b", "tiny", "mixtral-8x7b")
RULE = 0.05 * 30 * 60
"""Seconds to save in: 5 % of half an hour."""


class Row(NamedTuple):
    """A row of the published table, and the model and strategy that it means here."""

    name: str
    model: str
    strategy: tuple[int, str]
    capacity: float
    """In GB, as the next two."""
    slowest: float
    fastest: float | None
    checkpoint: float


ROWS = (
    Row("7B, ZeRO-2", "llama2-7b", (2, "none"), 100, 2, 3, 14),
    Row("13B, ZeRO-2/3", "13b", (3, "none"), 200, 3, 5, 26),
    Row("33B, ZeRO-3", "33b", (3, "none"), 500, 5, 8, 66),
    Row("65B, ZeRO-3 + offload", "65b", (3, "nvme"), 2000, 8, 12, 140),
    Row("70B, ZeRO-3 + offload", "70b", (3, "nvme"), 2000, 8, 12, 140),
    Row("175B, ZeRO-Infinity", "175b", (3, "nvme"), 5000, 15, None, 350),
)


answered = partial(advised.answered, "model")
printed = partial(advised.printed, "model")


def of(document: dict[str, Any], stage: int, offload: str) -> dict[str, Any]:
    (found,) = (each for each in document["strategies"] if (each["stage"], each["offload"]) == (stage, offload))
    return dict(found)


def line(row: Row) -> str:
    """The row of the guide's table: the published figure, ours, the difference."""
    document = answered(row.model)
    checkpoint, need = document["checkpoint"], of(document, *row.strategy)
    weights, full = checkpoint["weights_bytes"] / 1e9, checkpoint["full_bytes"] / 1e9
    capacity = need["node_capacity_bytes"] / 1e9
    rate = f"{row.slowest:g} to {row.fastest:g}" if row.fastest else f"{row.slowest:g} or more"
    seconds = (
        f"{full / row.fastest:.0f} to {full / row.slowest:.0f} s" if row.fastest else f"{full / row.slowest:.0f} s"
    )
    return (
        f"| {row.name} | {row.checkpoint:g} | {weights:.1f} | {weights / row.checkpoint - 1:+.1%} "
        f"| {row.capacity:,.0f} | {capacity:,.0f} | {capacity / row.capacity - 1:+.0%} "
        f"| {rate} | {full / RULE:.2f} | {seconds} |"
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_guide_has_each_published_row_beside_ours(row: Row) -> None:
    assert line(row) in GUIDE.read_text().splitlines()


def test_the_published_table_is_weights_and_one_full_checkpoint() -> None:
    for row in ROWS:
        document = answered(row.model)
        need = of(document, *row.strategy)
        assert document["checkpoint"]["weights_bytes"] / 1e9 == pytest.approx(row.checkpoint, rel=0.07)
        assert need["node_capacity_bytes"] / 1e9 == pytest.approx(row.capacity, rel=0.14)
        assert bool(need["node_swap_bytes"]) == (row.strategy[1] == "nvme")


@pytest.mark.parametrize(
    ("kind", "strategy", "model"),
    [
        *((kind, (stage, "none"), model) for kind, stage in (("zero2", 2), ("zero3", 3)) for model in KNOWN),
        *(("zero3-cpu", (3, "cpu"), model) for model in KNOWN),
        # A ds_config with NVMe buffers is refused for experts.
        *(("zero3-nvme", (3, "nvme"), model) for model in KNOWN[:2]),
    ],
)
def test_it_counts_as_the_ds_config_of_that_kind_does(kind: str, strategy: tuple[int, str], model: str) -> None:
    loaded = load_model(model)
    planned = plan(Job(kind, loaded, DEFAULTS.block(), "/mnt/nvme_raid0", world=8), Node(2**46))
    need = of(answered(model), *strategy)
    flat = sum(tensor.numel for tensor in loaded.tensors if len(tensor.shape) == 1) * zero.LOW
    # The plan rounds partitions up, and counts vectors that stay whole in ZeRO-3.
    assert need["gpu_bytes"] <= planned.rank_bytes("gpu") <= need["gpu_bytes"] * 1.001 + flat + 4 * len(loaded.tensors)
    assert need["node_swap_bytes"] == 8 * planned.rank_bytes("nvme")
    if kind == "zero3-cpu":
        assert need["node_memory_bytes"] == 8 * planned.rank_bytes("host")


def test_bytes_of_the_whole_job() -> None:
    document = answered("llama2-7b")
    numel = 6_738_415_616
    assert (document["parameters"], document["active_parameters"]) == (numel, numel)
    sizes = [document[f"{name}_bytes"] for name in ("weights", "gradients", "optimizer")]
    assert sizes == [2 * numel, 2 * numel, 12 * numel]
    assert document["checkpoint"]["full_bytes"] == 14 * numel
    assert document["checkpoint"]["full_bandwidth"] == pytest.approx(14 * numel / 90)
    assert document["schema"] == "tunetool.advise.model/1"


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (("--save-in", "60s"), 60),
        (("--save-every", "1h", "--save-share", "10%"), 360),
        (("--save-in", "60s", "--save-every", "1h"), 60),
    ],
)
def test_the_time_to_save_is_given_or_a_share_of_the_interval(options: tuple[str, ...], seconds: float) -> None:
    assert answered("tiny", *options)["checkpoint"]["save_seconds"] == pytest.approx(seconds)


def test_a_step_reads_and_writes_what_zero_infinity_says() -> None:
    document = answered("70b", "--gpus", "16", "--nodes", "2", "--step", "100s", "--micro-batches", "2")
    numel = 70_553_706_496
    both, optimizer = of(document, 3, "nvme"), of(document, 3, "nvme-optimizer")
    half = pytest.approx(numel / 2, rel=1e-6)
    assert both["step_read_bytes"] / (16 + 2 * 3 * 2) == half
    assert both["step_written_bytes"] / 18 == half
    assert (optimizer["step_read_bytes"] / 16, optimizer["step_written_bytes"] / 16) == (half, half)
    assert both["step_bandwidth"] == pytest.approx((both["step_read_bytes"] + both["step_written_bytes"]) / 100)
    assert of(document, 3, "cpu")["node_swap_bytes"] == 0
    assert of(answered("70b"), 3, "nvme")["step_bandwidth"] is None


def test_what_does_not_fit_is_said_before() -> None:
    options = ("--gpu-memory", "80GB", "--memory", "1TiB", "--nvme-space", "3TB")
    document = answered("70b", *options)
    lacking = {(each["stage"], each["offload"]) for each in document["strategies"] if each["lacks"]}
    assert lacking == {
        (0, "none"),
        (1, "none"),
        (2, "none"),
        (3, "none"),
        (3, "cpu"),
        (3, "nvme"),
        (3, "nvme-optimizer"),
    }
    assert "nothing in the table fits" in " ".join(document["advice"])
    assert "ZeRO-3 does not fit: a GPU: 145.3 GB of 80 GB" in printed("70b", *options)
    fitting = " ".join(answered("70b", *options, "--nvme-space", "4TB")["advice"])
    assert "ZeRO-3, optimizer on NVMe is the first that fits" in fitting
    assert "not compared" not in fitting


def test_what_fits_a_gpu_may_not_fit_a_node_of_unknown_size() -> None:
    fitting = answered("70b", "--gpu-memory", "80GB")["advice"]
    assert "ZeRO-3, offload to memory is the first that fits" in " ".join(fitting)
    assert "not compared: a node's memory (1.411 TB, `--memory`)" in fitting
    swapping = answered("70b", "--gpu-memory", "80GB", "--offload", "nvme")["advice"]
    assert "not compared: a node's memory (141.1 GB, `--memory`), its NVMe (3.245 TB, `--nvme-space`)" in swapping


def test_only_what_is_asked_for_is_shown() -> None:
    assert [each["offload"] for each in answered("tiny", "--offload", "nvme")["strategies"]] == ["nvme"]
    assert len(answered("tiny", "--stage", "3")["strategies"]) == 4
    assert advise_model.OFFLOADS == needs.OFFLOADS
    assert {str(each.stage) for each in needs.STRATEGIES} == set(advise_model.STAGES)


def test_experts_are_named() -> None:
    text = printed("mixtral-8x7b")
    assert "46,702,792,704 parameters, 12,879,925,248 of them used by a token (2 of a layer's 8 experts" in text
    assert answered("mixtral-8x7b")["active_parameters"] == 12_879_925_248


TINY = load_model("tiny")


@given(st.integers(1, 64), st.integers(1, 8), st.integers(0, 5), st.integers(1, 4))
def test_more_gpus_never_need_more_each(gpus: int, nodes: int, kept: int, n: int) -> None:
    def at(factor: int) -> list[Need]:
        return needs.needs(TINY, Machines(gpus * nodes * factor, nodes), Saving(90, kept))

    for few, many in zip(at(1), at(1 + n), strict=True):
        # Partitions are rounded up by less than an element of each tensor.
        assert many.gpu <= few.gpu + 16 * len(TINY.tensors)
        assert few.saving - few.capacity == pytest.approx(14 * TINY.numel / nodes)
        assert few.capacity == pytest.approx(few.swap + kept * 14 * TINY.numel / nodes)
        assert few.read >= few.swap >= few.written * 0.99
