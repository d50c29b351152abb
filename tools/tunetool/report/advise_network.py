"""The advice about a network: a table of the ZeRO stages, and one sentence for those that the link holds up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from tunetool.advise.communication import parameters, trained
from tunetool.advise.network import Answer, WhatIf
from tunetool.node.units import format_bandwidth, format_size
from tunetool.report.page import add_number_columns, new_table, print_block
from tunetool.view.text import number

_HELD = 0.1
"""Of a step: a link that takes less is no matter."""


def print_network(asked: WhatIf, model: str, stages: Sequence[Answer], console: Console) -> None:
    """Print the table and the sentences."""
    count, updated = (sum(each.numel for each in part) for part in (parameters(asked.modules), trained(asked.modules)))
    print_block(
        console,
        f"{model}: {count / 1e6:,.0f} million parameters, {updated / 1e6:,.2f} million of them trained; {asked.gpus} "
        f"GPUs; {format_bandwidth(asked.bandwidth)} ({asked.bandwidth * 8 / 1e9:g} Gb/s) from node to node, each way",
        2,
    )
    table = new_table()
    table.add_column("stage")
    add_number_columns(table, "sent/step", "collectives", "on the link, s", "1 GPU as fast, s")
    if asked.compute:
        add_number_columns(table, "epoch, x 1 GPU", "hidden from")
    for each in stages:
        row = [f"ZeRO-{each.stage}", format_size(round(each.sent)), str(each.calls), number(each.seconds)]
        row.append(number(each.even))
        if asked.compute and each.relative and each.hidden_at is not None:
            row += [" - ".join(number(value) for value in each.relative), f"{each.hidden_at / 1e9:.3g} GB/s"]
        table.add_row(*map(Text, row))
    console.print(table)
    for line in notes(asked, stages):
        print_block(console, line, 2)


def notes(asked: WhatIf, stages: Sequence[Answer]) -> Iterator[str]:
    """What the columns mean, and what follows."""
    yield (
        "on the link: bytes over bandwidth, without latency and if nothing is hidden; 1 GPU as fast: where one GPU's "
        f"step takes less than that, {asked.gpus} GPUs together are slower than one"
    )
    if asked.compute:
        yield (
            f"epoch: time for the same samples over that of one GPU, whose step takes {asked.compute:g} s: if all is "
            "hidden that can be, and if nothing is; hidden from: bandwidth at which computation could hide all of it"
        )
    second, third = (next(each for each in stages if each.stage == stage) for stage in (2, 3))
    if third.seconds > second.seconds * (1 + _HELD):
        yield (
            f"ZeRO-3 sends {third.sent / second.sent:.0f} times the bytes of ZeRO-2 in {third.calls} collectives: it "
            f"keeps the link busy for {number(third.seconds)} s of a step, ZeRO-2 for {number(second.seconds)} s"
        )
    slower = [each for each in stages if each.relative and each.relative[0] > 1]
    for each in slower:
        low, high = each.relative or (0.0, 0.0)
        yield (
            f"ZeRO-{each.stage}: {number(low)} to {number(high)} times as long as one GPU alone, whatever is hidden: "
            "use a lower stage, a faster link, or one node"
        )
