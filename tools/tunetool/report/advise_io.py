"""Who reads and writes what: the layer that binds, a table of the ways, and the strategies as sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tunetool.advise.checkpoint import format_duration
from tunetool.advise.io import Asked, Way, readers_to_saturate, strategies
from tunetool.advise.layers import Layers
from tunetool.advise.layout import names
from tunetool.node.units import format_bandwidth, format_size
from tunetool.report.page import add_number_columns, new_table, print_block

_TITLES = {"step": "a step", "load": "the start", "checkpoint": "a checkpoint"}


def print_ways(asked: Asked, layers: Layers, found: Sequence[Way], console: Console) -> None:
    """Print the storage, the table and the strategies."""
    layout = asked.layout
    print_block(
        console,
        f"{asked.model.name}: {asked.model.numel:,} parameters; {', '.join(names(layout))}: {layout.world} rank(s), "
        f"{layout.nodes} node(s) of up to {layout.of_node}; {asked.batch:,} samples of {format_size(asked.sample)} in "
        "a step",
        2,
    )
    print_block(console, f"storage of a node: {layers.source}", 2)
    for direction in layers.storage:
        layer = layers.binds(direction)
        print_block(console, f"{direction}: `{layer.name}` binds, {format_bandwidth(layer.value)}", 2)
    table = new_table()
    for title in ("in", "way"):
        table.add_column(title, overflow="fold")
    add_number_columns(table, "a rank", "a node", "the job", "times", "time")
    shown = ""
    for each in found:
        title = _TITLES[each.what] if each.what != shown else ""
        shown = each.what
        sizes = (format_size(round(size)) for size in (each.rank, each.node, each.job))
        table.add_row(*map(Text, (title, each.name, *sizes, f"{each.times:.3g}", _time(each.seconds))))
    console.print(table)
    print_block(
        console,
        "a rank, a node: the busiest one; times: how often a byte is read or written; time: of that node's bytes at "
        "the speed of the layer that binds. The start reads weights in bf16, a checkpoint is the full state",
        2,
    )
    for sentence in readers_to_saturate(layers):
        print_block(console, sentence, 2)
    if layers.loss is not None:
        print_block(console, layers.loss, 2)
    for name, sentence in strategies(asked, layers, found):
        print_block(console, f"{name}: {sentence}", 2)


def _time(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
